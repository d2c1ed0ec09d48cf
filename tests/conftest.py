"""What all tests share: the option --long, and the model that engines and schedulers are built for."""

import hashlib
from pathlib import Path

import pytest

from tests import models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run also the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long: runs with --long"))


def _model(which: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder. It is kept over sessions, as long as tests/models.py stays the same."""
    source = Path(models.__file__).read_bytes()
    name = f"{which}-{hashlib.sha256(source).hexdigest()[:12]}"
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("models") if cache else tmp_path_factory.mktemp("models")
    return models.write_model(which, folder / name)


@pytest.fixture(scope="session")
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small Llama."""
    return _model("llama", request, tmp_path_factory)


@pytest.fixture(scope="session")
def llama_250m(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's Llama."""
    return _model("llama-250m", request, tmp_path_factory)
