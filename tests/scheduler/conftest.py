"""A model folder that is enough for a Scheduler, and the shapes in which vLLM runs one."""

from pathlib import Path
from typing import Any

import pytest

SHAPES = [
    "V1",
    "V2",
    "V1, two steps in flight",
    "V2, two steps in flight",
    "V2, two steps in flight, run late",
    "V2, three steps in flight",
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_hidden_layers=4,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of `Engine`; vLLM is imported only by tests that run."""
    from tests.scheduler import harness

    assert set(harness.SHAPES) == set(SHAPES)
    return harness.SHAPES[request.param]
