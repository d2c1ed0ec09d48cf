"""C71: twelve wrong configurations. Each ends what `vllm serve` does before it loads anything, within seconds, with the
key, the value and what is allowed. Some are found by vLLM itself, and said in its own words: they are here so that we
notice when it stops finding them."""

import time
from pathlib import Path
from typing import Any

import pytest

BOUND_S = 15.0  # the 5 s, with slack for a loaded machine; 0.1 s is usual once vLLM is imported
SERVER = {"server": "unix:///tmp/nobody-listens-here.sock"}
NAME = "PrefixCacheConnector"


def configure(model: Path, engine: dict[str, Any] | None = None, **changed: Any) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {
        "kv_connector": NAME,
        "kv_connector_module_path": "connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": SERVER,
        **changed,
    }
    transfer = KVTransferConfig(**{name: value for name, value in given.items() if value != "left out"})
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, block_size=32, kv_transfer_config=transfer, **(engine or {})
    ).create_engine_config()


def settings(**changed: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": {**SERVER, **changed}}


# name → (what is wrong, ours or vLLM's own, words of the message)
OURS, VLLMS = SystemExit, Exception
WRONG: dict[str, tuple[dict[str, Any], type[BaseException], tuple[str, ...]]] = {
    "a typing error": (settings(lookup_timeout=3), OURS, ("lookup_timeout = 3", "did you mean 'lookup_timeout_ms'")),
    "a scheme": (settings(server="http://host:1"), OURS, ("server = 'http://host:1'", "HOST:PORT")),
    "no port": (settings(server="host"), OURS, ("server = 'host'", "HOST:PORT")),
    "a port that is none": (settings(server="host:abc"), OURS, ("server = 'host:abc'", "HOST:PORT")),
    "a negative size": (settings(min_load_tokens=-1), OURS, ("min_load_tokens = -1", "from 0")),
    "a size in another unit": (settings(staging_bytes="10GB"), OURS, ("staging_bytes = '10GB'", "GiB")),
    "an unknown policy": ({"kv_load_failure_policy": "recompte"}, VLLMS, ("kv_load_failure_policy", "'recompute'")),
    "no role": ({"kv_role": "left out"}, VLLMS, ("kv_role", "kv_both")),
    "another class": ({"kv_connector": "PrefixCachConnector"}, OURS, ("kv_connector = 'PrefixCachConnector'", NAME)),
    "a module that is not there": ({"kv_connector_module_path": "conector"}, VLLMS, ("No module named 'conector'",)),
    "context parallelism": (
        {
            "engine": {
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "hf_overrides": {"num_key_value_heads": 1},
            }
        },
        OURS,
        ("decode_context_parallel_size = 2", "only 1 is allowed"),
    ),
    "settings that are null": ({"kv_connector_extra_config": None}, VLLMS, ("kv_connector_extra_config", "dictionary")),
}


def test_there_are_twelve() -> None:
    assert len(WRONG) == 12


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_ends_in_seconds_with_one_line(model: Path, name: str) -> None:
    changed, kind, words = WRONG[name]
    configure(model)  # positive control, and vLLM is imported
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        configure(model, **changed)
    message = str(caught.value)

    assert time.monotonic() - began < BOUND_S
    assert all(word in message for word in words), message
    if kind is OURS:
        assert message.startswith("prefixd: ")
        assert "\n" not in message
