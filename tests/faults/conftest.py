"""Servers that are killed and stopped, and what stands before them. The engines are in `engines.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connector.conftest import new_engine, own_prefixd, prefixd
from tests.engine.prefixd import Prefixd
from tests.faults.engines import Fleet

__all__ = ["new_engine", "own_prefixd", "prefixd"]


@pytest.fixture
def own_server(own_prefixd: Prefixd) -> Prefixd:
    """A server of the test's own, running."""
    return own_prefixd.start()


@pytest.fixture(scope="package")
def started_fleet(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server and two engines for all tests here that need a real one."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), llama)
    try:
        yield fleet.wait_ready()
    finally:
        fleet.close()


@pytest.fixture
def fleet(started_fleet: Fleet) -> Fleet:
    """The same, as if nothing had been wrong before."""
    started_fleet.mend()
    return started_fleet
