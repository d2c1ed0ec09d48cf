"""The engines of this folder. A start takes 35-60 s, so there are few, and those that are needed at about the same
time are started side by side. `cold` lives as long as the session; the others, some 3 GB each, end with their module.

    cold      no connector: what is right
    early     started while nothing listened at its address; `RecordingConnector`, Unix socket, mapped slots
    streams   plain connector, host:port, on the same server as `early`
    small     8 blocks of memory, so that one of two requests is preempted; `RecordingConnector`
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine import Answer, Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.engine.recording_connector import FAULT, FOLDER
from tests.models import prompt

BLOCK_SIZE = 32
ARRIVAL_S = 10.0  # the bound: hits begin this long after the server is up

Cold = Callable[..., list[int]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eng")


@pytest.fixture(scope="session")
def settings(llama: Path) -> dict[str, Any]:
    """The arguments that all engines share: blocks of 32, prefill in chunks of 128 tokens, exact arithmetic."""
    return {
        "model": str(llama),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "enforce_eager": True,
    }


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Prefixd]:
    """One server for all tests here. `early` starts it; who needs it running asks for `early`, or starts it."""
    server = Prefixd(folder)
    yield server
    server.kill()


@dataclass(frozen=True)
class Recorded:
    """An engine with `RecordingConnector`."""

    engine: Engine
    folder: Path

    def break_(self, method: str, count: int, number: int) -> None:
        (self.folder / FAULT).write_text(f"{method} {count} {number}")

    def mend(self) -> None:
        (self.folder / FAULT).unlink()


@dataclass(frozen=True)
class Early(Recorded):
    """What the engine did before the server was there, and how long after its start the first hit came."""

    alone: list[Answer]
    arrival_s: float


def recorded(name: str, folder: Path, address: str, settings: dict[str, Any]) -> Recorded:
    records = folder / name
    records.mkdir()
    engine = Engine(
        folder / f"{name}.log",
        environment={FOLDER: str(records)},
        **settings,
        kv_transfer_config=connector_config(
            address, connector="RecordingConnector", module="tests.engine.recording_connector"
        ),
    )
    return Recorded(engine, records)


@pytest.fixture(scope="session")
def cold_engine(folder: Path, settings: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(folder / "cold.log", **settings)
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def cold(cold_engine: Engine) -> Cold:
    """`cold(prompt, max_tokens)`: the right answer, by an engine without the connector."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(prompt: list[int], max_tokens: int) -> list[int]:
        asked = (tuple(prompt), max_tokens)
        if asked not in known:
            cold_engine.clear_local()
            known[asked] = cold_engine.generate_one(prompt, max_tokens=max_tokens).token_ids
        return known[asked]

    return answer


@pytest.fixture(scope="module")
def early(folder: Path, settings: dict[str, Any], cold_engine: Engine, server: Prefixd) -> Iterator[Early]:
    """`cold_engine` is asked for to be started at the same time."""
    it = recorded("early", folder, server.unix_address, settings)
    try:
        yield _before_and_after_the_server(it, server)
    finally:
        it.engine.kill()


def _before_and_after_the_server(it: Recorded, server: Prefixd) -> Early:
    asked = prompt(4200, 100)
    assert not server.is_running
    alone = [it.engine.generate_one(asked, max_tokens=4)]
    it.engine.clear_local()
    alone.append(it.engine.generate_one(asked, max_tokens=4))
    server.start()
    began = time.monotonic()

    def hits() -> bool:
        it.engine.clear_local()
        it.engine.generate_one(asked, max_tokens=1)
        return it.engine.metric("vllm:prefixd_loaded_tokens") > 0

    wait_until(hits, 3 * ARRIVAL_S, "a hit after the server's start")
    return Early(it.engine, it.folder, alone, time.monotonic() - began)


@pytest.fixture(scope="module")
def second_pair(
    folder: Path, settings: dict[str, Any], early: Early, server: Prefixd
) -> Iterator[tuple[Engine, Recorded]]:
    streams = Engine(folder / "streams.log", **settings, kv_transfer_config=connector_config(server.port_address))
    small = recorded(
        "small",
        folder,
        server.unix_address,
        {**settings, "num_gpu_blocks_override": 8, "max_num_seqs": 2, "max_model_len": 7 * BLOCK_SIZE},
    )
    yield streams, small
    streams.kill()
    small.engine.kill()


@pytest.fixture(scope="module")
def streams(second_pair: tuple[Engine, Recorded]) -> Engine:
    return second_pair[0]


@pytest.fixture(scope="module")
def small(second_pair: tuple[Engine, Recorded]) -> Recorded:
    return second_pair[1]
