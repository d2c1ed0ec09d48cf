"""The proxy before Unix sockets, and half-open links; what it does on TCP is in tests/redis/test_proxy.py."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy import Proxy, _together


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """Sends back what it gets, on a Unix socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "echo.sock"))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=copy, args=(connection,), daemon=True).start()

    def copy(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()
    listener.close()


def connect(proxy: Proxy) -> socket.socket:
    family = socket.AF_UNIX if isinstance(proxy.address, str) else socket.AF_INET
    connection = socket.socket(family)
    connection.settimeout(3)
    connection.connect(proxy.address)
    return connection


@pytest.mark.parametrize("listens_on", ["a path", "a port"])
def test_a_unix_socket_is_fronted(echo: str, tmp_path: Path, listens_on: str) -> None:
    listen = str(tmp_path / "proxy.sock") if listens_on == "a path" else ("127.0.0.1", 0)
    with Proxy(echo, listen) as proxy, connect(proxy) as connection:
        connection.sendall(b"there and back")
        assert connection.recv(100) == b"there and back"

        proxy.stop()
        connection.sendall(b"later")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        proxy.resume()
        connection.settimeout(3)
        assert connection.recv(100) == b"later"

        proxy.half_close()
        assert connection.recv(100) == b""


def test_cut_ends_a_unix_connection(echo: str, tmp_path: Path) -> None:
    with Proxy(echo, str(tmp_path / "proxy.sock")) as proxy, connect(proxy) as connection:
        connection.sendall(b"x")
        connection.recv(1)
        proxy.cut()

        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_dropped_bytes_are_lost_and_nothing_ends(echo: str) -> None:
    with Proxy(echo) as proxy, connect(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.drop = True
        connection.sendall(b"lost")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.drop = False
        connection.settimeout(3)
        connection.sendall(b"b")
        assert connection.recv(100) == b"b"


async def test_a_broken_connection_is_an_error_that_the_proxy_takes() -> None:
    """However deep, on every Python: a group would be logged by whoever collects the task, in another test."""

    async def breaks() -> None:
        raise ConnectionResetError

    async def goes_on() -> None:
        await asyncio.sleep(60)

    with pytest.raises(ConnectionError):
        await _together(_together(breaks(), goes_on()), goes_on())
