"""Small random-weight models on disk, for running the real engine on the CPU.

The weights are the same in every process and run (seeded), so that engines, demo and benchmarks agree on what a model
answers. `write_model` is the one entrance; torch and transformers, which the engine brings, are imported only there.

    llama       4 layers, one full-attention KV-cache group: everything about correctness
    llama-250m  heavy enough that prefilling 4,096 tokens takes over ten seconds on two cores: time to first token
    gemma3      four sliding-window layers and two of full attention: three KV-cache groups
    mla         DeepSeek's latent attention: one KV head that every tensor-parallel rank has whole
    mamba       Falcon-H1: attention and Mamba-2 state in every layer

Weights are drawn wider than is usual: with the usual 0.02 the attention is flat and an answer loops through two tokens,
which a wrong block might not change. As it is, another first block changes every answer, from its first token on.

A small byte-level tokenizer is written beside the weights; the OpenAI server needs one.
"""

import argparse
import random
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {"max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1}
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "initializer_range": 0.06,
    },
    "llama-250m": {
        **COMMON,
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "initializer_range": 0.1,
    },
}
# As `LLAMAS`, by the names of transformers' classes.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **COMMON,
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,  # tied, it repeats itself whatever went before
            "initializer_range": 0.06,
        },
    ),
    "mla": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **COMMON,
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "moe_intermediate_size": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "topk_group": 1,
            "n_group": 1,
            "initializer_range": 0.06,
        },
    ),
    "mamba": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **COMMON,
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "initializer_range": 0.06,
        },
    ),
}
VOCABULARY = 2000  # token ids below this are ordinary ones in every model here


def write_model(name: str, path: Path, seed: int = 0) -> Path:
    """Writes model `name` to the folder `path`, unless it is complete there already. Returns `path`."""
    done = path / "complete"
    if done.exists():
        return path
    import torch
    import transformers

    torch.manual_seed(seed)
    config, model_class, settings = OTHERS.get(name) or ("LlamaConfig", "LlamaForCausalLM", LLAMAS[name])
    model = getattr(transformers, model_class)(getattr(transformers, config)(**settings))
    model.to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    done.touch()
    return path


def write_adapter(model: str, path: Path, seed: int) -> Path:
    """Writes a LoRA adapter of `model`'s attention to the folder `path`: as peft would, with random weights."""
    import json

    import torch
    from safetensors.torch import save_file

    settings = LLAMAS[model]
    hidden, head = settings["hidden_size"], settings["head_dim"]
    widths = {"q_proj": settings["num_attention_heads"] * head, "v_proj": settings["num_key_value_heads"] * head}
    generator = torch.Generator().manual_seed(seed)
    rank = 8
    weights = {}
    for layer in range(settings["num_hidden_layers"]):
        for name, width in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.3
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(widths), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.train_from_iterator(
        ["the cache keeps what was computed once"],
        trainers.BpeTrainer(
            vocab_size=1024, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<s>", eos_token="</s>")


def prompt(seed: int, num_tokens: int) -> list[int]:
    """`num_tokens` token ids that are a function of `seed`; prompts of different seeds share no block."""
    return random.Random(seed).choices(range(2, VOCABULARY), k=num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random-weight model.")
    parser.add_argument("name", choices=[*LLAMAS, *OTHERS])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    write_model(arguments.name, arguments.path)


if __name__ == "__main__":
    main()
