"""C47: processes that fork. A child never uses its parent's line, and never waits for it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.connector.conftest import Engine, chain
from tests.connector.test_worker import ask, save, wait_for
from tests.engine.prefixd import Prefixd
from tests.faults.processes import Child

# A scheduler side and a worker's line with its segments. grpc is imported first, as in vLLM's processes.
LINES = """
import grpc, json, multiprocessing, os, subprocess, sys, time
from connector.client import CacheClient, Hello

asker, worker = [
    CacheClient(
        sys.argv[1],
        Hello("engine", "test", b"n" * 32, "test", 16, 1, shard=shard, payload_bytes=16384, descriptor=b"layout"),
        call_timeout_s=1.0,
        transfer_timeout_s=5.0,
    )
    for shard in (None, 0)
]
for line in (worker, asker):
    line.start()
    assert line.wait_attached(20)


def asked():
    began = time.monotonic()
    call = asker.lookup(b"k" * 16, 0, lease=True)
    if call is not None:
        call.wait(5)
    return time.monotonic() - began, call is not None and call.answer() is not None


def reserved(number):
    session = worker.session()
    return 0 if session is None else worker.reserve(session, number).size
"""

FORKING = f"""{LINES}
def in_child(answers):
    first, slots = asked(), reserved(1)
    try:
        asker.start()
        again = asker.wait_attached(8) and asked()
    except RuntimeError as error:
        again = str(error)
    answers.put((first, slots, again))


fork, found = multiprocessing.get_context("fork"), []
for _ in range(int(sys.argv[2])):
    answers = fork.SimpleQueue()
    child = fork.Process(target=in_child, args=(answers,))
    child.start()
    child.join(20)
    heard = None if answers.empty() else answers.get()
    ran = subprocess.run(["true"]).returncode
    found.append(dict(exit=child.exitcode, heard=heard, parent=asked(), slots=int(reserved(1)), ran=ran))
print(json.dumps(found))
"""

FORKED = f"""{LINES}
while not reserved(4):
    time.sleep(0.05)
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("path", ["mapped slots", "streams"])
@pytest.mark.parametrize("prepared", ["0", "1"])
def test_a_forked_child_asks_nobody_and_never_hangs(own_server: Prefixd, path: str, prepared: str) -> None:
    """It has no session, at once. Where grpc was told to prepare for forks (GRPC_ENABLE_FORK_SUPPORT=1) it may attach
    anew; where not, that is refused in words, for grpc would crash. The parent, and what it runs, notice nothing.
    """
    address = own_server.unix_address if path == "mapped slots" else own_server.port_address
    with Child(FORKING, address, "5", environment={"GRPC_ENABLE_FORK_SUPPORT": prepared}) as parent:
        found = json.loads(parent.read())

    assert len(found) == 5
    assert max(one["slots"] for one in found) == (1 if path == "mapped slots" else 0)
    for one in found:
        assert (one["exit"], one["ran"]) == (0, 0)
        assert one["parent"][1], "the parent's line works on"
        (first_s, was_answered), slots, again = one["heard"]
        assert (was_answered, slots) == (False, 0)
        assert first_s < 0.1
        if prepared == "1":
            assert again[1], "attached anew, and answered"
        else:
            assert "GRPC_ENABLE_FORK_SUPPORT" in again


def test_a_fork_does_not_keep_a_dead_parents_slots(own_server: Prefixd) -> None:
    """The child closes its copy of the descriptor socket: the parent's slots come back when the parent is gone."""
    with Child(FORKED, own_server.unix_address, environment={"GRPC_ENABLE_FORK_SUPPORT": "0"}) as parent:
        child = int(parent.read())
        try:
            assert own_server.stats().reserved_bytes > 0, "positive control"
            parent.kill()
            wait_for(lambda: own_server.stats().reserved_bytes == 0)
            assert Path(f"/proc/{child}").exists(), "positive control: the child is still there"
        finally:
            os.kill(child, 9)


def test_what_the_daemon_runs_inherits_nothing(own_server: Prefixd, new_engine: Callable[..., Engine]) -> None:
    """Sockets, segments, clients' descriptors: all are closed in a program that the daemon starts."""
    engine = new_engine(own_server.unix_address)
    session = engine.ranks[0].client.session()
    assert session is not None
    assert session.mapped
    folder = Path(f"/proc/{own_server.pid}")
    closes = {}
    for link in (folder / "fd").iterdir():
        flags = int((folder / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0], 8)
        if int(link.name) > 2:
            closes[f"{link.name} {link.readlink()}"] = bool(flags & os.O_CLOEXEC)

    assert any("memfd" in name for name in closes), "positive control: segments are among them"
    assert any("socket" in name for name in closes)
    assert [name for name, is_closed in closes.items() if not is_closed] == []


DAEMON = """
import subprocess, sys, threading
from cache_server.cli import main

def run_programs():
    sys.stdin.readline()
    for _ in range(20):
        subprocess.run(["true"], check=True)
    print("ran", flush=True)

threading.Thread(target=run_programs, daemon=True).start()
sys.argv = ["prefixd", "serve", "--memory", "64MiB", "--listen", sys.argv[1]]
main()
"""


def test_a_daemon_that_runs_programs_goes_on_answering(tmp_path: Path, new_engine: Callable[..., Engine]) -> None:
    """Twenty programs from its own process, grpc's threads and all: lookups are answered meanwhile and after."""
    address = f"unix://{tmp_path / 'prefixd.sock'}"
    with Child(DAEMON, address) as daemon:
        engine = new_engine(address)
        names = chain(2, 3)
        save(engine, [1, 2, 3], names)
        daemon.tell("go")
        meanwhile = [ask(engine, names).is_present(0) for _ in range(50)]
        assert daemon.read() == "ran"
        afterwards = ask(engine, names)
        engine.close()

    assert all(meanwhile)
    assert afterwards.is_present(2)
