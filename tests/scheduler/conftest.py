"""A model folder that is enough for a Scheduler: a configuration without weights."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
