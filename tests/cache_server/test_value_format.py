"""What lies in Redis, byte by byte, as docs/formats.md says."""

import hashlib
import struct

import pytest
import xxhash

from cache_server.value_format import HEADER_BYTES, pack_header, read_checksum, redis_key, value_bytes
from cache_server.values import PayloadName

NAMESPACE = bytes(range(32))
KEY = b"k" * 16
NAME = PayloadName(NAMESPACE, KEY, 3, 4096)
CHECKSUM = xxhash.xxh3_64_intdigest(b"p" * 4096)


def test_the_header_is_what_the_document_says() -> None:
    header = pack_header(NAME, CHECKSUM)

    assert len(header) == HEADER_BYTES == 96
    assert header[0:8] == b"prefixdV"
    assert struct.unpack_from("<IIQQ", header, 8) == (1, 3, 4096, CHECKSUM)
    assert header[32:64] == hashlib.sha256(NAMESPACE).digest()
    assert header[64:96] == KEY + bytes(16)


def test_the_key_has_no_braces() -> None:
    """They would put a whole namespace into one hash slot of a cluster."""
    assert redis_key("prefixd", NAME) == f"prefixd:{NAMESPACE.hex()}:{KEY.hex()}:3".encode()


def test_length_includes_the_header() -> None:
    assert value_bytes(NAME) == 96 + 4096


def test_what_was_packed_is_read() -> None:
    assert read_checksum(NAME, pack_header(NAME, CHECKSUM)) == CHECKSUM
    assert read_checksum(NAME._replace(key=b"K" * 32), pack_header(NAME._replace(key=b"K" * 32), 0)) == 0


@pytest.mark.parametrize("position", [*range(24), *range(32, 96)])
def test_every_byte_but_the_checksum_is_compared(position: int) -> None:
    header = bytearray(pack_header(NAME, CHECKSUM))
    header[position] ^= 1

    assert read_checksum(NAME, header) is None
