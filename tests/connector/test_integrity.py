"""C37 in memory and on the wire: a payload that is not what was saved is a failed block, is counted, and goes.

A process of the same tenant can write anywhere in the segments it has mapped: that is how bytes are broken here.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash

from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import Client, payload_of
from tests.cache_server.harness import chain as keys_of
from tests.connector.conftest import Engine, chain
from tests.connector.test_worker import ask, load, load_spec, present, save, wait_for
from tests.engine.prefixd import Prefixd

NewEngine = Callable[..., Engine]
ALL = [0, 1, 2, 3]


def break_byte(engine: Engine, names: list, number: int, offset: int = 77) -> None:
    """One bit of one saved payload changes, by way of a mapped segment."""
    answer = ask(engine, names, lease=True)
    slot = int(answer.slots[0, number])
    session = engine.ranks[0].client.session()
    assert session is not None
    segment = session.segment(slot >> 32)
    assert segment is not None
    segment.data[(slot & 0xFFFFFFFF) * 4096 + offset] ^= 1
    engine.asker.release([answer.lease_id])


def failures(prefixd: Prefixd) -> int:
    return int(prefixd.stats().counters["integrity_failures"])


@pytest.mark.parametrize("offset", [0, 77, 16383])
@pytest.mark.parametrize("way", ["verified slots", "streams"])
def test_a_broken_payload_is_a_failed_block_is_counted_and_goes(
    prefixd: Prefixd, new_engine: NewEngine, way: str, offset: int
) -> None:
    """Its neighbours are loaded, its page stays as it was; the server drops it, and what is saved then is hit."""
    names = chain(9000 + offset + 20_000 * (way == "streams"), 4)
    near = new_engine(prefixd.unix_address)
    address = prefixd.unix_address if way == "verified slots" else prefixd.port_address
    reader = new_engine(address, verify_loads=True)
    save(near, ALL, names)
    break_byte(near, names, 2, offset)
    before, untouched = failures(prefixd), [layer.clone() for layer in reader.ranks[0].pages]

    failed = load(reader.ranks[0], load_spec(ask(reader, names, lease=True), names, [10, 11, 12, 13]))

    assert failed == {12}
    wait_for(lambda: failures(prefixd) == before + 1)
    assert reader.ranks[0].worker.take_counts()["corrupt_blocks"] == 1
    if way == "streams":
        assert all(torch.equal(a[12], b[12]) for a, b in zip(untouched, reader.ranks[0].pages, strict=True))
    for saved, loaded in zip(near.ranks[0].pages, reader.ranks[0].pages, strict=True):
        assert torch.equal(saved[[0, 1, 3]], loaded[[10, 11, 13]])
    assert present(ask(near, names), 4) == [True, True, False, True]

    save(near, ALL, names)
    assert load(reader.ranks[0], load_spec(ask(reader, names, lease=True), names, [20, 21, 22, 23])) == set()
    assert all(
        torch.equal(saved[ALL], loaded[[20, 21, 22, 23]])
        for saved, loaded in zip(near.ranks[0].pages, reader.ranks[0].pages, strict=True)
    )
    assert failures(prefixd) == before + 1


def test_without_the_setting_slots_are_not_verified(prefixd: Prefixd, new_engine: NewEngine) -> None:
    """Positive control of what `verify_loads` does, and what it costs to leave it: the byte is loaded as it is."""
    names = chain(9500, 1)
    engine = new_engine(prefixd.unix_address)
    save(engine, [0], names)
    break_byte(engine, names, 0)

    assert load(engine.ranks[0], load_spec(ask(engine, names, lease=True), names, [10])) == set()
    assert not torch.equal(engine.ranks[0].pages[0][0], engine.ranks[0].pages[0][10])


def test_a_checksum_is_made_at_save(prefixd: Prefixd, new_engine: NewEngine) -> None:
    """Of the engine's own page bytes, layer after layer, before anything else can happen to them."""
    names = chain(9600, 3)
    engine = new_engine(prefixd.unix_address, verify_loads=True)
    save(engine, [4, 5, 6], names)
    rank = engine.ranks[0]
    expected = [
        xxhash.xxh3_64_intdigest(b"".join(layer[block].numpy().tobytes() for layer in rank.pages))
        for block in (4, 5, 6)
    ]

    answer = ask(engine, names, lease=True)

    assert answer.checksums is not None
    assert answer.checksums.tolist() == [expected]


def test_each_rank_verifies_its_own_shard(prefixd: Prefixd, new_engine: NewEngine) -> None:
    names = chain(9700, 3)
    options = {"num_ranks": 2, "namespace": b"v" * 32}
    engine = new_engine(prefixd.unix_address, verify_loads=True, **options)
    save(engine, [1, 2, 3], names)
    answer = ask(engine, names, lease=True)
    slot = int(answer.slots[1, 1])  # of rank 1, block 1
    session = engine.ranks[1].client.session()
    assert session is not None
    segment = session.segment(slot >> 32)
    assert segment is not None
    segment.data[(slot & 0xFFFFFFFF) * 4096] ^= 0x80

    assert load(engine.ranks[0], load_spec(answer, names, [11, 12, 13])) == set()
    assert load(engine.ranks[1], load_spec(answer, names, [11, 12, 13])) == {12}


def test_the_server_believes_nobody(prefixd: Prefixd) -> None:
    """`Verify` of payloads that are right, absent, or were never summed drops nothing."""
    keys = keys_of("right", 3)
    target = {"fingerprint": b"w" * 32, "engine_id": "w"}
    with Client(prefixd.port_address, 0, **target) as client:
        client.put(keys[:2])
        reply = client.stub.Verify(pb.VerifyRequest(session_id=client.id, keys=b"".join(keys)))

        assert reply.num_dropped == 0
        assert client.get(keys) == [payload_of(key, 64 << 10) for key in keys[:2]] + [None]


def test_a_chain_goes_on_when_the_hole_is_filled(prefixd: Prefixd, new_engine: NewEngine) -> None:
    """Blocks behind a broken one are not lost: a lookup stops at the hole, and reaches them again when it is filled."""
    names = chain(9800, 4)
    engine = new_engine(prefixd.unix_address, verify_loads=True)
    save(engine, ALL, names)
    break_byte(engine, names, 1)
    load(engine.ranks[0], load_spec(ask(engine, names, lease=True), names, [10, 11, 12, 13]))
    wait_for(lambda: present(ask(engine, names), 4) == [True, False, True, True])

    assert ask(engine, names, lease=True).hit_end == 1
    save(engine, ALL, names)
    assert ask(engine, names, lease=True).hit_end == 4
    assert np.all(ask(engine, names, lease=True).generations > 0)
