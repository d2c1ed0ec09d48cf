"""Client and server of neighbouring versions work together, or one line says which of them to upgrade."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import (
    ROOT,
    TIMEOUT_S,
    Client,
    ServerProcess,
    batch,
    chain,
    payload_of,
    put_messages,
    wait_until,
)
from tests.fakes import recorded_log
from tests.faults.engine_like import EngineLike
from tests.versions.translator import FUTURE, Translator, Wire, next_wire, say_more

FIRST = Path(__file__).parent / "first"
TODAY = pb.DESCRIPTOR.serialized_pb
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{FIRST}:{ROOT}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "256MiB") as process:
        yield process


@pytest.fixture(scope="module")
def first_wire() -> Wire:
    code = "import sys; from protos import kv_cache_pb2 as pb; sys.stdout.buffer.write(pb.DESCRIPTOR.serialized_pb)"
    done = subprocess.run([sys.executable, "-c", code], cwd=FIRST, env=ENVIRONMENT, check=True, capture_output=True)
    return Wire(descriptor_pb2.FileDescriptorProto.FromString(done.stdout))


def test_stubs_of_the_previous_release_against_todays_server(server: ServerProcess) -> None:
    """The whole walk: slots, streams, leases, a refusal."""

    done = subprocess.run(
        [sys.executable, "tests/versions/first_client.py", server.unix, str(server.socket_path), server.tcp],
        cwd=ROOT,
        env=ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)

    assert seen.pop("stubs") == str(FIRST / "protos")
    assert seen == {
        "fields of Lookup": 5,
        "version": 1,
        "saved": [1] * 6,
        "put": [1] * 6,
        "got": True,
        "mapped": True,
        "renewed": True,
        "leased": 0,
        "refused": "FAILED_PRECONDITION",
    }
    assert len(pb.LookupRequest.DESCRIPTOR.fields) > 5, "a control: today's wire says more"


def walk(address: str, name: str, *, is_mapped: bool) -> None:
    """Today's client, as engines use it, saves and loads."""
    engine = EngineLike(address, name, namespace=name.encode().ljust(32, b"."))
    try:
        assert engine.wait_attached(TIMEOUT_S)
        session = engine.worker.session()
        assert session is not None
        assert session.mapped is is_mapped
        keys = chain(name, 8)
        wait_until(lambda: engine.save(keys) == keys, "it is saved, with patience for memory that is being touched")
        assert engine.load(keys) == 8
        assert engine.load(chain(f"{name} absent", 8)) == 0
        assert (engine.tally.wrong, engine.tally.missing, engine.tally.unanswered) == (0, 0, 0)
    finally:
        engine.close()


@pytest.mark.parametrize("path", ["mapped", "streams"])
def test_todays_client_against_a_server_of_the_previous_release(
    server: ServerProcess, tmp_path: Path, first_wire: Wire, path: str
) -> None:
    """What is newer in the client's questions is not understood, what is newer in the answers is not said."""

    with Translator(tmp_path, server.unix, server.socket_path, first_wire) as previous:
        walk(previous.unix if path == "mapped" else previous.tcp, f"old {path}", is_mapped=path == "mapped")
        assert previous.num_messages > 10


@pytest.mark.parametrize("path", ["mapped", "streams"])
def test_todays_client_against_a_server_of_the_next_release(server: ServerProcess, tmp_path: Path, path: str) -> None:
    """It still speaks today's version, and says more in each message."""

    with Translator(tmp_path, server.unix, server.socket_path, next_wire(TODAY), edit_reply=say_more) as following:
        walk(following.unix if path == "mapped" else following.tcp, f"new {path}", is_mapped=path == "mapped")
        assert following.num_messages > 10


def test_a_client_of_the_next_release_against_todays_server(server: ServerProcess, tmp_path: Path) -> None:
    """It says more in each message, and that it speaks versions 1 and 2: they agree on 1."""

    def ask_more(message: Any) -> None:
        say_more(message)
        if message.DESCRIPTOR.name == "AttachRequest":
            message.protocol_version, message.min_protocol_version = 2, 1

    with Translator(tmp_path, server.unix, server.socket_path, next_wire(TODAY), edit_request=ask_more) as asking:
        walk(asking.unix, "next asks", is_mapped=True)
        walk(asking.tcp, "next asks by streams", is_mapped=False)
        with Client(asking.tcp, 0, fingerprint=b"n" * 32) as client:
            assert client.attached.protocol_version == 1
            keys = chain("next", 2)
            header = pb.PutHeader(session_id=client.id, **batch(keys))
            messages = put_messages(header, [payload_of(key, 64 << 10) for key in keys], chunk_bytes=1000)
            assert list(client.stub.Put(messages, timeout=TIMEOUT_S).statuses) == [1, 1]
            assert client.get(keys) == [payload_of(key, 64 << 10) for key in keys]


@pytest.mark.parametrize(
    ("lowest", "highest", "line"),
    [
        (2, 3, "this client speaks protocol version 2 to 3, this server 1: upgrade the server"),
        (0, 2, "this client speaks protocol version 2, this server 1: upgrade the server"),
        (0, 0, "this client speaks protocol version 0, this server 1: upgrade the connector"),
    ],
)
def test_versions_without_one_in_common_are_refused_with_a_line(
    server: ServerProcess, lowest: int, highest: int, line: str
) -> None:
    """Which says what to do. Nothing is left of it."""

    before = len(server.stats().sessions)
    with grpc.insecure_channel(server.tcp) as channel:
        attach = channel.unary_stream(
            "/prefixd.v1.KvCache/Attach", request_serializer=pb.AttachRequest.SerializeToString
        )
        request = pb.AttachRequest(protocol_version=highest, min_protocol_version=lowest, role=pb.ROLE_SCHEDULER)
        with pytest.raises(grpc.RpcError) as caught:
            next(attach(request, timeout=TIMEOUT_S))

    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.FAILED_PRECONDITION, line)
    assert len(server.stats().sessions) <= before


def speaks_two(message: Any) -> None:
    if message.DESCRIPTOR.name == "AttachEvent" and message.HasField("attached"):
        message.attached.protocol_version = 2


def asks_for_three(message: Any) -> None:
    if message.DESCRIPTOR.name == "AttachRequest":
        message.protocol_version, message.min_protocol_version = 3, 3


@pytest.mark.parametrize(
    ("edits", "line"),
    [
        ({"edit_reply": speaks_two}, "it speaks protocol version 2, this connector 1 at most"),
        ({"edit_request": asks_for_three}, "this client speaks protocol version 3, this server 1: upgrade the server"),
    ],
)
def test_an_engine_whose_server_is_refused_runs_uncached_and_says_why_once(
    server: ServerProcess, tmp_path: Path, edits: dict[str, Callable[[Any], None]], line: str
) -> None:
    """One line, however often it tries."""

    with (
        Translator(tmp_path, server.unix, server.socket_path, Wire(file_of_today()), **edits) as other,
        recorded_log("vllm.prefixd") as log,
    ):
        engine = EngineLike(other.tcp, "refused")
        try:
            assert not engine.wait_attached(1.5)
            assert engine.save(chain("refused", 2)) == []
            assert engine.load(chain("refused", 2)) == 0
        finally:
            engine.close()
        assert other.num_messages > 3, "it tried again"
    assert len(log) == 2, log  # the scheduler side and the worker
    assert all(line in message for message in log), log


def file_of_today() -> descriptor_pb2.FileDescriptorProto:
    return descriptor_pb2.FileDescriptorProto.FromString(TODAY)


def test_the_next_wire_really_says_more() -> None:
    """A control: what the field of the future says is in the bytes."""

    wire = next_wire(TODAY)
    chunk = wire.message(wire.methods["Get"].output_type)(index=3, data=b"x")
    say_more(chunk)

    assert FUTURE.encode() in chunk.SerializeToString()
    assert pb.GetChunk.FromString(chunk.SerializeToString()).index == 3
