"""Memory that outlives a clean stop: everything comes back, nobody is given what somebody may still write into, and
any doubt is an empty cache."""

import dataclasses
import gc
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from cache_server import snapshot as snapshots
from cache_server.cache import Cache
from cache_server.persist import FolderInUseError, PersistError, PersistFolder, boot_id
from cache_server.snapshot import Snapshot, SnapshotError
from cache_server.warm_restart import ASK_EVERY_S, WarmRestart
from tests.cache_server.harness import GRANULE, NAMESPACE, Bench, blocks, chain
from tests.cache_server.test_invariants import CHAINS, OTHER, Clients
from tests.fakes import FakeClock, recorded_log

SEGMENT = 16 * GRANULE
LOG = "cache_server.warm_restart"


class Life:
    """One server's time over a folder, without the server: from `reopen` to `keep`."""

    def __init__(self, folder: Path, clock: FakeClock, num_segments: int = 4, **more: Any) -> None:
        self.warm = WarmRestart(folder, num_segments * SEGMENT, SEGMENT)
        self.bench = Bench(clock, arena=self.warm.arena, prepare=self.warm.reopen, **more)

    @property
    def cache(self) -> Cache:
        return self.bench.cache

    def stop(self, *, is_clean: bool = True, clients_leave: bool = True) -> None:
        if clients_leave:
            for session in self.cache.sessions:
                self.cache.unmap(session)
        if is_clean:
            self.warm.keep(self.cache)
        self.warm.folder.close()
        self.warm.arena.close()


def write(bench: Bench, keys: list[bytes]) -> None:
    """Save a chain whose payloads are functions of their keys."""
    for start in range(0, len(keys), 4):
        slots = bench.reserve(4)
        for slot, key in zip(slots, keys[start:], strict=False):
            bench.arena.payload(slot, GRANULE)[:] = key[0]
        part = slots[: len(keys) - start]
        assert bench.cache.commit(bench.worker.id, part, blocks(keys[: start + 4], start)) == bytes([1] * len(part))


def read(bench: Bench, keys: list[bytes]) -> list[int | None]:
    """The first byte of each payload that is there; all its bytes are the same."""
    found: list[int | None] = []
    for key in keys:
        held = bench.cache.hold_payload(bench.worker, key)
        if held is None:
            found.append(None)
            continue
        assert held.is_intact
        assert len(np.unique(held.bytes)) == 1
        found.append(int(held.bytes[0]))
        bench.cache.drop_payload(held)
    return found


def test_every_payload_is_there_after_a_clean_stop(shared_memory_folder: Path, clock: FakeClock) -> None:
    """Bytes, keys, order of use; also through three restarts."""

    chains = [chain(str(i), 8) for i in range(6)]
    life = Life(shared_memory_folder, clock)
    for keys in chains:
        write(life.bench, keys)
    life.bench.lookup(chains[0])  # the oldest is now the youngest
    life.stop()

    for _ in range(3):
        life = Life(shared_memory_folder, clock)
        assert [life.bench.num_hit(keys) for keys in chains[1:]] == [8] * 5
        assert [read(life.bench, keys) for keys in chains] == [[key[0] for key in keys] for keys in chains]
        life.bench.lookup(chains[0])
        life.stop()

    life = Life(shared_memory_folder, clock)
    write(life.bench, chain("more", 16))
    write(life.bench, chain("and more", 8))
    assert [life.bench.num_hit(keys) for keys in chains] == [8, 0, 8, 8, 8, 8]
    life.stop()


def test_nothing_of_an_unclean_stop_is_believed(shared_memory_folder: Path, clock: FakeClock) -> None:
    """No snapshot: the files go, and so does their memory."""

    life = Life(shared_memory_folder, clock)
    write(life.bench, chain("a", 8))
    life.stop(is_clean=False)
    assert len(list(shared_memory_folder.glob("segment-*"))) == 4
    with recorded_log(LOG) as log:
        warm = WarmRestart(shared_memory_folder, 4 * SEGMENT, SEGMENT)
        cache = Cache(warm.arena, clock)
        warm.reopen(cache)

    assert cache.namespaces == []
    assert log == ["persist: starting empty: the last server did not stop cleanly"]
    assert [file.name for file in shared_memory_folder.iterdir()] == ["lock"]


def test_a_snapshot_is_used_once(shared_memory_folder: Path, clock: FakeClock) -> None:
    """A server that dies after its start has changed what the snapshot speaks of."""

    life = Life(shared_memory_folder, clock)
    write(life.bench, chain("a", 8))
    life.stop()
    life = Life(shared_memory_folder, clock)
    assert life.bench.num_hit(chain("a", 8)) == 8
    life.stop(is_clean=False)

    life = Life(shared_memory_folder, clock)
    assert life.bench.num_hit(chain("a", 8)) == 0
    life.stop()


def test_a_folder_is_one_servers(shared_memory_folder: Path, clock: FakeClock) -> None:
    """And it lies on a tmpfs with room for the memory."""

    folder = PersistFolder(shared_memory_folder)
    folder.open(SEGMENT)
    with pytest.raises(FolderInUseError, match="another server uses"):
        PersistFolder(shared_memory_folder).open(SEGMENT)
    folder.close()
    with pytest.raises(PersistError, match=r"its tmpfs has room for \d+ bytes, the memory needs"):
        PersistFolder(shared_memory_folder).open(1 << 50)
    with pytest.raises(PersistError, match="it is on sysfs; it must be on a tmpfs"):
        PersistFolder(Path("/sys")).open(SEGMENT)
    (shared_memory_folder / "file").touch()
    with pytest.raises(PersistError, match="Not a directory"):
        PersistFolder(shared_memory_folder / "file" / "folder").open(SEGMENT)


# --- doubt ----------------------------------------------------------------------------------------------------


def edit(change: Callable[[Snapshot], Snapshot]) -> Callable[[Path], None]:
    """The snapshot as another server, mistaken but with a right checksum, would have written it."""

    def apply(folder: Path) -> None:
        path = folder / "snapshot"
        path.write_bytes(snapshots.pack(change(snapshots.unpack(path.read_bytes(), boot_id(), SEGMENT, 100))))

    return apply


def edit_columns(**changes: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(snapshot: Snapshot) -> Snapshot:
        kept = snapshot.namespaces[0]
        columns = dataclasses.replace(
            kept.columns, **{name: how(getattr(kept.columns, name).copy()) for name, how in changes.items()}
        )
        return dataclasses.replace(snapshot, namespaces=[dataclasses.replace(kept, columns=columns)])

    return edit(change)


def edit_namespace(**fields: Any) -> Callable[[Path], None]:
    return edit(
        lambda snapshot: dataclasses.replace(
            snapshot, namespaces=[dataclasses.replace(snapshot.namespaces[0], **fields)]
        )
    )


def edit_segments(**fields: Any) -> Callable[[Path], None]:
    return edit(
        lambda snapshot: dataclasses.replace(
            snapshot, segments=[dataclasses.replace(kept, **fields) for kept in snapshot.segments]
        )
    )


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Texts and numbers that `pack` would not write, with a right checksum."""

    def apply(folder: Path) -> None:
        path = folder / "snapshot"
        data = path.read_bytes()
        fields = list(struct.unpack_from("<8sII16sQQQ16s", data))
        manifest = json.loads(data[72 : 72 + fields[5]])
        change(manifest)
        text = json.dumps(manifest).encode()
        body = text + data[72 + fields[5] :]
        fields[5:] = [len(text), len(body), xxhash.xxh3_128_digest(body)]
        path.write_bytes(struct.pack("<8sII16sQQQ16s", *fields) + body)

    return apply


def put(offset: int, data: bytes) -> Callable[[Path], None]:
    """Overwrite some bytes of the snapshot."""

    def apply(folder: Path) -> None:
        with (folder / "snapshot").open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            file.write(data)

    return apply


def on(pattern: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Do something to the first file of that name."""
    return lambda folder: change(min(folder.glob(pattern)))


def punch(path: Path) -> None:
    """A hole of one page, the size stays."""
    with path.open("r+b") as file:
        file.truncate(SEGMENT - GRANULE)
        file.truncate(SEGMENT)


def replace(path: Path) -> None:
    """The same bytes in another file."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def raise_generation(path: Path) -> None:
    """Through a mapping, as the server itself does: the file's times do not tell."""
    np.memmap(path, dtype=np.uint32, mode="r+")[0] += 1


def first_to(value: int) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        column.flat[0] = value
        return column

    return change


def beyond_the_end(slots: Any) -> Any:
    slots.flat[0] = slots.flat[0] >> np.uint64(32) << np.uint64(32) | np.uint64(SEGMENT // GRANULE)
    return slots


def second_like_first(column: Any) -> Any:
    column[1] = column[0]
    return column


DOUBTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (on("snapshot", lambda path: path.write_bytes(b"")), "has 0 bytes"),
    "cut": (on("snapshot", lambda path: path.write_bytes(path.read_bytes()[:-1])), r"has \d+ of \d+ bytes"),
    "longer": (on("snapshot", lambda path: path.write_bytes(path.read_bytes() + b"x")), r"has \d+ of \d+ bytes"),
    "a bit": (put(-1, b"\xff"), "checksum"),
    "magic": (put(0, b"prefixdV"), "begins with something else"),
    "version": (put(8, b"\x01"), "has format 1, this server reads 2"),
    "another boot": (put(16, bytes(16)), "older than the machine's start"),
    "another segment size": (put(32, b"\x01"), "with this --memory they have"),
    "segment missing": (on("segment-*", Path.unlink), "No such file"),
    "generations missing": (on("generations-*", Path.unlink), "No such file"),
    "segment short": (on("segment-*", lambda path: os.truncate(path, SEGMENT - 1)), "is another file"),
    "segment punched": (on("segment-*", punch), f"has {SEGMENT - GRANULE} of {SEGMENT} bytes"),
    "segment exchanged": (on("segment-*", replace), "is another file"),
    "generations exchanged": (on("generations-*", replace), "is another file"),
    "generations short": (on("generations-*", lambda path: os.truncate(path, 8)), "is another file"),
    "a generation raised": (on("generations-*", raise_generation), "generations of segment . were changed"),
    "generation of a block": (edit_columns(generations=first_to(77)), "were replaced"),
    "more segments than memory": (
        edit(
            lambda s: dataclasses.replace(s, segments=[dataclasses.replace(s.segments[0], id=i) for i in range(1, 9)])
        ),
        "8 segments; this --memory has room for 4",
    ),
    "segment twice": (edit(lambda s: dataclasses.replace(s, segments=[*s.segments, s.segments[0]])), "not distinct"),
    "segment of no namespace": (edit_segments(namespace=7), "a namespace that is not there"),
    "segment cut otherwise": (edit_segments(payload_bytes=2 * GRANULE), "is cut for 8192 bytes"),
    "segment spare": (edit_segments(payload_bytes=0), "payloads of shard 0 in segment"),
    "namespace twice": (
        edit(lambda s: dataclasses.replace(s, namespaces=[s.namespaces[0], s.namespaces[0]])),
        "namespaces are not distinct",
    ),
    "namespace gone": (edit(lambda s: dataclasses.replace(s, namespaces=[])), "a namespace that is not there"),
    "shards gone": (edit_namespace(shards=[]), "is cut for 4096 bytes"),
    "fingerprint": (edit_namespace(fingerprint=b"short"), "namespaces are not distinct"),
    "held twice": (
        edit(
            lambda s: dataclasses.replace(
                s, namespaces=[dataclasses.replace(s.namespaces[0], held=s.namespaces[0].columns.slots[:1, 0])]
            )
        ),
        "two payloads in one slot",
    ),
    "held nowhere": (edit_namespace(held=np.array([9 << 32], "<u8")), "slots in segment 9"),
    "key twice": (edit_columns(keys=second_like_first), "a key is there twice"),
    "slot twice": (edit_columns(slots=second_like_first), "two payloads in one slot"),
    "slot beyond": (edit_columns(slots=beyond_the_end), "not where slots are"),
    "slot nowhere": (edit_columns(slots=first_to(9 << 32)), "in segment 9"),
    "no slot": (edit_columns(slots=first_to(0)), "without payload"),
    "parent nowhere": (edit_columns(parents=first_to(1000)), "is wrong"),
    "cycle": (edit_columns(parents=first_to(2)), "not one deeper"),
    "no parent": (edit_columns(depths=first_to(3)), "not one deeper|do not agree"),
    "orphan nowhere": (
        edit_columns(
            orphans=lambda column: np.array([999], "<u4"), orphan_parents=lambda column: np.zeros((1, 2), "<u8")
        ),
        "an orphan is not there",
    ),
    "negative count": (edit_manifest(lambda m: m["namespaces"][0].update(num_blocks=-1)), "-1 is no count"),
    "absurd count": (edit_manifest(lambda m: m["namespaces"][0].update(num_blocks=10**12)), "ends after the snapshot"),
    "overflowing count": (edit_manifest(lambda m: m["namespaces"][0].update(num_held=1 << 64)), "is no count"),
    "text for a count": (edit_manifest(lambda m: m["namespaces"][0].update(num_blocks="8")), "'8' is no count"),
    "fewer blocks": (edit_manifest(lambda m: m["namespaces"][0].update(num_blocks=1)), "goes on after|wrong|slot"),
    "key size": (edit_manifest(lambda m: m["namespaces"][0].update(key_bytes=24)), "keys of 24 bytes"),
    "field missing": (edit_manifest(lambda m: m.pop("segments")), "'segments'"),
    "no list": (edit_manifest(lambda m: m.update(segments=7)), "is wrong"),
    "age": (edit_manifest(lambda m: m.update(age=True)), "True is no count"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_any_doubt_is_an_empty_cache(shared_memory_folder: Path, clock: FakeClock, doubt: str) -> None:
    """With one line that says which. The positive control is the last part: without the change it all comes back."""

    keys = chain("a", 8)
    change, why = DOUBTS[doubt]
    life = Life(shared_memory_folder, clock)
    write(life.bench, keys)
    life.stop()
    change(shared_memory_folder)
    with recorded_log(LOG) as log:
        life = Life(shared_memory_folder, clock)

    assert life.bench.num_hit(keys) == 0
    assert life.bench.arena.stored_bytes == life.bench.arena.reserved_bytes == 0
    assert len(log) == 1
    assert log[0].startswith("persist: starting empty: ")
    assert re.search(why, log[0]), log[0]
    write(life.bench, keys)
    life.stop()
    life = Life(shared_memory_folder, clock)
    assert read(life.bench, keys) == [key[0] for key in keys]
    life.stop()


def test_bytes_that_are_no_snapshot_are_refused_whatever_they_are() -> None:
    """Also with a right header."""

    random = np.random.default_rng(1)
    for _ in range(300):
        body = random.bytes(int(random.integers(0, 200)))
        header = struct.pack(
            "<8sII16sQQQ16s",
            *(b"prefixdS", 1, 0, boot_id(), SEGMENT, int(random.integers(0, len(body) + 1)), len(body)),
            xxhash.xxh3_128_digest(body),
        )
        with pytest.raises(SnapshotError):
            snapshots.unpack(header + body, boot_id(), SEGMENT, 4)


# --- who may still read and write ------------------------------------------------------------------------------


def test_slots_of_a_client_that_did_not_leave_are_held_until_nobody_has_the_memory_open(
    shared_memory_folder: Path, clock: FakeClock
) -> None:
    """It may be stopped in the middle of a copy. Also over a second restart."""

    keys = chain("a", 6)
    first = Life(shared_memory_folder, clock, num_segments=1)
    write(first.bench, keys)
    slots = first.bench.reserve(4)
    mapped = first.bench.arena.payload(slots[0], GRANULE)  # as a client has it
    first.stop(clients_leave=False)
    del first
    gc.collect()

    for _ in range(2):
        life = Life(shared_memory_folder, clock, num_segments=1)
        assert life.bench.arena.reserved_bytes == 4 * GRANULE
        clock.advance(ASK_EVERY_S)
        life.warm.give_back_held(life.cache)
        assert life.bench.arena.reserved_bytes == 4 * GRANULE
        assert not set(slots) & set(life.bench.reserve(4))
        life.stop()
        del life
        gc.collect()
    del mapped
    gc.collect()
    life = Life(shared_memory_folder, clock, num_segments=1)
    assert life.bench.arena.reserved_bytes == 4 * GRANULE
    life.warm.give_back_held(life.cache)
    assert life.bench.arena.reserved_bytes == 0
    assert read(life.bench, keys) == [key[0] for key in keys]
    life.stop()


def test_a_reader_of_the_last_server_sees_that_its_slot_was_used_again(
    shared_memory_folder: Path, clock: FakeClock
) -> None:
    """It has the same generations mapped."""

    keys = chain("a", 8)
    first = Life(shared_memory_folder, clock, num_segments=1)
    write(first.bench, keys)
    free = first.bench.reserve(1)[0]
    promised = first.bench.lookup(keys)
    generations = [first.bench.arena.generations(int(slot)) for slot in promised.slots[0]]
    free_generation = int(first.bench.arena.generations(free)[0])
    free_view = first.bench.arena.generations(free)
    first.stop()

    life = Life(shared_memory_folder, clock, num_segments=1)
    assert [int(g[0]) for g in generations] == promised.generations[0].tolist()
    assert int(free_view[0]) == free_generation + 1
    for i in range(3):
        write(life.bench, chain(f"other {i}", 8))
    assert life.bench.num_hit(keys) == 0
    assert [int(g[0]) for g in generations] != promised.generations[0].tolist()
    assert all(int(g[0]) > was for g, was in zip(generations, promised.generations[0].tolist(), strict=True))
    life.stop()


def test_late_commits_after_a_restart_are_refused(shared_memory_folder: Path, clock: FakeClock) -> None:
    """The session is over, whatever slots it names."""

    first = Life(shared_memory_folder, clock, num_segments=1)
    slots = first.bench.reserve(2)
    session_id = first.bench.worker.id + 1000
    first.stop(clients_leave=False)
    life = Life(shared_memory_folder, clock, num_segments=1)

    with pytest.raises(Exception, match=r"session .* is unknown here: attach again"):
        life.cache.commit(session_id, slots, blocks(chain("late", 2)))
    with pytest.raises(Exception, match="not reserved by this session"):
        life.cache.commit(life.bench.worker.id, slots, blocks(chain("late", 2)))
    assert life.bench.arena.stored_bytes == 0
    life.stop()


# --- whatever clients did before -------------------------------------------------------------------------------


class RestartingClients(Clients):
    """The clients of the invariants' walk, whose server is restarted now and then."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.folder = folder
        self.warm = WarmRestart(folder, 3 * SEGMENT, SEGMENT)
        self.num_hits = 0
        super().__init__(seed, self.warm.arena)

    def contents(self) -> dict[tuple[bytes, bytes], Any]:
        """What can be found, and in which order it would go."""
        found = {}
        for namespace in self.namespaces():
            index = namespace.index
            for key, row in index._rows.items():
                if index.depth[row] and not index.parent[row] and row not in index._awaits:
                    continue
                if not index.num_present[row]:
                    continue  # it lost its only payload: nothing of it can be found
                found[namespace.fingerprint, key] = (
                    int(index.depth[row]),
                    index.key(int(index.parent[row])) if index.parent[row] else index._awaits.get(row),
                    index.slots[row].tolist(),
                    index.generations[row].tolist(),
                    index.checksums[row].tolist(),
                    int(index.last_use[row]),
                    bool(index.complete[row]),
                    bool(index.reachable[row]),
                )
        return found

    def restart(self) -> None:
        while self.held:
            self.drop()
        for session, target, _ in self.puts:
            self.cache.put_abandon(session, target)
        self.puts.clear()
        self.leases.clear()
        for session in list(self.cache.sessions):
            if not session.is_mapped or self.random.random() < 0.6:
                self.cache.unmap(session)
        self.held_over += [slot for session in self.cache.sessions for slot in session.reserved]
        before = self.contents()
        self.num_hits += self.cache.counters.lookup_hit_blocks
        self.warm.keep(self.cache)
        self.warm.folder.close()
        self.bench.arena.close()
        self.warm = WarmRestart(self.folder, 3 * SEGMENT, SEGMENT)
        with recorded_log(LOG) as log:
            self.bench = Bench(self.clock, num_shards=2, arena=self.warm.arena, prepare=self.warm.reopen)
        self.cache = self.bench.cache
        self.workers = list(self.bench.workers)
        self.schedulers = [self.bench.scheduler, self.bench.attach(fingerprint=OTHER, num_shards=1)]
        self.attach(2)

        assert log == []
        assert self.contents() == before

    def give_back(self) -> None:
        for namespace, _, slots in self.warm._held:
            self.cache.give_back_held(namespace, slots)
        self.warm._held.clear()
        self.held_over.clear()


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_at_any_moment_loses_nothing_and_mixes_nothing_up(shared_memory_folder: Path, seed: int) -> None:
    """Orphans, missing shards, two namespaces, branches; sums and indexes as ever, names as before."""

    clients = RestartingClients(seed, shared_memory_folder)
    for number in range(500):
        clients.step()
        if number % 50 == 49:
            clients.restart()
        if number % 90 == 89:
            clients.give_back()
        clients.check_sums()
        clients.check_indexes()
    assert clients.num_hits > 50
    assert len(clients.names) > 50
    assert {len(keys) for keys in CHAINS} == {12, 11}
    assert any(namespace.fingerprint == NAMESPACE for namespace in clients.namespaces())
    clients.warm.folder.close()
    clients.bench.arena.close()
