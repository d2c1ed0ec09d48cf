"""Real engines beside a server that goes wrong, and what that costs them, read from the connector's own clock.

`Clocked.price(do)` runs `do` while no other request is there and adds up, of the one request in it:

    none_s     from the first question that was answered None to the one that was not: vLLM was told to ask again
    load_s     vLLM waited for a load
    hooks_s    our hooks stood in its way, on both sides; those within the first two are not counted again
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.engine import Answer, Engine
from tests.faults.clocked_connector import FOLDER

BLOCK_SIZE = 32
LOOKUP_S = 0.05  # the default deadline of a lookup
NOTHING = {"prefixd.load": False, "prefixd.save": "none"}


@dataclass(frozen=True)
class Price:
    """Seconds that one request was kept for our sake. `num_failed`: blocks that a load did not bring."""

    none_s: float
    load_s: float
    hooks_s: float
    num_loaded: int = 0
    num_failed: int = 0
    load_timeout_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.none_s + self.load_s + self.hooks_s

    def __str__(self) -> str:
        return (
            f"{1e3 * self.total_s:8.2f} ms  (None {1e3 * self.none_s:.2f}, load {1e3 * self.load_s:.2f}, "
            f"hooks {1e3 * self.hooks_s:.2f})"
        )


class Clocked:
    """An engine with `ClockedConnector`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        address: str,
        settings: dict[str, Any],
        *,
        policy: str | None = "recompute",
        **extra: Any,
    ) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        transfer = {
            "kv_connector": "ClockedConnector",
            "kv_connector_module_path": "tests.faults.clocked_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"server": address, **extra},
        }
        if policy is not None:
            transfer["kv_load_failure_policy"] = policy
        self.engine = Engine(
            folder / f"{name}.log", environment={FOLDER: str(self.folder)}, **settings, kv_transfer_config=transfer
        )

    @property
    def log(self) -> str:
        return self.engine.log.read_text(errors="replace")

    def cold(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer without the cache: computed here, nothing loaded or saved, on an empty local cache."""
        self.engine.clear_local()
        params = {"extra_args": {"kv_transfer_params": NOTHING}}
        (answer,) = self.engine.generate(prompt, max_tokens=max_tokens, **params)
        self.engine.clear_local()
        assert answer.num_cached_tokens == 0
        return answer.token_ids

    def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """After "clear local"."""
        self.engine.clear_local()
        return self.engine.generate_one(prompt, max_tokens=max_tokens)

    def events(self, since: float, until: float = float("inf")) -> list[dict[str, Any]]:
        """What the engine's processes wrote down, in the order in which it happened."""
        lines = [
            json.loads(line)
            for path in self.folder.glob("*.jsonl")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return sorted((line for line in lines if since <= line["at"] < until), key=lambda line: line["at"])

    def price(self, do: Callable[[], Any]) -> Price:
        began = time.monotonic()
        do()
        return price_of(self.events(began, time.monotonic()))


def price_of(events: list[dict[str, Any]]) -> Price:
    """Of the events of one request."""
    asked = [event for event in events if event["event"] == "asked"]
    waits = _intervals(asked)
    loads = {event["request"]: event for event in events if event["event"] == "load"}
    ends = [event for event in events if event["event"] == "loaded"]
    loading = [(loads[end["request"]]["at"], end["at"]) for end in ends if end["request"] in loads]
    covered = waits + loading
    hooks = [event for event in events if event["event"] in {"asked", "hook"}]
    return Price(
        none_s=sum(end - start for start, end in waits),
        load_s=sum(end - start for start, end in loading),
        hooks_s=sum(event["took"] for event in hooks if not any(start <= event["at"] < end for start, end in covered)),
        num_loaded=sum(event["tokens"] for event in loads.values()) // BLOCK_SIZE,
        num_failed=sum(end["failed"] for end in ends),
        load_timeout_s=max((event["timeout"] for event in loads.values()), default=0.0),
    )


def _intervals(asked: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """From each first None to the end of the next answer that is none."""
    found, start = [], None
    for event in asked:
        if event["answer"] is None and start is None:
            start = event["at"]
        elif event["answer"] is not None and start is not None:
            found.append((start, event["at"] + event["took"]))
            start = None
    return found


@contextmanager
def ended(*engines: Clocked) -> Iterator[None]:
    """Kills them at the end of the block."""
    try:
        yield
    finally:
        for one in engines:
            one.engine.kill()
