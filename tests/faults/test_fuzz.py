"""Whatever arrives, on every call, stream and on the descriptor socket: an answer, no crash, no growth, no state
changed by what was refused.

A session of each kind is really there, with reserved slots, leases and a stored chain, and the messages are made of
their ids, slots and keys as often as of nonsense: so most messages get past the first check. 5,000 messages, with
--long 100,000.
"""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import (
    MIB,
    NAMESPACE,
    TIMEOUT_S,
    Client,
    ServerProcess,
    batch,
    chain,
    payload_of,
    put_messages,
    wait_until,
)

SERVICE = "/prefixd.v1.KvCache/"
UNARY = {
    "Lookup": pb.LookupRequest,
    "Release": pb.ReleaseRequest,
    "Renew": pb.RenewRequest,
    "Reserve": pb.ReserveRequest,
    "Commit": pb.CommitRequest,
    "Flush": pb.FlushRequest,
    "Stats": pb.StatsRequest,
}
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
KIB = 1 << 10
PER_EXAMPLE = 25
GROWTH_BYTES = 48 * MIB  # of the process itself, over all messages; a leak of 1 KiB per message would be 100 in --long
FLUSHED = b"f" * 32  # the only namespace that Flush may name: the others are the test's own
U32, U64 = 1 << 32, 1 << 64
ABSURD = (0, 1, 2, 63, 64, 4096, 10**9, 1 << 31, U32 - 1)


class Stage:
    """A server with sessions whose state the messages can name, and what must stay as it is."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.near = Client(server.unix, 0, descriptors=server.socket_path, engine_id="near")
        self.other = Client(server.unix, 0, descriptors=server.socket_path, engine_id="other")
        self.far = Client(server.tcp, 0, engine_id="far", fingerprint=b"y" * 32, payload_bytes=5000)
        self.scheduler = Client(server.unix, engine_id="near")
        self.clients = [self.near, self.other, self.far, self.scheduler]
        for client in (self.near, self.other):
            wait_until(client.is_mapped, "mapped")
        self.kept = chain("kept", 8)
        assert self.near.save(self.kept) == [pb.COMMIT_STATUS_STORED] * 8
        self.foreign_slots = self.other.reserve_all(8)
        self.own_slots = self.near.reserve_all(8)
        self.lease = self.scheduler.lookup(self.kept).lease_id
        with Client(server.unix, 0, engine_id="gone") as gone:
            self.gone = gone.id
        self.session_ids = [client.id for client in self.clients] + [self.gone]
        self.slots = self.own_slots + self.foreign_slots + [0, 1, 1 << 32, (1 << 32) + 5, U64 - 1, 7 << 60]
        self.keys = [*self.kept, *chain("absent", 8), bytes(16), b"\xff" * 16]
        self.codes: Counter[tuple[str, str]] = Counter()
        self.channel = grpc.insecure_channel(server.unix, options=[("grpc.use_local_subchannel_pool", 1)])
        self.num_messages = 0

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.channel.close()

    # --- sending

    def call(self, name: str, message: bytes) -> Any:
        self.num_messages += 1
        method = self.channel.unary_unary(SERVICE + name)
        return self.judge(name, lambda: method(message, timeout=TIMEOUT_S))

    def get(self, message: bytes) -> Any:
        self.num_messages += 1
        method = self.channel.unary_stream(SERVICE + "Get")
        return self.judge("Get", lambda: list(method(message, timeout=TIMEOUT_S)))

    def put(self, messages: Sequence[bytes]) -> Any:
        self.num_messages += max(len(messages), 1)
        method = self.channel.stream_unary(SERVICE + "Put")
        return self.judge("Put", lambda: method(iter(messages), timeout=TIMEOUT_S))

    def attach(self, message: bytes) -> Any:
        self.num_messages += 1

        def attach() -> bytes:
            stream = self.channel.unary_stream(SERVICE + "Attach")(message, timeout=TIMEOUT_S)
            try:
                first: bytes = next(stream)
                return first
            finally:
                stream.cancel()

        return self.judge("Attach", attach)

    def descriptor_socket(self, packets: Sequence[bytes]) -> None:
        self.num_messages += max(len(packets), 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(TIMEOUT_S)
            stranger.connect(f"{self.server.socket_path}.fd")
            for packet in packets:
                stranger.send(packet)
            if any(packets):
                # A wrong ticket is answered by hanging up, with no descriptor.
                data, fds, _, _ = socket.recv_fds(stranger, 64, 2)
                assert (data, fds) == (b"", [])

    def judge(self, name: str, call: Callable[[], Any]) -> Any:
        """A reply, or a status with a message: one of those that the errors' document names."""
        try:
            reply = call()
        except grpc.RpcError as error:
            status: Any = error
            assert status.code() in EXPECTED, f"{name}: {status.code()} {status.details()}"
            assert status.details(), f"{name}: {status.code()} without a word"
            self.codes[name, status.code().name] += 1
            return None
        self.codes[name, "OK"] += 1
        return reply

    # --- what stays

    def check(self) -> None:
        """Still there, still answering, and what was stored is what it was."""
        assert self.near.get(self.kept) == [payload_of(key, 64 * KIB) for key in self.kept]
        stats = self.server.stats()
        sessions = {session.session_id: session for session in stats.sessions}
        assert sessions[self.other.id].reserved_bytes == 8 * 64 * KIB, "slots of a session that said nothing"
        assert stats.reserved_bytes == sum(session.reserved_bytes for session in stats.sessions)
        assert stats.touched_bytes <= stats.memory_bytes
        assert stats.stored_bytes + stats.reserved_bytes <= stats.touched_bytes


# --- messages -------------------------------------------------------------------------------------------------


def numbers(limit: int, *more: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([n for n in (*ABSURD, *more, limit - 1) if n < limit]), st.integers(0, limit - 1))


def packed(items: Sequence[bytes], longest: int = 12) -> st.SearchStrategy[bytes]:
    """A packed field: whole items, or some bytes too many or few, or nonsense."""
    whole = st.lists(st.sampled_from(items), max_size=longest).map(b"".join)
    cut = st.tuples(whole, st.integers(1, 7)).map(lambda both: both[0][: -both[1]])
    return st.one_of(whole, whole, whole, cut, st.binary(max_size=100))


def columns(values: st.SearchStrategy[int], dtype: str) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.lists(values, max_size=12).map(lambda items: np.array(items, dtype).tobytes()), st.binary(max_size=40)
    )


def batches(stage: Stage, count: int, slots: bool) -> st.SearchStrategy[dict[str, bytes]]:
    """Columns of equal length, so that it depends on their contents."""
    fields: dict[str, st.SearchStrategy[bytes]] = {
        "keys": st.lists(st.sampled_from(stage.keys), min_size=count, max_size=count).map(b"".join),
        "parent_keys": st.lists(st.sampled_from(stage.keys), min_size=count, max_size=count).map(b"".join),
        "depths": st.lists(numbers(U32), min_size=count, max_size=count).map(lambda n: np.array(n, "<u4").tobytes()),
    }
    if slots:
        fields["slots"] = st.lists(st.sampled_from(stage.slots), min_size=count, max_size=count).map(
            lambda n: np.array(n, "<u8").tobytes()
        )
    return st.fixed_dictionaries(fields)


def loose(stage: Stage) -> dict[str, st.SearchStrategy[Any]]:
    """Every field of any message, without regard to the others."""
    sessions = st.one_of(st.sampled_from(stage.session_ids), numbers(U64))
    leases = st.lists(st.one_of(st.just(stage.lease + 1), numbers(U64)), max_size=20)
    depths = columns(numbers(U32), "<u4")
    slots = columns(st.one_of(st.sampled_from(stage.slots), numbers(U64)), "<u8")
    return {
        "session_id": sessions,
        "keys": packed(stage.keys),
        "first": numbers(U32),
        "lease": st.booleans(),
        "wait_ms": numbers(U32),
        "recompute_us_per_block": st.floats(),
        "lease_ids": leases,
        "num_slots": numbers(U32),
        "slots": slots,
        "parent_keys": packed(stage.keys),
        "depths": depths,
        "kv_group": numbers(U32),
        "checksums": columns(numbers(U64), "<u8"),
        "lease_id": numbers(U64),
        "fingerprint": st.one_of(st.just(FLUSHED), st.binary(min_size=1, max_size=40)),
    }


def some_of(stage: Stage, kind: Any) -> st.SearchStrategy[bytes]:
    """A message of this kind: fields at will, or equal columns, or its bytes spoiled, or bytes."""
    fields = loose(stage)
    names = [field.name for field in kind.DESCRIPTOR.fields if field.name in fields]
    required = {name: fields[name] for name in names if name in ("session_id", "fingerprint")}
    optional = {name: fields[name] for name in names if name not in required}
    values = st.fixed_dictionaries(required, optional=optional)
    if "parent_keys" in names:
        equal = st.integers(0, 4).flatmap(lambda count: batches(stage, count, "slots" in names))
        workers = st.sampled_from([stage.near.id, stage.far.id, stage.other.id])
        values = st.one_of(values, st.tuples(workers, equal).map(lambda both: {"session_id": both[0], **both[1]}))
    good = values.map(lambda fields: kind(**fields).SerializeToString())
    spoiled = st.tuples(good, st.integers(0, 200), st.binary(min_size=1, max_size=4)).map(
        lambda three: three[0][: three[1]] + three[2] + three[0][three[1] + len(three[2]) :]
    )
    return st.one_of(good, good, good, good, spoiled, st.binary(max_size=200))


def harmless(name: str, message: bytes, stage: Stage) -> bool:
    """Not what a client may do to itself and the test could not tell from damage.

    Which is: flushing the test's own blocks, and using the session whose slots must stay as they are.
    """
    with contextlib.suppress(Exception):  # what cannot be decoded is refused
        request = UNARY[name].FromString(message)
        if name == "Flush":
            return request.fingerprint not in (b"", NAMESPACE, b"y" * 32)
        if name in ("Commit", "Reserve"):
            return request.session_id != stage.other.id
        if name in ("Release", "Renew"):
            return stage.lease not in request.lease_ids
    return True


def attachments() -> st.SearchStrategy[bytes]:
    namespace = st.fixed_dictionaries(
        {},
        optional={
            "fingerprint": st.one_of(st.just(b"z" * 32), st.just(NAMESPACE), st.binary(max_size=40)),
            "key_bytes": st.one_of(st.just(16), numbers(U32)),
            "num_shards": st.one_of(st.just(1), numbers(U32)),
            "text": st.text(max_size=20),
        },
    )
    shard = st.fixed_dictionaries(
        {},
        optional={
            "index": st.one_of(st.just(0), numbers(U32)),
            "payload_bytes": st.one_of(st.just(5000), numbers(U64)),
            "descriptor": st.binary(max_size=20),
        },
    )
    values = st.fixed_dictionaries(
        {"protocol_version": st.one_of(st.just(1), st.just(1), numbers(U32)), "role": st.integers(0, 4)},
        optional={
            "namespace": namespace,
            "shard": shard,
            "engine_id": st.text(max_size=10),
            "pid": numbers(U32),
            "wants_descriptors": st.booleans(),
            "min_protocol_version": numbers(U32),
        },
    )

    def message(fields: dict[str, Any]) -> bytes:
        parts = {"namespace": pb.Namespace, "shard": pb.Shard}
        made = {name: parts[name](**value) if name in parts else value for name, value in fields.items()}
        return pb.AttachRequest(**made).SerializeToString()

    return st.one_of(values.map(message), values.map(message), st.binary(max_size=200))


def puts(stage: Stage) -> st.SearchStrategy[list[bytes]]:
    """Streams: a good one, one whose header or pieces are anything, messages at will."""

    def stream(name: str, num_blocks: int, piece: int) -> list[bytes]:
        keys = chain(name, num_blocks)
        header = pb.PutHeader(session_id=stage.far.id, **batch(keys))
        payloads = [payload_of(key, stage.far.payload_bytes) for key in keys]
        return [each.SerializeToString() for each in put_messages(header, payloads, chunk_bytes=piece)]

    good = st.builds(stream, st.sampled_from(["p", "q", "r"]), st.integers(1, 3), st.sampled_from([997, 5000, MIB]))
    pieces = st.builds(
        lambda index, offset, data: pb.PutChunk(index=index, offset=offset, data=data).SerializeToString(),
        st.one_of(st.just(0), numbers(U32)),
        st.one_of(st.just(0), numbers(U64)),
        st.one_of(st.binary(max_size=50), st.just(bytes(5000)), st.just(bytes(5001))),
    )
    headers = some_of(stage, pb.PutHeader).map(
        lambda header: b"\x0a" + bytes([len(header) & 0x7F | 0x80, len(header) >> 7]) + header
    )
    anything = st.tuples(headers, st.lists(pieces, max_size=4)).map(lambda both: [both[0], *both[1]])
    spoiled = st.tuples(good, st.integers(0, 5), st.binary(max_size=30)).map(
        lambda three: [*three[0][: three[1]], three[2], *three[0][three[1] :]]
    )
    shortened = st.tuples(good, st.integers(0, 3)).map(lambda both: both[0][: both[1]])
    return st.one_of(good, anything, anything, spoiled, shortened)


Step = tuple[str, Any]


def steps(stage: Stage) -> st.SearchStrategy[Step]:
    unary = [
        some_of(stage, kind)
        .filter(lambda message, name=name: harmless(name, message, stage))
        .map(lambda message, name=name: (name, message))
        for name, kind in UNARY.items()
    ]
    return st.one_of(
        *unary,
        some_of(stage, pb.GetRequest).map(lambda message: ("Get", message)),
        puts(stage).map(lambda messages: ("Put", messages)),
        attachments().map(lambda message: ("Attach", message)),
        st.lists(st.binary(max_size=64), max_size=3).map(lambda packets: ("descriptor socket", packets)),
    )


def take(stage: Stage, step: Step) -> None:
    name, content = step
    if name == "Get":
        stage.get(content)
    elif name == "Put":
        stage.put(content)
    elif name == "Attach":
        stage.attach(content)
    elif name == "descriptor socket":
        stage.descriptor_socket(content)
    else:
        stage.call(name, content)


# --- tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "128MiB") as server:
        stage = Stage(server)
        yield stage
        stage.close()


def private_bytes(server: ServerProcess) -> int:
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def num_descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.parametrize(
    "num_messages", [pytest.param(5_000, id="5,000"), pytest.param(100_000, id="100,000", marks=pytest.mark.long)]
)
def test_any_message_is_answered_and_nothing_grows(tmp_path: Path, num_messages: int) -> None:
    """Every call, the streams, the descriptor socket."""

    with ServerProcess(tmp_path, "128MiB") as server:
        stage = Stage(server)
        try:
            bombard(stage, num_messages)
        finally:
            stage.close()


def bombard(stage: Stage, num_messages: int) -> None:
    def run(num_examples: int) -> None:
        @seed(stage.num_messages)
        @settings(
            max_examples=num_examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(steps(stage), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
        def send(sequence: list[Step]) -> None:
            for step in sequence:
                take(stage, step)
            stage.check()

        send()

    run(20)  # what is allocated once, is allocated then
    before, descriptors = private_bytes(stage.server), num_descriptors(stage.server)
    while stage.num_messages < num_messages:
        run(max(20, (num_messages - stage.num_messages) // (2 * PER_EXAMPLE)))
    stage.check()
    wait_until(lambda: len(stage.server.stats().sessions) == len(stage.clients), "nobody else is left")
    began = time.monotonic()
    assert stage.scheduler.lookup(stage.kept).hit_end == 8
    took = time.monotonic() - began
    names = {name for name, _ in stage.codes}
    num_ok = sum(count for (_, code), count in stage.codes.items() if code == "OK")

    assert stage.server.process.poll() is None
    assert "Traceback" not in stage.server.log, stage.server.log[-3000:]
    assert private_bytes(stage.server) - before <= GROWTH_BYTES
    assert num_descriptors(stage.server) <= descriptors + 8
    assert took < 1
    assert names == {*UNARY, "Get", "Put", "Attach"}
    # A control: a good part is let through, and a good part is not.
    assert num_messages / 10 < num_ok < num_messages * 0.9, stage.codes
    print(f"{stage.num_messages} messages: {sorted(stage.codes.items())}")
    print(f"grown by {(private_bytes(stage.server) - before) >> 10} KiB")


@pytest.mark.parametrize(
    ("name", "message", "code", "word"),
    [
        ("Reserve", lambda s: pb.ReserveRequest(session_id=s.near.id, num_slots=10**9), "OK", ""),
        (
            "Lookup",
            lambda s: pb.LookupRequest(session_id=s.scheduler.id, keys=b"", first=10**9),
            "INVALID_ARGUMENT",
            "first is 1000000000, but there are 0 keys",
        ),
        (
            "Lookup",
            lambda s: pb.LookupRequest(
                session_id=s.scheduler.id, keys=bytes(16 * 200_000), wait_ms=U32 - 1, lease=True
            ),
            "OK",
            "",
        ),
        (
            "Release",
            lambda s: pb.ReleaseRequest(session_id=s.scheduler.id, lease_ids=range(1, 100_000)),
            "INVALID_ARGUMENT",
            "99999 leases in one call; at most 65536",
        ),
        (
            "Commit",
            lambda s: pb.CommitRequest(
                session_id=s.near.id,
                slots=np.arange(20_000, dtype="<u8").tobytes(),
                keys=bytes(16 * 20_000),
                parent_keys=bytes(16 * 20_000),
                depths=bytes(4 * 20_000),
            ),
            "INVALID_ARGUMENT",
            "20000 blocks in one commit; at most 16384",
        ),
        ("Commit", lambda s: commit_of(s, s.near.id, s.foreign_slots[:2]), "INVALID_ARGUMENT", "not reserved by this"),
        ("Commit", lambda s: commit_of(s, s.near.id, [0, 1 << 62]), "INVALID_ARGUMENT", "not reserved by this session"),
        ("Commit", lambda s: commit_of(s, s.near.id, [s.own_slots[0]] * 2), "INVALID_ARGUMENT", "named twice"),
        ("Commit", lambda s: commit_of(s, s.gone, s.own_slots[:2]), "FAILED_PRECONDITION", "attach again"),
        ("Commit", lambda s: commit_of(s, s.scheduler.id, s.own_slots[:2]), "INVALID_ARGUMENT", "no shard"),
        ("Commit", lambda s: commit_of(s, s.far.id, s.own_slots[:2]), "INVALID_ARGUMENT", "not reserved by this"),
    ],
)
def test_absurd_requests_have_an_answer_and_change_nothing(
    stage: Stage, name: str, message: Callable[[Stage], Any], code: str, word: str
) -> None:
    """Counts, other sessions' slots, slots that are nobody's, sessions that are over."""

    before = stage.server.stats()
    call: Any = getattr(stage.near.stub, name)
    try:
        call(message(stage), timeout=TIMEOUT_S)
        answer = ("OK", "")
    except grpc.RpcError as error:
        status: Any = error
        answer = (status.code().name, status.details())
    after = stage.server.stats()

    assert answer[0] == code, answer
    assert word in answer[1]
    assert after.stored_bytes == before.stored_bytes
    if code != "OK":
        assert after.reserved_bytes == before.reserved_bytes
        assert after.leased_bytes == before.leased_bytes
    assert after.touched_bytes <= after.memory_bytes
    stage.check()
    # And a control: the same session does what is right.
    keys = chain(f"right {stage.num_messages}", 2)
    stage.num_messages += 1
    assert stage.near.commit(stage.own_slots[:2], keys) == [pb.COMMIT_STATUS_STORED] * 2
    stage.own_slots = [*stage.own_slots[2:], *stage.near.reserve_all(2)]


def commit_of(stage: Stage, session_id: int, slots: Sequence[int]) -> Any:
    return pb.CommitRequest(
        session_id=session_id, slots=np.array(slots, "<u8").tobytes(), **batch(chain("wrong", len(slots)))
    )


def test_a_commit_twice_and_after_the_end_of_the_session(stage: Stage) -> None:
    """The slot has its name, or is somebody else's by now."""

    slots, stage.own_slots = stage.own_slots[:2], stage.own_slots[2:]
    keys = chain("once", 2)
    assert stage.near.commit(slots, keys) == [pb.COMMIT_STATUS_STORED] * 2
    for session in (stage.near, stage.other):
        with pytest.raises(grpc.RpcError, match="is not reserved by this session"):
            session.commit(slots, chain("twice", 2))
    gone = Client(stage.server.unix, 0, descriptors=stage.server.socket_path, engine_id="gone")
    wait_until(gone.is_mapped, "mapped")
    its = gone.reserve_all(2)
    assert gone.socket is not None
    gone.socket.close()
    wait_until(lambda: gone.id not in {session.session_id for session in stage.server.stats().sessions}, "it is over")
    with pytest.raises(grpc.RpcError, match=r"session .* is unknown here: attach again"):
        gone.commit(its, chain("late", 2))
    assert stage.near.get(chain("late", 2)) == [None, None]
    gone.socket = None
    gone.close()


def test_strangers_at_the_descriptor_socket_are_shown_out(stage: Stage) -> None:
    """Those that say nothing, too, and they keep nobody else out."""

    before = num_descriptors(stage.server)
    strangers = []
    for _ in range(80):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(TIMEOUT_S)
        stranger.connect(f"{stage.server.socket_path}.fd")
        strangers.append(stranger)
    wait_until(lambda: num_descriptors(stage.server) <= before + 66, "64 may wait, the others were shown out")
    for stranger in strangers:
        assert stranger.recv(100) == b"", "hung up within the time for a ticket"
        stranger.close()
    wait_until(lambda: num_descriptors(stage.server) <= before, "their descriptors are closed")
    with Client(stage.server.unix, 0, descriptors=stage.server.socket_path, engine_id="late") as late:
        wait_until(late.is_mapped, "mapped")
