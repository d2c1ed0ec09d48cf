"""A real cache server for the connector's tests, and workers and askers attached to it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from connector.client import CacheClient, Hello
from connector.kv_layout import KVLayout, layout_of
from connector.plan import BlockName
from connector.worker import WorkerSide
from tests.engine.prefixd import Prefixd

NUM_BLOCKS, PAGE_WORDS, NUM_LAYERS, BLOCK_SIZE = 32, 1024, 2, 16
ATTACH_S = 10.0
_engines = itertools.count()


@pytest.fixture(scope="module")
def prefixd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefixd]:
    server = Prefixd(tmp_path_factory.mktemp("prefixd"), memory="256MiB").start()
    yield server
    server.stop()


@dataclass
class Rank:
    """One worker of an engine: its pages, its line, its worker side."""

    pages: list[torch.Tensor]
    layout: KVLayout
    client: CacheClient
    worker: WorkerSide


class Engine:
    """What an engine is to prefixd: a scheduler-side line and one worker per rank, all in this process."""

    def __init__(
        self,
        address: str,
        *,
        num_ranks: int = 1,
        namespace: bytes = b"n" * 32,
        attach: bool = True,
        call_timeout_s: float = 1.0,
        load_timeout_s: float = 5.0,
        verify_loads: bool = False,
    ) -> None:
        self.engine_id = f"engine-{next(_engines)}"
        self._address = address
        self._namespace = namespace
        self._num_ranks = num_ranks
        self._call_timeout_s = call_timeout_s
        self._load_timeout_s = load_timeout_s
        self._verify_loads = verify_loads
        self.asker = self._line(None, None)
        self.ranks = [self.add_rank(i) for i in range(num_ranks)]
        self.asker.start()
        if attach:
            self.wait_attached()

    def _line(self, shard: int | None, layout: KVLayout | None) -> CacheClient:
        return CacheClient(
            self._address,
            Hello(
                engine_id=self.engine_id,
                client_name="test",
                fingerprint=self._namespace,
                namespace_text="test",
                key_bytes=16,
                num_shards=self._num_ranks,
                shard=shard,
                payload_bytes=layout.payload_bytes if layout else 0,
                descriptor=layout.descriptor if layout else b"",
            ),
            call_timeout_s=self._call_timeout_s,
            transfer_timeout_s=10.0,
            wants_checksums=self._verify_loads,
        )

    def add_rank(self, shard: int) -> Rank:
        generator = torch.Generator().manual_seed(shard + 100 * next(_engines))
        pages = [
            torch.randint(1 << 60, (NUM_BLOCKS, PAGE_WORDS), dtype=torch.int64, generator=generator)
            for _ in range(NUM_LAYERS)
        ]
        names = [f"layer.{i}" for i in range(NUM_LAYERS)]
        layout = layout_of(
            dict(zip(names, pages, strict=True)), names, dict.fromkeys(names, PAGE_WORDS * 8), NUM_BLOCKS
        )
        client = self._line(shard, layout)
        worker = WorkerSide(
            client,
            layout,
            shard=shard,
            slots_ahead=24,
            staging_bytes=4 << 20,
            load_timeout_s=self._load_timeout_s,
        )
        client.start()
        worker.start()
        return Rank(pages, layout, client, worker)

    def wait_attached(self) -> None:
        for line in (self.asker, *(rank.client for rank in self.ranks)):
            assert line.wait_attached(ATTACH_S)

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.shutdown()
            rank.client.close()
        self.asker.close()


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(address: str, **options: object) -> Engine:
        engines.append(Engine(address, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def chain(seed: int, num_blocks: int) -> list[BlockName]:
    """The names of a chain of blocks that no other seed has."""
    keys = [(seed << 64 | i + 1).to_bytes(16, "little") for i in range(num_blocks)]
    parents = [bytes(16), *keys[:-1]]
    return [BlockName(key, parent, i) for i, (key, parent) in enumerate(zip(keys, parents, strict=True))]


@pytest.fixture
def own_prefixd(tmp_path: Path) -> Iterator[Prefixd]:
    """A server of the test's own, not started: to be killed, stopped and restarted."""
    server = Prefixd(tmp_path, memory="64MiB")
    yield server
    server.kill()
