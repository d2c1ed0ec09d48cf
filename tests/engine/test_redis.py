"""Redis behind the server: blocks outlive daemon and engine, and reach the engines of another node."""

from pathlib import Path
from typing import Any

from tests.engine.conftest import Cold
from tests.engine.engine import Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.models import prompt
from tests.redis.servers import RedisServer

LOADED = "vllm:prefixd_loaded_tokens"
H_300 = 288  # the largest legal hit of 300 tokens in blocks of 32


def test_c69_what_one_node_saved_another_loads_and_a_restart_does_not_lose(
    tmp_path: Path, settings: dict[str, Any], cold: Cold
) -> None:
    """Two daemons on one Redis are two nodes. The second never had the blocks in its memory; then it is restarted."""
    asked = prompt(6900, 300)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with RedisServer(tmp_path / "redis") as redis:
        first, second = (Prefixd(folder, "--redis", redis.url) for folder in folders)
        with first, second:
            with Engine(
                tmp_path / "writer.log", **settings, kv_transfer_config=connector_config(first.unix_address)
            ) as writer:
                written = writer.generate_one(asked, max_tokens=12)
                wait_until(lambda: len(redis.payload_keys()) == 9, 20, "nine blocks are in Redis")
            first.stop()

            with Engine(
                tmp_path / "reader.log", **settings, kv_transfer_config=connector_config(second.unix_address)
            ) as reader:
                other_node = reader.generate_one(asked, max_tokens=12)
                loaded_there = reader.metric(LOADED)
                second.stop()
                second.start()
                wait_until(lambda: second.attached(2), 20, "the engine is attached to the new daemon")
                reader.clear_local()
                assert second.num_blocks() == 0
                restarted = reader.generate_one(asked, max_tokens=12)
                loaded_after = reader.metric(LOADED)

    right = cold(asked, 12)
    assert written.token_ids == other_node.token_ids == restarted.token_ids == right
    assert (other_node.num_cached_tokens, restarted.num_cached_tokens) == (H_300, H_300)
    assert (loaded_there, loaded_after) == (H_300, 2 * H_300)
