"""C66, C67: a server in a control group with the limit that the manifests give it, filled again and again."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.config import BASE_BYTES
from tests.cache_server.harness import MIB, Client, ServerProcess, chain, payload_of, wait_until
from tests.deploy.control_group import ControlGroup, control_group, why_not
from tests.deploy.policy import limit_for
from tests.redis.harness import percentile

WHY_NOT = why_not()
needs_group = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
HANG_S = 5.0  # what a save may take at worst when nothing hangs, on a machine with far more to do than cores


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    with control_group("prefixd-test") as made:
        yield made


def fill(client: Client, total_bytes: int, seconds: float = 0.0) -> list[float]:
    """Saves through slots, in batches of 32 MiB, evenly over `seconds`; how long each batch took."""
    per_batch = 32 * MIB // client.payload_bytes
    num_batches = total_bytes // (32 * MIB)
    took = []
    started = time.monotonic()
    for number in range(num_batches):
        began = time.monotonic()
        client.save(chain(f"batch {number}", per_batch))
        took.append(time.monotonic() - began)
        time.sleep(max(0.0, started + (number + 1) * seconds / num_batches - time.monotonic()))
    return took


@needs_group
@pytest.mark.parametrize(
    ("memory", "seconds"),
    [("256MiB", 0.0), pytest.param("1GiB", 600.0, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
)
def test_twenty_times_the_memory_is_written_within_the_limit(
    tmp_path: Path, group: ControlGroup, memory: str, seconds: float
) -> None:
    """C66: nobody is killed, old blocks go, and a save at the end takes no longer than one at the beginning."""

    cap = int(memory.removesuffix("MiB")) * MIB if "MiB" in memory else 1024 * MIB
    group.limit(cap + 300 * MIB)
    with ServerProcess(tmp_path, memory, prefix=group.prefix) as server:
        idle = group.usage_bytes
        with Client(server.unix, 0, payload_bytes=MIB, descriptors=server.socket_path) as client:
            wait_until(client.is_mapped, "the client has its segments")
            took = fill(client, 20 * cap, seconds)
            last = chain(f"batch {len(took) - 1}", 32)
            stats, full = server.stats(), group.usage_bytes
            kept = client.get(last)
        print(f"{memory}: {idle >> 20} MiB idle, {full >> 20} MiB full, p99 {percentile(took, 0.99) * 1000:.0f} ms")

        assert server.process.poll() is None
        assert group.num_kills == 0
        assert stats.counters["evicted_blocks_capacity"] == 19 * cap // MIB
        assert stats.stored_bytes == cap
        assert kept == [payload_of(key, MIB) for key in last]
        # The blocks are in this group, although the client wrote them; and the manifests' limit is enough.
        assert cap <= full <= limit_for(memory)
        early, late = took[: len(took) // 3], took[-len(took) // 3 :]
        assert percentile(late, 0.99) <= max(10 * percentile(early, 0.99), HANG_S)
        assert server.stop() == 0


@needs_group
def test_a_limit_that_the_memory_does_not_fit_into_is_refused_at_the_start(tmp_path: Path, group: ControlGroup) -> None:
    """C67: with both figures, instead of a kill when the cache is full. One that just fits is not."""

    limit = 256 * MIB + BASE_BYTES
    group.limit(limit - 4096)
    with (
        pytest.raises(AssertionError, match="memory: '268435456' is not allowed"),
        ServerProcess(tmp_path, "256MiB", prefix=group.prefix) as server,
    ):
        pass
    log = (tmp_path / "server.log").read_text()

    assert len(log.splitlines()) == 1
    assert f"needs {limit} bytes" in log
    assert f"limit is {limit - 4096}" in log

    group.limit(limit)
    with ServerProcess(tmp_path, "256MiB", prefix=group.prefix) as server:
        assert server.stop() == 0


@needs_group
def test_the_group_does_kill_what_needs_more(group: ControlGroup) -> None:
    """Positive control: the limit is real, also for memory that is shared."""

    group.limit(64 * MIB)
    program = "import os; fd = os.memfd_create('x'); os.posix_fallocate(fd, 0, 1 << 28)"
    done = subprocess.run([*group.prefix, sys.executable, "-c", program], check=False, capture_output=True)

    assert done.returncode != 0
    assert group.num_kills == 1 or b"No space left" in done.stderr or b"Cannot allocate" in done.stderr
