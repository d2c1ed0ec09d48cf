"""PATH.fd: who gets which segments, and what the end of its socket means."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.descriptors import DescriptorServer
from cache_server.segments import Segment
from tests.cache_server.harness import GRANULE, ROOT, Client, ServerProcess, wait_until

OTHER = b"o" * 32

_CHILD = """
import sys, time
from pathlib import Path
from tests.cache_server.harness import Client, wait_until
client = Client(sys.argv[1], 0, descriptors=Path(sys.argv[2]), engine_id="child")
wait_until(client.is_mapped, "mapped")
print(len(client.reserve_all(int(sys.argv[3]))), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "128MiB") as process:
        yield process


@contextlib.contextmanager
def child_with_slots(server: ServerProcess, num_slots: int) -> Iterator[subprocess.Popen[str]]:
    """A client process that has reserved slots and sleeps."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, server.unix, str(server.socket_path), str(num_slots)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == num_slots
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def reserved_by_children(server: ServerProcess) -> int:
    return sum(session.reserved_bytes for session in server.stats().sessions if session.engine_id == "child")


def num_sessions(server: ServerProcess) -> int:
    return len(server.stats().sessions)


def test_a_client_gets_the_segments_of_its_class_only(server: ServerProcess) -> None:
    """Existing ones at once, new ones before a reply names their slots; each once."""

    with (
        Client(server.unix, 0, descriptors=server.socket_path) as first,
        Client(server.unix, 0, descriptors=server.socket_path, fingerprint=OTHER, engine_id="other") as other,
    ):
        wait_until(first.is_mapped, "mapped")
        wait_until(other.is_mapped, "mapped")
        slots = first.reserve_all(1)
        assert set(first.segments) == {slots[0] >> 32}
        others = other.reserve_all(1)
        assert set(other.segments) == {others[0] >> 32}
        assert set(first.segments).isdisjoint(other.segments)
        with Client(server.unix, 0, descriptors=server.socket_path) as late:
            wait_until(late.is_mapped, "mapped")
            late.receive_segments()
            assert set(late.segments) == set(first.segments)


def test_a_wrong_ticket_gets_nothing(server: ServerProcess) -> None:
    """Neither does a second use, nor whoever says nothing."""

    with Client(server.unix, 0, descriptors=server.socket_path) as client:
        wait_until(client.is_mapped, "mapped")
        for ticket in (b"0" * 16, b"short", b"much longer than any ticket", client.attached.descriptor_ticket):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(5)
                stranger.connect(f"{server.socket_path}.fd")
                stranger.send(ticket)
                assert stranger.recv(100) == b""


def test_killing_a_client_process_returns_its_reserved_slots(server: ServerProcess) -> None:
    """C68: kill -9, twenty times; nothing is left of it."""

    before = num_sessions(server)
    with child_with_slots(server, 7) as child:
        assert reserved_by_children(server) == 7 * (64 << 10)
        child.kill()
        wait_until(lambda: reserved_by_children(server) == 0, "the slots came back")
        wait_until(lambda: num_sessions(server) == before, "the session is over")


def test_a_stopped_client_process_keeps_its_reserved_slots(server: ServerProcess) -> None:
    """It may wake up in the middle of a copy."""

    with child_with_slots(server, 5) as child:
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert reserved_by_children(server) == 5 * (64 << 10)
        child.send_signal(signal.SIGCONT)
        child.kill()
        wait_until(lambda: reserved_by_children(server) == 0, "the slots came back")


def test_a_session_lingers_until_its_descriptor_socket_ends(server: ServerProcess) -> None:
    """Its stream is gone, its slots are not."""

    client = Client(server.unix, 0, descriptors=server.socket_path, engine_id="child")
    wait_until(client.is_mapped, "mapped")
    client.reserve_all(3)
    client.detach()
    time.sleep(0.5)
    assert reserved_by_children(server) == 3 * (64 << 10)
    client.close()
    wait_until(lambda: reserved_by_children(server) == 0, "the slots came back")


def test_the_end_of_the_descriptor_socket_ends_the_session_and_says_so(server: ServerProcess) -> None:
    """The Attach stream gets a Closing event; the client attaches again."""

    with Client(server.unix, 0, descriptors=server.socket_path) as client:
        wait_until(client.is_mapped, "mapped")
        assert client.socket is not None
        client.socket.close()
        client.socket = None

        assert "descriptor socket" in next(client.events).closing.reason


def test_twenty_killed_clients_leave_no_descriptors_behind(server: ServerProcess) -> None:
    """C68: neither in the server nor under /dev/shm."""

    def num_descriptors() -> int:
        return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))

    shm = sorted(Path("/dev/shm").iterdir())
    with Client(server.unix, 0, descriptors=server.socket_path) as client:
        wait_until(client.is_mapped, "mapped")
        client.reserve_all(1)
    wait_until(lambda: num_sessions(server) == 0, "all sessions are over")
    before = num_descriptors()
    for _ in range(20):
        client = Client(server.unix, 0, descriptors=server.socket_path)
        wait_until(client.is_mapped, "mapped")
        client.reserve(2)
        client.close()
    wait_until(lambda: num_sessions(server) == 0, "all sessions are over")

    wait_until(lambda: num_descriptors() <= before + 5, "descriptors are closed")
    assert sorted(Path("/dev/shm").iterdir()) == shm


async def test_a_client_that_does_not_read_blocks_nobody(tmp_path: Path) -> None:
    """Packets wait; when it reads it gets every segment once, in order."""

    segments = [Segment(i, GRANULE) for i in range(1, 200)]
    ended: list[int] = []
    path = tmp_path / "p.fd"
    server = DescriptorServer(
        path, lambda ticket: 7 if ticket == b"t" * 16 else 0, lambda _: segments[:150], ended.append
    )
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(str(path))
    client.send(b"t" * 16)
    await asyncio.sleep(0.05)
    for segment in segments[140:]:
        server.announce(7, segment)
    client.setblocking(False)
    seen: list[int] = []
    while len(seen) < len(segments):
        try:
            packet, fds, _, _ = socket.recv_fds(client, 64, 2)
        except BlockingIOError:
            await asyncio.sleep(0.01)
            continue
        seen.append(int.from_bytes(packet[:4], "little"))
        assert os.fstat(fds[0]).st_size == GRANULE
        for fd in fds:
            os.close(fd)
    assert seen == [segment.id for segment in segments]
    assert ended == []
    client.close()
    await asyncio.sleep(0.05)

    assert ended == [7]
    server.close()
    for segment in segments:
        segment.close()
