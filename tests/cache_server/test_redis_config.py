"""The options --redis…: what is accepted, and that a wrong one is one line without the password."""

from pathlib import Path
from typing import Any

import pytest

from cache_server.config import ConfigError
from cache_server.redis_config import RedisAddress, RedisConfig, RedisOptions, masked, parse_redis, password_in


def parse(url: str | None, environment: dict[str, str] | None = None, **options: Any) -> RedisConfig | None:
    return parse_redis(RedisOptions(url, **options), environment or {})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", RedisConfig("single", (RedisAddress("host", 6379),))),
        ("redis://host:1/7", RedisConfig("single", (RedisAddress("host", 1),), db=7)),
        ("redis://host/", RedisConfig("single", (RedisAddress("host", 6379),))),
        ("rediss://[::1]:1", RedisConfig("single", (RedisAddress("::1", 1),), tls=True)),
        ("redis://:p%40@h", RedisConfig("single", (RedisAddress("h", 6379),), password="p@")),
        ("redis://u:p:q@h", RedisConfig("single", (RedisAddress("h", 6379),), user="u", password="p:q")),
        ("unix:///run/redis.sock", RedisConfig("single", (RedisAddress(path="/run/redis.sock"),))),
        ("unix://:p@/r.sock?db=2", RedisConfig("single", (RedisAddress(path="/r.sock"),), db=2, password="p")),
        ("redis+cluster://a:1,b", RedisConfig("cluster", (RedisAddress("a", 1), RedisAddress("b", 6379)))),
        ("rediss+cluster://a", RedisConfig("cluster", (RedisAddress("a", 6379),), tls=True)),
        (
            "redis+sentinel://a,b:2/main/3",
            RedisConfig("sentinel", (RedisAddress("a", 26379), RedisAddress("b", 2)), master="main", db=3),
        ),
    ],
)
def test_urls(url: str, expected: RedisConfig) -> None:
    assert parse(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "host", "http://host", "redis:/host", "REDIS://host", "redis+ssl://host"),
        *("redis://", "redis://:6379", "redis:///0", "redis://user:secret@", "redis://a b", "redis://@host"),
        *("redis://-host", "redis://host.", "redis://[host]", "redis://[::1", "redis://[fe80::1%eth0]", "redis://::1"),
        *("redis://host:1\n", "redis://host:\u0661", "redis://host/\u0661", "unix:///run/a b.sock", "unix:///a%20b"),
        *("redis://host:0", "redis://host:65536", "redis://host:port", "redis://host:-1"),
        *("redis://host/x", "redis://host/-1", "redis://host/0/1", "redis://host/123456", "redis://host?db=1"),
        *("redis://a,b", "redis+cluster://a/1", "redis+cluster://", "redis+cluster://a,", "redis+sentinel://a"),
        *("unix://", "unix://relative", "unix:///", "unix:///x?y=1", "unix:///x?db=y", "unix:///" + "x" * 200),
        *("redis://user@host", "redis://u:secret%0d%0a@host"),
    ],
)
def test_a_wrong_url_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)

    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("ttl", text) for text in ("1", "0s", "-1s", "1 d", " 1d", "1w", "500d", "", "9" * 400 + "d")),
        *(("prefix", text) for text in ("", "a{b}", "a b", "x" * 65, "a\n")),
        *(("connections", number) for number in (0, -1, 65)),
        *(("queue", text) for text in ("10", "-1MiB", "1XB", "10GB", "640KiB")),
        *(("timeout", text) for text in ("1", "1ms", "2m", "1h")),
        ("ca_file", "/nowhere/ca.pem"),
        ("cert_file", "/dev/null"),
        ("password_file", "/nowhere/password"),
        ("password_file", "/dev/null"),
    ],
)
def test_wrong_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="redis-"):
        parse("rediss://host", **{option: value})


def test_options_without_the_url_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs --redis"):
        parse(None, ttl="1d")


def test_without_any_option_there_is_no_tier() -> None:
    assert parse(None) is None


def test_tls_files_need_tls() -> None:
    with pytest.raises(ConfigError, match="rediss"):
        parse("redis://host", ca_file="/dev/null")


def test_the_password_comes_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    variable = {"PREFIXD_REDIS_PASSWORD": "secret"}

    for config in (
        parse("redis://user@h", password_file=str(file)),
        parse("redis://user@h", variable),
        parse("redis://user:secret@h"),
    ):
        assert config is not None
        assert (config.user, config.password) == ("user", "secret")
    with pytest.raises(ConfigError, match="one"):
        parse("redis://h", variable, password_file=str(file))
    with pytest.raises(ConfigError, match="one") as caught:
        parse("redis://:secret@h", variable)
    assert "secret" not in str(caught.value)


def test_the_password_is_not_shown() -> None:
    config = parse("redis://user:secret@host:1/2")
    assert config is not None

    assert config.text == "redis://host:1/2"
    assert "secret" not in repr(config)


@pytest.mark.parametrize("password", ["secret", "se:cr@et", "a/b"])
def test_masking(password: str) -> None:
    url = f"redis://user:{password}@host/1"

    assert password_in(url) == password
    assert masked(url) == "redis://user:***@host/1"
    assert masked("redis://host/1") == "redis://host/1"
    assert password_in("unix:///path/with:colon@x") == ""
