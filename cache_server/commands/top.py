"""`prefixd top`: a server, live, in a terminal.

Everything comes from `Stats`; rates are the growth between two of its answers. A server that does not answer is shown
as such, with the last figures, and asked again.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import click

from cache_server.commands.ask import Server, json_option, server_option
from cache_server.commands.text import human_bytes, human_percent, human_seconds, print_json
from cache_server.status import rates_of, status_of

SPARKS: Final = "▁▂▃▄▅▆▇█"
NUM_SPARKS: Final = 40
MIN_INTERVAL_S: Final = 0.2


@click.command()
@server_option
@click.option("--interval", type=click.FloatRange(MIN_INTERVAL_S, 60), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print one picture, over one interval, and end.")
@json_option
def top(address: str, interval: float, once: bool, as_json: bool) -> None:
    """Watch a server: hit rate, memory, throughput, clients, namespaces, evictions. Ctrl-C ends it."""
    server = Server(address)
    view = View()
    if as_json or once:
        view.take(status_of(server.stats()), time.monotonic())
        time.sleep(interval)
        view.take(status_of(server.stats()), time.monotonic())
        if as_json:
            print_json({**view.status, "per_second": view.rates, "hit_rate_now": view.hit_rate_now})
            return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        console.print(view.render(address))
        return
    if not sys.stdout.isatty():
        raise click.UsageError("top needs a terminal; elsewhere use --once or --json")
    view.take(status_of(server.stats()), time.monotonic())
    try:
        with Live(view.render(address), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                reply = server.try_stats()
                if isinstance(reply, str):
                    view.trouble = reply
                else:
                    view.take(status_of(reply), time.monotonic())
                live.update(view.render(address), refresh=True)
    except KeyboardInterrupt:
        return


class View:
    """What is on the screen."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.rates: dict[str, float] = {}  # per second, over the last interval
        self.hit_rate_now: float | None = None
        self.trouble = ""
        self._before: tuple[float, str, dict[str, int]] | None = None  # when, epoch, totals
        self._hit_rates: deque[float | None] = deque(maxlen=NUM_SPARKS)

    def take(self, status: dict[str, Any], now: float) -> None:
        """A new answer. The first of a server has no rates."""
        totals = rates_of(status["counters"])
        self.status, self.trouble = status, ""
        self.rates, self.hit_rate_now = dict.fromkeys(totals, 0.0), None
        if self._before is not None and self._before[1] == status["epoch"]:
            then, _, before = self._before
            growth = {name: total - before[name] for name, total in totals.items()}
            self.rates = {name: more / max(now - then, 1e-9) for name, more in growth.items()}
            asked = growth["lookup_asked_blocks"]
            self.hit_rate_now = growth["lookup_hit_blocks"] / asked if asked else None
            self._hit_rates.append(self.hit_rate_now)
        self._before = (now, status["epoch"], totals)

    def render(self, address: str) -> Any:
        """For rich."""
        from rich.console import Group
        from rich.text import Text

        status, memory = self.status, self.status["memory"]
        state = "draining" if status["draining"] else "serving"
        if self.trouble:
            state = f"does not answer: {self.trouble}"
        head = Text()
        head.append("prefixd ", "bold")
        head.append(f"{address}  {status['version']}  up {human_seconds(status['uptime_s'])}  ")
        head.append(state, "bold red" if self.trouble else "bold green")
        rate = f"{human_percent(self.hit_rate_now)} now, {human_percent(status['hit_rate'])} in all  {self._spark()}"
        used = (
            f"{human_bytes(memory['stored_bytes'])} of {human_bytes(memory['budget_bytes'])} stored, "
            f"{human_bytes(memory['leased_bytes'])} leased, {human_bytes(memory['reserved_bytes'])} reserved  "
        )
        flow = (
            f"{self._per_s('commits_stored_bytes')} saved, {self._per_s('promised_bytes')} promised, "
            f"{self.rates['evicted_blocks']:.0f} blocks evicted"
        )
        bar = _bar(memory["stored_bytes"] / memory["budget_bytes"])
        body = Text()
        for name, text in (
            ("hit rate", rate),
            ("memory", f"{used}{bar}"),
            ("per second", flow),
            ("redis", self._redis()),
        ):
            body.append(f"{name:>12}  ", "dim")
            body.append(f"{text}\n")
        return Group(head, Text(), body, *self._tables())

    def _per_s(self, name: str) -> str:
        return f"{human_bytes(self.rates[name])}/s"

    def _redis(self) -> str:
        counters = self.status["counters"]
        if "redis_up" not in counters:
            return "none"
        return (
            f"{'up' if counters['redis_up'] else 'DOWN'}, {self._per_s('promoted_bytes')} from it, "
            f"{self._per_s('redis_saved_bytes')} to it, {human_bytes(counters['redis_queue_bytes'])} wait"
        )

    def _spark(self) -> str:
        return "".join(" " if one is None else SPARKS[min(int(one * 8), 7)] for one in self._hit_rates)

    def _tables(self) -> list[Any]:
        from rich.table import Table

        def table(title: str, heads: list[str], rows: list[list[str]]) -> Any:
            made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for head in heads:
                made.add_column(head, no_wrap=True, justify="left" if head.islower() else "right")
            for row in rows:
                made.add_row(*row)
            return made

        status = self.status
        evicted = {name: count for name, count in status["counters"].items() if name.startswith("evicted_blocks_")}
        by_use: Callable[[dict[str, Any]], float] = lambda one: one["idle_s"]  # noqa: E731 - a key, used once
        return [
            table(
                "namespaces",
                ["namespace", "model", "BLOCKS", "MEMORY", "LEASED", "IDLE"],
                [
                    [
                        one["namespace"],
                        one["model"],
                        f"{one['complete_blocks']:,}",
                        human_bytes(one["stored_bytes"]),
                        str(one["leased_blocks"]),
                        human_seconds(one["idle_s"]),
                    ]
                    for one in sorted(status["namespaces"], key=by_use)[:8]
                ],
            ),
            table(
                "clients",
                ["client", "engine", "role", "path", "RESERVED"],
                [
                    [
                        one["client"],
                        one["engine"][:12],
                        one["role"] if one["shard"] is None else f"worker {one['shard']}",
                        "" if one["shard"] is None else "mapped" if one["mapped"] else "stream",
                        human_bytes(one["reserved_bytes"]),
                    ]
                    for one in status["sessions"][:12]
                ],
            ),
            table(
                "evicted blocks",
                ["cause", "BLOCKS"],
                [[name.removeprefix("evicted_blocks_"), f"{count:,}"] for name, count in sorted(evicted.items())],
            ),
            table(
                "operations",
                ["operation", "COUNT", "MEAN", "99 %"],
                [
                    [one["name"], f"{one['count']:,}", human_seconds(one["mean_s"]), human_seconds(one["p99_s"])]
                    for one in status["operations"]
                    if one["count"]
                ],
            ),
        ]


def _bar(share: float, width: int = 20) -> str:
    filled = round(min(share, 1.0) * width)
    return f"[{'#' * filled}{'.' * (width - filled)}]"
