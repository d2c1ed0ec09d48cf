"""Workers of several ranks and several kinds of layers, on a real server: pipeline stages, replicas, groups, sleep."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from cache_server.eviction import UNSETTLED_GRACE_S
from connector.client import CacheClient, Hello, LookupAnswer, OtherGroup
from connector.group_workers import GroupWorkers
from connector.kv_layout import KVLayout, layout_of, layout_of_tables
from connector.plan import NO_BLOCK, BlockName, LoadSpec, SaveSpec, StepPlan
from connector.worker import WorkerSide
from tests.connector.conftest import ATTACH_S, chain
from tests.engine.prefixd import Prefixd

NUM_BLOCKS, BLOCK_SIZE = 64, 16
FULL, WINDOW = b"full".ljust(32), b"window".ljust(32)
WAIT_S = 20.0


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def pages_of(num_layers: int, page_words: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randint(1 << 60, (NUM_BLOCKS, page_words), dtype=torch.int64, generator=generator)
        for i in range(num_layers)
    }


def plain_layout(pages: dict[str, torch.Tensor]) -> KVLayout:
    return layout_of(pages, list(pages), {name: page[0].nbytes for name, page in pages.items()}, NUM_BLOCKS)


class Lines:
    """What tests attach; all of it ends with the test."""

    def __init__(self, server: Prefixd) -> None:
        self._server = server
        self._stack = ExitStack()

    def line(self, fingerprint: bytes, engine_id: str, num_shards: int, **more: object) -> CacheClient:
        hello = Hello(engine_id, "test", fingerprint, "test", 16, num_shards, **more)  # type: ignore[arg-type]
        client = CacheClient(self._server.unix_address, hello, call_timeout_s=5.0, transfer_timeout_s=10.0)
        client.start()
        self._stack.callback(client.close)
        return client

    def worker(
        self,
        fingerprint: bytes,
        engine_id: str,
        num_shards: int,
        shard: int,
        layout: KVLayout,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        **more: object,
    ) -> WorkerSide:
        client = self.line(
            fingerprint,
            engine_id,
            num_shards,
            shard=shard,
            payload_bytes=layout.payload_bytes,
            descriptor=layout.descriptor,
            replica=replica,
            num_replicas=num_replicas,
        )
        worker = WorkerSide(
            client,
            layout,
            shard=shard,
            slots_ahead=24,
            staging_bytes=4 << 20,
            load_timeout_s=5.0,
            writes=replica == 0,
            **more,  # type: ignore[arg-type]
        )
        worker.start()
        self._stack.callback(worker.shutdown)
        assert client.wait_attached(ATTACH_S)
        return worker

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def prefixd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefixd]:
    """With a segment for every shape of payload here: they are one class each, and tests keep their leases."""
    server = Prefixd(tmp_path_factory.mktemp("prefixd"), memory="1GiB").start()
    yield server
    server.stop()


@pytest.fixture
def lines(prefixd: Prefixd) -> Iterator[Lines]:
    lines = Lines(prefixd)
    yield lines
    lines.close()


def ask(asker: CacheClient, names: Sequence[BlockName], *, lease: bool = True) -> LookupAnswer:
    assert asker.wait_attached(ATTACH_S)
    call = asker.lookup(b"".join(name.key for name in names), 0, lease=lease)
    assert call is not None
    call.wait(5)
    answer = call.answer()
    assert answer is not None
    return answer


def save(worker: WorkerSide | GroupWorkers, saves: Sequence[SaveSpec]) -> None:
    """One step of the engine; returns when what it saves has its names."""
    sides = worker._workers if isinstance(worker, GroupWorkers) else [worker]
    wanted = [sum(save.group == group for save in saves) for group in range(len(sides))]
    for side, number in zip(sides, wanted, strict=True):
        wait_for(lambda side=side, number=number: not number or len(side._current_lane().pool) >= number)
    worker.begin_step(StepPlan(saves=tuple(saves)))
    worker.finish_saves()
    number = 0

    def stored() -> bool:
        nonlocal number
        number += worker.take_counts().get("saved_blocks", 0)
        return number == len(saves)

    wait_for(stored)


def specs(names: Sequence[BlockName], block_ids: Sequence[int]) -> list[SaveSpec]:
    return [SaveSpec(block_id, name) for block_id, name in zip(block_ids, names, strict=True)]


def spec_of(answer: LookupAnswer, names: Sequence[BlockName], block_ids: Sequence[int]) -> LoadSpec:
    return LoadSpec(
        "r",
        tuple(block_ids),
        b"".join(name.key for name in names),
        answer.slots.tobytes(),
        answer.generations.tobytes(),
        answer.lease_id,
        answer.server_epoch,
        num_tokens=BLOCK_SIZE * len(names),
    )


def load(worker: WorkerSide | GroupWorkers, spec: LoadSpec) -> set[str]:
    """Runs a load to its end; returns the requests that failed."""
    worker.start_loads([spec])
    finished: set[str] = set()
    wait_for(lambda: finished.update(worker.take_finished()) or finished)
    assert finished == {"r"}
    return worker.take_failed_requests()


# --- pipeline and tensor parallel


def test_two_pipeline_stages_hit_where_both_have_the_block(lines: Lines) -> None:
    """Other layers, other payload sizes, one scheduler side (C25)."""
    names, shape = chain(9001, 5), b"pp2".ljust(32)
    stages = [pages_of(2, 512, 1), pages_of(3, 512, 2)]
    asker = lines.line(shape, "e", 2)
    first = lines.worker(shape, "e", 2, 0, plain_layout(stages[0]))
    alone = ask(asker, names)
    second = lines.worker(shape, "e", 2, 1, plain_layout(stages[1]))
    save(first, specs(names, range(1, 6)))
    save(second, specs([names[i] for i in (0, 1, 3, 4)], [1, 2, 4, 5]))
    without = ask(asker, names)
    save(second, specs(names[2:3], [3]))
    whole = ask(asker, names)

    assert alone.workers_missing
    assert (without.hit_end, [without.is_present(i) for i in range(5)]) == (2, [True, True, False, True, True])
    assert whole.hit_end == 5
    for worker, pages in ((first, stages[0]), (second, stages[1])):
        assert load(worker, spec_of(whole, names, range(20, 25))) == set()
        assert all(torch.equal(page[20:25], page[1:6]) for page in pages.values())


def test_the_orphan_of_a_stage_is_reclaimed(tmp_path: Path) -> None:
    """Stage 1 lost a block: the other's half of it goes before any whole block does, once memory is short."""
    shape = b"orphan".ljust(32)
    with Prefixd(tmp_path, memory="256MiB") as server, closing(Lines(server)) as lines:
        pages = [pages_of(1, 1 << 17, 1), pages_of(1, 1 << 18, 2)]  # 1 and 2 MiB per block
        asker = lines.line(shape, "e", 2)
        stages = [lines.worker(shape, "e", 2, shard, plain_layout(each)) for shard, each in enumerate(pages)]
        orphans, names = chain(9100, 2), chain(9101, 8)
        save(stages[0], specs(orphans, [1, 2]))
        for stage in stages:
            save(stage, specs(names, range(8)))
        with_orphans = server.stats().namespaces[0]
        time.sleep(UNSETTLED_GRACE_S)
        more = 0
        while server.stats().counters["evicted_blocks_unsettled"] < 2:
            more += 1
            assert more < 60, "memory is never short"
            for stage in stages:
                save(stage, specs(chain(9200 + more, 8), range(8)))

        assert (with_orphans.num_blocks, with_orphans.num_complete) == (10, 8)
        now = server.stats().namespaces[0]
        assert now.num_blocks == now.num_complete
        assert ask(asker, orphans, lease=False).hit_end == 0


def test_c26_engines_of_other_parallel_sizes_have_other_namespaces(lines: Lines) -> None:
    """One model, tensor parallel 1 and 2, on one server: no hit, no error, and each hits its own."""
    from tests.connector.test_namespace import fingerprint, kv_cache_config, spec, vllm_config

    names = chain(9300, 3)
    hits = {}
    for size in (1, 2):
        # A rank of two has half the heads, which is another page already; here only the size tells them apart.
        shape = fingerprint(vllm_config("m", parallel__tensor_parallel_size=size), kv_cache_config(spec()))
        asker = lines.line(shape, f"tp{size}", size)
        workers = [
            lines.worker(shape, f"tp{size}", size, shard, plain_layout(pages_of(2, 1024 // size, shard)))
            for shard in range(size)
        ]
        before = ask(asker, names).hit_end
        for worker in workers:
            save(worker, specs(names, [1, 2, 3]))
        hits[size] = (before, ask(asker, names).hit_end)

    assert hits == {1: (0, 3), 2: (0, 3)}


def test_one_copy_for_all_replicas_written_by_one_and_read_by_all(lines: Lines, prefixd: Prefixd) -> None:
    """MLA under tensor parallel 2."""
    names, shape = chain(9400, 4), b"mla".ljust(32)
    pages = [pages_of(2, 512, 7), pages_of(2, 512, 7)]
    asker = lines.line(shape, "e", 1, num_replicas=2)
    writer = lines.worker(shape, "e", 1, 0, plain_layout(pages[0]), replica=0, num_replicas=2)
    alone = ask(asker, names)
    reader = lines.worker(shape, "e", 1, 0, plain_layout(pages[1]), replica=1, num_replicas=2)
    plan = StepPlan(saves=tuple(specs(names, [1, 2, 3, 4])))
    reader.begin_step(plan)
    reader.finish_saves()
    save(writer, plan.saves)
    answer = ask(asker, names)

    assert alone.workers_missing
    assert answer.hit_end == 4
    stored = [one for one in prefixd.stats().namespaces if one.fingerprint == shape]
    assert [(one.num_shards, one.num_blocks, one.stored_bytes) for one in stored] == [(1, 4, 4 * 8192)]
    assert prefixd.stats().counters["commits_already_present"] == 0
    assert reader.take_counts() == {}, "what another rank saves is not counted as dropped"
    for worker, each in zip((writer, reader), pages, strict=True):
        assert load(worker, spec_of(answer, names, [11, 12, 13, 14])) == set()
        assert all(torch.equal(page[11:15], page[1:5]) for page in each.values())


# --- several kinds of layers


@dataclasses.dataclass
class Hybrid:
    asker: CacheClient
    worker: GroupWorkers
    pages: list[dict[str, torch.Tensor]]


def hybrid(lines: Lines, engine_id: str, seed: int) -> Hybrid:
    """Full attention with two layers; two window groups of two layers each, in one payload."""
    pages = [pages_of(2, 512, seed), pages_of(4, 256, seed + 1)]
    names = list(pages[1])
    layouts = [
        plain_layout(pages[0]),
        layout_of_tables(pages[1], [names[:2], names[2:]], dict.fromkeys(names, 2048), NUM_BLOCKS),
    ]
    others = (OtherGroup(WINDOW, 1, 2, 1),)
    workers = [
        lines.worker(FULL, engine_id, 1, 0, layouts[0]),
        lines.worker(WINDOW, engine_id, 1, 0, layouts[1], is_chain=False),
    ]
    return Hybrid(lines.line(FULL, engine_id, 1, others=others), GroupWorkers(workers), pages)


def hybrid_load(answer: LookupAnswer, names: Sequence[BlockName], tables: Sequence[Sequence[int]]) -> LoadSpec:
    """All blocks of the first group to tables[0], the window before the end to the others."""
    (window,) = answer.others
    block_ids = [block_id for pair in zip(*tables[1:], strict=True) for block_id in pair]
    part = LoadSpec(
        "r",
        tuple(block_ids),
        b"".join(name.key for name in names[window.hit_start :]),
        window.slots.tobytes(),
        window.generations.tobytes(),
        answer.lease_id,
        answer.server_epoch,
        group=1,
        num_tables=2,
    )
    return dataclasses.replace(spec_of(answer, names, tables[0]), others=(part,))


def hybrid_saves(names: Sequence[BlockName]) -> list[SaveSpec]:
    """Block i: block 1 + i of full attention, 11 + i and 21 + i of the window groups."""
    return [
        *(SaveSpec(1 + i, name) for i, name in enumerate(names)),
        *(SaveSpec(11 + i, name, group=1, more=(21 + i,)) for i, name in enumerate(names)),
    ]


def test_another_engine_loads_all_groups_and_nothing_else_changes(lines: Lines) -> None:
    names = chain(9500, 4)
    writer, reader = hybrid(lines, "w", 1), hybrid(lines, "r", 50)
    save(writer.worker, hybrid_saves(names))
    before = [{name: page.clone() for name, page in pages.items()} for pages in reader.pages]
    answer = ask(reader.asker, names)
    assert (answer.hit_end, answer.others[0].hit_start, answer.covers(0), answer.covers(3)) == (4, 2, True, True)

    assert load(reader.worker, hybrid_load(answer, names, [[31, 32, 33, 34], [41, 42], [51, NO_BLOCK]])) == set()

    assert reader.worker.take_counts()["loaded_blocks"] == 4 + 2
    targets = [[(31 + i, 1 + i) for i in range(4)]] * 2, [[(41, 13), (42, 14)]] * 2 + [[(51, 23)]] * 2
    for pages, held, was, moves in zip(reader.pages, writer.pages, before, targets, strict=True):
        for (name, page), moved in zip(pages.items(), moves, strict=True):
            expected = was[name].clone()
            for target, source in moved:
                expected[target] = held[name][source]
            assert torch.equal(page, expected), name


def test_a_load_is_reported_once_when_the_last_group_has_ended_and_failed_when_one_has(lines: Lines) -> None:
    names = chain(9600, 4)
    engine = hybrid(lines, "e", 1)
    save(engine.worker, hybrid_saves(names))
    good = hybrid_load(ask(engine.asker, names), names, [[31, 32, 33, 34], [41, 42], [51, 52]])
    wrong = dataclasses.replace(good.others[0], generations=bytes(len(good.others[0].generations)))

    assert load(engine.worker, good) == set()
    engine.worker.take_counts()
    assert load(engine.worker, dataclasses.replace(good, others=(wrong,))) == {"r"}
    counts = engine.worker.take_counts()
    assert (counts["loaded_blocks"], counts["load_failed_blocks"]) == (4, 2)
    assert engine.worker.take_failed_blocks() == set(), "block ids say nothing without their group"
    assert load(engine.worker, dataclasses.replace(good, keys=b"")) == {"r"}
    engine.worker.fail_loads([good])
    assert engine.worker.take_finished() == {"r"}
    assert engine.worker.take_failed_requests() == {"r"}


# --- sleep and wake


def test_nothing_is_read_or_written_between_sleep_and_wake(lines: Lines) -> None:
    """vLLM 0.33: `unregister_kv_caches`, `restore_kv_caches`. The memory behind the tensors is gone meanwhile."""
    names = chain(9700, 4)
    engine = hybrid(lines, "e", 1)
    save(engine.worker, hybrid_saves(names[:3]))
    spec = hybrid_load(ask(engine.asker, names[:3]), names[:3], [[31, 32, 33], [41, 42], [51, 52]])
    engine.worker.take_counts()

    engine.worker.suspend()
    asleep = [{name: page.clone() for name, page in pages.items()} for pages in engine.pages]
    engine.worker.begin_step(StepPlan(saves=tuple(hybrid_saves(names)[3:4])))
    engine.worker.save_layer("layer.0")
    engine.worker.finish_saves()
    failed = load(engine.worker, spec)
    counts = engine.worker.take_counts()
    unchanged = all(
        torch.equal(page, was[name])
        for pages, was in zip(engine.pages, asleep, strict=True)
        for name, page in pages.items()
    )
    assert engine.worker.resume()

    assert failed == {"r"}
    assert (counts["dropped_blocks"], counts["load_failed_blocks"]) == (1, 3 + 2)
    assert unchanged
    assert load(engine.worker, spec) == set()
    assert torch.equal(engine.pages[0]["layer.0"][31:34], engine.pages[0]["layer.0"][1:4])


def test_sleep_waits_for_a_load_that_is_writing(lines: Lines) -> None:
    """When `suspend` has returned no thread of ours can touch the pages any more, whatever was under way."""
    names, shape = chain(9800, 20), b"sleep".ljust(32)
    pages = pages_of(4, 1 << 15, 3)
    asker = lines.line(shape, "e", 1)
    worker = lines.worker(shape, "e", 1, 0, plain_layout(pages))
    save(worker, specs(names, range(1, 21)))
    spec = spec_of(ask(asker, names), names, range(31, 51))
    for _ in range(20):
        worker.start_loads([spec])
        worker.suspend()
        assert worker._num_copying == 0
        frozen = [page.clone() for page in pages.values()]
        finished: set[str] = set()
        wait_for(lambda finished=finished: finished.update(worker.take_finished()) or finished)
        assert all(torch.equal(page, was) for page, was in zip(pages.values(), frozen, strict=True))
        assert worker.resume()
    worker.take_failed_requests()
    assert load(worker, spec) == set()


def test_tensors_registered_again_are_those_that_are_read(lines: Lines) -> None:
    names, shape = chain(9900, 2), b"again".ljust(32)
    old, new = pages_of(2, 512, 1), pages_of(2, 512, 2)
    asker = lines.line(shape, "e", 1)
    worker = lines.worker(shape, "e", 1, 0, plain_layout(old))
    worker.suspend()
    other_layout = plain_layout(pages_of(2, 1024, 3))

    assert not worker.resume(other_layout)
    assert worker.resume(plain_layout(new))
    save(worker, specs(names, [1, 2]))
    assert load(worker, spec_of(ask(asker, names), names, [5, 6])) == set()
    for name, page in new.items():
        assert torch.equal(page[5:7], page[1:3])
        assert not torch.equal(old[name][5:7], page[1:3])
