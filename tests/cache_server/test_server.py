"""The server as a process: addresses, health, reflection, memory, start and stop."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import MIB, TIMEOUT_S, Client, ServerProcess, chain, payload_of, wait_until

BASE_BYTES = 160 * MIB  # what the process needs beside the segments: interpreter, grpc, messages in flight


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


def mapped(server: ServerProcess, **more: object) -> Client:
    client = Client(server.unix, 0, descriptors=server.socket_path, **more)  # type: ignore[arg-type]
    wait_until(client.is_mapped, "the descriptor socket is connected")
    return client


def test_health_says_serving_for_the_server_and_for_the_service(server: ServerProcess) -> None:
    """Probes and load balancers ask one or the other."""

    for target in (server.unix, server.tcp):
        with grpc.insecure_channel(target) as channel:
            for name in ("", "prefixd.v1.KvCache"):
                request = health_pb2.HealthCheckRequest(service=name)
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)

                assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(server: ServerProcess) -> None:
    """grpcurl works without the proto file."""

    with grpc.insecure_channel(server.tcp) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request]), timeout=TIMEOUT_S
        )
        names = {service.name for service in next(replies).list_services_response.service}

    assert "prefixd.v1.KvCache" in names


def test_blocks_saved_through_slots_are_read_by_another_client_through_slots(server: ServerProcess) -> None:
    """One memory copy on each side, exact bytes, generations unchanged."""

    keys = chain("slots", 20)
    with mapped(server) as writer, mapped(server, engine_id="other") as reader, Client(server.unix) as scheduler:
        assert writer.save(keys) == [pb.COMMIT_STATUS_STORED] * 20
        reply = scheduler.lookup(keys)
        reader.receive_segments()
        slots = np.frombuffer(reply.slots, "<u8").tolist()
        generations = np.frombuffer(reply.generations, "<u4").tolist()

        assert (reply.hit_start, reply.hit_end, reply.missing_workers) == (0, 20, 0)
        assert [reader.slot(slot) for slot in slots] == [payload_of(key, 64 << 10) for key in keys]
        assert [reader.generation(slot) for slot in slots] == generations


def test_blocks_saved_through_slots_are_read_by_a_stream_and_the_other_way_round(server: ServerProcess) -> None:
    """Two ways to the same payloads."""

    saved, put = chain("saved", 5), chain("put", 5)
    with mapped(server) as near, Client(server.tcp, 0) as far, Client(server.unix) as scheduler:
        near.save(saved)
        assert far.put(put) == [pb.COMMIT_STATUS_STORED] * 5

        assert far.get(saved) == [payload_of(key, 64 << 10) for key in saved]
        near.receive_segments()
        slots = np.frombuffer(scheduler.lookup(put).slots, "<u8").tolist()
        assert [near.slot(slot) for slot in slots] == [payload_of(key, 64 << 10) for key in put]
