"""What lies in Redis: one value per shard of a block, which says itself what it is. Written down in docs/formats.md.

    0  magic            8 bytes   "prefixdV"
    8  format version   u32       1
   12  shard            u32
   16  payload bytes    u64
   24  checksum         u64       XXH3-64 of the payload
   32  namespace       32 bytes   SHA-256 of the NAMESPACE of the key (`redis_generations.stored_namespace`)
   64  key             32 bytes   a key of 16 bytes is followed by zeros
   96  payload

Numbers are little-endian. The reader knows every field but the checksum before it asks, so it compares instead of
parsing: the length of the reply first (nothing is allocated for a wrong one), the header second, the checksum
when the payload has arrived. Whatever differs, the value is not ours or not whole: a miss.

Not here: Redis, memory. The key that a value is stored under repeats namespace, key and shard; the copy inside is what
makes a value that was moved to another key detectable.
"""

import hashlib
import struct

from cache_server.values import PayloadName

MAGIC = b"prefixdV"
FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s32s")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 96


def value_bytes(name: PayloadName) -> int:
    """How long the value of a payload is."""
    return HEADER_BYTES + name.num_bytes


def pack_header(name: PayloadName, checksum: int) -> bytes:
    """What precedes the payload."""
    namespace = hashlib.sha256(name.namespace).digest()
    return _HEADER.pack(MAGIC, FORMAT_VERSION, name.shard, name.num_bytes, checksum, namespace, name.key)


def read_checksum(name: PayloadName, header: bytes | bytearray) -> int | None:
    """The checksum that the payload must have; None when the header is another's, or of another format."""
    checksum: int = _HEADER.unpack(header)[4]
    return checksum if header == pack_header(name, checksum) else None


def redis_key(prefix: str, name: PayloadName) -> bytes:
    """Under which key it lies. Without braces: they would put a whole namespace into one hash slot of a cluster."""
    return f"{prefix}:{name.namespace.hex()}:{name.key.hex()}:{name.shard}".encode()
