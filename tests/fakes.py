"""Stand-ins for what is slow, far away or always on time: part of the product, so that tests patch nothing.

`FakeClock` is a clock that moves when told. `FakeServer` is a cache server in a dict, and `FakeCacheClient` one
engine's line to it with the interface of `connector.client.CacheClient` that the scheduler side uses: lookups are
answered at once, or when the test says so. `recorded_log` is a log that can be read.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from connector.client import LookupAnswer


class FakeClock:
    """Monotonic seconds, moved by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"{seconds} s would go back in time"
        self.now += seconds


@contextlib.contextmanager
def recorded_log(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages that a logger gets from now on. vLLM's loggers hand nothing on to the root, where caplog listens."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A payload under its key. `slot` and `generation` change with every life of the key in the server."""

    payload: object
    slot: int
    generation: int


class FakeServer:
    """A cache server: the first commit of a key wins, leased keys stay, the rest can be dropped by the test.

    One shard. `calls` counts by RPC. Answers can be held back (`hold`, `let_go`), fail, or say that workers are
    missing.
    """

    LEASE_S = 10.0

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.blocks: dict[bytes, StoredBlock] = {}
        self.leases: dict[int, tuple[frozenset[bytes], float]] = {}
        self.calls = {"lookup": 0, "release": 0, "renew": 0}
        self.epoch = 1
        self.down = False  # nobody to ask
        self.failing = False  # calls are made, no answer comes of them
        self.workers_missing = False
        self.leases_refused = False  # half of the memory is leased already: presence is told, nothing promised
        self.held: list[FakeCall] | None = None
        self.num_already_present = 0
        self.num_waits = 0  # how often somebody stood still for an answer
        self._lease_ids = itertools.count(1)
        self._slots = itertools.count(1)

    # --- what a test does to it

    def hold(self) -> None:
        """From now on lookups are not answered until `let_go`."""
        if self.held is None:
            self.held = []

    def let_go(self) -> None:
        """Answers every lookup that was held back, in order, and later ones at once."""
        held, self.held = self.held or [], None
        for call in held:
            call.arrive()

    def num_outstanding(self) -> int:
        """Lookups on their way."""
        return len(self.held or ())

    def drop(self, key: bytes) -> None:
        """The block is gone: evicted, lost or flushed. Leases of it are broken, as by a crash."""
        del self.blocks[key]

    def restart(self) -> None:
        """A new process: nothing of the old one holds."""
        self.epoch += 1
        self.blocks.clear()
        self.leases.clear()

    def held_leases(self) -> set[int]:
        """Leases that neither ended nor were released."""
        self.leases = {name: lease for name, lease in self.leases.items() if lease[1] > self.clock()}
        return set(self.leases)

    # --- what clients do to it

    def commit(self, key: bytes, payload: object) -> bool:
        """True if stored, False if there was a block of this name already."""
        if key in self.blocks:
            assert self.blocks[key].payload == payload, f"{key.hex()} names two payloads"
            self.num_already_present += 1
            return False
        slot = next(self._slots)
        self.blocks[key] = StoredBlock(payload, slot, generation=slot % (1 << 32))
        return True

    def lookup(self, keys: Sequence[bytes], first: int, lease: bool) -> LookupAnswer | None:
        if self.failing:
            return None
        present = [key in self.blocks for key in keys]
        start = stop = first
        promises = lease and not self.workers_missing and not self.leases_refused
        if promises and first < len(keys) and present[first]:
            while start > 0 and present[start - 1]:
                start -= 1
            while stop < len(keys) and present[stop]:
                stop += 1
        lease_id = 0
        if stop > start:
            lease_id = next(self._lease_ids)
            self.leases[lease_id] = (frozenset(keys[start:stop]), self.clock() + self.LEASE_S)
        blocks = [self.blocks[key] for key in keys[start:stop]]
        return LookupAnswer(
            present=np.packbits(np.array(present, dtype=bool), bitorder="little").tobytes(),
            hit_start=start,
            hit_end=stop,
            lease_id=lease_id,
            deadline=self.clock() + self.LEASE_S,
            half_life=self.clock() + self.LEASE_S / 2,
            slots=np.array([[block.slot for block in blocks]], dtype="<u8"),
            generations=np.array([[block.generation for block in blocks]], dtype="<u4"),
            workers_missing=self.workers_missing,
            server_epoch=self.epoch,
        )


class FakeCall:
    """A lookup under way. It sees the server as it is when the answer is made."""

    def __init__(self, server: FakeServer, keys: Sequence[bytes], first: int, lease: bool) -> None:
        self.server_epoch = server.epoch
        self._server = server
        self._question = (keys, first, lease)
        self._done = False
        self._answer: LookupAnswer | None = None

    def arrive(self) -> None:
        self._answer = self._server.lookup(*self._question)
        self._done = True

    def wait(self, timeout_s: float) -> None:
        assert 0 <= timeout_s <= 0.1, f"the scheduler would stand still for {timeout_s} s"
        self._server.num_waits += 1

    def done(self) -> bool:
        return self._done

    def answer(self) -> LookupAnswer | None:
        return self._answer if self._done else None


class FakeCacheClient:
    """The scheduler side's line to a `FakeServer`."""

    def __init__(self, server: FakeServer, key_bytes: int = 16) -> None:
        self.server = server
        self._key_bytes = key_bytes
        self.leases_in_doubt: list[int] = []  # how many were held, each time that nothing was to be sent any more

    num_outages = 0

    def start(self) -> None:
        """Nothing to attach to."""

    def session(self) -> FakeServer | None:
        """Whoever would be asked."""
        return None if self.server.down else self.server

    def close(self) -> None:
        """Nothing to let go of."""

    def lookup(self, keys: bytes, first: int, *, lease: bool, recompute_us_per_block: float = 0.0) -> FakeCall | None:
        if self.server.down:
            return None
        self.server.calls["lookup"] += 1
        call = FakeCall(self.server, list(unpacked(keys, self._key_bytes)), first, lease)
        if self.server.held is None:
            call.arrive()
        else:
            self.server.held.append(call)
        return call

    def release(self, lease_ids: Sequence[int]) -> None:
        self.server.calls["release"] += 1
        for lease_id in lease_ids:
            assert lease_id, "lease 0 is none"
            self.server.leases.pop(lease_id, None)

    def doubt(self) -> None:
        self.leases_in_doubt.append(len(self.server.held_leases()))

    def renew(self, lease_ids: Sequence[int]) -> None:
        self.server.calls["renew"] += 1
        for lease_id in lease_ids:
            if lease_id in self.server.held_leases():
                keys, _ = self.server.leases[lease_id]
                self.server.leases[lease_id] = (keys, self.server.clock() + self.server.LEASE_S)


def unpacked(keys: bytes, key_bytes: int) -> Iterator[bytes]:
    """The keys in a packed field."""
    for start in range(0, len(keys), key_bytes):
        yield keys[start : start + key_bytes]
