"""Two teams on one server: nobody sees, takes or pushes out what is the other's."""

import contextlib
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from cache_server.exposition import NAMESPACE_DIGITS, Exposition
from cache_server.status import status_of
from cache_server.tenants import fingerprint_of
from protos import kv_cache_pb2 as pb
from protos import kv_cache_pb2_grpc as pb_grpc
from protos.channel import open_channel
from tests.cache_server.harness import MIB, NAMESPACE, TIMEOUT_S, Client, ServerProcess, batch, chain, payload_of
from tests.security.harness import PAYLOAD, Tenants, engine, named, refused

STORED, REFUSED = pb.COMMIT_STATUS_STORED, pb.COMMIT_STATUS_REFUSED
DENIED = grpc.StatusCode.PERMISSION_DENIED
KEYS = chain("the same prompt", 6, 32)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    tenants = Tenants(tmp_path_factory.mktemp("tokens"))
    tenants.add("team-a", quota="128MiB")
    tenants.add("team-b", quota="128MiB")
    tenants.add("team-a", name="a-reader", write=["scratch-*"])
    tenants.add("team-a", name="a-writer", read=["scratch-*"])
    tenants.add("team-a", name="a-llama", read=["llama*"], write=["llama*"])
    tenants.add_operator()
    tenants.write()
    return tenants


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tenants: Tenants) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, "256MiB", "--tokens-file", str(tenants.path)) as process:
        yield process


@pytest.fixture(autouse=True)
def _empty(server: ServerProcess, tenants: Tenants) -> Iterator[None]:
    yield
    with _operator(server, tenants) as stub:
        stub.Flush(pb.FlushRequest(), timeout=TIMEOUT_S)


@contextlib.contextmanager
def _operator(server: ServerProcess, tenants: Tenants) -> Iterator[Any]:
    with open_channel(server.unix, token=tenants.tokens["operator"]) as channel:
        yield pb_grpc.KvCacheStub(channel)


def save_all(worker: Client, keys: list[bytes]) -> None:
    """A session may hoard a quarter of its tenant's quota: 32 slots."""
    for start in range(0, len(keys), 32):
        worker.save(keys[: start + 32], start)


# --- nothing is served across


def test_equal_keys_in_an_equal_namespace_are_two_blocks(server: ServerProcess, tenants: Tenants) -> None:
    """What A saved, B does not hit, by slots or by stream; what B then saves is its own, under the same keys."""
    a, b = tenants.tokens["team-a"], tenants.tokens["team-b"]
    with engine(server, a) as (a_worker, a_scheduler), engine(server, b) as (b_worker, b_scheduler):
        assert set(a_worker.save(KEYS)) == {STORED}
        assert a_scheduler.lookup(KEYS).hit_end == 6  # positive control

        assert b_scheduler.lookup(KEYS).hit_end == 0
        assert b_scheduler.lookup(KEYS, lease=False).present == b"\0"
        assert b_worker.get(KEYS) == [None] * 6
        slots = b_worker.reserve_all(6)
        for slot in slots:
            b_worker.slot(slot)[:] = b"b" * PAYLOAD
        assert b_worker.commit(slots, KEYS) == [STORED] * 6

        assert b_worker.get(KEYS) == [b"b" * PAYLOAD] * 6
        assert a_worker.get(KEYS) == [payload_of(key, PAYLOAD) for key in KEYS]


def test_what_each_tenant_stores_is_seen_apart(server: ServerProcess, tenants: Tenants) -> None:
    """In the metrics and the status, where an equal namespace alone would name two series alike."""
    a, b = tenants.tokens["team-a"], tenants.tokens["team-b"]
    with engine(server, a) as (a_worker, _), engine(server, b) as (b_worker, _):
        a_worker.save(KEYS)
        b_worker.save(KEYS[:2])
        with _operator(server, tenants) as stub:
            stats = stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)

    text = Exposition(lambda: stats).text("")[0].decode()
    blocks = re.findall(r'prefixd_namespace_blocks\{namespace="(\w+)",tenant="([\w-]*)"\} (\S+)', text)
    stored = {(one["namespace"], one["tenant"]): one["blocks"] for one in status_of(stats)["namespaces"]}

    mine = NAMESPACE.hex()[:NAMESPACE_DIGITS]
    assert {(tenant, count) for name, tenant, count in blocks if name == mine} == {("team-a", "6.0"), ("team-b", "2.0")}
    assert (stored[mine, "team-a"], stored[mine, "team-b"]) == (6, 2)


def test_no_segment_is_mapped_by_two_tenants(server: ServerProcess, tenants: Tenants) -> None:
    """The descriptors that each gets are of different files; an own colleague gets the same ones."""
    a, b = tenants.tokens["team-a"], tenants.tokens["team-b"]
    with (
        engine(server, a) as (first, _),
        engine(server, a, engine_id="colleague") as (second, _),
        engine(server, b) as (other, _),
    ):
        for number, client in enumerate((first, second, other)):
            save_all(client, chain(f"of {number}", 40, 32))
            client.receive_segments()
        first.receive_segments()
        files = [{os.fstat(segment.fd).st_ino for segment in c.segments.values()} for c in (first, second, other)]

        assert files[0] == files[1] != set()
        assert not files[0] & files[2]


def test_the_memory_of_a_tenant_that_left_is_not_anothers(server: ServerProcess, tenants: Tenants) -> None:
    """A keeps its descriptors, whatever it promised; B fills its whole quota; A finds none of B's bytes."""
    a, b = tenants.tokens["team-a"], tenants.tokens["team-b"]
    with engine(server, a) as (worker, _):
        save_all(worker, chain("a", 100, 32))
        kept = [(os.dup(segment.fd), len(segment.data)) for segment in worker.segments.values()]
    assert len(kept) == 2
    with _operator(server, tenants) as stub:
        stub.Flush(pb.FlushRequest(tenant="team-a"), timeout=TIMEOUT_S)
    with engine(server, b) as (other, _):
        save_all(other, chain("b", 128, 32))
        files = {os.fstat(segment.fd).st_ino for segment in other.segments.values()}
        found = payload_of(chain("b", 128, 32)[5], PAYLOAD)[:4096]
        for fd, size in kept:
            assert os.fstat(fd).st_ino not in files
            with mmap.mmap(fd, size) as memory:
                assert memory.find(found) < 0
            os.close(fd)
        ((fd, size),) = [(segment.fd, len(segment.data)) for segment in list(other.segments.values())[:1]]
        with mmap.mmap(fd, size) as memory:
            assert memory.find(found) >= 0  # positive control


def calls_of(stub: Any, session_id: int, lease_id: int, slots: list[int]) -> list[Callable[[], Any]]:
    """Every call that names a session."""
    packed = np.array(slots, "<u8").tobytes()
    own: dict[str, Any] = {"session_id": session_id}
    return [
        lambda: stub.Lookup(pb.LookupRequest(**own, keys=b"".join(KEYS))),
        lambda: stub.Release(pb.ReleaseRequest(**own, lease_ids=[lease_id])),
        lambda: stub.Renew(pb.RenewRequest(**own, lease_ids=[lease_id])),
        lambda: stub.Reserve(pb.ReserveRequest(**own, num_slots=1)),
        lambda: stub.Commit(pb.CommitRequest(**own, slots=packed, **batch(KEYS[:1]))),
        lambda: stub.Verify(pb.VerifyRequest(**own, keys=KEYS[0])),
        lambda: next(stub.Get(pb.GetRequest(**own, keys=KEYS[0]))),
        lambda: stub.Put(iter([pb.PutChunk(header=pb.PutHeader(**own, **batch(KEYS[:1])))])),
    ]


def test_anothers_session_is_one_that_does_not_exist(server: ServerProcess, tenants: Tenants) -> None:
    """Whoever knows A's session number can do nothing with it: every call that names it is refused, in the same words
    as for a number that nobody has."""
    with (
        engine(server, tenants.tokens["team-a"]) as (worker, scheduler),
        engine(server, tenants.tokens["team-b"]) as (thief, _other),
    ):
        worker.save(KEYS)
        lease = scheduler.lookup(KEYS).lease_id
        slots = worker.reserve_all(1)
        for session_id in (worker.id, scheduler.id, 0x1234):
            for call in calls_of(thief.stub, session_id, lease, slots):
                with refused(grpc.StatusCode.FAILED_PRECONDITION, f"session {session_id:#018x} is unknown here"):
                    call()
        assert scheduler.stub.Renew(pb.RenewRequest(session_id=scheduler.id, lease_ids=[lease])).renewed == [lease]


def test_anothers_slots_cannot_be_named(server: ServerProcess, tenants: Tenants) -> None:
    """B commits a slot of A under a key of its own: it is not reserved by B."""
    with (
        engine(server, tenants.tokens["team-a"]) as (worker, _),
        engine(server, tenants.tokens["team-b"]) as (thief, _),
    ):
        slots = worker.reserve_all(1)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "not reserved by this session"):
            thief.commit(slots, KEYS[:1])


# --- what a token may do


def test_namespaces_that_a_token_may_not_use(server: ServerProcess, tenants: Tenants) -> None:
    """Another name, no name, a stolen text: refused at Attach. Its own: let in."""
    token = tenants.tokens["a-llama"]
    llama, secret = named("llama-3"), named("secret")
    with engine(server, token, **llama) as (worker, scheduler):
        worker.save(KEYS)
        assert scheduler.lookup(KEYS).hit_end == 6
    for wrong in (secret, {"key_bytes": 32}, {**secret, "text": llama["text"]}, {**llama, "text": ""}):
        with refused(DENIED, "tenant team-a may neither read nor write namespace"):
            Client(server.unix, credentials={"token": token}, **wrong)


def test_another_kind_of_layers_needs_the_right_to_read_it(server: ServerProcess, tenants: Tenants) -> None:
    """A lookup over several kinds of blocks names other namespaces: of the same tenant, and only what may be read."""
    llama, other = named("llama"), named("mistral")
    mine = pb.KvGroup(fingerprint=_of_group(llama, 1)["fingerprint"], num_replicas=1)
    foreign = pb.KvGroup(fingerprint=other["fingerprint"], num_replicas=1)
    with (
        engine(server, tenants.tokens["team-a"], **other),
        engine(server, tenants.tokens["a-llama"], **_of_group(llama, 1)) as (of_group, _),
        engine(server, tenants.tokens["a-llama"], **llama) as (worker, scheduler),
    ):
        worker.save(KEYS)
        of_group.save(KEYS)
        request = pb.LookupRequest(session_id=scheduler.id, keys=b"".join(KEYS), lease=True, groups=[mine])
        reply = scheduler.stub.Lookup(request, timeout=TIMEOUT_S)
        assert reply.hit_end == 6  # positive control
        request.groups[0].CopyFrom(foreign)
        with refused(DENIED, "may not read"):
            scheduler.stub.Lookup(request, timeout=TIMEOUT_S)


def _of_group(namespace: dict[str, Any], number: int) -> dict[str, Any]:
    """The namespace of one more kind of its layers."""
    fields = {**json.loads(namespace["text"]), "kv_group": number}
    return {**namespace, "fingerprint": fingerprint_of(fields), "text": json.dumps(fields)}


def test_reading_only_and_writing_only(server: ServerProcess, tenants: Tenants) -> None:
    """A reader's saves and a writer's loads are refused; each is told at Attach, so that a connector does not try."""
    llama = named("llama-3")
    with (
        engine(server, tenants.tokens["team-a"], **llama) as (owner, _),
        engine(server, tenants.tokens["a-reader"], engine_id="r", **llama) as (reader, reading),
        engine(server, tenants.tokens["a-writer"], engine_id="w", **llama) as (writer, writing),
    ):
        owner.save(KEYS)
        assert reading.lookup(KEYS).hit_end == 6
        assert None not in reader.get(KEYS)
        for call in (lambda: reader.reserve(1), lambda: reader.commit([], []), lambda: reader.put(chain("r", 1, 32))):
            with refused(DENIED, "tenant team-a may not write"):
                call()
        assert (reader.attached.read_denied, reader.attached.write_denied) == (False, True)

        assert set(writer.save(chain("w", 2, 32))) == {STORED}
        assert writing.lookup(KEYS, lease=False).present == b"\x3f"  # what need not be saved
        for call in (lambda: writing.lookup(KEYS), lambda: writer.get(KEYS)):
            with refused(DENIED, "tenant team-a may not read"):
                call()
        assert (writer.attached.read_denied, writer.attached.write_denied) == (True, False)


def test_keys_of_16_bytes_are_refused(server: ServerProcess, tenants: Tenants) -> None:
    with refused(DENIED, "sha256"):
        Client(server.unix, key_bytes=16, credentials={"token": tenants.tokens["team-a"]})


def test_an_operator_sees_all_and_attaches_nowhere(server: ServerProcess, tenants: Tenants) -> None:
    """And a tenant sees its own."""
    with engine(server, tenants.tokens["team-a"]) as (a, _), engine(server, tenants.tokens["team-b"]) as (b, _):
        a.save(KEYS)
        b.save(KEYS)
        for name, expected in (("operator", {"team-a", "team-b"}), ("team-a", {"team-a"}), ("team-b", {"team-b"})):
            stats = server.stats(token=tenants.tokens[name])
            assert {namespace.tenant for namespace in stats.namespaces} == expected
            assert {session.tenant for session in stats.sessions} == expected
        with refused(DENIED, "operator"):
            Client(server.unix, key_bytes=32, credentials={"token": tenants.tokens["operator"]})


# --- flush


def test_a_flush_is_of_ones_own(server: ServerProcess, tenants: Tenants) -> None:
    """B flushes the fingerprint that both use: A's blocks stay. What it may not write it may not flush either."""
    with engine(server, tenants.tokens["team-a"]) as (a, in_a), engine(server, tenants.tokens["team-b"]) as (b, in_b):
        a.save(KEYS)
        b.save(KEYS)
        fingerprint = server.stats(token=tenants.tokens["team-a"]).namespaces[0].fingerprint
        begun = a.reserve_all(1)

        with refused(DENIED, "another's"):
            b.flush(tenant="team-a")
        assert b.flush(fingerprint).num_blocks == 6
        assert (in_a.lookup(KEYS).hit_end, in_b.lookup(KEYS).hit_end) == (6, 0)
        credentials = {"token": tenants.tokens["a-reader"]}
        with Client(server.unix, credentials=credentials, key_bytes=32) as reader, refused(DENIED, "may not write"):
            reader.flush(fingerprint)
        with _operator(server, tenants) as stub:
            assert stub.Flush(pb.FlushRequest(fingerprint=fingerprint), timeout=TIMEOUT_S).num_blocks == 6
            with refused(grpc.StatusCode.INVALID_ARGUMENT, "no tenant"):
                stub.Flush(pb.FlushRequest(tenant="team-x"), timeout=TIMEOUT_S)
        assert in_a.lookup(KEYS).hit_end == 0
        assert a.commit(begun, KEYS[:1]) == [REFUSED]


# --- quotas


@pytest.mark.parametrize("way", ["slots", "stream"])
def test_a_tenant_that_writes_20_times_its_quota_pushes_out_its_own(
    server: ServerProcess, tenants: Tenants, way: str
) -> None:
    """B's hits do not move, block for block, and A's youngest blocks are there."""
    num_chains = 20 * 128 // 32
    b_chains = [chain(f"b{number}", 24, 32) for number in range(5)]
    with engine(server, tenants.tokens["team-b"]) as (b, in_b):
        for keys in b_chains:
            b.save(keys)
        before = [in_b.lookup(keys, lease=False).hit_end for keys in b_chains]
        with engine(server, tenants.tokens["team-a"], mapped=way == "slots") as (a, in_a):
            evicted = 0
            for number in range(num_chains):
                keys = chain(f"a{number}", 32, 32)
                if way == "slots":
                    slots = a.reserve_all(32)
                    a.commit(slots, keys)
                else:
                    a.put(keys)
            stats = server.stats(token=tenants.tokens["operator"])
            stored = {namespace.tenant: namespace.stored_bytes for namespace in stats.namespaces}
            evicted = stats.counters["evicted_blocks_capacity"]
            after = [in_b.lookup(keys, lease=False).hit_end for keys in b_chains]
            youngest = in_a.lookup(chain(f"a{num_chains - 1}", 32, 32), lease=False).hit_end

        assert before == after == [24] * 5
        assert youngest == 32
        assert stored == {"team-a": 128 * MIB, "team-b": 120 * MIB}
        assert evicted >= 20 * 128 - 128
        assert stats.touched_bytes <= 256 * MIB
        assert None not in b.get(b_chains[0])


def test_leases_of_one_tenant_do_not_use_up_anothers(server: ServerProcess, tenants: Tenants) -> None:
    """Each may lease half of its own quota."""
    with engine(server, tenants.tokens["team-a"]) as (a, in_a), engine(server, tenants.tokens["team-b"]) as (b, in_b):
        for worker in (a, b):
            save_all(worker, chain("c", 96, 32))
        hits = [in_a.lookup(chain("c", 96, 32)), in_b.lookup(chain("c", 96, 32))]

        assert [(hit.hit_end, hit.retry) for hit in hits] == [(64, True), (64, True)]


def test_many_namespaces_do_not_make_a_tenant_larger(server: ServerProcess, tenants: Tenants) -> None:
    """A opens five namespaces; together they stay below its quota, and B gets all of its own."""
    with contextlib.ExitStack() as stack:
        for number in range(5):
            worker, _ = stack.enter_context(
                engine(server, tenants.tokens["team-a"], engine_id=f"e{number}", **named(f"n{number}"))
            )
            slots, _ = worker.reserve(32)
            worker.commit(slots, chain(f"n{number}", len(slots), 32))
        b, in_b = stack.enter_context(engine(server, tenants.tokens["team-b"]))
        save_all(b, chain("b", 128, 32))
        stats = server.stats(token=tenants.tokens["operator"])
        of_a = sum(namespace.stored_bytes for namespace in stats.namespaces if namespace.tenant == "team-a")

        assert 0 < of_a <= 128 * MIB
        assert in_b.lookup(chain("b", 128, 32), lease=False).hit_end == 128
