"""The proxy does what it says; all fault tests stand on it."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """Sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=copy, args=(connection,), daemon=True).start()

    def copy(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()
    listener.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=3)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data


def test_bytes_pass_unchanged_and_in_order(echo: tuple[str, int]) -> None:
    sent = bytes(range(256)) * 4096
    with Proxy(echo) as proxy, connect(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()

        assert receive(connection, len(sent)) == sent
        assert proxy.num_bytes == [len(sent), len(sent)]


def test_delay_is_latency_and_throttle_is_rate(echo: tuple[str, int]) -> None:
    with Proxy(echo) as proxy, connect(proxy) as connection:
        proxy.delay_s = 0.05
        started = time.monotonic()
        connection.sendall(b"x")
        receive(connection, 1)
        assert 0.1 <= time.monotonic() - started < 0.5

        proxy.delay_s, proxy.bytes_per_s = 0.0, 2e6
        started = time.monotonic()
        threading.Thread(target=connection.sendall, args=(bytes(1_000_000),), daemon=True).start()
        receive(connection, 1_000_000)
        assert 0.4 <= time.monotonic() - started < 1.5


def test_stopped_nothing_moves_and_nothing_ends(echo: tuple[str, int]) -> None:
    with Proxy(echo) as proxy, connect(proxy) as connection:
        proxy.stop()
        connection.sendall(b"x")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)

        proxy.resume()
        connection.settimeout(3)
        assert connection.recv(1) == b"x"


def test_cut_resets(echo: tuple[str, int]) -> None:
    with Proxy(echo) as proxy, connect(proxy) as connection:
        connection.sendall(b"x")
        receive(connection, 1)
        proxy.cut()

        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_half_closed_the_client_sees_the_end_and_can_send(echo: tuple[str, int]) -> None:
    with Proxy(echo) as proxy, connect(proxy) as connection:
        connection.sendall(b"x")
        receive(connection, 1)
        proxy.half_close()

        assert connection.recv(1) == b""
        connection.sendall(b"y")


def test_refused(echo: tuple[str, int]) -> None:
    with Proxy(echo) as proxy:
        proxy.refuse = True
        with connect(proxy) as connection:
            assert connection.recv(1) == b""
