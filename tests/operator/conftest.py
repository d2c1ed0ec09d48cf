"""A server with a status page, over which a known sequence has gone."""

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cache_server.harness import ServerProcess
from tests.operator.traffic import Traffic


@dataclass(frozen=True)
class Watched:
    """The server, what was done to it, and its HTTP address."""

    server: ServerProcess
    traffic: Traffic
    url: str

    def get(self, path: str, accept: str = "*/*") -> str:
        request = urllib.request.Request(f"{self.url}{path}", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as reply:
            return str(reply.read().decode())


def http_url(server: ServerProcess) -> str:
    """As its log says it."""
    return re.findall(r"status page and /metrics on (http://\S+)", server.log)[-1]


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Shared: tests only look."""
    with ServerProcess(tmp_path_factory.mktemp("op"), "256MiB", "--http", "127.0.0.1:0") as server:
        traffic = Traffic(server)
        traffic.run()
        yield Watched(server, traffic, http_url(server))
        traffic.close()
