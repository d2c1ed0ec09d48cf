"""Faults at random over a running server, its Redis and its engines, for as long as you like.

    python -m tests.faults.soak --minutes 30 [--seed 1]

One server with `--redis` (behind a proxy) and `--persist`, four engine-like processes that save and load all the time,
two on mapped slots and two on streams, more bytes than memory. Every few seconds one fault, from a shuffled deck, so
that each kind comes before any comes twice. What must hold, and is told in the table:

  * no engine is ever served a wrong byte (payloads are functions of their keys), and none dies of it;
  * after each fault every living engine loads right payloads again within HEAL_S;
  * a warm restart keeps every block; a killed server starts empty; nobody but the faults ends a process;
  * the server's memory stays below budget + 150 MiB at any moment;
  * at the end, when the engines have gone: no session, no reserved slot, nothing leased after the lease time, and every
    payload that is still there is right.

Exit status 1 if anything did not hold. No vLLM: the engine's own life has tests of its own.
"""

import argparse
import collections
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from tests.cache_server.harness import ROOT, chain
from tests.engine.prefixd import Prefixd
from tests.faults.engine_like import EngineLike
from tests.proxy import Proxy
from tests.redis.servers import RedisServer

MIB = 1 << 20
BUDGET = 192 * MIB
BEYOND_BUDGET = 150 * MIB
HEAL_S = 30.0  # three times the 10 s in which a first good hit has to come
PAUSE_S = 1.0  # between faults
LEASE_S = 30.0
NUM_ENGINES = 4
# After these there are leases that end by their time only: their holder is gone, or nobody took the release.
LEAVE_LEASES = {"server: leased out", "server: stopped", "client: kill -9", "client: kill -9 in a save"}


class Engine:
    """One engine-like process and what it tells."""

    def __init__(self, address: str, number: int, log: Path) -> None:
        self.number = number
        self.is_mapped = address.startswith("unix")
        self.tally: dict[str, int] = collections.defaultdict(int)
        self.errors = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.engine_like", address, str(number)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # a line cut by kill -9
                self.tally.update(json.loads(line))

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Soak:
    """The stage: server, Redis, engines, and the record of what was done to them."""

    def __init__(self, folder: Path, shared: Path, seed: int) -> None:
        self.choose = random.Random(seed)
        self.folder = folder
        self.redis = RedisServer(folder / "redis", "--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
        self.redis.start()
        self.line = Proxy(self.redis.address)
        redis = f"redis://127.0.0.1:{self.line.port}"
        self.server = Prefixd(folder, "--redis", redis, "--persist", str(shared), memory=f"{BUDGET // MIB}MiB")
        self.shared = shared
        self.server.start()
        self.engines: list[Engine] = []
        self.next_number = NUM_ENGINES
        self.gone: collections.Counter[str] = collections.Counter()  # figures of engines that are no more
        self.times: dict[str, int] = collections.Counter()
        self.worst_s: dict[str, float] = collections.defaultdict(float)
        self.broken: list[str] = []
        self.highest = 0
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def start_engines(self) -> None:
        self.engines = [self.new_engine(number) for number in range(NUM_ENGINES)]
        self.heal("start")

    def new_engine(self, number: int) -> Engine:
        address = self.server.unix_address if number % 2 else self.server.port_address
        return Engine(address, number, self.folder / "engines.log")

    def _watch(self) -> None:
        """The server's memory, all the time."""
        while not self.over.wait(0.05):
            with contextlib.suppress(OSError, IndexError, AssertionError):  # it is being restarted
                self.highest = max(self.highest, memory_of(self.server))

    def fail(self, what: str) -> None:
        self.broken.append(what)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    # --- what is always looked at

    def total(self, name: str) -> int:
        return self.gone[name] + sum(engine.tally[name] for engine in self.engines)

    def look(self, fault: str) -> None:
        """Nobody was served a wrong byte and nobody has died who was not killed."""
        self.check(self.total("wrong") == 0, f"{fault}: {self.total('wrong')} wrong payloads")
        self.check(self.server.is_running, f"{fault}: the server has died")
        for number, engine in enumerate(self.engines):
            if engine.process.poll() is not None:
                self.fail(f"{fault}: engine {engine.number} ended with {engine.process.returncode}")
                self.replace(number)

    def replace(self, number: int) -> None:
        """Another engine in the place of one that is gone."""
        old = self.engines[number]
        old.end()
        self.gone.update(old.tally)
        # Of the same kind: odd numbers are mapped.
        self.next_number += 1 + (self.next_number + 1 + old.number) % 2
        self.engines[number] = self.new_engine(self.next_number)

    def heal(self, fault: str) -> None:
        """Every engine loads right payloads again."""
        before = [engine.tally["loaded"] for engine in self.engines]
        began = time.monotonic()
        waiting = set(range(len(self.engines)))
        while waiting and time.monotonic() - began < HEAL_S:
            waiting = {i for i in waiting if self.engines[i].tally["loaded"] <= before[i]}
            time.sleep(0.02)
        self.worst_s[fault] = max(self.worst_s[fault], time.monotonic() - began)
        for number in waiting:
            self.fail(f"{fault}: engine {self.engines[number].number} loads nothing for {HEAL_S:.0f} s afterwards")

    # --- faults

    def pick(self, *, mapped: bool | None = None) -> int:
        fitting = [i for i, engine in enumerate(self.engines) if mapped is None or engine.is_mapped is mapped]
        return self.choose.choice(fitting)

    def pause(self, longest: float) -> None:
        time.sleep(self.choose.uniform(0.2, longest))

    def kill_server(self) -> None:
        self.server.kill()
        self.pause(1.5)
        self.restart_and_compare(0)

    def stop_server(self) -> None:
        self.server.send_signal(signal.SIGSTOP)
        self.pause(3)
        self.server.send_signal(signal.SIGCONT)

    def restart_server(self) -> None:
        self.check(self.server.stop() == 0, "restart: exit status")
        (self.shared / "snapshot").unlink(missing_ok=True)
        self.restart_and_compare(0)

    def warm_restart(self) -> None:
        self.check(self.server.stop() == 0, "warm restart: exit status")
        kept = int(self.log_line("kept in").split("persist: ")[1].split()[0])
        self.check(kept > 0, "warm restart: nothing was kept")
        self.restart_and_compare(kept)

    def kill_server_in_the_stop(self) -> None:
        """kill -9 at any moment of a clean stop: either everything is there, or nothing is believed."""
        self.server.send_signal(signal.SIGTERM)
        time.sleep(self.choose.uniform(0, 0.2))
        self.server.kill()
        is_kept = (self.shared / "snapshot").exists()
        kept = int(self.log_line("kept in").split("persist: ")[1].split()[0]) if is_kept else 0
        self.restart_and_compare(kept)

    def restart_and_compare(self, kept: int) -> None:
        """The new server says how much it has taken over."""
        said = self.server.log.read_text(errors="replace").count("taken over in")
        self.server.start()
        now = self.server.log.read_text(errors="replace").count("taken over in")
        self.check(now == said + (kept > 0), f"restart: {kept} blocks were kept, {now - said} times taken over")
        if kept:
            taken = int(self.log_line("taken over in").split("persist: ")[1].split()[0])
            self.check(taken == kept, f"warm restart: {taken} of {kept} blocks taken over")

    def log_line(self, word: str) -> str:
        lines = [line for line in self.server.log.read_text(errors="replace").splitlines() if word in line]
        return lines[-1]

    def fill_server(self) -> None:
        """Somebody writes twice the memory."""
        engine = EngineLike(self.server.unix_address, "flood", namespace=b"\x06" * 32, payload_bytes=MIB)
        try:
            if engine.wait_attached(10):
                for number in range(2 * BUDGET // MIB // 8):
                    engine.save(chain(f"flood {number}", 8))
        finally:
            self.gone.update(vars(engine.tally))
            engine.close()

    def lease_out(self) -> None:
        """Somebody holds as much as he is promised, and lets go of nothing."""
        engine = EngineLike(self.server.unix_address, "hoarder")
        try:
            if engine.wait_attached(10):
                for number in range(200):
                    engine.hits(chain(f"shared {number}", 24), lease=True)
                self.pause(1)
        finally:
            engine.close()

    def stop_redis(self) -> None:
        self.redis.stop()
        self.pause(3)
        self.redis.resume()

    def kill_redis(self) -> None:
        self.redis.kill()
        self.pause(3)
        self.redis.start()

    def slow_redis(self) -> None:
        self.line.delay_s = 0.2
        self.pause(3)
        self.line.delay_s = 0.0

    def cut_redis(self) -> None:
        for _ in range(5):
            self.line.cut()
            self.pause(0.4)

    def kill_client(self) -> None:
        number = self.pick()
        self.engines[number].process.kill()
        self.replace(number)

    def stop_client_anywhere(self) -> None:
        engine = self.engines[self.pick()]
        engine.process.send_signal(signal.SIGSTOP)
        self.pause(3)
        engine.process.send_signal(signal.SIGCONT)

    def reach(self, number: int, at: signal.Signals) -> bool:
        """The engine stops itself in the middle of a save or load; False: there was none to stop in."""
        engine = self.engines[number]
        engine.process.send_signal(at)
        until = time.monotonic() + 10
        while not engine.is_stopped():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def stop_client_in_a_save(self) -> None:
        self._stop_client_in(signal.SIGUSR1)

    def stop_client_in_a_load(self) -> None:
        self._stop_client_in(signal.SIGUSR2)

    def _stop_client_in(self, at: signal.Signals) -> None:
        number = self.pick(mapped=True)
        self.check(self.reach(number, at), "a client did not get to the point where it was to stop")
        if self.choose.random() < 0.3:
            self.warm_restart()
        else:
            self.fill_server()
        self.engines[number].process.send_signal(signal.SIGCONT)

    def kill_client_in_a_save(self) -> None:
        number = self.pick(mapped=True)
        self.check(self.reach(number, signal.SIGUSR1), "a client did not get to the point where it was to die")
        self.engines[number].process.kill()
        self.replace(number)

    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "server: kill -9": self.kill_server,
            "server: stopped": self.stop_server,
            "server: restarted": self.restart_server,
            "server: warm restart": self.warm_restart,
            "server: kill -9 in a clean stop": self.kill_server_in_the_stop,
            "server: twice its memory written": self.fill_server,
            "server: leased out": self.lease_out,
            "redis: stopped": self.stop_redis,
            "redis: kill -9": self.kill_redis,
            "redis: slow by 200 ms": self.slow_redis,
            "redis: connections cut": self.cut_redis,
            "client: kill -9": self.kill_client,
            "client: stopped": self.stop_client_anywhere,
            "client: stopped in a save": self.stop_client_in_a_save,
            "client: stopped in a load": self.stop_client_in_a_load,
            "client: kill -9 in a save": self.kill_client_in_a_save,
        }

    def deck(self, until: float) -> Iterator[str]:
        """All kinds, shuffled, again and again. What leaves leases behind comes early: they are over at the end."""
        names = list(self.faults())
        self.choose.shuffle(names)
        yield from sorted(names, key=lambda name: name not in LEAVE_LEASES)
        while True:
            self.choose.shuffle(names)
            for name in names:
                if name not in LEAVE_LEASES or until - time.monotonic() > LEASE_S:
                    yield name

    # --- the run

    def run(self, minutes: float) -> None:
        self.start_engines()
        until = time.monotonic() + 60 * minutes
        faults = self.faults()
        for name in self.deck(until):
            if time.monotonic() > until:
                break
            self.times[name] += 1
            try:
                faults[name]()
            except Exception as error:  # noqa: BLE001 - what went wrong is told in the table, and the soak goes on
                self.fail(f"{name}: {type(error).__name__}: {error}")
                if not self.server.is_running:
                    self.server.start()
            self.heal(name)
            self.look(name)
            time.sleep(PAUSE_S)

    def finish(self) -> None:
        """Engines go, one after the other; what is left of them?"""
        for engine in self.engines:
            engine.process.send_signal(signal.SIGTERM)
        for engine in self.engines:
            try:
                status = engine.process.wait(20)
            except subprocess.TimeoutExpired:
                status = -1
            self.check(status == 0, f"end: engine {engine.number} ended with {status}")
            engine.end()
        self.check(self.total("wrong") == 0, f"end: {self.total('wrong')} wrong payloads")
        self.sweep()
        self.wait_for("no session is left", lambda stats: not stats.sessions, 10)
        self.wait_for("no slot is reserved", lambda stats: stats.reserved_bytes == 0, 15)
        self.wait_for("nothing is leased", lambda stats: stats.leased_bytes == 0, LEASE_S + 10)
        self.over.set()
        self.watcher.join()
        limit = (BUDGET + BEYOND_BUDGET) / MIB
        self.check(self.highest <= BUDGET + BEYOND_BUDGET, f"memory: {self.highest / MIB:.0f} of {limit:.0f} MiB")
        for path in (self.server.log, self.folder / "engines.log"):
            text = path.read_text(errors="replace")
            if "Traceback" in text:
                self.fail(f"{path.name}: {text[text.index('Traceback') :][:1500]}")

    def sweep(self) -> None:
        """Everything that all engines have saved, read once more on both paths."""
        for address in (self.server.unix_address, self.server.port_address):
            engine = EngineLike(address, "sweep")
            try:
                if not engine.wait_attached(10):
                    self.fail("end: the server takes nobody any more")
                    continue
                for number in range(200):
                    engine.load(chain(f"shared {number}", 24))
                self.check(engine.tally.wrong == 0, f"end: {engine.tally.wrong} wrong payloads in the sweep")
                self.check(engine.tally.loaded > 0, "end: the sweep has found nothing")
            finally:
                self.gone.update(vars(engine.tally))
                engine.close()

    def wait_for(self, what: str, holds: Callable[[Any], bool], within_s: float) -> None:
        until = time.monotonic() + within_s
        while True:
            with contextlib.suppress(grpc.RpcError):
                if holds(self.server.stats()):
                    return
            if time.monotonic() > until:
                self.fail(f"end: not within {within_s:.0f} s: {what}")
                return
            time.sleep(0.1)

    def close(self) -> None:
        self.over.set()
        for engine in self.engines:
            engine.end()
        self.server.kill()
        self.line.close()
        self.redis.kill()

    def report(self) -> str:
        rows = [f"{'what was injected':36} {'times':>5} {'good again after, at most':>26}"]
        rows.extend(f"{name:36} {count:5} {self.worst_s[name]:24.2f} s" for name, count in sorted(self.times.items()))
        counts = ", ".join(
            f"{self.total(name)} {what}"
            for name, what in (
                ("saved", "payloads saved"),
                ("loaded", "loaded and right"),
                ("missing", "promised and gone"),
                ("wrong", "wrong"),
                ("unanswered", "questions without an answer"),
            )
        )
        rows += ["", counts, f"server's memory: {self.highest / MIB:.0f} MiB at most, budget {BUDGET // MIB} MiB"]
        held = ["everything held"] if not self.broken else [f"did not hold: {line}" for line in self.broken]
        return "\n".join([*rows, *held])


def memory_of(server: Prefixd) -> int:
    """Resident: its own and the shared."""
    process = server._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(status.split(f"{name}:")[1].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def soak(minutes: float, seed: int) -> tuple[bool, str]:
    """Whether everything held, and the report."""
    folder = Path(tempfile.mkdtemp(prefix="prefixd-soak-"))
    shared = Path(tempfile.mkdtemp(prefix="prefixd-soak-", dir="/dev/shm"))
    try:
        stage = Soak(folder, shared, seed)
        try:
            stage.run(minutes)
            stage.finish()
        finally:
            stage.close()
        if stage.broken:
            stage.fail(f"the logs are in {folder}")
        return not stage.broken, stage.report()
    finally:
        shutil.rmtree(shared)
        if "stage" in locals() and not stage.broken:
            shutil.rmtree(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"{options.minutes:g} minutes, seed {options.seed}", flush=True)
    holds, report = soak(options.minutes, options.seed)
    print(report)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
