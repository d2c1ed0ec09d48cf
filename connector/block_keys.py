"""Keys: what a block is called, for ever and everywhere.

This file owns the encoding that turns token ids into keys, and the two questions about a request on which it
depends: who asks (`identity_of`), and whether its blocks have a name at all (`cannot_be_keyed`).

    key[-1] = H("prefixd root 2"  ‖ fingerprint ‖ epoch ‖ LoRA name ‖ path ‖ content ‖ cache salt ‖ tenant)
    key[i]  = H(key[i-1] ‖ token ids of block i ‖ extra fields of block i)

Invariant: equal keys mean equal inputs. Every field of variable length is preceded by its length, an absent field
differs from an empty one, key[i-1] has a fixed length, and token ids are little-endian u32. So the same tokens
under the same namespace have the same key in every process, Python version, hash seed and machine;
`tests/connector/golden_keys.json` holds us to it. Whoever changes a byte of this encoding raises FORMAT_VERSION
in `namespace.py`.

A multimodal feature enters every block that it overlaps, with its full identifier: placeholder token ids are the same
for all pictures. Blocks before it stay shared.

Not here: the namespace (`namespace.py`), and the engine's own `Request.block_hashes`, which hold no model, dtype or
rank and change with version, Python and PYTHONHASHSEED. Partial blocks have no key.
"""

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

HashName = Literal["xxh3_128", "sha256"]

KEY_BYTES: dict[str, int] = {"xxh3_128": 16, "sha256": 32}

_ROOT_MAGIC = b"prefixd root 2"
_U32 = struct.Struct("<I")
_NO_EXTRA_FIELDS = _U32.pack(0)
_WRONG_ID = "a token id is not an integer in [0, 2**32): {}"
_ABSENT, _PRESENT = b"\x00", b"\x01"


@dataclass(frozen=True, slots=True)
class MultimodalFeature:
    """One picture, clip or sound: it stands at the token positions [offset, offset + length) of its sequence."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What besides token ids decides which blocks a request may share. The features act on their own blocks only."""

    lora_name: str | None
    lora_path: str | None  # None where the content is known: an adapter is the same wherever it lies
    cache_salt: str | None
    tenant: str
    features: tuple[MultimodalFeature, ...]
    lora_content: str | None = None


def hash_function(name: str) -> Callable[[bytes], bytes]:
    """XXH3-128, or SHA-256 where tenants are hostile to each other and could search for collisions."""
    if name == "xxh3_128":
        return xxhash.xxh3_128_digest
    if name == "sha256":
        return _sha256
    raise ValueError(f"hash {name!r}: one of {', '.join(KEY_BYTES)} is allowed")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def root_key(fingerprint: bytes, identity: RequestIdentity, epoch: bytes, hash_name: str) -> bytes:
    """key[-1]. The epoch is empty until this engine's `reset_cache`: an empty one is shared by all engines."""
    return hash_function(hash_name)(
        b"".join(
            (
                _with_length(_ROOT_MAGIC),
                _with_length(fingerprint),
                _with_length(epoch),
                _optional(identity.lora_name),
                _optional(identity.lora_path),
                _optional(identity.lora_content),
                _optional(identity.cache_salt),
                _with_length(_utf8(identity.tenant)),
            )
        )
    )


@functools.cache  # shared by all requests: what is used in every step stays in the processor's cache
def _one_block(block_size: int) -> struct.Struct:
    """How many token ids, the token ids, no extra fields."""
    return struct.Struct(f"<{1 + block_size + 1}I")


class BlockKeys:
    """The keys of one sequence. It grows as tokens become known and never forgets: a sequence only appends.

    `_chain` is the root and the keys, one after the other: each entry is the parent of the next. `_tail` is its last
    key with its parent: those of the block that a decoding request has just filled.
    """

    __slots__ = ("_chain", "_extra_fields", "_hash", "_key_bytes", "_num_blocks", "_one_block", "_tail", "block_size")

    def __init__(
        self, root: bytes, block_size: int, hash_name: str, features: Iterable[MultimodalFeature] = ()
    ) -> None:
        key_bytes = KEY_BYTES.get(hash_name, 0)
        assert block_size > 0, f"block_size {block_size} > 0"
        self._hash = hash_function(hash_name)
        assert len(root) == key_bytes, f"root of {len(root)} bytes == {key_bytes} bytes of {hash_name}"
        self._key_bytes = key_bytes
        self._chain = bytearray(root)
        self._tail = (root, b"")
        self._num_blocks = 0
        self._one_block = _one_block(block_size)
        self._extra_fields = _extra_fields(features, block_size)
        self.block_size = block_size

    def __len__(self) -> int:
        """The number of full blocks known."""
        return self._num_blocks

    def extend(self, token_ids: Sequence[int]) -> int:
        """Hash the blocks that `token_ids`, the whole sequence known so far, fills anew. Returns their total number.

        Earlier blocks are not read again: a caller whose sequence was rewritten starts a new object.
        """
        size = self.block_size
        first, stop = self._num_blocks, len(token_ids) // size
        if stop <= first:
            return first
        key = parent = self._tail[0]
        if stop == first + 1 and not self._extra_fields:  # decoding fills one at a time
            try:
                block = self._one_block.pack(size, *token_ids[first * size : stop * size], 0)
            except struct.error as error:
                raise ValueError(_WRONG_ID.format(error)) from None
            key = self._hash(key + block)
            self._chain += key
            self._tail = (key, parent)
            self._num_blocks = stop
            return stop
        data = _little_endian_u32(token_ids[first * size : stop * size])
        block_bytes = size * _U32.size
        num_token_ids = _U32.pack(size)
        hash_bytes, extra_fields, no_extra_fields = self._hash, self._extra_fields, _NO_EXTRA_FIELDS
        # 131,072 token ids are 8,192 turns of this loop on vLLM's scheduler thread: no call but the hash's.
        if extra_fields:
            for number in range(first, stop):
                start = (number - first) * block_bytes
                extra = extra_fields.get(number, no_extra_fields)
                key, parent = hash_bytes(key + num_token_ids + data[start : start + block_bytes] + extra), key
                self._chain += key
        else:
            keys = [parent]
            for start in range(0, len(data), block_bytes):
                key = hash_bytes(key + num_token_ids + data[start : start + block_bytes] + no_extra_fields)
                keys.append(key)
            self._chain += b"".join(keys[1:])
            parent = keys[-2]
        self._tail = (key, parent)
        self._num_blocks = stop
        return stop

    def key(self, number: int) -> bytes:
        """The key of block `number`."""
        return self.packed(number, number + 1)

    def key_and_parent(self, number: int) -> tuple[bytes, bytes]:
        """The key of block `number` and the one that it extends (the root for block 0), as saves need both."""
        if number + 1 == self._num_blocks > 0:
            return self._tail
        assert 0 <= number < self._num_blocks, f"0 <= {number} < {self._num_blocks} known blocks"
        width = self._key_bytes
        pair = bytes(self._chain[number * width : (number + 2) * width])
        return pair[width:], pair[:width]

    def packed(self, start: int, stop: int) -> bytes:
        """The keys of the blocks [start, stop), one after the other: the form the wire takes them in."""
        assert 0 <= start <= stop <= self._num_blocks, f"0 <= start {start} <= stop {stop} <= {len(self)} known blocks"
        return bytes(self._chain[(start + 1) * self._key_bytes : (stop + 1) * self._key_bytes])


def identity_of(
    request: Any, tenant: str = "", lora_content: Callable[[Any], str | None] = lambda _lora: None
) -> RequestIdentity:
    """The identity of a vLLM request. Attributes that its version lacks are taken as absent.

    `lora_content` names the content of a `LoRARequest`'s adapter, None where it cannot be read (`lora_identity.py`).
    """
    lora = getattr(request, "lora_request", None)
    content = None if lora is None else lora_content(lora)
    return RequestIdentity(
        lora_name=None if lora is None else lora.lora_name,
        lora_path=None if lora is None or content is not None else getattr(lora, "lora_path", None),
        lora_content=content,
        cache_salt=getattr(request, "cache_salt", None),
        tenant=tenant,
        features=tuple(
            MultimodalFeature(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in getattr(request, "mm_features", None) or ()
        ),
    )


def cannot_be_keyed(request: Any, *, features_name_content: bool = True) -> str | None:
    """Why the blocks of this vLLM request have no key (it is neither looked up nor saved), or None if they have one.

    `features_name_content` comes from `namespace.features_name_content`: without it a picture's identifier is a
    counter of the process that saw it.
    """
    if getattr(request, "pooling_params", None) is not None:
        return "a pooling request"
    if getattr(request, "prompt_token_ids", None) is None:
        return "a prompt without token ids"
    # With embeddings among the token ids (`prompt_is_token_ids`) vLLM reports their positions as token id 0.
    if getattr(request, "prompt_embeds", None) is not None or getattr(request, "prompt_is_token_ids", None) is not None:
        return "prompt embeddings"
    # A streaming session cuts its token ids back and rewrites its prompt: key i would not stay key i.
    if getattr(request, "resumable", False) or getattr(request, "streaming_queue", None) is not None:
        return "a streaming session"
    features = getattr(request, "mm_features", None) or ()
    if getattr(getattr(request, "lora_request", None), "load_inplace", False):
        return "a LoRA adapter that is loaded in place: its weights change under one name"
    if features and not features_name_content:
        return "multimodal features without a content hash (the engine runs without prefix and processor caches)"
    if any(not feature.identifier for feature in features):
        return "a multimodal feature without an identifier"
    return None


def _extra_fields(features: Iterable[MultimodalFeature], block_size: int) -> dict[int, bytes]:
    """Block number → its length-prefixed extra fields, for the blocks that a feature overlaps."""
    overlapping: dict[int, list[bytes]] = {}
    for feature in sorted(features, key=lambda f: (f.offset, f.length, f.identifier)):
        if feature.offset < 0 or feature.length < 0:
            raise ValueError(f"multimodal feature at {feature.offset} of length {feature.length}: both must be >= 0")
        if feature.length == 0:
            continue
        encoded = _with_length(_utf8(feature.identifier)) + _U32.pack(feature.offset) + _U32.pack(feature.length)
        for number in range(feature.offset // block_size, (feature.offset + feature.length - 1) // block_size + 1):
            overlapping.setdefault(number, []).append(encoded)
    return {number: _with_length(b"".join(encoded)) for number, encoded in overlapping.items()}


def _little_endian_u32(token_ids: Sequence[int]) -> bytes:
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(_WRONG_ID.format(error)) from None
    assert words.itemsize == _U32.size, f"array('I') item of {words.itemsize} bytes == {_U32.size}"
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _with_length(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _optional(text: str | None) -> bytes:
    return _ABSENT if text is None else _PRESENT + _with_length(_utf8(text))


def _utf8(text: str) -> bytes:
    # A salt comes from JSON and may hold half a surrogate pair; this mode encodes it and stays one-to-one.
    return text.encode("utf-8", "surrogatepass")
