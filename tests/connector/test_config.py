"""The operator's settings: closed, and refused in one line that says what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from connector.config import Address, ConfigError, ConnectorConfig, parse_address

SOCKET = "unix:///run/prefixd/prefixd.sock"


def refusal(extra_config: Any) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(ConfigError) as refused:
        ConnectorConfig.parse(extra_config)
    line = str(refused.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


def test_only_the_server_is_required() -> None:
    """Every other setting has a default that suits most."""
    assert ConnectorConfig.parse({"server": SOCKET}) == ConnectorConfig(
        server=SOCKET,
        namespace=None,
        weights_version=None,
        hash="xxh3_128",
        lookup_timeout_ms=50.0,
        load_timeout_ms=10_000.0,
        lookup_wait_ms=1.0,
        save_decoded=True,
        min_load_tokens=0,
        staging_bytes=256 * 1024 * 1024,
        verify_loads=False,
        token_file=None,
        ca_file=None,
        cert_file=None,
        key_file=None,
        tls_server_name=None,
    )


def test_all_settings() -> None:
    """What is set is taken as it is."""
    extra_config = {
        "server": "cache.example:7100",
        "namespace": "m1",
        "weights_version": "2025-01",
        "hash": "sha256",
        "lookup_timeout_ms": 20,
        "load_timeout_ms": 2500.5,
        "lookup_wait_ms": 0,
        "save_decoded": False,
        "min_load_tokens": 512,
        "staging_bytes": "1 GiB",
    }

    assert ConnectorConfig.parse(extra_config) == ConnectorConfig(
        "cache.example:7100", "m1", "2025-01", "sha256", 20.0, 2500.5, 0.0, False, 512, 1 << 30
    )


def test_null_is_an_unset_text() -> None:
    """JSON's null for a text that has no default is the same as leaving it out."""
    assert ConnectorConfig.parse({"server": SOCKET, "namespace": None}).namespace is None


@pytest.mark.parametrize("extra_config", [None, {}])
def test_a_missing_server_is_named(extra_config: Any) -> None:
    """The message shows the forms an address may have."""
    assert refusal(extra_config) == (
        "kv_connector_extra_config.server is missing: unix:///ABSOLUTE/PATH, HOST:PORT or [IPV6]:PORT is allowed"
    )


@pytest.mark.parametrize("extra_config", [[], "server", 7])
def test_settings_are_an_object(extra_config: Any) -> None:
    """Anything else is refused as such."""
    assert "an object is allowed" in refusal(extra_config)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("sever", "server"), ("lookup_timeout", "lookup_timeout_ms"), ("staging_byte", "staging_bytes"), ("Hash", "hash")],
)
def test_an_unknown_key_is_refused_with_its_nearest_match(key: str, nearest: str) -> None:
    """A typing error never switches a setting off in silence (C71)."""
    line = refusal({"server": SOCKET, key: 1})

    assert line.startswith(f"kv_connector_extra_config.{key} = 1: unknown; did you mean '{nearest}'?")
    assert "allowed are server, namespace" in line


def test_an_unknown_key_like_none_is_refused_with_all_keys() -> None:
    """Without a near match the keys are listed."""
    line = refusal({"server": SOCKET, "zzz": "a\nb" * 200})

    assert "did you mean" not in line
    assert "unknown; allowed are" in line


ADDRESSES = {
    SOCKET: Address("/run/prefixd/prefixd.sock", None, None),
    "unix:///a": Address("/a", None, None),
    "unix:///run/prefixd@1/a_b-c+d=e.sock": Address("/run/prefixd@1/a_b-c+d=e.sock", None, None),
    "localhost:7100": Address(None, "localhost", 7100),
    "10.0.0.7:1": Address(None, "10.0.0.7", 1),
    "cache-0.cache.prod.svc:65535": Address(None, "cache-0.cache.prod.svc", 65535),
    "[::1]:7100": Address(None, "::1", 7100),
    "[2001:db8::7]:7100": Address(None, "2001:db8::7", 7100),
    f"unix:///{'p' * 103}": Address(f"/{'p' * 103}", None, None),
}

NO_ADDRESSES = [
    "",
    " ",
    "http://cache:7100",
    "grpc://cache:7100",
    "dns:///cache:7100",
    "tcp://cache:7100",
    "cache",
    "cache:",
    ":7100",
    "cache:abc",
    "cache:0",
    "cache:-1",
    "cache:65536",
    "cache:99999999999999999999",
    "cache:7100 ",
    " cache:7100",
    "cache:7100\n",
    "cache:7100/",
    "cache:71:00",
    "cache:\u0667\u0661\u0660\u0660",
    "cache/x:7100",
    "-cache:7100",
    "cache.:7100",
    "::1:7100",
    "[::1]",
    "[::1]:",
    "[::1:7100",
    "[cache]:7100",
    "[fe80::1%eth0]:7100",
    "unix:",
    "unix://",
    "unix:///",
    "unix:/run/prefixd.sock",
    "unix:run/prefixd.sock",
    "unix://run/prefixd.sock",
    "unix:///run/prefixd/",
    "unix:///run/pre fixd.sock",
    "unix:///run/prefixd.sock?x=1",
    "unix:///run/%41.sock",
    "unix:///run/prefixd.sock\n",
    "unix:///run/\0.sock",
    "UNIX:///run/prefixd.sock",
    "unix-abstract:prefixd",
    "/run/prefixd.sock",
    f"unix:///{'p' * 104}",
]


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses(text: str) -> None:
    """The forms that connector and server both take."""
    address = parse_address(text)

    assert address == ADDRESSES[text] == ConnectorConfig.parse({"server": text}).address
    assert address.is_local == text.startswith("unix:")


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address_is_refused(text: str) -> None:
    """One line: key, value, what is allowed."""
    line = refusal({"server": text})

    assert line.startswith("kv_connector_extra_config.server = '")
    assert line.endswith(": unix:///ABSOLUTE/PATH, HOST:PORT or [IPV6]:PORT is allowed")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("server", 7100, "HOST:PORT"),
        ("server", None, "HOST:PORT"),
        ("server", [SOCKET], "HOST:PORT"),
        ("namespace", 1, "a text of 1 to 256 printable characters"),
        ("namespace", "", "a text of 1 to 256 printable characters"),
        ("namespace", "a\nb", "a text of 1 to 256 printable characters"),
        ("namespace", "a" * 257, "a text of 1 to 256 printable characters"),
        ("weights_version", 2, "a text of 1 to 256 printable characters"),
        ("weights_version", True, "a text of 1 to 256 printable characters"),
        ("hash", "md5", "xxh3_128 or sha256 is allowed"),
        ("hash", "xxh3-128", "did you mean 'xxh3_128'?"),
        ("hash", None, "xxh3_128 or sha256 is allowed"),
        ("hash", ["sha256"], "xxh3_128 or sha256 is allowed"),
        ("lookup_timeout_ms", 0, "above 0"),
        ("lookup_timeout_ms", -5, "above 0"),
        ("lookup_timeout_ms", "50", "a number of milliseconds"),
        ("lookup_timeout_ms", True, "a number of milliseconds"),
        ("lookup_timeout_ms", None, "a number of milliseconds"),
        ("lookup_timeout_ms", float("nan"), "a number of milliseconds"),
        ("load_timeout_ms", float("inf"), "a number of milliseconds"),
        ("load_timeout_ms", 10**9, "up to 3600000"),
        ("load_timeout_ms", 10**400, "up to 3600000"),
        ("lookup_wait_ms", -0.1, "from 0 to 1000"),
        ("lookup_wait_ms", 60, "at most lookup_timeout_ms (50)"),
        ("save_decoded", "no", "true or false is allowed"),
        ("save_decoded", 0, "true or false is allowed"),
        ("save_decoded", None, "true or false is allowed"),
        ("min_load_tokens", -1, "a whole number of tokens from 0 to 4294967296 is allowed"),
        ("min_load_tokens", 0.5, "a whole number of tokens"),
        ("min_load_tokens", "64", "a whole number of tokens"),
        ("min_load_tokens", True, "a whole number of tokens"),
        ("min_load_tokens", 10**10, "a whole number of tokens"),
        ("staging_bytes", "10", "with its unit (B, KiB, MiB, GiB, TiB)"),
        ("staging_bytes", 268435456, "with its unit"),
        ("staging_bytes", "-1GiB", "with its unit"),
        ("staging_bytes", "10GB", "with its unit"),
        ("staging_bytes", "1.5GiB", "with its unit"),
        ("staging_bytes", "0MiB", "1MiB or more"),
        ("staging_bytes", "1KiB", "1MiB or more"),
        ("staging_bytes", "9" * 5000 + "TiB", "with its unit"),
        ("staging_bytes", "\u0662MiB", "with its unit"),
        ("staging_bytes", None, "with its unit"),
    ],
)
def test_values_that_cannot_be_taken_are_refused(key: str, value: Any, allowed: str) -> None:
    """Nothing is adjusted: the line names the key, the value and what is allowed (C71)."""
    line = refusal({"server": SOCKET, key: value})

    assert line.startswith(f"kv_connector_extra_config.{key} = ")
    assert allowed in line


@pytest.mark.parametrize(
    ("text", "size"), [("1MiB", 1 << 20), ("256MiB", 1 << 28), ("2 GiB", 2 << 30), ("1048576B", 1 << 20)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    """Binary units, so that nobody wonders."""
    assert ConnectorConfig.parse({"server": SOCKET, "staging_bytes": text}).staging_bytes == size


# --- credentials

SECRET = "team-a." + "s" * 43


def token_file(folder: Path, text: str = SECRET + "\n") -> str:
    file = folder / "token"
    file.write_text(text)
    return str(file)


def test_the_token_says_whose_blocks_these_are(tmp_path: Path) -> None:
    config = ConnectorConfig.parse({"server": SOCKET, "token_file": token_file(tmp_path)})

    assert config.tenant == "team-a"
    assert "s" * 43 not in repr(config)
    assert ConnectorConfig.parse({"server": SOCKET}).tenant == ""


@pytest.mark.parametrize(
    "text",
    ["", "s" * 43, "team-a.short", "Team-A." + "s" * 43, SECRET + "\n" + SECRET, "team a." + "s" * 43, "\xff" * 60],
)
def test_a_token_that_is_none_is_not_shown(tmp_path: Path, text: str) -> None:
    """What stands in the file may be a secret, whatever it is."""
    path = token_file(tmp_path, text)
    message = refusal({"server": SOCKET, "token_file": path})

    assert path in message
    assert "s" * 43 not in message
    assert "TENANT.SECRET is allowed" in message


@pytest.mark.parametrize("server", ["cache.example:7100", "10.0.0.1:7100", "[2001:db8::1]:7100"])
def test_a_token_does_not_travel_in_the_clear(tmp_path: Path, server: str) -> None:
    """Over a network it needs TLS; on this machine it does not."""
    file = token_file(tmp_path)
    message = refusal({"server": server, "token_file": file})

    assert "TLS (ca_file) only" in message
    for local in (SOCKET, "localhost:7100", "127.0.0.1:7100", "[::1]:7100"):
        assert ConnectorConfig.parse({"server": local, "token_file": file}).tenant == "team-a"
    assert ConnectorConfig.parse({"server": server, "token_file": file, "ca_file": file}).ca_file == file


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"server": SOCKET, "ca_file": "F"}, "only with server = HOST:PORT"),
        ({"cert_file": "F", "key_file": "F"}, "only with ca_file"),
        ({"ca_file": "F", "cert_file": "F"}, "cert_file and key_file come together"),
        ({"ca_file": "F", "key_file": "F"}, "cert_file and key_file come together"),
        ({"tls_server_name": "cache"}, "only with ca_file"),
        ({"ca_file": "/nowhere/ca.pem"}, "a file that can be read (No such file or directory)"),
        ({"token_file": "/nowhere/token"}, "a file that can be read (No such file or directory)"),
        ({"ca_file": 7}, "the path of a file is allowed"),
        ({"verify_loads": "yes"}, "true or false is allowed"),
    ],
)
def test_credentials_that_contradict_themselves_are_refused(
    tmp_path: Path, settings: dict[str, Any], allowed: str
) -> None:
    file = token_file(tmp_path)
    given = {key: file if value == "F" else value for key, value in settings.items()}

    assert allowed in refusal({"server": "cache.example:7100", **given})
