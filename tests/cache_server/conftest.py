"""A clock that moves when told, and a folder on a tmpfs."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def shared_memory_folder() -> Iterator[Path]:
    """Empty, on the tmpfs that every Linux has."""
    folder = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
