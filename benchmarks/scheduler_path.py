"""What the cache costs vLLM's scheduler thread.

    python -m benchmarks.scheduler_path [--rounds 15]

1. A new prompt of 131,072 tokens in blocks of 16, all of which the server has: keys plus lookup, from the scheduler's
   first question to the answer "load so many tokens".
2. A step with 256 decoding requests: `build_plan` alone, on a step that fills no block and on one where every
   request fills one, with stand-ins for vLLM's requests and nothing else in the processor's caches.
3. The same on vLLM's real Scheduler, sixteen blocks in each step: `build_connector_meta`, and the whole `schedule()`
   with the connector beside one without, in turn. The wire is a fake: a decoding step asks nothing.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from benchmarks.bench import client, median, rounds, server, table
from connector import block_keys
from connector.block_keys import BlockKeys, RequestIdentity, root_key
from connector.client import CacheClient
from connector.scheduler import SchedulerSide

BLOCK_SIZE = 16
NUM_TOKENS = 131_072
NUM_DECODING = 256
FINGERPRINT = b"b" * 32
NOBODY = RequestIdentity(None, None, None, "", ())


def request(request_id: str, token_ids: list[int]) -> Any:
    """What the scheduler side reads of a vLLM request."""
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=token_ids,
        num_tokens=len(token_ids),
        num_computed_tokens=0,
        prompt_token_ids=token_ids,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
    )


def scheduler_side(line: CacheClient, wait_s: float) -> SchedulerSide:
    return SchedulerSide(
        line,
        block_size=BLOCK_SIZE,
        hash_name="xxh3_128",
        root_of=lambda identity, epoch: root_key(FINGERPRINT, identity, epoch, "xxh3_128"),
        identity_of=block_keys.identity_of,
        cannot_be_keyed=block_keys.cannot_be_keyed,
        lookup_wait_s=wait_s,
        lookup_timeout_s=0.05,
        load_timeout_s=10.0,
    )


def fill(worker: CacheClient, token_ids: list[int]) -> None:
    """Commits a (meaningless) payload under every key of the prompt."""
    keys = BlockKeys(root_key(FINGERPRINT, NOBODY, b"", "xxh3_128"), BLOCK_SIZE, "xxh3_128")
    num_blocks = keys.extend(token_ids)
    session = worker.session()
    assert session is not None
    at = 0
    while at < num_blocks:
        slots = worker.reserve(session, min(512, num_blocks - at))
        stop = at + len(slots)
        parents = keys.key_and_parent(at)[1] + keys.packed(at, stop - 1) if stop > at else b""
        depths = np.arange(at, stop, dtype="<u4")
        if stop > at:
            worker.commit(session, slots, keys.packed(at, stop), parents, depths)
        else:
            time.sleep(0.05)
        at = stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    seed = np.random.default_rng(1)
    token_ids = seed.integers(0, 150_000, NUM_TOKENS).tolist()
    with (
        server("1GiB") as (address, _),
        client(address, payload_bytes=4096, shard=0) as worker,
        client(address) as line,
    ):
        time.sleep(0.5)
        fill(worker, token_ids)
        number = 0

        def keys_only() -> None:
            BlockKeys(root_key(FINGERPRINT, NOBODY, b"", "xxh3_128"), BLOCK_SIZE, "xxh3_128").extend(token_ids)

        def keys_and_lookup() -> float:
            nonlocal number
            number += 1
            side = scheduler_side(line, wait_s=0.001)
            asked = request(f"r{number}", [*token_ids, number])
            started = time.perf_counter()
            num_questions = 1
            answer = side.num_new_matched_tokens(asked, 0)
            while answer[0] is None:
                num_questions += 1
                answer = side.num_new_matched_tokens(asked, 0)
            elapsed = time.perf_counter() - started
            assert answer == (NUM_TOKENS, True), answer
            side.forget(asked.request_id)
            side.build_plan(_step({}))
            return elapsed

        def hashes_only() -> None:
            key = bytes(16)
            data = bytes(4 * BLOCK_SIZE)
            for _ in range(NUM_TOKENS // BLOCK_SIZE):
                key = xxhash.xxh3_128_digest(key + data)

        cases = {"8,192 bare chained XXH3": hashes_only, "keys": keys_only, "keys + lookup": keys_and_lookup}
        seconds = rounds(cases, args.rounds)
        rows = [[name, f"{median(v) * 1e3:.2f}", f"{max(v) * 1e3:.2f}"] for name, v in seconds.items()]
        table("prompt of 131,072 tokens, 8,192 blocks, all present", ["", "median ms", "max ms"], rows)

        side = scheduler_side(line, wait_s=0.001)
        rows = decode_steps(side, 20 * args.rounds)
    table(f"build_plan with {NUM_DECODING} decoding requests", ["", "median µs", "p99 µs"], rows)
    rows = [real_steps(shape, 10 * args.rounds) for shape in ("V1", "V2", "V2, two steps in flight")]
    header = ["", "build_connector_meta µs", "p99", "schedule() µs", "without connector", "difference"]
    table(f"real Scheduler with {NUM_DECODING} decoding requests, medians", header, rows)


def _step(scheduled: dict[str, int], new: list[Any] | None = None) -> Any:
    cached = [] if new else list(scheduled)
    return SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=new or [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached, new_block_ids=[None] * len(cached), resumed_req_ids=set()
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
    )


def decode_steps(side: SchedulerSide, num_steps: int) -> list[list[str]]:
    """Requests that start at different places of a block, so that each step fills 16 of them; and all at once."""
    rows = []
    for title, offset in (("16 blocks fill in each step", 1), ("all 256 fill in every sixteenth step", 0)):
        requests = []
        new = []
        for i in range(NUM_DECODING):
            one = request(f"{title}-{i}", list(range(i, i + 64 + offset * (i % BLOCK_SIZE))))
            side.num_new_matched_tokens(one, 0)
            requests.append(one)
            new.append(SimpleNamespace(req_id=one.request_id, block_ids=([*range(200)],)))
        side.build_plan(_step({one.request_id: one.num_tokens for one in requests}, new))
        for one in requests:
            one.num_computed_tokens = one.num_tokens
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(num_steps):
            for one in requests:
                one.all_token_ids.append(7)
                one.num_tokens += 1
            step = _step(dict.fromkeys((one.request_id for one in requests), 1))
            started = time.perf_counter()
            plan = side.build_plan(step)
            times[bool(plan.saves)].append(time.perf_counter() - started)
            for one in requests:
                one.num_computed_tokens += 1
        for one in requests:
            side.request_finished(one)
        for fills, values in times.items():
            if values:
                kind = title if fills else "no block fills"
                rows.append([kind, f"{median(values) * 1e6:.0f}", f"{np.percentile(values, 99) * 1e6:.0f}"])
    return rows


def real_steps(shape: str, num_steps: int) -> list[str]:
    """One line of the table: vLLM's Scheduler with our connector and without, step by step in turn."""
    logging.disable(logging.WARNING)
    from tests.fakes import FakeServer
    from tests.scheduler.conftest import write_configuration
    from tests.scheduler.harness import SHAPES, Engine

    with tempfile.TemporaryDirectory() as folder:
        model = write_configuration(Path(folder))
        engines = [
            Engine(model, one, num_blocks=9000, max_num_seqs=NUM_DECODING, max_num_batched_tokens=8192, **SHAPES[shape])
            for one in (FakeServer(), None)
        ]
    in_flight = SHAPES[shape].get("in_flight", 1)
    meta: list[float] = []
    build = engines[0].connector.build_connector_meta

    def timed_build(output: Any) -> Any:
        started = time.perf_counter()
        plan = build(output)
        meta.append(time.perf_counter() - started)
        return plan

    engines[0].connector.build_connector_meta = timed_build  # type: ignore[method-assign]
    for engine in engines:
        for i in range(NUM_DECODING):
            engine.add(f"r{i}", range(i, i + 64 + i % BLOCK_SIZE), max_tokens=400)
    schedule: list[list[float]] = [[], []]
    queues: list[list[Any]] = [[], []]
    for _ in range(num_steps):
        for engine, times, queue in zip(engines, schedule, queues, strict=True):
            started = time.perf_counter()
            queue.append(engine.scheduler.schedule())
            times.append(time.perf_counter() - started)
            if len(queue) == in_flight:
                output = queue.pop(0)
                engine.scheduler.update_from_output(output, engine.anything(output))
    warm = num_steps // 10
    with_it, without = (median(times[warm:]) * 1e6 for times in schedule)
    figures = [median(meta[warm:]) * 1e6, np.percentile(meta[warm:], 99) * 1e6, with_it, without, with_it - without]
    return [shape, *(f"{figure:.0f}" for figure in figures)]


if __name__ == "__main__":
    main()
