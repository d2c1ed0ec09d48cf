"""What each fault costs a request on a running engine, on the connector's own clock.

    python -m tests.faults.price

Counted: time blocked in our hooks, time in which vLLM was told to ask again, and time it waited for a load
(`engines.py`). The *first* request is the one that meets the fault, in mid-load where the row says so; the *next* are
five that come after it while the fault lasts, the dearest of them is shown; *back* is how long after the neighbour's
return the first good hit came. A row's bound for the first request is one lookup deadline (50 ms) or, in mid-load, what
its load was worth waiting for. Every request of a row is also compared with what the engine answers by itself.
"""

import itertools
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cache_server.harness import Client
from tests.engine.engine import wait_until
from tests.faults.engines import LOOKUP_S, Fleet, Price
from tests.models import prompt, write_model
from tests.redis.servers import RedisServer

NUM_NEXT = 5
NUM_TOKENS = 900
PATHS = ("mapped slots", "streams")
_seeds = itertools.count(70_000)


@dataclass(frozen=True)
class Row:
    """One fault on one path. `bound_s`: what the first request may cost. `is_alive`: the server answers all the while,
    and a request pays for its answer as without the fault."""

    fault: str
    path: str
    first: Price
    following: list[Price]
    bound_s: float
    back_s: float | None
    is_alive: bool = False

    @property
    def dearest(self) -> Price:
        return max(self.following, key=lambda price: price.total_s)

    @property
    def cheapest(self) -> Price:
        return min(self.following, key=lambda price: price.total_s)

    def __str__(self) -> str:
        back = "" if self.back_s is None else f"{self.back_s:6.1f} s"
        return (
            f"{self.fault:30} {self.path:13} {1e3 * self.first.total_s:9.2f} {1e3 * self.bound_s:9.0f} "
            f"{1e3 * self.cheapest.total_s:9.2f} {1e3 * self.dearest.total_s:9.2f} {back:>9}"
        )


HEADER = f"{'fault':30} {'path':13} {'first ms':>9} {'bound ms':>9} {'next ms':>9} {'worst ms':>9} {'back':>9}"


class Measurement:
    """One fault, one path: a prompt that is loaded before it, and what it costs afterwards."""

    def __init__(self, fleet: Fleet, path: str) -> None:
        self.fleet = fleet
        self.path = path
        self.one = fleet.engine(path)
        self.prompt = prompt(next(_seeds), NUM_TOKENS)
        fleet.mend()
        self.right = self.one.cold(self.prompt, 4)
        fleet.warm(path, self.prompt, 4)

    def ask(self) -> Price:
        """One request; its answer is right or this ends."""
        answers: list[Any] = []
        price = self.one.price(lambda: answers.append(self.one.ask(self.prompt, 4)))
        assert answers[0].token_ids == self.right, f"{self.path}: a wrong answer"
        return price

    def row(
        self,
        fault: str,
        begin: Callable[[], object],
        end: Callable[[], object] | None,
        *,
        meets_at: str = "",
        is_alive: bool = False,
    ) -> Row:
        """`begin` happens before the first request or, if `meets_at` names a point of the front, in the middle of it.
        `end` makes it well again."""
        if meets_at:
            self.fleet.front.at(meets_at, begin, times=1)
        else:
            begin()
        first = self.ask()
        following = [self.ask() for _ in range(NUM_NEXT)]
        bound_s = LOOKUP_S
        if first.num_loaded and meets_at:
            bound_s = first.load_timeout_s
        back_s = None
        if end is not None:
            end()
            back = time.monotonic()
            wait_until(lambda: self.ask().is_good_hit, 60, f"a good hit after {fault}")
            back_s = time.monotonic() - back
        return Row(fault, self.path, first, following, bound_s, back_s, is_alive)


def healthy(fleet: Fleet, path: str) -> Row:
    """What a hit costs when all is well: lookup and load."""
    return Measurement(fleet, path).row("none", lambda: None, None, is_alive=True)


def killed(fleet: Fleet, path: str) -> Row:
    return Measurement(fleet, path).row("killed", fleet.server.kill, fleet.server.start)


def stopped(fleet: Fleet, path: str) -> Row:
    server = fleet.server
    return Measurement(fleet, path).row(
        "stopped", lambda: server.send_signal(signal.SIGSTOP), lambda: server.send_signal(signal.SIGCONT)
    )


def restarted_while_idle(fleet: Fleet, path: str) -> Row:
    return Measurement(fleet, path).row("restarted while idle", fleet.restart, lambda: None, is_alive=True)


def killed_in_mid_load(fleet: Fleet, path: str) -> Row:
    return Measurement(fleet, path).row(
        "killed in mid-load", fleet.server.kill, fleet.server.start, meets_at="Get chunk 3"
    )


def stopped_in_mid_load(fleet: Fleet, path: str) -> Row:
    """The answer to the lookup is on its way, nothing after it comes."""
    server = fleet.server
    return Measurement(fleet, path).row(
        "stopped in mid-load",
        lambda: server.send_signal(signal.SIGSTOP),
        lambda: server.send_signal(signal.SIGCONT),
        meets_at="Lookup answered",
    )


def restarted_under_load(fleet: Fleet, path: str) -> Row:
    """Requests one after the other all the while; the dearest of them is the one that met it."""
    it = Measurement(fleet, path)
    restarting = threading.Thread(target=fleet.restart)
    prices = [it.ask()]
    restarting.start()
    began = time.monotonic()
    back_s = None
    while back_s is None or restarting.is_alive():
        prices.append(it.ask())
        if not restarting.is_alive() and prices[-1].is_good_hit:
            back_s = time.monotonic() - began
        assert time.monotonic() - began < 60, "no good hit after a restart under load"
    prices.sort(key=lambda price: price.total_s)
    # A load that is cut short ends when the link does; what its deadline would have been is the bound.
    bound_s = max([LOOKUP_S, *(price.load_timeout_s for price in prices if price.num_failed)])
    return Row("restarted under load", path, prices[-1], prices[:-1], bound_s, back_s, is_alive=True)


def slow(fleet: Fleet, path: str) -> Row:
    """By 200 ms, there and back together."""
    proxy = fleet.proxy(path)

    def delay(seconds: float) -> None:
        proxy.delay_s = seconds

    return Measurement(fleet, path).row("slow by 200 ms", lambda: delay(0.1), lambda: delay(0.0))


def full(fleet: Fleet, path: str) -> Row:
    """No slot is free and none can be taken: others hold all of them."""
    it = Measurement(fleet, path)
    hoarders: list[Client] = []

    def hoard() -> None:
        for number in range(64):
            one = Client(
                fleet.server.unix_address,
                0,
                payload_bytes=4 << 20,
                fingerprint=bytes([number]) * 32,
                engine_id=f"hoarder {number}",
                descriptors=Path(fleet.server.unix_address.removeprefix("unix://")),
            )
            hoarders.append(one)
            wait_until(one.is_mapped, 10, "the hoarder has its segments")
            patience = time.monotonic() + 2
            got = 0
            while time.monotonic() < patience:
                slots, retry = one.reserve(16)
                got += len(slots)
                if not slots and not retry:
                    break
            if not got:
                return
        raise AssertionError("the server does not become full")

    def let_go() -> None:
        for one in hoarders:
            one.close()

    try:
        return it.row("full", hoard, let_go, is_alive=True)
    finally:
        let_go()


def redis_stopped(fleet: Fleet, path: str) -> Row:
    """What is asked for lies in Redis only, and Redis says nothing any more."""
    with RedisServer(fleet.folder / f"redis-{next(_seeds)}") as redis:
        it = Measurement(fleet, path)
        fleet.restart("--redis", redis.url)
        wait_until(lambda: fleet.server.attached(4), 20, "both engines are attached")
        fleet.warm(path, it.prompt, 4)
        wait_until(lambda: len(redis.payload_keys()) >= (NUM_TOKENS - 1) // 32, 20, "the prompt's blocks are in Redis")
        fleet.restart("--redis", redis.url)  # memory is empty again
        wait_until(lambda: fleet.server.attached(4), 20, "both engines are attached")
        row = it.row("Redis stopped", redis.stop, redis.resume, is_alive=True)
    fleet.mend()
    return row


FAULTS = (healthy, killed, stopped, restarted_while_idle, restarted_under_load, slow, full, redis_stopped)
MID_LOAD_FAULTS = (killed_in_mid_load, stopped_in_mid_load)  # on mapped slots a load does not need the server


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(Path(name), write_model("llama", Path(name) / "llama"))
        try:
            fleet.wait_ready()
            print(HEADER)
            for path in PATHS:
                for fault in (*FAULTS, *(MID_LOAD_FAULTS if path == "streams" else ())):
                    print(fault(fleet, path), flush=True)
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
