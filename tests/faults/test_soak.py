"""The soak for a minute (half an hour with --long), and the controls: it would see a wrong byte, and say so."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from cache_server.leases import LEASE_S
from protos import kv_cache_pb2 as pb
from tests.cache_server.conftest import shared_memory_folder  # noqa: F401 - a fixture
from tests.cache_server.harness import (
    ROOT,
    Client,
    ServerProcess,
    batch,
    chain,
    payload_of,
    put_messages,
    wait_until,
)
from tests.faults.engine_like import EngineLike
from tests.faults.soak import Engine, Soak, soak

SEED = 20
ATTACH_S = 10.0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("minutes", [pytest.param(1, id="a-minute"), pytest.param(30, marks=pytest.mark.long)])
def test_whatever_happens_no_byte_is_wrong_and_all_come_back(minutes: int) -> None:
    """As `python -m tests.faults.soak` says."""

    holds, report = soak(minutes, SEED)
    print(report)

    assert holds, report


def poison(address: str, chains: Iterable[list[bytes]]) -> None:
    """Blocks whose payloads are not what their keys say, with right checksums: as a broken engine would save."""
    with Client(address, 0, fingerprint=b"\x05" * 32, engine_id="poisoner") as client:
        for keys in chains:
            payloads = [payload_of(key[::-1], client.payload_bytes) for key in keys]
            messages = put_messages(pb.PutHeader(session_id=client.id, **batch(keys)), payloads)
            client.stub.Put(messages, timeout=20)


def test_a_wrong_byte_would_be_seen(tmp_path: Path) -> None:
    """The oracle's own control."""

    keys = chain("poisoned", 3)
    with ServerProcess(tmp_path, "64MiB") as server:
        for address in (server.unix, server.tcp):
            engine = EngineLike(address, "engine")
            try:
                assert engine.wait_attached(ATTACH_S)
                poison(server.tcp, [keys])
                assert engine.load(keys) == 0
                assert engine.tally.wrong == 3
            finally:
                engine.close()


def test_a_soak_says_so_when_engines_are_served_wrong_bytes(tmp_path: Path, shared_memory_folder: Path) -> None:  # noqa: F811 - the fixture
    """And it says nothing before."""

    stage = Soak(tmp_path, shared_memory_folder, SEED)
    try:
        # Before any engine has saved them: half of what they look for.
        poison(stage.server.port_address, (chain(f"shared {number}", 24) for number in range(100)))
        stage.look("nothing yet")
        assert stage.report().endswith("everything held")
        stage.start_engines()
        wait_until(lambda: stage.total("wrong") > 0, "an engine has loaded one", 30)
        stage.look("poison")

        assert "did not hold: poison: " in stage.report()
        assert "everything held" not in stage.report()
    finally:
        stage.close()


@pytest.mark.parametrize(
    "seconds", [pytest.param(4, id="short"), pytest.param(3 * LEASE_S, id="three-lease-times", marks=pytest.mark.long)]
)
def test_engines_stopped_in_a_save_and_in_a_load_while_others_fill_the_server(tmp_path: Path, seconds: float) -> None:
    """When they go on, no payload is wrong: neither what they save nor what they load, nor what the others did."""

    log = tmp_path / "engines.log"
    with ServerProcess(tmp_path / "server", "64MiB") as server:
        engines = [Engine(server.unix, number, log) for number in (1, 3)]
        other = EngineLike(server.unix, "other")
        try:
            wait_until(lambda: all(engine.tally["loaded"] for engine in engines), "both load", 30)
            for engine, at in zip(engines, (signal.SIGUSR1, signal.SIGUSR2), strict=True):
                engine.process.send_signal(at)
                wait_until(engine.is_stopped, f"stopped at {at.name}", 30)
            assert other.wait_attached(ATTACH_S)
            until, number = time.monotonic() + seconds, 0
            while time.monotonic() < until or number < 200:
                other.save(chain(f"other {number}", 16))
                other.load(chain(f"other {max(number - 3, 0)}", 16))
                number += 1
            before = [engine.tally["loaded"] for engine in engines]
            for engine in engines:
                os.kill(engine.process.pid, signal.SIGCONT)
            wait_until(
                lambda: all(engine.tally["loaded"] > was for engine, was in zip(engines, before, strict=True)),
                "both load again",
                30,
            )
            for back in range(20):
                other.load(chain(f"other {number - 1 - back}", 16))

            assert other.tally.saved > 64 * 16, "a control: more than the memory was written"
            assert other.tally.wrong == 0
            assert [engine.tally["wrong"] for engine in engines] == [0, 0]
            assert [engine.process.poll() for engine in engines] == [None, None]
        finally:
            other.close()
            for engine in engines:
                engine.end()
        assert "Traceback" not in log.read_text()
        wait_until(lambda: server.stats().reserved_bytes == 0, "their slots are back")


def test_the_command_says_what_it_does() -> None:
    """Its seed can be given again."""

    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--help"], cwd=ROOT, check=False, capture_output=True, text=True
    )

    assert done.returncode == 0
    assert "--minutes" in done.stdout
    assert "--seed" in done.stdout
