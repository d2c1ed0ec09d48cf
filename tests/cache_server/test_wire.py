"""The two messages by hand are those of the generated stubs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server import wire
from protos import kv_cache_pb2 as pb

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(u32, u64, st.binary(max_size=300), st.binary(max_size=40))
def test_put_chunks_of_the_stubs_are_parsed(index: int, offset: int, data: bytes, keys: bytes) -> None:
    """Whatever a generated client sends."""

    header = pb.PutHeader(session_id=7, keys=keys)
    piece = wire.parse_put_chunk(pb.PutChunk(header=header, index=index, offset=offset, data=data).SerializeToString())

    assert (piece.index, piece.offset, bytes(piece.data)) == (index, offset, data)
    assert piece.header is not None
    assert pb.PutHeader.FromString(bytes(piece.header)) == header


@given(u32, u64, u64, st.binary(min_size=1, max_size=300))
def test_get_chunks_are_parsed_by_the_stubs(index: int, offset: int, checksum: int, data: bytes) -> None:
    """Whatever a generated client receives."""

    chunk = pb.GetChunk.FromString(wire.join_get_chunk(index, offset, checksum, memoryview(data)))

    assert chunk == pb.GetChunk(index=index, offset=offset, checksum=checksum, data=data)
    assert pb.GetChunk.FromString(wire.join_get_missing(index)) == pb.GetChunk(index=index, missing=True)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_wire_error(message: bytes) -> None:
    """Nothing else comes out of a stranger's bytes."""

    try:
        piece = wire.parse_put_chunk(message)
    except wire.WireError:
        return
    assert 0 <= piece.index < 2**32


def test_unknown_fields_are_skipped_and_a_cut_message_is_an_error() -> None:
    """So that a later client may say more."""

    message = b"\x25abcd\x21abcdefgh\x28\x05" + pb.PutChunk(index=3, data=b"xyz").SerializeToString() + b"\x32\x01q"

    assert wire.parse_put_chunk(message).index == 3
    assert bytes(wire.parse_put_chunk(message).data) == b"xyz"
    for end in (1, 4, 6, 13, len(message) - 1):
        with pytest.raises(wire.WireError):
            wire.parse_put_chunk(message[:end])
