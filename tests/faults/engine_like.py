"""`EngineLike`: what an engine is to a cache server, without the engine, and with a byte oracle.

A scheduler side that looks up under leases and a worker that saves and loads, over the connector's own client, on
mapped slots or on streams. Every payload is a function of its key, so whatever is ever served can be judged: a payload
is right, or missing, or a *wrong byte*. It attaches again by itself, as engines do.

    python -m tests.faults.engine_like ADDRESS SEED   saves and loads until SIGTERM, two lines of figures per second

That process stops itself (SIGSTOP) in the middle of its next save when it gets SIGUSR1, of its next load at SIGUSR2:
half of the payloads are written or copied, the others are not. (On mapped slots: a stream has no such middle.)

Not here: the connector's worker and scheduler, which have tests of their own; faults (`soak.py`).
"""

import contextlib
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import xxhash

from connector.client import STORED, CacheClient, Hello, LookupAnswer, Session
from tests.cache_server.harness import chain, parents_of, payload_of
from tests.faults.processes import stop_here

GRANULE = 4096
CALL_S = 1.0
TRANSFER_S = 10.0
PRESENT = 2  # COMMIT_STATUS_ALREADY_PRESENT


@dataclass
class Tally:
    """What an engine saw."""

    saved: int = 0  # payloads that got a name
    loaded: int = 0  # payloads that were promised, copied and right
    missing: int = 0  # payloads that were promised and could not be loaded: recomputed by an engine
    wrong: int = 0  # payloads that were served with other bytes: never
    misses: int = 0  # lookups without a hit
    unanswered: int = 0  # questions that nobody answered


class EngineLike:
    """One engine with one rank. Not thread-safe: one thread uses it."""

    def __init__(
        self, address: str, engine_id: str, *, payload_bytes: int = 64 << 10, namespace: bytes = b"\x05" * 32
    ) -> None:
        self.payload_bytes = payload_bytes
        self.tally = Tally()
        self.reach: Callable[[str], None] = lambda point: None  # called in the middle of a "save" and of a "load"
        common = {"engine_id": engine_id, "client_name": "engine-like", "fingerprint": namespace}
        common |= {"namespace_text": "faults", "key_bytes": 16, "num_shards": 1}
        asker = Hello(**common)  # type: ignore[arg-type]
        worker = Hello(**common, shard=0, payload_bytes=payload_bytes, descriptor=b"layout")  # type: ignore[arg-type]
        self.asker, self.worker = (
            CacheClient(address, hello, call_timeout_s=CALL_S, transfer_timeout_s=TRANSFER_S)
            for hello in (asker, worker)
        )
        self._pool: tuple[Session | None, list[int]] = (None, [])
        self.asker.start()
        self.worker.start()

    def close(self) -> None:
        """Leave. When this question is answered, what was sent before has arrived: releases, which nobody waits for."""
        self.hits(chain("the last question", 1))
        self.asker.close()
        self.worker.close()

    def wait_attached(self, timeout_s: float) -> bool:
        return self.asker.wait_attached(timeout_s) and self.worker.wait_attached(timeout_s)

    # --- save

    def save(self, keys: Sequence[bytes], start: int = 0) -> list[bytes]:
        """Save keys[start:] of a chain. Returns those that are certainly stored: the server said so."""
        session = self.worker.session()
        if session is None:
            self.tally.unanswered += 1
            return []
        keys_now, parents = list(keys[start:]), parents_of(keys)[start:]
        depths = np.arange(start, len(keys), dtype="<u4")
        with session.inside():
            if session.mapped:
                statuses = self._save_mapped(session, keys_now, parents, depths)
            else:
                payloads = [memoryview(payload_of(key, self.payload_bytes)) for key in keys_now]
                sums = np.array([xxhash.xxh3_64_intdigest(payload) for payload in payloads], dtype="<u8")
                statuses = self.worker.put(session, payloads, b"".join(keys_now), b"".join(parents), depths, sums)
        self.tally.unanswered += statuses is None
        self.tally.saved += (statuses or b"").count(STORED)
        return [key for key, status in zip(keys_now, statuses or b"", strict=False) if status in (STORED, PRESENT)]

    def _save_mapped(
        self, session: Session, keys: list[bytes], parents: list[bytes], depths: np.ndarray
    ) -> bytes | None:
        if self._pool[0] is not session:
            self._pool = (session, [])
        pool = self._pool[1]
        if len(pool) < len(keys):
            pool.extend(self.worker.reserve(session, 2 * len(keys) - len(pool)).tolist())
        slots = [pool.pop() for _ in range(min(len(keys), len(pool)))]
        for number, (slot, key) in enumerate(zip(slots, keys, strict=False)):
            if number == len(slots) // 2:
                self.reach("save")
            memory = session.segment(slot >> 32)
            if memory is None:
                return None
            first = (slot & 0xFFFFFFFF) * GRANULE
            memory.data[first : first + self.payload_bytes] = np.frombuffer(
                payload_of(key, self.payload_bytes), np.uint8
            )
        if not slots:
            return b""
        count = len(slots)
        statuses = self.worker.commit(
            session,
            np.array(slots, dtype="<u8"),
            b"".join(keys[:count]),
            b"".join(parents[:count]),
            depths[:count],
        )
        if statuses is not None:
            pool.extend(slot for slot, status in zip(slots, statuses, strict=True) if status != STORED)
        return statuses

    # --- load

    def hits(self, keys: Sequence[bytes], *, lease: bool = False) -> LookupAnswer | None:
        """The answer to a lookup; None: there was none."""
        call = self.asker.lookup(b"".join(keys), 0, lease=lease)
        if call is None:
            return None
        call.wait(CALL_S)
        return call.answer()

    def num_present(self, keys: Sequence[bytes]) -> int | None:
        """How many leading blocks are there; None: nobody answered."""
        answer = self.hits(keys)
        if answer is None:
            return None
        return next((i for i in range(len(keys)) if not answer.is_present(i)), len(keys))

    def load(self, keys: Sequence[bytes]) -> int:
        """Look up and load what is promised, judge every byte. Returns how many leading payloads were right."""
        answer = self.hits(keys, lease=True)
        if answer is None:
            self.tally.unanswered += 1
            return 0
        promised = list(keys[answer.hit_start : answer.hit_end])
        if not promised or not answer.lease_id:
            self.tally.misses += 1
            return 0
        good = self._copy(answer, promised)
        self.asker.release([answer.lease_id])
        right = 0
        for key, payload in zip(promised, good, strict=True):
            if payload is None:
                self.tally.missing += 1
            elif payload != payload_of(key, self.payload_bytes):
                self.tally.wrong += 1
            else:
                right += 1
        self.tally.loaded += right
        return right

    def _copy(self, answer: LookupAnswer, keys: list[bytes]) -> list[bytes | None]:
        session = self.worker.session()
        if session is None or session.server_epoch != answer.server_epoch:
            return [None] * len(keys)
        with session.inside():
            if session.mapped:
                pairs = list(zip(answer.slots[0].tolist(), answer.generations[0].tolist(), strict=True))
                half = len(pairs) // 2
                copied = [self._copy_slot(session, slot, generation) for slot, generation in pairs[:half]]
                self.reach("load")
                return copied + [self._copy_slot(session, slot, generation) for slot, generation in pairs[half:]]
            buffers = [bytearray(self.payload_bytes) for _ in keys]
            views = [memoryview(buffer) for buffer in buffers]
            sums = self.worker.get(session, b"".join(keys), answer.lease_id, views)
            return [
                bytes(buffer) if checksum is not None and checksum in (0, xxhash.xxh3_64_intdigest(buffer)) else None
                for buffer, checksum in zip(buffers, sums, strict=True)
            ]

    def _copy_slot(self, session: Session, slot: int, generation: int) -> bytes | None:
        memory = session.segment(slot >> 32)
        granule = slot & 0xFFFFFFFF
        if memory is None or int(memory.generations[granule]) != generation:
            return None
        first = granule * GRANULE
        payload = memory.data[first : first + self.payload_bytes].tobytes()
        return payload if int(memory.generations[granule]) == generation else None


def main(address: str, seed: int) -> None:
    """Until SIGTERM: save new chains, load old ones, tell once a second."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    choose = random.Random(seed)
    engine = EngineLike(address, f"engine-{seed}")
    armed: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: armed.append("save"))
    signal.signal(signal.SIGUSR2, lambda *_: armed.append("load"))

    def reach(point: str) -> None:
        if point in armed:
            armed.clear()
            stop_here()

    engine.reach = reach
    known: list[list[bytes]] = []
    told_at = 0.0
    while not over.is_set():
        # Every second chain is one that all engines save: the first commit wins, the others are told.
        name = f"shared {choose.randrange(200)}" if choose.random() < 0.5 else f"{seed} {choose.randrange(10_000)}"
        keys = chain(name, choose.randint(2, 24))
        engine.save(keys)
        known = [*known[-60:], keys]
        engine.load(choose.choice(known))
        engine.load(chain(f"shared {choose.randrange(200)}", 24))
        if time.monotonic() - told_at > 0.5:
            told_at = time.monotonic()
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(asdict(engine.tally)), flush=True)
        over.wait(0.005 if engine.worker.session() else 0.05)
    print(json.dumps(asdict(engine.tally)), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
