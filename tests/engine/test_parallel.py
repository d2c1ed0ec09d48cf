"""Tensor parallel 2: every rank has its own shard, and loads it after a restart."""

from pathlib import Path
from typing import Any

from tests.engine.conftest import Cold
from tests.engine.engine import Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.models import prompt

LOADED = "vllm:prefixd_loaded_tokens"
LOADED_BLOCKS = "vllm:prefixd_loaded_blocks"


def test_after_a_restart_every_rank_loads_its_own_shard(tmp_path: Path, settings: dict[str, Any], cold: Cold) -> None:
    """vLLM's own ExampleConnector gives both ranks the same bytes here, and answers wrongly."""
    asked, other = prompt(1, 300), prompt(2, 300)
    with Prefixd(tmp_path) as server:

        def two_ranks(life: str) -> Engine:
            return Engine(
                tmp_path / f"{life}.log",
                environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
                **settings,
                tensor_parallel_size=2,
                # Two workers that wait for work by `sched_yield`, each bound to one of two cores: while the scheduler
                # asks again and again, the server was seen to get no processor for seconds. So it waits in one go.
                kv_transfer_config=connector_config(server.unix_address, lookup_wait_ms=500),
            )

        with two_ranks("first") as engine:
            wait_until(lambda: server.attached(3), 10, "both ranks and the scheduler side are attached")
            first = engine.generate_one(asked, max_tokens=12)
            wait_until(lambda: server.num_blocks() == 9, 10, "nine blocks with both shards")
        (namespace,) = server.stats().namespaces
        assert (namespace.num_shards, namespace.num_blocks) == (2, 9)

        with two_ranks("second") as engine:
            wait_until(lambda: server.attached(3), 10, "both ranks and the scheduler side are attached")
            second = engine.generate_one(asked, max_tokens=12)
            third = engine.generate_one(other, max_tokens=12)
            loaded = engine.metric(LOADED)
            blocks = [engine.metric(LOADED_BLOCKS, shard=shard) for shard in ("0", "1")]

    assert second.num_cached_tokens == 288
    assert (loaded, blocks) == (288, [9, 9])
    assert first.token_ids == second.token_ids == cold(asked, 12)
    assert third.token_ids == cold(other, 12)
