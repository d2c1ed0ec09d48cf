"""Processes that are stopped and killed at a point of one's choice.

`stopped(pid)` holds a process as SIGSTOP does; `wait_stopped` waits until a child stopped itself at a point of its own
code (`stop_here()`): the one way to stop in the middle of a copy, and not about there.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
STOP_S = 60.0


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Alive, connected, silent."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop_here() -> None:
    """The calling thread goes no further, and with it all others, until SIGCONT. The signal is sent to this thread: of
    one sent to the process another thread may take notice, and this one would run on for a while.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def wait_stopped(pid: int, timeout_s: float = STOP_S) -> None:
    """Until the process is in state T."""
    deadline = time.monotonic() + timeout_s
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert state != "Z", f"process {pid} has ended"
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.01)


class Child:
    """`python -c CODE ARGUMENTS…` in the repository, its stdin and stdout ours; killed at the end of the block."""

    def __init__(self, code: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> str:
        """The next line that it prints, '' at its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def tell(self, line: str) -> None:
        print(line, file=self._process.stdin, flush=True)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout_s: float = 60) -> int:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL: no handler of its own runs."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for end in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.close()
