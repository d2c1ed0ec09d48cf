"""From an engine's configuration and a request to the keys of its blocks: one field differs, and no key is shared;
or something differs that must not matter, and every key is.

The two halves have tests of their own (`test_namespace.py`, `test_block_keys.py`). Here they are put together as the
plugin does.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.block_keys import KEY_BYTES, BlockKeys, identity_of, root_key
from connector.lora_identity import Adapters
from tests.connector.test_namespace import NEUTRAL_FIELDS, SEPARATING_FIELDS, fingerprint, make_model, vllm_config

ROOT = Path(__file__).parents[2]
TOKENS = [(number * 2654435761) % 50_000 for number in range(100)]
PICTURE = "0123456789abcdef" * 4


def request_of(**fields: Any) -> SimpleNamespace:
    """A vLLM request with one picture over the tokens [20, 30)."""
    plain: dict[str, Any] = {"lora_request": None, "cache_salt": None, "mm_features": [picture()]}
    return SimpleNamespace(**{**plain, **fields})


def picture(identifier: str = PICTURE, offset: int = 20, length: int = 10) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def lora(name: str = "sql", path: str = "/nowhere/sql", number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number, load_inplace=False)


def keys_of(
    namespace: bytes,
    request: SimpleNamespace,
    *,
    tenant: str = "",
    epoch: bytes = b"",
    tokens: list[int] = TOKENS,
    hash_name: str = "sha256",
    cuts: tuple[int, ...] = (),
) -> list[bytes]:
    identity = identity_of(request, tenant, Adapters().content_of)
    keys = BlockKeys(root_key(namespace, identity, epoch, hash_name), 16, hash_name, identity.features)
    for end in (*cuts, len(tokens)):
        keys.extend(tokens[:end])
    return [keys.key(number) for number in range(len(keys))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "models")


@pytest.fixture
def plain(model: Path) -> bytes:
    return fingerprint(vllm_config(model))


# name → (what differs, how many leading blocks may still be shared)
REQUEST_FIELDS: dict[str, tuple[Callable[[bytes], list[bytes]], int]] = {
    "cache salt": (lambda n: keys_of(n, request_of(cache_salt="a")), 0),
    "another cache salt": (lambda n: keys_of(n, request_of(cache_salt="b")), 0),
    "an empty cache salt": (lambda n: keys_of(n, request_of(cache_salt="")), 0),
    "an adapter": (lambda n: keys_of(n, request_of(lora_request=lora())), 0),
    "an adapter named as the salt": (lambda n: keys_of(n, request_of(lora_request=lora("a"))), 0),
    "an adapter elsewhere": (lambda n: keys_of(n, request_of(lora_request=lora(path="/nowhere/else"))), 0),
    "tenant": (lambda n: keys_of(n, request_of(), tenant="team-a"), 0),
    "another tenant": (lambda n: keys_of(n, request_of(), tenant="team-b"), 0),
    "a tenant named as the salt": (lambda n: keys_of(n, request_of(), tenant="a"), 0),
    "epoch": (lambda n: keys_of(n, request_of(), epoch=b"1" * 16), 0),
    "another epoch": (lambda n: keys_of(n, request_of(), epoch=b"2" * 16), 0),
    "the first token": (lambda n: keys_of(n, request_of(), tokens=[7, *TOKENS[1:]]), 0),
    "a token of the third block": (lambda n: keys_of(n, request_of(), tokens=[*TOKENS[:40], 7, *TOKENS[41:]]), 2),
    "picture, first digit": (lambda n: keys_of(n, request_of(mm_features=[picture("f" + PICTURE[1:])])), 1),
    "picture, last digit": (lambda n: keys_of(n, request_of(mm_features=[picture(PICTURE[:-1] + "0")])), 1),
    "picture, same last digits": (lambda n: keys_of(n, request_of(mm_features=[picture("0" * 60 + PICTURE[-4:])])), 1),
    "picture, one token later": (lambda n: keys_of(n, request_of(mm_features=[picture(offset=21)])), 1),
    "picture, longer": (lambda n: keys_of(n, request_of(mm_features=[picture(length=11)])), 1),
    "no picture": (lambda n: keys_of(n, request_of(mm_features=[])), 1),
    "a second picture": (lambda n: keys_of(n, request_of(mm_features=[picture(), picture(offset=64)])), 4),
}


def test_one_field_differs_and_no_key_is_shared(model: Path, plain: bytes) -> None:
    """C16, C18, C23, C24 at the level of keys: every field of engine and request, one at a time, against all others."""
    chains = {"nothing": (keys_of(plain, request_of()), 0)}
    for name, of_model in SEPARATING_FIELDS.items():
        if name == "hash":  # another length of keys
            continue
        chains[f"engine: {name}"] = (keys_of(of_model(model), request_of()), 0)
    for name, (of_namespace, num_shared) in REQUEST_FIELDS.items():
        chains[f"request: {name}"] = (of_namespace(plain), num_shared)

    assert len(chains) == 69
    where: dict[bytes, str] = {}
    for name, (keys, num_shared) in chains.items():
        assert len(keys) == 6
        assert keys[:num_shared] == chains["nothing"][0][:num_shared], f"{name}: what precedes the difference is shared"
        for key in keys[num_shared:]:
            assert where.setdefault(key, name) == name, f"{name} shares a block with {where[key]}"


@pytest.mark.parametrize("hash_name", sorted(KEY_BYTES))
def test_what_must_not_matter_does_not(model: Path, plain: bytes, hash_name: str) -> None:
    """Served names, paths, order of keys, cuts: the same blocks."""
    keys = keys_of(plain, request_of(), hash_name=hash_name)
    for name, of_model in NEUTRAL_FIELDS.items():
        assert keys_of(of_model(model), request_of(), hash_name=hash_name) == keys, name
    for cuts in ((1,), (16,), (17, 33, 90), tuple(range(0, 100, 7))):
        assert keys_of(plain, request_of(), hash_name=hash_name, cuts=cuts) == keys, f"cut at {cuts}"


PROGRAM = """
import json, sys
from tests.connector import test_identity_matrix as t
namespace = t.fingerprint(t.vllm_config(sys.argv[1]))
print(json.dumps([key.hex() for key in t.keys_of(namespace, t.request_of(cache_salt="a"), tenant="team-a")]))
"""


def test_another_process_in_another_checkout_makes_the_same_keys(tmp_path: Path, model: Path, plain: bytes) -> None:
    """PYTHONHASHSEED, working directory, path of the checkout and time: none of them is in a key."""
    checkout = tmp_path / "some where" / "else"
    for package in ("connector", "tests/connector"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests" / "__init__.py").touch()
    expected = [key.hex() for key in keys_of(plain, request_of(cache_salt="a"), tenant="team-a")]
    for place, hash_seed in ((checkout, "1"), (ROOT, "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(place)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(model)],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )

        assert json.loads(done.stdout) == expected
