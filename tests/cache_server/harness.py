"""What the tests of the cache server share: a server process, a client over the generated stubs, keys, and a cache
with small segments for tests that need no process.

`ServerProcess` is `python -m cache_server serve` in a process of its own. `Client` is one session, with its segments
mapped if it wants them; it knows nothing of the connector, so that the wire is tested from outside.
"""

import contextlib
import hashlib
import itertools
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import xxhash

from cache_server.arena import Arena
from cache_server.cache import Cache
from cache_server.sessions import Session
from cache_server.values import Attachment, Blocks, Shard
from protos import kv_cache_pb2 as pb
from protos import kv_cache_pb2_grpc as pb_grpc

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
GRANULE = 4096
NAMESPACE = hashlib.sha256(b"a namespace").digest()
TIMEOUT_S = 20.0
CHUNK = MIB
_OPTIONS = [("grpc.max_receive_message_length", 16 * MIB), ("grpc.use_local_subchannel_pool", 1)]


def chain(name: str, length: int, key_bytes: int = 16) -> list[bytes]:
    """The keys of a sequence: chained, so two chains have no key in common."""
    keys = []
    key = name.encode()
    for _ in range(length):
        key = hashlib.sha256(key).digest()[:key_bytes]
        keys.append(key)
    return keys


def payload_of(key: bytes, num_bytes: int) -> bytes:
    """The only right bytes for a key."""
    pattern = xxhash.xxh3_128_digest(key)
    return (pattern * (num_bytes // 16 + 1))[:num_bytes]


def parents_of(keys: Sequence[bytes]) -> list[bytes]:
    """The parent of each key of a chain that starts at depth 0."""
    return [bytes(len(keys[0])), *keys[:-1]] if keys else []


def batch(keys: Sequence[bytes], start: int = 0) -> dict[str, bytes]:
    """The packed fields of a commit or put of keys[start:] of a chain."""
    return {
        "keys": b"".join(keys[start:]),
        "parent_keys": b"".join(parents_of(keys)[start:]),
        "depths": np.arange(start, len(keys), dtype="<u4").tobytes(),
    }


def blocks(keys: Sequence[bytes], start: int = 0) -> Blocks:
    """The same as domain values."""
    count = len(keys) - start
    return Blocks(list(keys[start:]), parents_of(keys)[start:], list(range(start, len(keys))), [0] * count)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    """For what happens in another process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


# --- without a process ----------------------------------------------------------------------------------------


class Bench:
    """A cache over small segments, its memory touched, with one worker per shard and a scheduler side attached."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        num_segments: int = 4,
        segment_bytes: int = 16 * GRANULE,
        payload_bytes: int = GRANULE,
        num_shards: int = 1,
        tell_every_s: float | None = None,
        arena: Arena | None = None,
        prepare: Callable[[Cache], None] = lambda cache: None,
    ) -> None:
        """`arena`: instead of the default; `prepare` sees the cache before anybody attaches."""
        ids = itertools.count(1)
        self.arena = arena or Arena(num_segments * segment_bytes, segment_bytes)
        self.cache = Cache(self.arena, now, lambda: next(ids), lambda: next(ids).to_bytes(16, "little"), tell_every_s)
        prepare(self.cache)
        self.payload_bytes = payload_bytes
        self.num_shards = num_shards
        self.workers = [self.attach_worker(shard) for shard in range(num_shards)]
        self.worker = self.workers[0]
        self.scheduler = self.attach()
        self.grow()

    def attach(
        self,
        shard: Shard | None = None,
        *,
        engine_id: str = "engine",
        fingerprint: bytes = NAMESPACE,
        num_shards: int | None = None,
    ) -> Session:
        return self.cache.attach(
            Attachment(
                engine_id,
                "client",
                1,
                fingerprint,
                "text",
                16,
                num_shards or self.num_shards,
                shard,
                shard is not None,
            )
        )

    def attach_worker(self, shard: int = 0, *, payload_bytes: int = 0, is_mapped: bool = True, **more: Any) -> Session:
        session = self.attach(Shard(shard, payload_bytes or self.payload_bytes, b"layout"), **more)
        if is_mapped:
            assert self.cache.sessions.redeem(self.cache.sessions.issue_ticket(session)) is session
        return session

    def grow(self) -> None:
        """Touch the whole budget."""
        while self.arena.num_segments < self.arena.max_segments:
            segment = self.arena.begin_segment()
            segment.touch()
            self.arena.finish_segment(segment)

    def reserve(self, num_slots: int, worker: Session | None = None) -> list[int]:
        slots, _ = self.cache.reserve((worker or self.worker).id, num_slots)
        return [int(slot) for slot in slots]

    def save(self, keys: Sequence[bytes], start: int = 0, worker: Session | None = None) -> bytes:
        """Reserve and commit keys[start:] of a chain."""
        worker = worker or self.worker
        slots = self.reserve(len(keys) - start, worker)
        assert len(slots) == len(keys) - start, f"{len(slots)} slots for {len(keys) - start} blocks"
        return self.cache.commit(worker.id, slots, blocks(keys, start))

    def lookup(self, keys: Sequence[bytes], first: int = 0, lease: bool = True) -> Any:
        return self.cache.lookup(self.scheduler.id, b"".join(keys), first, lease)

    def num_hit(self, keys: Sequence[bytes]) -> int:
        """Leading blocks present; nothing is promised."""
        return int(self.lookup(keys, lease=False).hit_end)

    def is_present(self, key: bytes) -> bool:
        """Without touching its age."""
        return bool(self.worker.namespace.index.row(key))


# --- a server process -----------------------------------------------------------------------------------------


class ServerProcess:
    """`python -m cache_server serve` on a Unix socket and a free port; ends with the `with` block."""

    def __init__(
        self,
        folder: Path,
        memory: str = "256MiB",
        *options: str,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.options = options
        self.environment = {**os.environ, **(environment or {})}
        self.socket_path = folder / "prefixd.sock"
        self.unix = f"unix://{self.socket_path}"
        self.tcp = ""
        self._memory = memory
        self._prefix = prefix  # of the command: what puts it into a control group or a network namespace
        self._log = folder / "server.log"

    def __enter__(self) -> Self:
        self._log.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self._prefix,
                    *(sys.executable, "-m", "cache_server", "serve", "--memory", self._memory),
                    *("--listen", self.unix, "--listen", "127.0.0.1:0", *self.options),
                ],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(lambda: "ready on" in self.log or self.process.poll() is not None, "the server is ready", 30)
            assert self.process.poll() is None, self.log
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.tcp = re.findall(r"ready on .*(127\.0\.0\.1:\d+)", self.log)[-1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)

    def memory_bytes(self) -> int:
        """Resident: shared segments and its own."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))

    def stats(self, **credentials: Any) -> Any:
        with _open(self.unix, credentials) as channel:
            return pb_grpc.KvCacheStub(channel).Stats(pb.StatsRequest(), timeout=TIMEOUT_S)


class MappedSegment:
    """What a client has of a segment."""

    def __init__(self, num_bytes: int, fds: Sequence[int]) -> None:
        self.fd, self.generations_fd = fds
        self.data = mmap.mmap(self.fd, num_bytes)
        self.generations = mmap.mmap(self.generations_fd, num_bytes // GRANULE * 4, prot=mmap.PROT_READ)

    def close(self) -> None:
        self.data.close()
        self.generations.close()
        os.close(self.fd)
        os.close(self.generations_fd)


def _open(target: str, credentials: dict[str, Any]) -> Any:
    """Imported late: an earlier wire's stubs come without it (`tests/versions`)."""
    if not credentials:
        return grpc.insecure_channel(target, options=_OPTIONS)
    from protos.channel import open_channel

    return open_channel(target, _OPTIONS, **credentials)


class Client:
    """One session of a server: a worker if it has a shard, else a scheduler side."""

    def __init__(
        self,
        target: str,
        shard: int | None = None,
        *,
        payload_bytes: int = 64 << 10,
        descriptor: bytes = b"layout",
        num_shards: int = 1,
        key_bytes: int = 16,
        fingerprint: bytes = NAMESPACE,
        engine_id: str = "engine",
        descriptors: Path | None = None,
        text: str = "a namespace",
        credentials: dict[str, Any] | None = None,
    ) -> None:
        """`credentials`: the keywords of `protos.channel.open_channel`."""
        self.payload_bytes = payload_bytes
        self.key_bytes = key_bytes
        self.stream_timeout_s = TIMEOUT_S
        self.channel = _open(target, credentials or {})
        self.stub = pb_grpc.KvCacheStub(self.channel)
        request = pb.AttachRequest(
            protocol_version=1,
            role=pb.ROLE_SCHEDULER if shard is None else pb.ROLE_WORKER,
            engine_id=engine_id,
            client_name="test",
            pid=os.getpid(),
            namespace=pb.Namespace(fingerprint=fingerprint, text=text, key_bytes=key_bytes, num_shards=num_shards),
            wants_descriptors=descriptors is not None,
        )
        if shard is not None:
            request.shard.CopyFrom(pb.Shard(index=shard, payload_bytes=payload_bytes, descriptor=descriptor))
        self.events = self.stub.Attach(request)
        try:
            self.attached = next(self.events).attached
        except grpc.RpcError:
            self.channel.close()
            raise
        self.id = self.attached.session_id
        self.segments: dict[int, MappedSegment] = {}
        self.socket: socket.socket | None = None
        if descriptors is not None:
            self.connect_descriptors(descriptors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.detach()
        if self.socket is not None:
            self.socket.close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()

    def detach(self) -> None:
        """End the Attach stream and everything else of grpc."""
        self.events.cancel()
        self.channel.close()

    def connect_descriptors(self, socket_path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(f"{socket_path}.fd")
        self.socket.send(self.attached.descriptor_ticket)

    def receive_segments(self) -> list[int]:
        """Map what has arrived; the ids of the new ones."""
        assert self.socket is not None
        self.socket.setblocking(False)
        new = []
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, fds, _, _ = socket.recv_fds(self.socket, 64, 2)
                if not packet:
                    break
                segment_id, zero, num_bytes = struct.unpack("<IIQ", packet)
                assert zero == 0
                assert segment_id not in self.segments, f"segment {segment_id} came twice"
                self.segments[segment_id] = MappedSegment(num_bytes, fds)
                new.append(segment_id)
        return new

    def flush(self, fingerprint: bytes = b"", tenant: str = "") -> Any:
        return self.stub.Flush(pb.FlushRequest(fingerprint=fingerprint, tenant=tenant), timeout=TIMEOUT_S)

    def is_mapped(self) -> bool:
        stats = self.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
        return any(session.session_id == self.id and session.mapped for session in stats.sessions)

    # --- names

    def lookup(
        self,
        keys: Sequence[bytes],
        first: int = 0,
        lease: bool = True,
        wait_ms: int = 0,
        recompute_us_per_block: float = 0.0,
    ) -> Any:
        request = pb.LookupRequest(
            session_id=self.id,
            keys=b"".join(keys),
            first=first,
            lease=lease,
            wait_ms=wait_ms,
            recompute_us_per_block=recompute_us_per_block,
        )
        return self.stub.Lookup(request, timeout=TIMEOUT_S)

    def reserve(self, num_slots: int) -> tuple[list[int], bool]:
        reply = self.stub.Reserve(pb.ReserveRequest(session_id=self.id, num_slots=num_slots), timeout=TIMEOUT_S)
        if self.socket is not None:
            self.receive_segments()
        return np.frombuffer(reply.slots, "<u8").tolist(), reply.retry

    def reserve_all(self, num_slots: int) -> list[int]:
        """With patience for memory that is being touched."""
        slots: list[int] = []
        wait_until(lambda: slots.extend(self.reserve(num_slots - len(slots))[0]) or len(slots) == num_slots, "slots")
        return slots

    def commit(self, slots: Sequence[int], keys: Sequence[bytes], start: int = 0, checksums: bytes = b"") -> list[int]:
        fields = {**batch(keys, start), "checksums": checksums}
        request = pb.CommitRequest(session_id=self.id, slots=np.array(slots, "<u8").tobytes(), **fields)
        return list(self.stub.Commit(request, timeout=TIMEOUT_S).statuses)

    # --- bytes

    def slot(self, slot: int) -> memoryview:
        start = (slot & 0xFFFFFFFF) * GRANULE
        return memoryview(self.segments[slot >> 32].data)[start : start + self.payload_bytes]

    def generation(self, slot: int) -> int:
        start = (slot & 0xFFFFFFFF) * 4
        return int.from_bytes(self.segments[slot >> 32].generations[start : start + 4], "little")

    def save(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """Through slots."""
        slots = self.reserve_all(len(keys) - start)
        for slot, key in zip(slots, keys[start:], strict=True):
            self.slot(slot)[:] = payload_of(key, self.payload_bytes)
        return self.commit(slots, keys, start)

    def put(self, keys: Sequence[bytes], start: int = 0, **header: Any) -> list[int]:
        """Through a stream."""
        fields: dict[str, Any] = {"session_id": self.id, **batch(keys, start), **header}
        messages = put_messages(pb.PutHeader(**fields), [payload_of(k, self.payload_bytes) for k in keys[start:]])
        return list(self.stub.Put(messages, timeout=self.stream_timeout_s).statuses)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The payloads; None where missing. Offsets and checksums are checked."""
        payloads: list[bytearray | None] = [bytearray() for _ in keys]
        checksums: dict[int, int] = {}
        request = pb.GetRequest(session_id=self.id, keys=b"".join(keys))
        for chunk in self.stub.Get(request, timeout=self.stream_timeout_s):
            payload = payloads[chunk.index]
            if chunk.missing:
                payloads[chunk.index] = None
                continue
            assert payload is not None
            assert chunk.offset == len(payload)
            assert len(chunk.data) <= self.attached.limits.chunk_bytes
            if not payload:
                checksums[chunk.index] = chunk.checksum
            payload += chunk.data
        for index, payload in enumerate(payloads):
            if payload is not None:
                assert len(payload) == self.payload_bytes
                assert xxhash.xxh3_64_intdigest(payload) == checksums[index]
        return [None if payload is None else bytes(payload) for payload in payloads]


def put_messages(header: Any, payloads: Sequence[bytes], chunk_bytes: int = CHUNK) -> Iterator[Any]:
    """A Put as the wire wants it."""
    yield pb.PutChunk(header=header)
    for index, payload in enumerate(payloads):
        for offset in range(0, len(payload), chunk_bytes):
            yield pb.PutChunk(index=index, offset=offset, data=payload[offset : offset + chunk_bytes])
