"""Real engines beside a server that goes wrong, and what that costs them, read from the connector's own clock.

`Clocked.price(do)` runs `do` while no other request is there and adds up, of the one request in it:

    none_s     from the first question that was answered None to the one that was not: vLLM was told to ask again
    load_s     vLLM waited for a load
    hooks_s    our hooks stood in its way, on both sides; those within the first two are not counted again
"""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.engine.engine import Answer, Engine, wait_until
from tests.engine.prefixd import Prefixd
from tests.faults.clocked_connector import FOLDER
from tests.faults.front import Front
from tests.proxy import Proxy

BLOCK_SIZE = 32
LOOKUP_S = 0.05  # the default deadline of a lookup
STREAM_LOAD_MS = 2000  # C14
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
    def is_good_hit(self) -> bool:
        return self.num_loaded > 0 and self.num_failed == 0

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


class Fleet:
    """One server, two engines, and what stands between them:

    mapped    ─ proxy (Unix) ─────────────┐
    streams   ─ proxy (TCP) ─ front ──────┴─ server

    The mapped engine's descriptor socket is the server's own, by a link. Redis and further options of the server come
    by `restart`.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.server = Prefixd(folder, memory="256MiB").start()
        real = self.server.unix_address.removeprefix("unix://")
        path = folder / "fronted.sock"
        Path(f"{path}.fd").symlink_to(f"{real}.fd")
        self.unix_proxy = Proxy(real, str(path))
        self.front = Front(self.server.port_address)
        host, _, port = self.front.address.rpartition(":")
        self.tcp_proxy = Proxy((host, int(port)))
        settings = {
            "model": str(model),
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
            "enforce_eager": True,
        }
        self.mapped = Clocked("mapped", folder, f"unix://{path}", settings)
        self.streams = Clocked(
            "streams", folder, f"127.0.0.1:{self.tcp_proxy.port}", settings, load_timeout_ms=STREAM_LOAD_MS
        )

    def wait_ready(self) -> Self:
        for one in (self.mapped, self.streams):
            one.engine.wait_ready()
        return self

    def engine(self, path: str) -> Clocked:
        return self.mapped if path == "mapped slots" else self.streams

    def proxy(self, path: str) -> Proxy:
        return self.unix_proxy if path == "mapped slots" else self.tcp_proxy

    def restart(self, *options: str) -> None:
        """Kills it, if it runs, and starts it anew."""
        self.server.kill()
        self.server.options = options
        self.server.start()

    def mend(self) -> None:
        """Everything as at first, the server running and both engines attached; its contents may be gone."""
        self.front.mend()
        for proxy in (self.unix_proxy, self.tcp_proxy):
            proxy.resume()
            proxy.delay_s = proxy.bytes_per_s = 0.0
            proxy.refuse = proxy.drop = False
        if self.server.is_running:
            self.server.send_signal(signal.SIGCONT)
        if not self.server.is_running or self.server.options:
            self.restart()
        wait_until(lambda: self.server.attached(4), 20, "both engines are attached")

    def warm(self, path: str, prompt: list[int], max_tokens: int = 1) -> None:
        """Until a request for `prompt` is loaded: whatever was wrong before is mended, and its blocks are saved."""
        one = self.engine(path)

        def is_loaded() -> bool:
            return one.price(lambda: one.ask(prompt, max_tokens)).is_good_hit

        wait_until(is_loaded, 30, f"a good hit by {path}")

    def close(self) -> None:
        for one in (self.mapped, self.streams):
            one.engine.kill()
        self.unix_proxy.close()
        self.tcp_proxy.close()
        self.front.close()
        self.server.kill()
