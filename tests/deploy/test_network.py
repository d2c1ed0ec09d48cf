"""Three nodes on one machine, each a server and an engine, one Redis Cluster across them; one is cut off and healed.

The cluster is joined by the script that the manifests run. What is asked is always the same: no answer is wrong and
none hangs, whatever is reachable; when all is well again, blocks go from node to node again.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cache_server.harness import ServerProcess, chain, wait_until
from tests.deploy.network import Node, network, why_not
from tests.deploy.rendering import KUBERNETES
from tests.redis.harness import Engine, engine, wait_counter
from tests.redis.servers import executable

WHY_NOT = why_not()
pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
PORT = 6379
FORM = KUBERNETES / "components" / "redis-cluster" / "form-cluster.sh"
ANSWER_S = 15.0  # a hang guard: deadlines of lookups and of Redis are a second or less
HEAL_S = 60.0  # the cluster's own time-outs, the breaker's pauses, and a busy machine
PASSWORD = "between the nodes"


@dataclass
class Machine:
    """One node with all that runs on it."""

    node: Node
    server: ServerProcess
    engine: Engine

    def num_hit(self, keys: list[bytes]) -> int:
        """Blocks promised; their bytes are right, and the answer came in time."""
        began = time.monotonic()
        hit = self.engine.num_hit(keys)
        assert time.monotonic() - began < ANSWER_S
        return hit

    def save(self, name: str, num_blocks: int = 12) -> list[bytes]:
        keys = chain(name, num_blocks)
        self.engine.worker.save(keys)
        return keys

    def cli(self, *command: str) -> str:
        return subprocess.run(
            [*self.node.prefix, "redis-cli", "-h", self.node.address, *command],
            env={"PATH": "/usr/bin:/bin:/usr/sbin", "REDISCLI_AUTH": PASSWORD},
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        ).stdout

    def is_cluster_ok(self) -> bool:
        return "cluster_state:ok" in self.cli("cluster", "info")


def form(machine_nodes: list[Node], password_file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*machine_nodes[0].prefix, "sh", FORM],
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin",
            "NODES": " ".join(f"{node.address}:{PORT}" for node in machine_nodes),
            "PASSWORD_FILE": str(password_file),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@contextlib.contextmanager
def redis_on(node: Node, folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(*node.prefix, executable(), "--port", str(PORT), "--bind", node.address, "--dir", str(folder)),
                *("--save", "", "--appendonly", "no", "--requirepass", PASSWORD),
                # As the manifests have it.
                *("--cluster-enabled", "yes", "--cluster-config-file", str(folder / "nodes.conf")),
                *("--cluster-announce-ip", node.address, "--cluster-require-full-coverage", "no"),
                *("--cluster-node-timeout", "2000"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    folder = tmp_path_factory.mktemp("nodes")
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(network(3))
        for node in nodes:
            stack.enter_context(redis_on(node, folder / node.address / "redis"))
        done = form(nodes, password_file)
        assert done.returncode == 0, done.stdout + done.stderr
        url = "redis+cluster://" + ",".join(f"{node.address}:{PORT}" for node in nodes)
        found = []
        for node in nodes:
            options = ("--redis", url, "--redis-password-file", str(password_file))
            server = stack.enter_context(
                ServerProcess(folder / node.address / "server", "64MiB", *options, prefix=node.prefix)
            )
            found.append(Machine(node, server, stack.enter_context(engine(server))))
        again = form(nodes, password_file)
        assert (again.returncode, "already" in again.stdout) == (0, True), again.stdout + again.stderr
        wait_until(lambda: all(machine.is_cluster_ok() for machine in found), "the cluster is one", 30)
        yield found


def test_the_nodes_reach_each_other_and_nothing_else(machines: list[Machine]) -> None:
    """Positive control of what is cut below: no route leads out."""

    for machine in machines:
        routes = subprocess.run(
            [*machine.node.prefix, "ip", "route"], capture_output=True, text=True, check=True
        ).stdout

        assert routes.split()[0] == "192.168.77.0/24"
        assert "default" not in routes


def test_what_one_node_saved_is_loaded_by_the_others(machines: list[Machine]) -> None:
    """Through the cluster: each Redis holds a share of the blocks."""

    first, *others = machines
    keys = first.save("from the first")
    wait_counter(first.server, "redis_saved_payloads", 12)

    assert [machine.num_hit(keys) for machine in others] == [12, 12]
    assert all(int(machine.cli("dbsize")) > 0 for machine in machines)


def test_a_node_that_is_cut_off_gives_no_wrong_answer_and_comes_back(machines: list[Machine]) -> None:
    """During the cut each side has what is in its memory and at most the shares of Redis that it reaches."""

    first, second, lonely = machines
    before = first.save("before the cut")
    wait_counter(first.server, "redis_saved_payloads", 24)
    assert lonely.num_hit(before) == 12

    lonely.node.cut()
    lonely_keys, first_keys = lonely.save("saved while alone"), first.save("saved without the third")
    both = [machine.save("computed on both sides") for machine in (first, lonely)]
    started = time.monotonic()
    answers = []
    while time.monotonic() - started < 12:
        answers.append(
            (
                lonely.num_hit(before),
                lonely.num_hit(lonely_keys),
                lonely.num_hit(both[1]),
                lonely.num_hit(first_keys),
                first.num_hit(both[0]),
                first.num_hit(lonely_keys),
                second.num_hit(before),
                second.num_hit(first_keys),
            )
        )
        # New blocks go on being saved on both sides.
        for machine in (first, lonely):
            machine.save(f"{machine.node.address} {len(answers)}", 2)

    assert len(answers) >= 3
    for alone, own, both_lonely, of_first, both_first, of_lonely, _, _ in answers:
        assert (alone, own, both_lonely, both_first) == (12, 12, 12, 12)  # in its own memory
        assert of_lonely == of_first == 0  # the other side of the cut
    assert not lonely.is_cluster_ok()

    lonely.node.heal()
    wait_until(lambda: all(machine.is_cluster_ok() for machine in machines), "the cluster is one again", HEAL_S)
    hits = []

    def is_exchanged(giver: Machine, taker: Machine) -> bool:
        """The breaker of each opens in its own time: new blocks until one has crossed."""
        keys = giver.save(f"{giver.node.address} after {len(hits)}", 3)
        time.sleep(0.5)
        hits.append(taker.num_hit(keys))
        return hits[-1] == 3

    for giver, taker in ((lonely, first), (first, lonely), (second, lonely)):
        wait_until(lambda g=giver, t=taker: is_exchanged(g, t), f"{giver.node} → {taker.node}", HEAL_S)  # type: ignore[misc]
    assert [machine.num_hit(before) for machine in machines] == [12, 12, 12]
