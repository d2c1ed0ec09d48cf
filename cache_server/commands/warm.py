"""`prefixd warm`: have an engine compute prompts, so that they are in the cache before anybody asks.

Only an engine can make KV, so this asks one, over its OpenAI endpoint, for one token of each prompt. The file has one
prompt per line, as JSON: a list of token ids, or an object with the list under `prompt_token_ids`.

The server is not asked: what the engine says it had in its caches already (`cached_tokens`, which needs vLLM's
--enable-prompt-tokens-details) is told.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import click

from cache_server.commands.ask import json_option
from cache_server.commands.text import fail, print_json

TIMEOUT_S: Final = 600.0  # for one prompt: a long one in a long queue


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--engine", required=True, metavar="URL", help="Of vLLM's server: http://HOST:PORT.")
@click.option("--model", metavar="NAME", help="As it is served.  [default: the first that the engine serves]")
@click.option("--parallel", type=click.IntRange(1, 256), default=4, show_default=True, help="Prompts at a time.")
@json_option
def warm(file: str, engine: str, model: str | None, parallel: int, as_json: bool) -> None:
    """Compute the prompts in FILE once: a JSON list of token ids per line."""
    prompts = read_prompts(Path(file))
    if not engine.startswith(("http://", "https://")):
        fail(2, f"engine: {engine!r} is not allowed; http://HOST:PORT or https://HOST:PORT")
    done, failed = asyncio.run(_warm(prompts, engine.rstrip("/"), model, parallel))
    cached = [answer["cached"] for answer in done if answer["cached"] is not None]
    figures = {
        "prompts": len(done),
        "tokens": sum(answer["tokens"] for answer in done),
        "cached_tokens": sum(cached) if cached else None,
        "failed": failed,
    }
    if as_json:
        print_json(figures)
    else:
        known = f", {figures['cached_tokens']} of them were cached" if cached else ""
        click.echo(f"{figures['prompts']} prompts, {figures['tokens']} tokens{known}")
        for line in failed:
            click.echo(f"failed: {line}", err=True)
    if failed:
        raise SystemExit(1)


def read_prompts(path: Path) -> list[list[int]]:
    """The prompts of a file; ends the process where a line is not one."""
    prompts = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        token_ids = said.get("prompt_token_ids") if isinstance(said, dict) else said
        if (
            not isinstance(token_ids, list)
            or not token_ids
            or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in token_ids)
        ):
            fail(2, f'{path}: line {number} is not allowed; a JSON list of token ids, or {{"prompt_token_ids": […]}}')
        prompts.append(token_ids)
    return prompts


async def _warm(
    prompts: list[list[int]], engine: str, model: str | None, parallel: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """(what the engine said of each prompt, one line for each that failed)"""
    import aiohttp

    turn = asyncio.Semaphore(parallel)
    done: list[dict[str, Any]] = []
    failed: list[str] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
        name = model or await _first_model(http, engine)

        async def ask(number: int, prompt: list[int]) -> None:
            body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            async with turn:
                try:
                    async with http.post(f"{engine}/v1/completions", json=body) as reply:
                        said = await reply.json(content_type=None)
                        if reply.status != 200:
                            failed.append(f"prompt {number}: {reply.status} {_message(said)}")
                            return
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    failed.append(f"prompt {number}: {str(error) or type(error).__name__}")
                    return
            usage = said["usage"]
            details = usage.get("prompt_tokens_details") or {}
            done.append({"tokens": usage["prompt_tokens"], "cached": details.get("cached_tokens")})

        await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts, 1)))
    return done, failed


async def _first_model(http: Any, engine: str) -> str:
    import aiohttp

    try:
        async with http.get(f"{engine}/v1/models") as reply:
            return str((await reply.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        fail(1, f"engine: {engine!r} does not say what it serves: {str(error) or type(error).__name__}")


def _message(said: Any) -> str:
    error = said.get("error", said) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
