"""What the settings may be, and what a wrong one costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from cache_server.cgroup import memory_limit
from cache_server.config import (
    BASE_BYTES,
    ConfigError,
    ServerConfig,
    TcpAddress,
    UnixAddress,
    check_limit,
    parse_address,
    parse_config,
    parse_size,
)
from tests.cache_server.harness import ROOT


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64MiB", 64 << 20),
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("1TiB", 1 << 40),
        ("100MB", 10**8),
        ("70000kB", 7 * 10**7),
    ],
)
def test_a_size_has_a_number_and_a_unit(text: str, num_bytes: int) -> None:
    """Binary and decimal units are told apart."""

    assert parse_size("memory", text) == num_bytes


@pytest.mark.parametrize("text", ["10", "", "GiB", "2gib", "2 G", "-1GiB", "1e3MiB", "0x10MiB", "2GiBs"])
def test_a_size_without_a_known_unit_is_refused(text: str) -> None:
    """`10` means something else to everybody."""

    with pytest.raises(ConfigError, match="memory"):
        parse_size("memory", text)


def test_addresses_are_unix_sockets_or_tcp() -> None:
    """Both kinds come back as they were written."""

    assert parse_address("listen", "unix:///run/p.sock") == UnixAddress(Path("/run/p.sock"))
    assert parse_address("listen", "127.0.0.1:7070") == TcpAddress("127.0.0.1", 7070)
    assert parse_address("listen", "[::1]:7070") == TcpAddress("::1", 7070)
    for text in ("unix:///run/p.sock", "127.0.0.1:7070", "[::1]:7070", "localhost:0"):
        assert str(parse_address("listen", text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7070",
        "host",
        "host:",
        ":7070",
        "host:70000",
        "http://host:1",
        "unix:relative",
        "unix://host/p",
        "unix:///",
        "unix:///" + "p" * 105,
    ],
)
def test_anything_else_is_no_address(text: str) -> None:
    """Also a path that the descriptor socket beside it would make too long."""

    with pytest.raises(ConfigError, match="listen"):
        parse_address("listen", text)


def test_less_than_a_segment_of_memory_is_refused() -> None:
    """64 MiB is the smallest segment."""

    with pytest.raises(ConfigError, match="at least 64MiB"):
        parse_config(["127.0.0.1:1"], "63MiB")
    with pytest.raises(ConfigError, match="once"):
        parse_config(["127.0.0.1:1", "127.0.0.1:1"], "64MiB")


def test_memory_that_the_container_cannot_hold_is_refused_with_both_figures() -> None:
    """It would be killed when the cache is full, hours later."""

    config = ServerConfig((TcpAddress("h", 1),), 1 << 30)
    check_limit(config, None)
    check_limit(config, (1 << 30) + BASE_BYTES)

    with pytest.raises(ConfigError, match=r"1207959552 bytes, the container's limit is 1073741824"):
        check_limit(config, 1 << 30)


def test_the_smallest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    """Pods have theirs above the container's."""

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    pod = tmp_path / "sys/fs/cgroup/pod"
    (pod / "container").mkdir(parents=True)
    assert memory_limit(tmp_path) is None
    (pod / "container/memory.max").write_text("max\n")
    (pod / "memory.max").write_text("1000\n")

    assert memory_limit(tmp_path) == 1000


def test_version_one_control_groups_count_too(tmp_path: Path) -> None:
    """Their number for "no limit" is none."""

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    mount.mkdir(parents=True)
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path) is None
    (mount / "memory.limit_in_bytes").write_text("2000\n")

    assert memory_limit(tmp_path) == 2000


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["serve", "--memory", "10"], "memory: '10'"),
        (["serve", "--memory", "1MiB"], "memory: '1MiB'"),
        (["serve", "--listen", "nowhere"], "listen: 'nowhere'"),
        (["stats", "--server", "nowhere"], "server: 'nowhere'"),
    ],
)
def test_a_wrong_setting_costs_one_line_and_status_2(arguments: list[str], key: str) -> None:
    """The key, the value, what is allowed; no traceback."""

    done = subprocess.run(
        [sys.executable, "-m", "cache_server", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert key in done.stderr
