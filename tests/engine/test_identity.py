"""Who may be served whose KV, on real engines: salts, adapters, dtypes, and models that lie where others lay.

`computed(…)` is the right answer: the same engine with loading switched off for that request. Hits are read from the
workers' own counters. Figures are for blocks of 32 tokens.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine import Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.models import prompt, write_adapter, write_model

LOADED = "vllm:prefixd_loaded_tokens"
PROMPT = prompt(1600, 200)
HIT = 192  # of 200 tokens
NUM_TOKENS = 8


@contextlib.contextmanager
def engines(*them: Engine) -> Iterator[None]:
    """All started before, all ended."""
    try:
        for engine in them:
            engine.wait_ready()
        yield
    finally:
        for engine in them:
            engine.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefixd]:
    with Prefixd(tmp_path_factory.mktemp("identity")) as server:
        yield server


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """Where everybody mounts the model."""
    return Path(shutil.copytree(llama, tmp_path_factory.mktemp("mnt") / "models"))


def ask(engine: Engine, salt: str | None = None, lora: list[Any] | None = None, **params: Any) -> list[int]:
    engine.clear_local()
    (answer,) = engine.generate(PROMPT, salts=[salt], loras=[lora] if lora else None, max_tokens=NUM_TOKENS, **params)
    return answer.token_ids


def computed(engine: Engine, salt: str | None = None, lora: list[Any] | None = None) -> list[int]:
    nothing = {"kv_transfer_params": {"prefixd.load": False, "prefixd.save": "none"}}
    return ask(engine, salt, lora, extra_args=nothing)


def hit(server: Prefixd, engine: Engine, salt: str | None = None, lora: list[Any] | None = None) -> int:
    """Tokens loaded for the prompt, whose answer is right; when it returns, what was computed is saved."""
    before = engine.metric(LOADED)
    right = computed(engine, salt, lora)
    num_blocks = server.num_blocks()
    assert ask(engine, salt, lora) == right
    loaded = int(engine.metric(LOADED) - before)
    if not loaded:
        wait_until(lambda: server.num_blocks() >= num_blocks + 6, 10, "what was computed is saved")
    return loaded


def test_salts_adapters_and_dtypes(server: Prefixd, folder: Path, settings: dict[str, Any], mounted: Path) -> None:
    """C16, C23, and LoRA: each asker gets what was computed for it, twice; nobody gets another's."""
    settings = {**settings, "model": str(mounted)}
    adapters = [["sql", 1, str(write_adapter("llama", folder / "sql", 1))]]
    adapters.append(["chat", 2, str(write_adapter("llama", folder / "chat", 2))])
    plain = Engine(
        folder / "float32.log",
        **settings,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        kv_transfer_config=connector_config(server.unix_address),
    )
    other_dtype = Engine(
        folder / "bfloat16.log",
        **{**settings, "dtype": "bfloat16"},
        kv_transfer_config=connector_config(server.unix_address),
    )
    with engines(plain, other_dtype):
        assert [hit(server, plain, salt) for salt in ("a", "b", None, "a", "sql")] == [0, 0, 0, HIT, 0]

        assert [hit(server, plain, None, adapter) for adapter in adapters] == [0, 0]
        assert [hit(server, plain, None, adapter) for adapter in adapters] == [HIT, HIT]
        assert hit(server, plain, "a", adapters[0]) == 0
        answers = [computed(plain), *(computed(plain, None, adapter) for adapter in adapters)]
        assert len(set(map(tuple, answers))) == 3, "the adapters do something"
        moved = [["sql", 3, str(shutil.copytree(folder / "sql", folder / "moved"))]]
        assert hit(server, plain, None, moved[0]) == HIT  # the same adapter, loaded from elsewhere
        trained = [["sql", 4, str(write_adapter("llama", folder / "anew", 3))]]
        assert hit(server, plain, None, trained[0]) == 0  # another one of that name

        assert hit(server, other_dtype) == 0
        assert hit(server, other_dtype) == HIT
        assert hit(server, plain) == HIT
        digits = [line.split("namespace ")[1][:16] for line in namespaces_in(plain, other_dtype)]
        assert len(set(digits)) == 2
        logs = [log.read_text(errors="replace") for log in (plain.log, other_dtype.log, server.log)]
        assert not [log for log in logs if ", ".join(map(str, PROMPT[:6])) in log], "token ids in a log"


def namespaces_in(*them: Engine) -> list[str]:
    """C24: the log says under which namespace an engine runs."""
    lines = [line for engine in them for line in engine.log.read_text().splitlines() if "load failure policy" in line]
    assert len(lines) == len(them)
    return lines


def test_two_models_at_one_path_and_one_at_two(
    server: Prefixd, folder: Path, settings: dict[str, Any], mounted: Path
) -> None:
    """C24: everybody mounts at /models. What lies there decides, not where it lies.

    The engines of the test before have filled the server from `mounted`.
    """
    assert any(namespace.num_complete for namespace in server.stats().namespaces)
    elsewhere = mounted.rename(mounted.with_name("elsewhere"))
    write_model("llama", mounted, seed=1)
    transfer = connector_config(server.unix_address)
    same = Engine(folder / "same.log", **{**settings, "model": str(elsewhere)}, kv_transfer_config=transfer)
    other = Engine(folder / "other.log", **{**settings, "model": str(mounted)}, kv_transfer_config=transfer)
    with engines(same, other):
        assert hit(server, same) == HIT
        assert hit(server, other) == 0
        assert hit(server, other) == HIT
        assert computed(same) != computed(other)
