"""Servers that are killed and stopped, and what stands before them. The engines are in `engines.py`."""

import pytest

from tests.connector.conftest import new_engine, own_prefixd, prefixd
from tests.engine.prefixd import Prefixd

__all__ = ["new_engine", "own_prefixd", "prefixd"]


@pytest.fixture
def own_server(own_prefixd: Prefixd) -> Prefixd:
    """A server of the test's own, running."""
    return own_prefixd.start()
