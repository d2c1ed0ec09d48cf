"""What the server writes to stderr: one line per change of state, as text or as JSON, and never too many.

`setup` is called once, by `prefixd serve`. Every line passes the same two things:
  * `Quota`: of one message (one place in the code, whatever its arguments) at most BURST lines in PERIOD_S; when it
    speaks again, it says how many were left out;
  * `Recent`: the last warnings and errors, for the status page and `prefixd top`.

Rule for whoever logs: no token ids, no prompt text, no keys of blocks, no password. Those who are named are engines,
addresses, sizes, counts and causes.

Not here: what is logged. The connector logs through vLLM's own logging (logger `vllm.prefixd`).
"""

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

Format = Literal["text", "json"]
FORMATS: Final[tuple[Format, ...]] = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
BURST: Final = 10
PERIOD_S: Final = 60.0
NUM_RECENT: Final = 20
MAX_MESSAGE: Final = 2000  # characters; whatever a client sends us cannot make a longer line


class Quota(logging.Filter):
    """Lets at most BURST records of one message through per PERIOD_S."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._periods: dict[tuple[str, int], tuple[float, int]] = {}  # place → when its period began, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written; the first after a period of too many says how many were not."""
        place = (record.pathname, record.lineno)
        now = self._now()
        began_at, count = self._periods.get(place, (now, 0))
        if now - began_at >= PERIOD_S:
            left_out = max(count - BURST, 0)
            began_at, count = now, 0
            if left_out:
                record.left_out = left_out
        self._periods[place] = (began_at, count + 1)
        return count < BURST


class Recent(logging.Handler):
    """Keeps the last warnings and errors in memory."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._now = now
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=NUM_RECENT)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, in whatever thread; a deque's append is one step."""
        self._lines.append((self._now(), record.levelname.lower(), _message(record)))

    def lines(self) -> list[tuple[float, str, str]]:
        """(seconds ago, level, message), youngest first."""
        now = self._now()
        return [(now - at, level, text) for at, level, text in reversed(list(self._lines))]


class TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00.123 WARNING message"""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, of which there is one per broken invariant, follows it."""
        line = f"{_local(record)} {record.levelname} {_message(record)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """{"time": RFC 3339 in UTC, "level": …, "logger": …, "message": …}, one object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Numbers that were passed with `extra={"figures": {…}}` are fields of their own."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **getattr(record, "figures", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def setup(log_format: Format = "text", level: str = "info", stream: TextIO | None = None) -> Recent:
    """From now on all logging of this process goes to `stream` (stderr). Returns what keeps the last warnings."""
    lines = logging.StreamHandler(stream or sys.stderr)
    lines.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    recent = Recent()
    quota = Quota()
    lines.addFilter(quota)
    root = logging.getLogger()
    root.handlers = [lines, recent]
    root.setLevel(level.upper())
    # Libraries tell of each connection and call at INFO.
    for library in ("aiohttp", "asyncio", "grpc", "redis"):
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))
    return recent


def _message(record: logging.LogRecord) -> str:
    text = " ".join(record.getMessage().splitlines())
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}…"
    left_out: int = getattr(record, "left_out", 0)
    return f"{text} ({left_out} more like this were left out)" if left_out else text


def _local(record: logging.LogRecord) -> str:
    return f"{datetime.fromtimestamp(record.created, UTC).astimezone():%Y-%m-%d %H:%M:%S}.{int(record.msecs):03d}"
