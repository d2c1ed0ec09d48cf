"""Whatever clients do, in whatever order: the sums add up and no block is left that cannot be reached.

Clients at random, from a seed: hypothesis shrinks better, but hardly ever gets as far as a full memory with leases.
"""

from random import Random
from typing import Any

import numpy as np
import pytest

from cache_server.arena import Arena
from cache_server.sessions import Session
from cache_server.values import Blocks, HeldPayload, PutSlot
from tests.cache_server.harness import GRANULE, NAMESPACE, Bench, chain, parents_of
from tests.fakes import FakeClock

OTHER = b"o" * 32
CHAINS = [chain(str(i), 12) for i in range(4)]
CHAINS.append([*CHAINS[0][:5], *chain("branch", 6)])


class Clients:
    """Two namespaces of different payload sizes, the first with two shards; workers come, write, and go."""

    def __init__(self, seed: int, arena: Arena | None = None) -> None:
        self.random = Random(seed)
        self.clock = FakeClock()
        self.bench = Bench(self.clock, num_segments=3, num_shards=2, arena=arena)
        self.cache = self.bench.cache
        self.workers = list(self.bench.workers)
        self.schedulers = [self.bench.scheduler, self.bench.attach(fingerprint=OTHER, num_shards=1)]
        self.leases: list[tuple[Session, int]] = []
        self.held: list[HeldPayload] = []
        self.puts: list[tuple[Session, PutSlot, bytes]] = []
        self.names: dict[tuple[int, int], bytes] = {}
        self.held_over: list[int] = []  # slots of an earlier server's clients
        self.attach(2)

    # --- steps, each with how often it is taken

    def step(self) -> None:
        steps = {
            self.attach: 1,
            self.leave: 1,
            self.reserve: 3,
            self.commit: 6,
            self.save_everywhere: 8,
            self.lookup: 10,
            self.release: 5,
            self.begin_put: 3,
            self.end_put: 4,
            self.hold: 3,
            self.drop: 4,
            self.lose: 0.5,
            self.pass_time: 2,
            self.flush: 0.2,
        }
        self.random.choices(list(steps), list(steps.values()))[0]()

    def attach(self, which: int | None = None) -> None:
        which = self.random.randrange(3) if which is None else which
        if len(self.workers) > 5:
            return
        if which == 2:
            worker = self.bench.attach_worker(payload_bytes=3 * GRANULE, fingerprint=OTHER, num_shards=1)
        else:
            worker = self.bench.attach_worker(which)
        self.workers.append(worker)

    def leave(self) -> None:
        if len(self.workers) < 4:
            return
        worker = self.workers.pop(self.random.randrange(3, len(self.workers)))
        if self.random.random() < 0.5:
            self.cache.detach(worker)
            assert self.cache.sessions.find(worker.id) is worker
        self.cache.unmap(worker)

    def reserve(self) -> None:
        slots, _ = self.cache.reserve(self.random.choice(self.workers).id, self.random.randint(1, 10))
        assert (np.diff(slots.astype(np.int64)) > 0).all()

    def commit(self) -> None:
        worker, keys = self.random.choice(self.workers), self.random.choice(CHAINS)
        first = self.random.randrange(len(keys))
        slots = list(worker.reserved)[: min(self.random.randint(1, 6), len(keys) - first)]
        self.cache.commit(worker.id, slots, batch(keys, first, len(slots)))

    def save_everywhere(self) -> None:
        keys = self.random.choice(CHAINS)
        for worker in self.workers:
            self.cache.reserve(worker.id, len(keys))
            slots = list(worker.reserved)[: len(keys)]
            self.cache.commit(worker.id, slots, batch(keys, 0, len(slots)))

    def lookup(self) -> None:
        scheduler, keys = self.random.choice(self.schedulers), self.random.choice(CHAINS)
        first = self.random.choice([0, 0, 0, 1, 5, len(keys)])
        result = self.cache.lookup(scheduler.id, b"".join(keys), first, self.random.random() < 0.8)
        assert result.hit_start <= first <= result.hit_end
        assert result.present[result.hit_start : result.hit_end].all()
        if not result.lease_id:
            return
        self.leases.append((scheduler, result.lease_id))
        names = keys[result.hit_start : result.hit_end]
        for slots, generations in zip(result.slots.tolist(), result.generations.tolist(), strict=True):
            for slot, generation, name in zip(slots, generations, names, strict=True):
                # A slot and a generation stand for one name, for ever.
                assert self.names.setdefault((slot, generation), name) == name
                assert self.bench.arena.generation(slot) == generation

    def release(self) -> None:
        if self.leases:
            scheduler, lease_id = self.leases.pop(self.random.randrange(len(self.leases)))
            self.cache.release(scheduler.id, [lease_id])

    def begin_put(self) -> None:
        worker, key = self.random.choice(self.workers), self.random.choice(CHAINS)[0]
        target = self.cache.put_slot(worker, key)
        if isinstance(target, PutSlot):
            self.puts.append((worker, target, key))

    def end_put(self) -> None:
        if not self.puts:
            return
        worker, target, key = self.puts.pop()
        if self.random.random() < 0.3:
            self.cache.put_abandon(worker, target)
        else:
            self.cache.put_commit(worker, target, batch([key], 0, 1), 0, self.random.random() < 0.8)

    def hold(self) -> None:
        keys = self.random.choice(CHAINS)
        held = self.cache.hold_payload(self.random.choice(self.workers), self.random.choice(keys))
        if held is not None:
            self.held.append(held)

    def drop(self) -> None:
        if self.held:
            self.cache.drop_payload(self.held.pop())

    def lose(self) -> None:
        """A payload turns out to be broken, leased or not."""
        keys = self.random.choice(CHAINS)
        held = self.cache.hold_payload(self.random.choice(self.workers), self.random.choice(keys))
        if held is not None:
            self.cache.lose_payload(held)
            self.cache.drop_payload(held)

    def pass_time(self) -> None:
        self.clock.advance(self.random.choice([0.5, 9.0, 31.0]))

    def flush(self) -> None:
        self.cache.flush(self.random.choice([b"", NAMESPACE, OTHER]))

    # --- what must hold after each

    def check_sums(self) -> None:
        arena, cache = self.bench.arena, self.cache
        named = [slot for namespace in self.namespaces() for slot in namespace.index.all_slots().tolist()]
        reserved = [slot for session in cache.sessions for slot in session.reserved]
        reserved += [target.slot for _, target, _ in self.puts] + self.held_over
        cuts = [cut for slot_class in arena.classes for cut in slot_class.cuts.values()]

        assert len({*named, *reserved}) == len(named) + len(reserved)
        assert sum(cut.num_reserved for cut in cuts) == len(reserved)
        assert sum(cut.num_named for cut in cuts) == len(named)
        assert arena.touched_bytes <= arena.budget_bytes
        assert (cache.leased_bytes == 0) or self.held or len(cache.leases)

    def check_indexes(self) -> None:
        for namespace in self.namespaces():
            index = namespace.index
            rows = np.flatnonzero(index._live)
            parents = index.parent[rows]
            may_go = rows[(index.num_children[rows] == 0) & (index.num_leases[rows] == 0)]
            can_be_reached = (index.depth[rows] == 0) | index.reachable[parents]

            assert len(index) == len(rows)
            assert np.isin(parents[parents > 0], rows).all()
            assert (index.num_children[rows] == np.bincount(parents, minlength=len(index.parent))[rows]).all()
            assert (index.queue.queued[may_go] != 0).all()
            assert (index.reachable[rows] == (can_be_reached & index.complete[rows])).all()
            assert index.num_complete == np.count_nonzero(index.complete[rows])
            assert index.num_leased == np.count_nonzero(index.num_leases[rows])

    def namespaces(self) -> list[Any]:
        return list(self.cache._namespaces.values())


def batch(keys: list[bytes], first: int, count: int) -> Blocks:
    positions = list(range(first, first + count))
    parents = parents_of(keys)
    return Blocks([keys[i] for i in positions], [parents[i] for i in positions], positions, [0] * count)


@pytest.mark.parametrize("seed", range(10))
def test_sums_add_up_and_every_block_without_lease_and_children_can_go(seed: int) -> None:
    """After each of many steps; and at the end, when all leases are over, everything can go."""

    clients = Clients(seed)
    for _ in range(600):
        clients.step()
        clients.check_sums()
        clients.check_indexes()
    counters = clients.cache.counters
    assert counters.leases_granted > 15
    assert counters.evicted_blocks_capacity > 50
    while clients.held:
        clients.drop()
    clients.clock.advance(1000)
    clients.cache.expire()
    for namespace in clients.namespaces():
        clients.bench.arena.evict(namespace.index.evict(1 << 30, [0], clients.clock.now).slots)
        assert len(namespace.index) == 0
    assert clients.bench.arena.stored_bytes == 0
    clients.bench.arena.close()
