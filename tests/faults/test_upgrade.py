"""A running server is replaced by another one over the same `--persist DIR` while engines save and load."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.cache_server.conftest import shared_memory_folder  # noqa: F401 - a fixture
from tests.cache_server.harness import NAMESPACE, ROOT, ServerProcess, chain, wait_until
from tests.engine.prefixd import Prefixd
from tests.faults.engine_like import EngineLike

ATTACH_S = 10.0
SLACK_S = 30.0


class Saver:
    """One engine in a thread: saves chain after chain, and knows which payloads the server said it has."""

    def __init__(self, address: str, name: str) -> None:
        self.engine = EngineLike(address, name)
        self.stored: dict[str, list[bytes]] = {}  # chain name → its keys, all of them stored
        self.num_after = 0
        self._name = name
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        assert self.engine.wait_attached(ATTACH_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.engine.close()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        assert self._failure is None, self._failure

    def _run(self) -> None:
        try:
            number = 0
            while not self._is_over.is_set():
                name = f"{self._name} {number}"
                keys = chain(name, 4)
                if self.engine.save(keys) == keys:
                    self.stored[name] = keys
                    number += 1
                    self.engine.load(keys)
                time.sleep(0.005)
        except BaseException as error:  # noqa: BLE001 - a thread's top: reported by the test
            self._failure = error


@pytest.fixture
def server(tmp_path: Path, shared_memory_folder: Path) -> Iterator[Prefixd]:  # noqa: F811 - the fixture
    prefixd = Prefixd(tmp_path, "--persist", str(shared_memory_folder), memory="512MiB").start()
    yield prefixd
    prefixd.kill()


def test_no_hit_is_lost_when_a_server_is_upgraded_under_load(server: Prefixd) -> None:
    """On mapped slots and on streams, three times: everything that was stored is a hit, and its bytes are right."""

    with Saver(server.unix_address, "near") as near, Saver(server.port_address, "far") as far:
        savers = (near, far)
        for _ in range(3):
            before = [len(saver.stored) for saver in savers]
            wait_until(
                lambda before=before: all(
                    len(saver.stored) > count + 20 for saver, count in zip(savers, before, strict=True)
                ),
                "both save",
                SLACK_S,
            )
            assert server.stop() == 0
            stored = [dict(saver.stored) for saver in savers]
            server.start()
            # By themselves, and they go on saving.
            wait_until(
                lambda stored=stored: all(
                    len(saver.stored) > len(was) + 5 for saver, was in zip(savers, stored, strict=True)
                ),
                "both save again",
                SLACK_S,
            )
            assert server.log.read_text().count("taken over in") >= 1
        near.stop()
        far.stop()
        everything = near.stored | far.stored
        tally = near.engine.tally
        assert tally.wrong == far.engine.tally.wrong == 0
        for saver in savers:
            assert saver.engine.wait_attached(ATTACH_S)
            lost = [name for name, keys in everything.items() if saver.engine.load(keys) != len(keys)]
            assert lost == []
        assert near.engine.tally.wrong == far.engine.tally.wrong == 0
        assert "starting empty" not in server.log.read_text()
        assert server.log.read_text().count("taken over in") == 3


def test_a_restart_without_the_folder_is_empty(tmp_path: Path) -> None:
    """The control: what the test above shows comes from `--persist`."""

    keys = chain("a", 4)
    server = Prefixd(tmp_path, memory="128MiB").start()
    engine = EngineLike(server.unix_address, "engine")
    try:
        assert engine.wait_attached(ATTACH_S)
        assert engine.save(keys) == keys
        assert engine.num_present(keys) == engine.load(keys) == 4
        assert server.stop() == 0
        server.start()
        wait_until(lambda: engine.wait_attached(0.1) and engine.num_present(keys) is not None, "attached", SLACK_S)
        assert engine.num_present(keys) == engine.load(keys) == 0
    finally:
        engine.close()
        server.kill()


def test_kill_9_of_a_server_with_a_folder_is_an_empty_cache_and_its_memory_is_free(
    tmp_path: Path,
    shared_memory_folder: Path,  # noqa: F811 - the fixture
) -> None:
    """C68, five times: nothing is believed, nothing is left behind."""

    for _ in range(5):
        with ServerProcess(tmp_path, "64MiB", "--persist", str(shared_memory_folder)) as server:
            assert server.stats().stored_bytes == 0
            with Attached(server.unix) as engine:
                assert len(engine.save(chain("a", 4))) == 4
            server.process.kill()
            server.process.wait()
        assert sorted(file.name for file in shared_memory_folder.iterdir()) == ["generations-1", "lock", "segment-1"]
    with ServerProcess(tmp_path, "64MiB", "--persist", str(shared_memory_folder)) as server:
        assert server.log.count("starting empty: the last server did not stop cleanly") == 1
        assert server.stop() == 0


class Attached:
    """An engine for the time of a block."""

    def __init__(self, address: str) -> None:
        self._engine = EngineLike(address, "engine", namespace=NAMESPACE)

    def __enter__(self) -> EngineLike:
        assert self._engine.wait_attached(ATTACH_S)
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


_WRITER = """
import sys
from pathlib import Path
from tests.cache_server.harness import Client, wait_until
from tests.faults.processes import stop_here
client = Client(sys.argv[1], 0, descriptors=Path(sys.argv[2]), engine_id="stopped")
wait_until(client.is_mapped, "mapped")
slots = client.reserve_all(8)
print(slots, flush=True)
stop_here()
for slot in slots:
    client.slot(slot)[:] = b"\\xee" * client.payload_bytes
print("written", flush=True)
sys.stdin.read()
"""


def test_a_client_stopped_in_the_middle_of_a_save_over_the_restart_harms_nobody(
    tmp_path: Path,
    shared_memory_folder: Path,  # noqa: F811 - the fixture
) -> None:
    """It wakes up after others have filled the new server, and writes: into slots that nobody got."""

    options = ("64MiB", "--persist", str(shared_memory_folder))
    with ServerProcess(tmp_path, *options) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, server.unix, str(server.socket_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            child.stdout.readline()
            wait_until(lambda: is_stopped(child.pid), "stopped")
            assert server.stop() == 0
            with ServerProcess(tmp_path, *options) as after, Attached(after.unix) as engine:
                slot_bytes = 64 << 10
                assert after.stats().reserved_bytes >= 8 * slot_bytes
                written = [chain(str(i), 8) for i in range(200)]  # 100 MiB into 64
                for keys in written:
                    engine.save(keys)
                os.kill(child.pid, signal.SIGCONT)
                assert child.stdout.readline() == "written\n"
                # A control: what it wrote is really there, in memory that the new server has mapped.
                assert holds_bytes(shared_memory_folder / "segment-1", b"\xee" * slot_bytes) >= 8
                assert sum(engine.load(keys) for keys in written) >= 100 * 8
                assert engine.tally.wrong == 0
                child.stdin.close()
                child.wait()
                engine.close()
                wait_until(lambda: after.stats().reserved_bytes == 0, "its slots are back", SLACK_S)
        finally:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def holds_bytes(path: Path, payload: bytes) -> int:
    """How many aligned payloads of a segment are exactly these bytes."""
    data = path.read_bytes()
    return sum(data[i : i + len(payload)] == payload for i in range(0, len(data), len(payload)))
