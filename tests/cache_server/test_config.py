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
from connector.config import ConfigError as ConnectorConfigError
from connector.config import ConnectorConfig
from tests.cache_server.harness import ROOT
from tests.connector.test_config import ADDRESSES, NO_ADDRESSES


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64MiB", 64 << 20),
        ("2GiB", 2 << 30),
        ("1536 MiB", 3 << 29),
        ("1TiB", 1 << 40),
        ("1048576B", 1 << 20),
        ("1024KiB", 1 << 20),
    ],
)
def test_a_size_has_a_number_and_a_unit(text: str, num_bytes: int) -> None:
    """Binary units, as in the connector's settings."""

    assert parse_size("memory", text) == num_bytes


NO_SIZES = [
    *("10", "", "GiB", "2gib", "2 G", "-1GiB", "1e3MiB", "0x10MiB", "2GiBs", "10GB", "1.5GiB", "2GiB ", " 2GiB"),
    *("0MiB", "1KiB", "9999999TiB", "9" * 400 + "MiB", "\u0662GiB", "2GiB\n"),
]


@pytest.mark.parametrize("text", NO_SIZES)
def test_a_size_without_a_known_unit_is_refused(text: str) -> None:
    """`10` and `10GB` mean something else to everybody. One line, in the words of the connector."""

    with pytest.raises(ConfigError) as caught:
        parse_size("memory", text)
    with pytest.raises(ConnectorConfigError) as there:
        ConnectorConfig.parse({"server": "unix:///p", "staging_bytes": text})

    allowed = "a size of 1MiB or more with its unit (B, KiB, MiB, GiB, TiB) is allowed"
    assert str(caught.value).startswith("memory: '")
    assert str(caught.value).endswith(f"' is not allowed; {allowed}") or len(text) > 100
    assert str(there.value).endswith(allowed)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_of_the_connector_is_one_here(text: str) -> None:
    """One grammar."""

    expected = ADDRESSES[text]
    if expected.path is not None:
        assert parse_address("listen", text) == UnixAddress(Path(expected.path))
    else:
        assert expected.host is not None
        assert expected.port is not None
        assert parse_address("listen", text) == TcpAddress(expected.host, expected.port)


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_the_connector_does_not_take_is_no_address_here(text: str) -> None:
    """Both end with the same words."""

    with pytest.raises(ConfigError) as caught:
        parse_address("server", text)

    assert str(caught.value).startswith("server: '")
    assert str(caught.value).endswith("is not allowed; unix:///ABSOLUTE/PATH, HOST:PORT or [IPV6]:PORT is allowed")
    assert "\n" not in str(caught.value)


def test_any_free_port_is_for_listening_only() -> None:
    """Port 0 says nothing about where a server is."""

    assert parse_config(["127.0.0.1:0"], "64MiB").listen == (TcpAddress("127.0.0.1", 0),)
    with pytest.raises(ConfigError, match=r"server: '127\.0\.0\.1:0'"):
        parse_address("server", "127.0.0.1:0")


def test_addresses_are_unix_sockets_or_tcp() -> None:
    """Both kinds come back as they were written."""

    assert parse_address("listen", "unix:///run/p.sock") == UnixAddress(Path("/run/p.sock"))
    assert parse_address("listen", "127.0.0.1:7070") == TcpAddress("127.0.0.1", 7070)
    assert parse_address("listen", "[::1]:7070") == TcpAddress("::1", 7070)
    for text in ("unix:///run/p.sock", "127.0.0.1:7070", "[::1]:7070", "localhost:1"):
        assert str(parse_address("listen", text)) == text


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
