"""What the server writes: one line per record, text or JSON, not too many, and the last warnings kept."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.logs import BURST, MAX_MESSAGE, NUM_RECENT, PERIOD_S, JsonFormatter, Quota, Recent, setup
from tests.cache_server.harness import Client, ServerProcess, wait_until
from tests.fakes import FakeClock

log = logging.getLogger("prefixd.test")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """pytest's own handlers come back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level


def written(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_text_is_one_line_with_time_and_level() -> None:
    """Whatever is in the message."""
    stream = io.StringIO()
    setup("text", "info", stream)
    log.info("two\nlines of %d", 7)
    log.debug("not this")

    (line,) = written(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO two lines of 7", line)


def test_json_is_one_object_per_line() -> None:
    """With figures as fields; a traceback is a field too."""
    stream = io.StringIO()
    setup("json", "debug", stream)
    log.warning("lost %s", "it", extra={"figures": {"engines": 3}})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("here")
    first, second = map(json.loads, written(stream))

    assert (first["level"], first["logger"]) == ("warning", "prefixd.test")
    assert (first["message"], first["engines"]) == ("lost it", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert "ValueError: broken" in second["traceback"]


def test_a_message_has_a_bound() -> None:
    """Whatever a client sends."""
    record = logging.LogRecord("n", logging.INFO, "file", 1, "x" * 10 * MAX_MESSAGE, None, None)

    assert len(json.loads(JsonFormatter().format(record))["message"]) == MAX_MESSAGE + 1


def test_one_place_says_so_much_and_no_more() -> None:
    """And afterwards, how much it did not say. Another place is not held back."""
    clock = FakeClock()
    quota = Quota(clock)

    def record(line: int) -> logging.LogRecord:
        return logging.LogRecord("n", logging.WARNING, "file", line, "again", None, None)

    said = [quota.filter(record(1)) for _ in range(BURST + 5)]
    other = quota.filter(record(2))
    clock.advance(PERIOD_S)
    later = record(1)
    assert quota.filter(later)

    assert said == [True] * BURST + [False] * 5
    assert other
    assert json.loads(JsonFormatter().format(later))["message"] == "again (5 more like this were left out)"


def test_the_last_warnings_are_kept_youngest_first() -> None:
    """Not what is below a warning, and not for ever."""
    clock = FakeClock()
    recent = Recent(clock)
    quiet = logging.getLogger("prefixd.test.recent")
    quiet.addHandler(recent)
    quiet.setLevel(logging.INFO)
    quiet.info("not this")
    for number in range(NUM_RECENT + 3):
        quiet.warning("number %d", number)
        clock.advance(1)
    lines = recent.lines()

    assert len(lines) == NUM_RECENT
    assert lines[0] == (1.0, "warning", f"number {NUM_RECENT + 2}")
    assert lines[-1] == (float(NUM_RECENT), "warning", "number 3")


def test_a_server_that_logs_json(tmp_path: Path) -> None:
    """Every line is an object; starting and stopping say so once each, clients that come and go say nothing."""
    with ServerProcess(tmp_path, "128MiB", "--log-format", "json", "--http", "127.0.0.1:0") as server:
        for number in range(20):
            with Client(server.unix, engine_id=f"engine {number}"):
                pass
        wait_until(lambda: not server.stats().sessions, "all sessions have ended")
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]

    assert [line["message"].split()[0] for line in lines] == ["status", "ready", "stopping:", "stopped"]
    assert {line["level"] for line in lines} == {"info"}


def test_warnings_reach_the_status(tmp_path: Path) -> None:
    """Redis is not there: one line, on stderr and in `Stats`."""
    with ServerProcess(tmp_path, "128MiB", "--redis", "redis://127.0.0.1:1", "--redis-timeout", "100ms") as server:
        warnings = list(server.stats().recent_warnings)
        lines = [line for line in server.log.splitlines() if " WARNING " in line]

    assert [one.level for one in warnings] == ["warning"]
    assert "starting without it" in warnings[0].text
    assert len(lines) == 1
    assert lines[0].endswith(warnings[0].text)
