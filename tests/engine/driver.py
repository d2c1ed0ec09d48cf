"""One real vLLM engine in a process of its own, steered by JSON lines.

    python -m tests.engine.driver '{"model": "/tmp/llama", "block_size": 32, …}'     (arguments of vllm.LLM)

Each line on stdin is a command, each line on stdout its answer; everything that vLLM writes goes to stderr.

    {"do": "generate", "prompts": [[1, 2, …], …], "sampling": {…}}    sampling: one, or a list as long as prompts
        "salts": ["a", null, …], "loras": [["name", 1, "/path"], null, …]    may follow, as long as prompts
        → {"requests": [{"token_ids": […], "num_cached_tokens": n, "first_token_s": s, "finish_reason": "length"}, …]}
    {"do": "reset", "connector": false}   forget the engine's own prefix cache → {"reset": true}
    {"do": "metrics"}                     → {"metrics": [[name, {label: value}, value], …]}
    {"do": "quit"}                        ends it, as does the end of stdin

An answer {"error": "…"} means that the command raised; the engine may be dead.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # vLLM and its child processes inherit descriptor 1: it becomes stderr, and only we keep the real one.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])

    from vllm import LLM

    llm = LLM(**{"skip_tokenizer_init": True, "disable_log_stats": False, **arguments})
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            answer = COMMANDS[command.pop("do")](llm, **command)
        except Exception as error:  # noqa: BLE001 -- the other side decides what an error means
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    # Orderly end: the engine core and its workers are told and waited for by the finaliser of this object.
    del llm


def generate(
    llm: Any,
    prompts: list[list[int]],
    sampling: dict[str, Any] | list[dict[str, Any]],
    salts: list[str | None] | None = None,
    loras: list[list[Any] | None] | None = None,
) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    began = time.monotonic()
    outputs = llm.generate(
        [
            {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt is not None else {})
            for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True)
        ],
        [sampling_params(one) for one in each],
        use_tqdm=False,
        lora_request=[lora and LoRARequest(*lora) for lora in loras] if loras else None,
    )
    took_s = time.monotonic() - began
    return {
        "took_s": took_s,
        "requests": [described(output) for output in outputs],
    }


def sampling_params(wanted: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False, **wanted})


def described(output: Any) -> dict[str, Any]:
    """vLLM's RequestOutput as JSON takes it. prompt_logprobs: of each prompt token, null for the first."""
    rows = output.prompt_logprobs
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "finish_reason": output.outputs[0].finish_reason,
        "first_token_s": output.metrics and output.metrics.first_token_latency,
        "num_preemptions": output.metrics and getattr(output.metrics, "num_preemptions", None),
        "prompt_logprobs": rows
        and [row and row[token].logprob for token, row in zip(output.prompt_token_ids, rows, strict=True)],
    }


def reset(llm: Any, connector: bool = False) -> dict[str, Any]:
    return {"reset": bool(llm.reset_prefix_cache(reset_connector=connector))}


def metrics(llm: Any) -> dict[str, Any]:
    return {
        "metrics": [[one.name, one.labels, one.value] for one in llm.get_metrics() if hasattr(one, "value")],
    }


COMMANDS = {"generate": generate, "reset": reset, "metrics": metrics}

if __name__ == "__main__":
    main()
