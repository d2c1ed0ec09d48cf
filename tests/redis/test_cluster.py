"""C51: a cluster of three real nodes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_server.redis_topology import TierRefusedError
from tests.cache_server.harness import ServerProcess, chain
from tests.redis.harness import PAYLOAD, counters, engine, name_of, redis_key, tier, wait_counter
from tests.redis.servers import RedisServer, cluster
from tests.redis.test_tier import value_of


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def nodes(three_nodes: list[RedisServer]) -> list[RedisServer]:
    """Without any key."""
    for node in three_nodes:
        with node.client() as client:
            client.flushall()
    return three_nodes


def url_of(nodes: list[RedisServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])


def test_fifty_blocks_lie_on_three_nodes_and_come_back(tmp_path: Path, nodes: list[RedisServer]) -> None:
    keys = chain("a", 50)
    with ServerProcess(tmp_path, "128MiB", "--redis", url_of(nodes)) as server, engine(server) as one:
        one.worker.save(keys)
        wait_counter(server, "redis_saved_payloads", 50)
    assert sum(len(node.payload_keys()) for node in nodes) == 50
    assert all(node.payload_keys() for node in nodes)
    with ServerProcess(tmp_path, "128MiB", "--redis", url_of(nodes)) as server, engine(server) as one:
        assert one.num_hit(keys) == 50
        assert counters(server)["redis_downs"] == 0


def test_each_node_holds_more_than_a_fifth_of_a_thousand_values(tmp_path: Path, nodes: list[RedisServer]) -> None:
    keys = chain("many", 1000)
    with (
        ServerProcess(tmp_path, "128MiB", "--redis", url_of(nodes)) as server,
        engine(server, payload_bytes=4096) as one,
    ):
        one.worker.save(keys)
        wait_counter(server, "redis_saved_payloads", 1000)
    counts = [len(node.payload_keys()) for node in nodes]

    assert sum(counts) == 1000
    assert min(counts) > 200, counts


async def test_a_cluster_url_to_a_single_server_is_refused(redis_server: RedisServer) -> None:
    with pytest.raises(TierRefusedError, match=r"single server.*use redis://"):
        async with tier(f"redis+cluster://127.0.0.1:{redis_server.port}"):
            pass


async def test_a_plain_url_to_a_cluster_is_refused(nodes: list[RedisServer]) -> None:
    with pytest.raises(TierRefusedError, match=r"use redis\+cluster://"):
        async with tier(nodes[0].url):
            pass


async def test_keys_that_move_to_another_node_are_followed(nodes: list[RedisServer]) -> None:
    """The last test of this file: it leaves the cluster uneven."""
    keys = chain("moving", 30)
    names = [name_of(key) for key in keys]
    async with tier(url_of(nodes)) as redis:
        assert await redis.lengths(names) == [0] * 30
        first, second = nodes[0].client(), nodes[1].client()
        source, target = (client.execute_command("CLUSTER", "MYID") for client in (first, second))
        moved = [slot for slot in range(16384 // 3) if slot % 2]
        assert source != target
        for client in (second, first, nodes[2].client()):
            with client.pipeline(transaction=False) as pipeline:
                for slot in moved:
                    pipeline.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
                pipeline.execute()
        for key in keys:
            for client in (first, second, nodes[2].client()):
                try:
                    client.set(redis_key(key), value_of(key, PAYLOAD))
                except Exception:  # noqa: BLE001 - it lies on one of the three
                    continue

        assert await redis.lengths(names) == [96 + PAYLOAD] * 30
        results = await asyncio.gather(*(redis.load(name, np.zeros(PAYLOAD, np.uint8)) for name in names))
        assert all(isinstance(result, int) for result in results)
        assert redis.num_downs == 0
