"""A Redis server per test, on a port of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.redis.servers import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", "--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
