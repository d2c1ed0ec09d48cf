"""The keys of blocks: the same everywhere and for ever, and different wherever the KV may differ."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.block_keys import (
    KEY_BYTES,
    BlockKeys,
    MultimodalFeature,
    RequestIdentity,
    cannot_be_keyed,
    hash_function,
    identity_of,
    root_key,
)

GOLDEN = Path(__file__).with_name("golden_keys.json")
BLOCK_SIZE = 16
FINGERPRINT = bytes(range(32))
NOBODY = RequestIdentity(lora_name=None, lora_path=None, cache_salt=None, tenant="", features=())
HASHES = sorted(KEY_BYTES)


def identity(**fields: Any) -> RequestIdentity:
    return RequestIdentity(**{name: fields.get(name, getattr(NOBODY, name)) for name in RequestIdentity.__slots__})


def root(request: RequestIdentity = NOBODY, hash_name: str = "xxh3_128", epoch: bytes = b"") -> bytes:
    return root_key(FINGERPRINT, request, epoch, hash_name)


def keys_of(
    token_ids: list[int],
    request: RequestIdentity = NOBODY,
    *,
    block_size: int = BLOCK_SIZE,
    hash_name: str = "xxh3_128",
    epoch: bytes = b"",
) -> list[bytes]:
    keys = BlockKeys(root(request, hash_name, epoch), block_size, hash_name, request.features)
    keys.extend(token_ids)
    return [keys.key(number) for number in range(len(keys))]


def golden_cases() -> dict[str, dict[str, Any]]:
    """Fixed inputs: name → keywords of `keys_of`. Adding a case adds a line to the file and changes none."""
    tokens = [(number * 2654435761) % 151_936 for number in range(70)]
    return {
        "plain": {"token_ids": tokens},
        "block size 32": {"token_ids": tokens, "block_size": 32},
        "largest token id": {"token_ids": [2**32 - 1] * 16},
        "tenant and salt": {"token_ids": tokens, "request": identity(tenant="t1", cache_salt="größe \ud800")},
        "lora": {"token_ids": tokens, "request": identity(lora_name="sql", lora_path="/adapters/sql")},
        "lora of known content": {"token_ids": tokens, "request": identity(lora_name="sql", lora_content="ab" * 32)},
        "epoch": {"token_ids": tokens, "epoch": b"\x01" * 16},
        "pictures": {
            "token_ids": tokens,
            "request": identity(features=(MultimodalFeature("a" * 64, 20, 8), MultimodalFeature("b" * 64, 30, 10))),
        },
    }


def golden_keys() -> dict[str, dict[str, list[str]]]:
    return {
        hash_name: {
            name: [key.hex() for key in keys_of(hash_name=hash_name, **case)] for name, case in golden_cases().items()
        }
        for hash_name in HASHES
    }


# --- the same everywhere


def test_keys_equal_the_golden_file() -> None:
    """A key made by any release names the same block in the next; a wanted change raises FORMAT_VERSION."""
    assert golden_keys() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_encoding_spelled_out() -> None:
    """What `docs/formats.md` says, written a second time: lengths as u32, token ids as u32, all little-endian."""

    def field(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    asker = identity(lora_name="sql", lora_content="c0ffee", tenant="t", features=(MultimodalFeature("pic", 3, 2),))
    first = field(b"prefixd root 2") + field(FINGERPRINT) + field(b"")
    first += b"\x01" + field(b"sql") + b"\x00" + b"\x01" + field(b"c0ffee") + b"\x00" + field(b"t")
    key = hashlib.sha256(first).digest()
    extra = field(b"pic") + (3).to_bytes(4, "little") + (2).to_bytes(4, "little")
    tokens = b"".join(token_id.to_bytes(4, "little") for token_id in (5, 6, 7, 8))
    block_0 = hashlib.sha256(key + (4).to_bytes(4, "little") + tokens + field(extra)).digest()
    block_1 = hashlib.sha256(block_0 + (4).to_bytes(4, "little") + tokens + field(extra)).digest()
    block_2 = hashlib.sha256(block_1 + (4).to_bytes(4, "little") + tokens + field(b"")).digest()

    assert keys_of([5, 6, 7, 8] * 3, asker, block_size=4, hash_name="sha256") == [block_0, block_1, block_2]


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_keys_do_not_depend_on_the_process(hash_seed: str) -> None:
    """Another process with another PYTHONHASHSEED computes the same keys."""
    program = "import json; from tests.connector import test_block_keys as t; print(json.dumps(t.golden_keys()))"
    root_folder = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root_folder}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root_folder, check=True, capture_output=True, text=True
    ).stdout

    assert json.loads(printed) == golden_keys()


@settings(max_examples=60, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    features=st.lists(
        st.builds(MultimodalFeature, st.text(max_size=4), st.integers(0, 80), st.integers(0, 20)), max_size=3
    ),
)
def test_keys_do_not_depend_on_how_the_tokens_became_known(
    token_ids: list[int], cuts: list[int], block_size: int, features: list[MultimodalFeature]
) -> None:
    """A sequence that grows by any steps ends with the keys of the sequence given at once."""
    at_once = BlockKeys(root(), block_size, "xxh3_128", features)
    at_once.extend(token_ids)
    grown = BlockKeys(root(), block_size, "xxh3_128", reversed(features))
    for cut in [*sorted(cuts), len(token_ids)]:
        grown.extend(token_ids[:cut])

    assert grown.packed(0, len(grown)) == at_once.packed(0, len(at_once))


def test_a_shorter_sequence_changes_nothing() -> None:
    """`extend` with what is known already keeps the keys: rejected drafts may make a sequence look shorter."""
    keys = BlockKeys(root(), BLOCK_SIZE, "xxh3_128")
    known = keys.extend(list(range(50)))

    assert keys.extend(list(range(20))) == known == 3


def test_tokens_given_as_any_sequence_of_ints() -> None:
    """vLLM's ConstantList slices to a list; tuples and numpy integers count as token ids too."""
    np = pytest.importorskip("numpy")

    assert keys_of(tuple(range(32))) == keys_of(list(range(32))) == keys_of(list(np.arange(32)))  # type: ignore[arg-type]


# --- which blocks have a key


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2)])
def test_only_full_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    """floor(n / block_size) keys for n token ids."""
    keys = BlockKeys(root(), BLOCK_SIZE, "xxh3_128")

    assert keys.extend(list(range(num_tokens))) == len(keys) == num_keys


@pytest.mark.parametrize("hash_name", HASHES)
def test_packed_keys_and_parents_agree_with_single_keys(hash_name: str) -> None:
    """`packed` is the concatenation; the parent of a block is the key before it, and the root's for block 0."""
    keys = BlockKeys(root(hash_name=hash_name), BLOCK_SIZE, hash_name)
    keys.extend(list(range(64)))

    assert keys.packed(1, 4) == keys.key(1) + keys.key(2) + keys.key(3)
    assert [keys.key_and_parent(n)[1] for n in range(4)] == [
        root(hash_name=hash_name),
        keys.key(0),
        keys.key(1),
        keys.key(2),
    ]
    assert {len(keys.key(n)) for n in range(4)} == {KEY_BYTES[hash_name]}


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.0, "7", None])
def test_what_is_no_token_id_is_refused(token_id: object) -> None:
    """A token id is an integer in [0, 2**32); nothing is wrapped around into another one's key."""
    with pytest.raises(ValueError, match=r"a token id is not an integer in \[0, 2\*\*32\)"):
        keys_of([*range(15), token_id])  # type: ignore[list-item]


def test_an_unknown_hash_is_refused() -> None:
    """The error names what is allowed."""
    with pytest.raises(ValueError, match="xxh3_128, sha256 is allowed"):
        hash_function("md5")


# --- different wherever the KV may differ


def distinct(identities: list[RequestIdentity], token_ids: list[int] | None = None) -> bool:
    first_keys = [keys_of(token_ids or list(range(16)), request)[0] for request in identities]
    return len(set(first_keys)) == len(identities)


def test_no_two_identities_encode_alike() -> None:
    """A salt is not a LoRA name is not a tenant, absent is not empty, and text does not move between fields (C16)."""
    assert distinct(
        [
            NOBODY,
            identity(cache_salt="x"),
            identity(lora_name="x"),
            identity(lora_path="x"),
            identity(lora_content="x"),
            identity(lora_name="x", lora_content="y"),
            identity(lora_path="x", lora_content=""),
            identity(tenant="x"),
            identity(cache_salt=""),
            identity(lora_name=""),
            identity(lora_name="", lora_path=""),
            identity(lora_name="x", lora_path="y"),
            identity(lora_name="xy", lora_path=""),
            identity(lora_name="", lora_path="xy"),
            identity(lora_name="x", cache_salt="y"),
            identity(lora_name="x", tenant="y"),
            identity(cache_salt="x", tenant="y"),
            identity(cache_salt="y", tenant="x"),
            identity(cache_salt="\x00"),
            identity(cache_salt="\x01\x01\x00\x00\x00x"),
        ]
    )


def test_epochs_and_namespaces_separate() -> None:
    """`reset_cache` moves one engine to keys of its own (C19); an empty epoch is the shared one."""
    roots = [root_key(f, NOBODY, e, "xxh3_128") for f in (b"\0" * 32, b"\1" * 32) for e in (b"", b"\0", b"\0\0")]

    assert len(set(roots)) == 6


def test_text_does_not_move_between_fingerprint_and_epoch() -> None:
    """Every field is preceded by its length."""
    assert root_key(b"ab", NOBODY, b"c", "sha256") != root_key(b"a", NOBODY, b"bc", "sha256")


def test_a_key_holds_its_whole_prefix() -> None:
    """Equal blocks after different ones have different keys, and the size of blocks matters."""
    same_tail = list(range(100, 116))
    one, other = keys_of([*range(16), *same_tail]), keys_of([*range(1, 17), *same_tail])

    assert one[1] != other[1]
    assert keys_of([0] * 32)[0] != keys_of([0] * 32)[1]
    assert not set(keys_of([0] * 64, block_size=16)) & set(keys_of([0] * 64, block_size=32))


def picture(identifier: str, offset: int = 36, length: int = 10) -> RequestIdentity:
    return identity(features=(MultimodalFeature(identifier, offset, length),))


@pytest.mark.parametrize(
    "other",
    [
        picture("b" + "0" * 62 + "1"),
        picture("a" + "1" + "0" * 62),
        picture("ffff" + "0" * 60),
        picture("a" + "0" * 63, offset=35),
        picture("a" + "0" * 63, offset=37),
        picture("a" + "0" * 63, length=9),
        NOBODY,
    ],
    ids=["last digit", "second digit", "same last 4 digits", "one before", "one after", "shorter", "no picture"],
)
def test_another_picture_changes_the_keys_from_its_first_block_on(other: RequestIdentity) -> None:
    """Placeholder ids are the same for all pictures: the full identifier and its place enter the key (C18)."""
    token_ids = [7] * 80
    one, two = keys_of(token_ids, picture("a" + "0" * 63)), keys_of(token_ids, other)

    assert one[:2] == two[:2]
    assert all(a != b for a, b in zip(one[2:], two[2:], strict=True))


def test_blocks_before_a_picture_are_those_of_the_text_alone() -> None:
    """A text prefix is shared whatever follows it."""
    assert keys_of([7] * 80, picture("a"))[:2] == keys_of([7] * 80)[:2]


def test_features_do_not_run_into_each_other() -> None:
    """Two features in a block are not one with a longer identifier, and their order of arrival does not matter."""
    a, b, ab = (MultimodalFeature(name, 0, 16) for name in ("a", "b", "ab"))
    both, swapped, one = (identity(features=f) for f in ((a, b), (b, a), (ab,)))

    assert keys_of([0] * 16, both) == keys_of([0] * 16, swapped)
    assert distinct([both, one, identity(features=(a,)), NOBODY], [0] * 16)


def test_a_feature_ends_where_it_ends() -> None:
    """[offset, offset + length) is half open: a picture that fills block 1 enters blocks 1, not 0 and 2."""
    keys = BlockKeys(root(), BLOCK_SIZE, "xxh3_128", [MultimodalFeature("a", 16, 16)])

    assert set(keys._extra_fields) == {1}


def test_extra_fields_are_not_token_ids() -> None:
    """A block with a feature never equals a longer run of token ids: both fields carry their length."""
    feature = MultimodalFeature("aaaa", 0, 4)
    plain = keys_of([1, 2, 3, 4] + [0] * 4, block_size=8)
    with_feature = keys_of([1, 2, 3, 4], identity(features=(feature,)), block_size=4)

    assert plain[0] != with_feature[0]


# --- vLLM's requests


def request(**fields: Any) -> SimpleNamespace:
    """The attributes of `vllm.v1.request.Request` (0.32) that matter here."""
    plain = {
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "pooling_params": None,
        "resumable": False,
        "streaming_queue": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**plain, **fields})


def feature(identifier: str = "f" * 64, offset: int = 2, length: int = 5) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_identity_of_a_request() -> None:
    """LoRA name and path, salt, tenant and features are read off the request."""
    lora = SimpleNamespace(lora_name="sql", lora_path="/adapters/sql", lora_int_id=3)

    assert identity_of(request(lora_request=lora, cache_salt="s", mm_features=[feature()]), "t") == RequestIdentity(
        lora_name="sql",
        lora_path="/adapters/sql",
        cache_salt="s",
        tenant="t",
        features=(MultimodalFeature("f" * 64, 2, 5),),
    )


def test_identity_of_a_request_without_anything() -> None:
    """Attributes that an older vLLM lacks count as absent."""
    assert identity_of(SimpleNamespace(prompt_token_ids=[1])) == identity_of(request()) == NOBODY


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"prompt_embeds": object(), "prompt_token_ids": None}, "without token ids"),
        ({"prompt_is_token_ids": [True, False, True]}, "prompt embeddings"),
        ({"prompt_token_ids": None}, "without token ids"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming"),
        ({"streaming_queue": object()}, "streaming"),
        ({"mm_features": [feature(""), feature()]}, "without an identifier"),
    ],
)
def test_what_cannot_be_keyed_is_bypassed(fields: dict[str, Any], reason: str) -> None:
    """Requests whose token ids do not determine their KV are neither looked up nor saved (C64)."""
    assert reason in str(cannot_be_keyed(request(**fields)))


@pytest.mark.parametrize("plain", [request(), request(mm_features=[feature()]), SimpleNamespace(prompt_token_ids=[])])
def test_plain_requests_can_be_keyed(plain: SimpleNamespace) -> None:
    """Positive control, also with the attributes of an older vLLM."""
    assert cannot_be_keyed(plain) is None


def test_pictures_that_are_only_counted_are_bypassed() -> None:
    """Where identifiers are counters of a process, the first picture of every process has the same one."""
    assert "content hash" in str(cannot_be_keyed(request(mm_features=[feature()]), features_name_content=False))
    assert cannot_be_keyed(request(), features_name_content=False) is None


@pytest.mark.parametrize("bad", [MultimodalFeature("a", -1, 4), MultimodalFeature("a", 0, -4)])
def test_a_feature_outside_of_its_sequence_is_refused(bad: MultimodalFeature) -> None:
    """Negative positions are nobody's."""
    with pytest.raises(ValueError, match="both must be >= 0"):
        BlockKeys(root(), BLOCK_SIZE, "xxh3_128", [bad])
