"""One real vLLM engine behind its asynchronous front, where requests come and go at any time, and are aborted.

    python -m tests.engine.async_driver '{"model": "/tmp/llama", "block_size": 32, …}'     (vLLM's engine arguments)

Lines as in `driver.py`, whose commands "reset" and "metrics" it has too, and this one:

    {"do": "play", "requests": [{"prompt": […], "sampling": {…}, "at_s": 0.5, "abort_s": 0.2}, …]}
        at_s: when the request comes, from now; abort_s: how long after that its client leaves, null: it stays
        → {"requests": [{…, as in driver.py, "times_s": [when each answer came, from now]}, …]}; of one that was
          aborted, what it had until then, with the finish reason "abort"
"""

import asyncio
import itertools
import json
import os
import sys
import threading
from typing import Any

from tests.engine.driver import described, sampling_params


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # see driver.py
    os.dup2(2, 1)
    asyncio.run(serve(json.loads(sys.argv[1]), answers))


async def serve(arguments: dict[str, Any], answers: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_arguments = {"skip_tokenizer_init": True, "disable_log_stats": False, **arguments}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments))
    print(json.dumps({"ready": True}), file=answers)
    lines: asyncio.Queue[str] = asyncio.Queue()
    threading.Thread(target=_read_lines, args=(asyncio.get_running_loop(), lines), daemon=True).start()
    while (command := json.loads(await lines.get()))["do"] != "quit":
        try:
            answer = await COMMANDS[command.pop("do")](engine, **command)
        except Exception as error:  # noqa: BLE001 -- the other side decides what an error means
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    engine.shutdown()


def _read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(lines.put_nowait, '{"do": "quit"}')


# What there is of a request that was aborted before its first token.
NOTHING = {"token_ids": [], "num_cached_tokens": 0, "first_token_s": None, "num_preemptions": None}
plays = itertools.count(1)  # a part of the request ids, so that none is used twice


async def play(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    number = next(plays)

    async def one(i: int, prompt: list[int], sampling: dict[str, Any], at_s: float, abort_s: float | None) -> Any:
        await asyncio.sleep(at_s)
        last, times = None, []

        async def listen() -> None:
            nonlocal last
            params = sampling_params(sampling)
            async for output in engine.generate({"prompt_token_ids": prompt}, params, f"{number}-{i}"):
                last = output
                times.append(loop.time() - began)

        reason = None
        try:
            await asyncio.wait_for(listen(), abort_s)
        except TimeoutError:
            reason = "abort"
        said = described(last) if last is not None else NOTHING
        return {**said, "finish_reason": reason or said["finish_reason"], "times_s": times}

    defaults: dict[str, Any] = {"sampling": {}, "at_s": 0.0, "abort_s": None}
    played = (one(i, **{**defaults, **request}) for i, request in enumerate(requests))
    return {"requests": await asyncio.gather(*played)}


async def reset(engine: Any, connector: bool = False) -> dict[str, Any]:
    return {"reset": bool(await engine.reset_prefix_cache(reset_connector=connector))}


async def metrics(engine: Any) -> dict[str, Any]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return {
        "metrics": [[one.name, one.labels, one.value] for one in get_metrics_snapshot() if hasattr(one, "value")],
    }


COMMANDS = {"play": play, "reset": reset, "metrics": metrics}

if __name__ == "__main__":
    main()
