"""Shows prefixd at work: two engine processes, one after the other, on the same prompt, which is computed once.

Writes a small random-weight Llama, starts a cache server, and lets each engine (a vLLM of its own, on the CPU, float32)
answer the same 4,096 tokens. Nothing is shared between the two but the server. Exit status 0 only if both answers are
equal token for token and the second engine's workers *loaded* 4,064 tokens by their own counter: all blocks but the
last, of which at least one token is computed again to get an answer.

Everything lives in one temporary folder and in process groups of its own, and is gone when this ends, however it ends.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engine.engine import Answer, Engine, connector_config, wait_until
from tests.engine.prefixd import Prefixd
from tests.models import prompt

NUM_PROMPT_TOKENS = 4096
NUM_ANSWER_TOKENS = 16
BLOCK_SIZE = 32
EXPECTED_LOADED_TOKENS = (NUM_PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
NUM_SAVED_BLOCKS = NUM_PROMPT_TOKENS // BLOCK_SIZE
STILL_EVERY_S = 15.0

began = time.monotonic()


@dataclass(frozen=True, slots=True)
class Run:
    answer: Answer
    num_loaded_tokens: int


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Tells that `what` is going on: a spinner on a terminal, now and then a line elsewhere."""
    over = threading.Event()
    terminal = sys.stderr.isatty()
    started = time.monotonic()

    def line(text: str, end: str = "\n") -> None:
        start = "\r" if terminal else ""
        print(f"{start}[{time.monotonic() - began:4.0f}s] {text}", end=end, file=sys.stderr, flush=True)

    def spin() -> None:
        if terminal:
            turns = "|/-\\"
            for i in range(10**9):
                line(f"{what} {turns[i % 4]}", end="")
                if over.wait(0.2):
                    return
        while not over.wait(STILL_EVERY_S):
            line(f"  still {what}")

    if not terminal:
        line(what)
    spinner = threading.Thread(target=spin, daemon=True)
    spinner.start()
    try:
        yield
    finally:
        over.set()
        spinner.join()
        if terminal:
            line(f"{what}: {time.monotonic() - started:.1f} s  ")


def run_engine(which: str, folder: Path, model: Path, server: Prefixd, seed: int) -> Run:
    engine = Engine(
        folder / f"{which}.log",
        model=str(model),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=NUM_PROMPT_TOKENS + 256,
        max_num_seqs=2,
        enforce_eager=True,
        kv_transfer_config=connector_config(server.unix_address),
    )
    try:
        with phase(f"starting the {which} engine"):
            engine.wait_ready()
            wait_until(lambda: server.attached(2), 30, "worker and scheduler side are attached to the server")
            # Less than a block, and another one for each engine: warms up, saves and loads nothing.
            engine.generate_one(prompt(seed, BLOCK_SIZE // 2), max_tokens=2)
        with phase(f"the {which} engine answers {NUM_PROMPT_TOKENS:,} tokens"):
            answer = engine.generate_one(prompt(0, NUM_PROMPT_TOKENS), max_tokens=NUM_ANSWER_TOKENS)
            wait_until(lambda: server.num_blocks() >= NUM_SAVED_BLOCKS, 30, "all blocks of the prompt are saved")
            num_loaded_tokens = int(engine.metric("vllm:prefixd_loaded_tokens"))
        with phase(f"ending the {which} engine"):
            engine.close()
    except BaseException:
        engine.kill()
        raise
    return Run(answer, num_loaded_tokens)


def report(first: Run, second: Run, server: Prefixd) -> bool:
    """Prints the table; True if all is as it should be."""
    equal = first.answer.token_ids == second.answer.token_ids
    rows = [("engine", "cached tokens", "loaded from the server", "time to first token", "output equal")]
    for name, run, same in (("first", first, "-"), ("second", second, "yes" if equal else "NO")):
        rows.append(
            (
                name,
                f"{run.answer.num_cached_tokens:,}",
                f"{run.num_loaded_tokens:,}",
                f"{run.answer.first_token_s:.2f} s",
                same,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"\nserver: {hit_rate(server)}")
    faster = first.answer.first_token_s / second.answer.first_token_s
    print(f"first token {faster:.0f} times sooner; both answers are {first.answer.token_ids[:6]}…" if equal else "")
    good = equal and first.num_loaded_tokens == 0 and second.num_loaded_tokens == EXPECTED_LOADED_TOKENS
    if not good:
        print(f"FAILED: expected equal output, and {EXPECTED_LOADED_TOKENS:,} tokens loaded by the second engine")
    return good


def hit_rate(server: Prefixd) -> str:
    stats = server.stats()
    counters = stats.counters
    hit, missed = counters["lookup_hit_blocks"], counters["lookup_missed_blocks"]
    rate = f"{hit} of {hit + missed} blocks asked for were here ({hit / max(1, hit + missed):.0%})"
    return f"{server.num_blocks()} blocks, {stats.stored_bytes / 2**20:.0f} MiB; {rate}"


def write_model(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models", "llama-250m", str(path)],
        cwd=Path(__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)


@contextlib.contextmanager
def temporary_folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="prefixd-demo-"))
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def interrupt(*_: Any) -> None:
    """Ctrl-C, TERM and HUP take the same way out; a second one does not interrupt the tidying."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--keep", action="store_true", help="keep the folder with model and logs")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        with temporary_folder(arguments.keep) as folder:
            with phase("writing a random-weight Llama of 250 million parameters"):
                write_model(folder / "model")
            with Prefixd(folder, memory="2GiB") as server:
                first = run_engine("first", folder, folder / "model", server, seed=1)
                second = run_engine("second", folder, folder / "model", server, seed=2)
                good = report(first, second, server)
                if (status := server.stop()) != 0:
                    print(f"FAILED: the server ended with status {status}")
                    good = False
            return 0 if good else 1
    except KeyboardInterrupt:
        print("\ninterrupted: all processes and files of the demo are gone", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
