"""The images, built and run: the pods of the manifests, as far as one machine without Kubernetes goes.

Two containers with mount, IPC and network namespaces of their own share the node's folder of sockets, and nothing
else. They run with what the rendered manifests say: user, capabilities, read-only root, probes, limits.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.config import BASE_BYTES
from tests.deploy import containers
from tests.deploy.containers import ENGINE_IMAGE, ROOT, SERVER_IMAGE, Container, podman, run_once
from tests.deploy.pod_runner import command_of, image_of, options_of, run_init_containers, running
from tests.deploy.policy import SERVER_USER
from tests.deploy.rendering import Document, documents, engines, pods, servers

MIB = 1 << 20
MISSING = containers.missing_programs() if os.geteuid() == 0 else ["root"]
WHY_NOT = f"needs {' '.join(MISSING)}; as root of Debian: apt-get install podman buildah runc debootstrap"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.skipif(bool(MISSING), reason=WHY_NOT)]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """Built from the Dockerfiles as they are."""
    containers.make_base()
    containers.build("cache_server.Dockerfile", SERVER_IMAGE)
    containers.build("vllm.Dockerfile", ENGINE_IMAGE)


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What /run/prefixd is on a node: made by the kubelet, root's."""
    folder = tmp_path_factory.mktemp("run") / "prefixd"
    folder.mkdir(mode=0o755)
    # pytest's folders are closed to others; a node's /run is not.
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    return folder


def server_pod(name: str, *more: str, memory: str = "") -> tuple[Document, Document]:
    """The pod of a rendering and its container; `memory` MiB instead of what it says, limit included."""
    ((pod, container),) = servers(documents(name))
    if memory:
        mebibytes = int(memory.removesuffix("MiB"))
        container["args"][2] = f"--memory={memory}"
        container["resources"]["limits"]["memory"] = f"{mebibytes + (mebibytes + 63) // 64 + 256}Mi"
    container["args"] += more
    return pod, container


@pytest.fixture
def server(node: Path) -> Iterator[Container]:
    """The DaemonSet's pod of the base, with 1 GiB."""
    pod, container = server_pod("base", memory="1024MiB")
    run_init_containers(pod, {"socket": node})
    with running(pod, container, {"socket": node}) as started:
        started.wait_until_healthy()
        yield started


def engine_options(node: Path, *, user: int = SERVER_USER) -> list[str]:
    """As the engine's pod has them, with the tests beside its own files."""
    ((pod, container),) = engines(documents("base"))
    container["resources"]["limits"]["memory"] = "1024Mi"
    container["securityContext"]["runAsUser"] = container["securityContext"]["runAsGroup"] = user
    return [
        option
        for option in options_of(pod, container, {"socket": node})
        if not option.startswith("--entrypoint") and (user == SERVER_USER or not option.startswith("--group-add"))
    ] + [f"--volume={ROOT}/tests:/work/tests:ro", "--env=PYTHONPATH=/work", "--entrypoint=python3"]


def said(done: subprocess.CompletedProcess[str]) -> Document:
    """What a client printed."""
    assert done.returncode == 0, done.stderr
    printed: Document = json.loads(done.stdout)
    return printed


def client(
    node: Path, action: str, num_blocks: int = 256, payload: int = MIB, user: int = SERVER_USER
) -> subprocess.CompletedProcess[str]:
    script = ("/work/tests/deploy/container_client.py", action, "/run/prefixd/prefixd.sock", action)
    return run_once(ENGINE_IMAGE, *script, str(num_blocks), str(payload), options=engine_options(node, user=user))


def printed_by(image: str, program: str, *arguments: str) -> str:
    done = run_once(image, *arguments, options=[f"--entrypoint={program}"])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- images ---------------------------------------------------------------------------------------------------


def test_the_servers_image_is_small_and_holds_no_torch_no_pip_and_no_root() -> None:
    """Nothing that the server does not need, nothing that it could change."""

    config = json.loads(podman("inspect", SERVER_IMAGE))[0]
    base = json.loads(podman("inspect", f"localhost/base:{containers.SUITE}"))[0]
    program = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'pip', 'hatchling') if u.find_spec(n)])"

    assert config["Config"]["User"] == f"{SERVER_USER}:{SERVER_USER}"
    assert config["Config"]["Entrypoint"] == ["prefixd"]
    assert config["Healthcheck"]["Test"] == ["CMD", "prefixd", "health"]
    assert config["Size"] - base["Size"] < 200 * MIB
    assert printed_by(SERVER_IMAGE, "/opt/prefixd/bin/python", "-c", program) == "[]"
    assert printed_by(SERVER_IMAGE, "find", "/opt", "/usr", "-writable", "-not", "-type", "l") == ""
    assert printed_by(SERVER_IMAGE, "find", "/run/prefixd", "-writable") == "/run/prefixd"


def test_the_engines_image_has_the_connector_and_every_version_that_was_there() -> None:
    """On a base without vLLM, so this says nothing of vLLM; `tests/packaging` does."""

    program = "import importlib.metadata as m; print([p.value for p in m.entry_points(group='vllm.general_plugins')])"

    assert "connector.plugin:register" in printed_by(ENGINE_IMAGE, "python3", "-c", program)
    freeze = ("python3", "-m", "pip", "freeze", "--all")
    before = set(printed_by(f"localhost/base:{containers.SUITE}", *freeze).split())
    after = set(printed_by(ENGINE_IMAGE, *freeze).split())
    assert len(before) > 0
    assert before <= after
    assert printed_by(ENGINE_IMAGE, "id", "-u") == str(SERVER_USER)


# --- the node path --------------------------------------------------------------------------------------------


def test_a_client_loads_through_mapped_slots_what_another_container_saved(server: Container, node: Path) -> None:
    """1 GiB pool, /dev/shm of 64 MiB everywhere (C67), a read-only mount of the sockets, no network at all. What the
    blocks take is charged to the server and not to who wrote or read them."""

    before, limit = server.memory()
    saved = client(node, "save")
    after, _ = server.memory()
    with Container(
        ENGINE_IMAGE,
        *("/work/tests/deploy/container_client.py", "load", "/run/prefixd/prefixd.sock", "other", "256", str(MIB), "1"),
        options=[*engine_options(node), "--interactive"],
    ) as reader:
        deadline = time.monotonic() + 60
        while "hit" not in reader.log:
            assert time.monotonic() < deadline and reader.is_running, reader.log
            time.sleep(0.1)
        loaded = json.loads(reader.log)
        charged, _ = reader.memory()

        shared = [kind for kind in ("mnt", "ipc", "net", "pid") if reader.namespace(kind) == server.namespace(kind)]
        shm = reader.execute("df", "--output=size", "--block-size=1M", "/dev/shm").stdout
    print(f"charged to the server: {before >> 20} MiB, then {after >> 20}; to the reader: {charged >> 20} MiB")

    assert said(saved) == {"saved": 256}
    assert shared == []
    assert loaded["hit"] == loaded["right"] == 256
    assert loaded["mapped"] >= 256 * MIB
    assert shm.split()[-1] in {"63", "64"}
    assert limit == (1024 + 16 + 256) * MIB
    # Segments of 64 MiB, one of them touched ahead.
    assert 192 * MIB <= after - before <= 400 * MIB
    assert charged < 150 * MIB


def test_a_user_that_is_not_the_servers_cannot_open_the_socket(server: Container, node: Path) -> None:
    """The folder is closed to others; the positive control is the client above."""

    done = client(node, "load", user=20002)

    assert done.returncode != 0
    assert "StatusCode.UNAVAILABLE" in done.stderr


# --- memory ---------------------------------------------------------------------------------------------------


def test_twenty_times_the_memory_is_written_and_the_container_lives(node: Path) -> None:
    """C66, in the pod of the manifests with 128 MiB; probes pass while it is full."""

    pod, container = server_pod("base", memory="128MiB")
    run_init_containers(pod, {"socket": node})
    with running(pod, container, {"socket": node}) as server:
        server.wait_until_healthy()
        done = client(node, "save", num_blocks=2560)
        usage, limit = server.memory()
        stats = json.loads(server.execute("prefixd", "stats", "--json").stdout)

        assert said(done) == {"saved": 2560}
        assert server.execute("prefixd", "health").returncode == 0
        assert server.inspect()["State"]["OOMKilled"] is False
        assert int(stats["stored_bytes"]) == 128 * MIB
        assert int(stats["counters"]["evicted_blocks_capacity"]) == 2560 - 128
        assert 128 * MIB <= usage <= limit == (128 + 2 + 256) * MIB


def test_a_limit_below_what_the_memory_needs_is_refused_with_both_figures(node: Path) -> None:
    """C67: the pod fails at once and says why."""

    pod, container = server_pod("base", memory="1024MiB")
    container["resources"]["limits"]["memory"] = "1100Mi"
    run_init_containers(pod, {"socket": node})
    with running(pod, container, {"socket": node}) as server:
        podman("wait", server.id)
        state, log = server.inspect()["State"], server.log

    assert state["ExitCode"] == 2
    assert f"needs {1024 * MIB + BASE_BYTES} bytes, the container's limit is {1100 * MIB}" in log


# --- probes ---------------------------------------------------------------------------------------------------


def probe(server: Container, container: Document, kind: str) -> tuple[bool, float]:
    """Whether it passes, as the kubelet judges it, and how long it took."""
    rendered = container[f"{kind}Probe"]
    began = time.monotonic()
    done = server.execute(*rendered["exec"]["command"])
    took = time.monotonic() - began
    return done.returncode == 0 and took < rendered["timeoutSeconds"], took


def test_probes_pass_soon_after_the_start_full_and_without_redis_and_fail_when_stuck(node: Path) -> None:
    """C70, with the commands of the manifests, in the image."""

    pod, container = server_pod("base", "--redis=redis://127.0.0.1:6379", memory="64MiB")
    run_init_containers(pod, {"socket": node})
    with running(pod, container, {"socket": node}) as server:
        ready_after = server.wait_until_healthy()
        full = client(node, "save", num_blocks=128)
        passes = [probe(server, container, kind)[0] for kind in ("startup", "readiness", "liveness")]
        os.kill(server.pid, signal.SIGSTOP)
        stuck, took = probe(server, container, "liveness")
        os.kill(server.pid, signal.SIGCONT)
        woken = [server.execute(*container["livenessProbe"]["exec"]["command"]).returncode]
        podman("stop", "--time", "30", server.id)
        state = server.inspect()["State"]

    print(f"ready after {ready_after:.1f} s; stuck: failed after {took:.1f} s")
    assert ready_after <= 5.0 * 3
    assert said(full) == {"saved": 128}
    assert passes == [True, True, True]
    assert stuck is False
    assert woken == [0]
    # SIGTERM reaches it as the first process, and it drains.
    assert state["ExitCode"] == 0


# --- the whole overlay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["overlay cpu-demo", "chart cpu-demo"])
def test_the_server_and_the_valkey_of_the_demo_work_together(name: str, node: Path, tmp_path: Path) -> None:
    """Their arguments, their secret, their users; blocks are in Valkey and come back after the server's restart."""

    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "password").write_text("a-demonstration")
    found = documents(name)
    ((valkey_pod, valkey_container),) = [
        (pod, pod["spec"]["containers"][0]) for owner, pod in pods(found) if owner == "StatefulSet/prefixd-redis"
    ]
    pod, container = server_pod(name)
    # In one network namespace, where a Service would stand between them.
    container["args"] = [text.replace("prefixd-redis:6379", "127.0.0.1:6379") for text in container["args"]]
    folders = {"socket": node, "redis-password": secret}
    run_init_containers(pod, folders)
    with running(valkey_pod, valkey_container, {"redis-password": secret}) as valkey:
        deadline = time.monotonic() + 30
        while valkey.execute(*valkey_container["readinessProbe"]["exec"]["command"]).returncode != 0:
            assert time.monotonic() < deadline and valkey.is_running, valkey.log
        for attempt in range(2):
            with running(pod, container, folders, network=f"container:{valkey.id}") as server:
                server.wait_until_healthy()
                if attempt == 0:
                    saved = client(node, "save", num_blocks=64)
                    podman("stop", "--time", "30", server.id)
                else:
                    stats = json.loads(server.execute("prefixd", "stats", "--json").stdout)
                    keys = valkey.execute(
                        "sh", "-c", 'REDISCLI_AUTH="$(cat /run/secrets/redis/password)" valkey-cli dbsize'
                    )
                    refused = valkey.execute("valkey-cli", "dbsize")

    assert said(saved) == {"saved": 64}
    assert int(keys.stdout) >= 64
    assert "NOAUTH" in refused.stdout + refused.stderr
    assert stats["memory_bytes"] == str(1024 * MIB)


def test_the_folder_container_does_its_one_thing(node: Path) -> None:
    """As root with three capabilities: the folder is the server's afterwards, and it may run again."""

    pod, container = server_pod("base")
    for _ in range(2):
        run_init_containers(pod, {"socket": node})

    status = node.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (SERVER_USER, SERVER_USER, 0o750)
    assert image_of(container) == SERVER_IMAGE
    assert command_of(container)[0] == "serve"
