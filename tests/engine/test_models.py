"""Models of other kinds on real engines: what one engine saved is loaded by the next one after a restart, and every
answer equals that of an engine without us.

Of each model: an engine without the connector, one that saves and ends, and one that is started anew and loads. Sizes
are read from the server, so that what is stored is what the kinds of layers need, and each of it once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from protos import kv_cache_pb2
from tests.engine.engine import Answer, Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.models import prompt, write_model

LOADED = "vllm:prefixd_loaded_tokens"
FAILED = "vllm:prefixd_load_failed_tokens"
NUM_TOKENS = 12


@dataclass(frozen=True)
class Model:
    """How an engine of it is started, and what it must come to.

    block_size: of our unit. num_sessions: attached by one engine. payload_bytes: stored per unit, of each kind of
    layers.
    """

    name: str
    block_size: int
    num_sessions: int
    payload_bytes: tuple[int, ...]
    settings: dict[str, Any]
    environment: dict[str, str]

    def hit(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.block_size * self.block_size


FLOAT32 = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 128, "max_num_seqs": 4}
PAGE = 4 * 32 * 2 * 32 * 4  # four heads, 32 tokens, keys and values of 32 in float32
MODELS = {
    # Two layers of full attention, four of sliding windows: pages of one block of 32 tokens.
    "gemma3": Model("gemma3", 32, 3, (2 * PAGE, 4 * PAGE), {**FLOAT32, "block_size": 32}, {}),
    # Two layers; a state is 3*320 + 8*32*32 floats, whatever the page is padded to.
    "mamba": Model(
        "mamba", 128, 3, (2 * 4 * PAGE, 2 * (3 * 320 + 8 * 32 * 32) * 4), {**FLOAT32, "enable_prefix_caching": True}, {}
    ),
    # Three layers of 576 numbers per token, bfloat16 (the CPU's experts know no float32); one copy for two ranks.
    "mla": Model(
        "mla",
        128,
        3,
        (3 * 128 * 576 * 2,),
        {**FLOAT32, "dtype": "bfloat16", "tensor_parallel_size": 2},
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}


@dataclass(frozen=True)
class Run:
    """The answers to `asked`, in order, by each of the engines; and what the server had after the first."""

    model: Model
    asked: list[list[int]]
    cold: list[Answer]
    first: list[Answer]
    second: list[Answer]
    stats: kv_cache_pb2.StatsReply
    loaded_tokens: float
    failed_tokens: float


# Three engines each: one model in every run, the others with --long.
@pytest.fixture(
    scope="module",
    params=["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name != "gemma3")],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    model = MODELS[request.param]
    folder = tmp_path_factory.mktemp(model.name)
    settings = {"model": str(write_model(model.name, folder / "model")), "enforce_eager": True, **model.settings}
    first_turn = prompt(1, 300)
    with Prefixd(folder) as server:

        def engine(name: str, **more: Any) -> Engine:
            return Engine(folder / f"{name}.log", environment=model.environment, **settings, **more)

        # As in test_parallel.py: two workers that wait by `sched_yield` leave the server no processor otherwise.
        transfer = connector_config(server.unix_address, lookup_wait_ms=500)
        writer = engine("first", kv_transfer_config=transfer)  # the two start side by side
        try:
            with engine("cold") as it:
                answer = it.generate_one(first_turn, max_tokens=NUM_TOKENS)
                asked = [first_turn, [*first_turn, *answer.token_ids, *prompt(2, 60)], prompt(3, 200)]
                cold = [answer, *(it.generate_one(one, max_tokens=NUM_TOKENS) for one in asked[1:])]
        except BaseException:
            writer.kill()
            raise
        with writer as it:
            wait_until(lambda: server.attached(model.num_sessions), 20, "all workers are attached")
            first = [it.generate_one(first_turn, max_tokens=NUM_TOKENS)]
            wait_until(lambda: _settled(server), 10, "what was saved is there")
            stats = server.stats()
        with engine("second", kv_transfer_config=transfer) as it:
            wait_until(lambda: server.attached(model.num_sessions), 20, "all workers are attached")
            second = [it.generate_one(one, max_tokens=NUM_TOKENS) for one in asked]
            it.clear_local()
            second.append(it.generate_one(asked[1], max_tokens=NUM_TOKENS))
            figures = it.metric(LOADED), it.metric(FAILED)
        yield Run(model, asked, cold, first, second, stats, *figures)


def _settled(server: Prefixd) -> bool:
    counts = [server.stats().counters["commits_stored"] for _ in range(5)]
    return counts[0] == counts[-1] > 0


def test_every_answer_equals_cold(run: Run) -> None:
    assert run.first[0].token_ids == run.cold[0].token_ids
    assert [answer.token_ids for answer in run.second[:3]] == [answer.token_ids for answer in run.cold]
    assert run.second[3].token_ids == run.cold[1].token_ids
    assert len(set(run.cold[0].token_ids)) > 3, "an answer that a wrong block would change"


def test_what_was_computed_before_the_restart_is_hit_after_it(run: Run) -> None:
    """The first prompt whole; the next turn hits it and what the engine has computed since; a stranger nothing."""
    again, next_turn, stranger, once_more = run.second
    hit = run.model.hit(300)

    assert (run.first[0].num_cached_tokens, again.num_cached_tokens) == (0, hit)
    assert next_turn.num_cached_tokens >= hit
    assert stranger.num_cached_tokens == 0
    assert once_more.num_cached_tokens == run.model.hit(len(run.asked[1]))
    assert run.loaded_tokens == hit + once_more.num_cached_tokens
    assert run.failed_tokens == 0


def test_what_is_stored_is_what_the_kinds_of_layers_need(run: Run) -> None:
    """One namespace per kind; of each block one payload, as large as its pages; nothing twice."""
    of_kind = [namespace for namespace in run.stats.namespaces if namespace.num_blocks]
    num_units = (300 + NUM_TOKENS - 1) // run.model.block_size

    stored = sorted((namespace.num_shards, namespace.stored_bytes // namespace.num_blocks) for namespace in of_kind)
    slot_bytes = sorted((1, -(-payload // 4096) * 4096) for payload in run.model.payload_bytes)
    assert stored == slot_bytes
    assert {namespace.num_blocks for namespace in of_kind} == {num_units}
    assert run.stats.counters["commits_already_present"] == 0
