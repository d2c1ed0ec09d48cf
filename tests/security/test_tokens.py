"""The tokens file: what it means, what is refused, and that nothing of it is told to anybody."""

import hashlib
import json
from pathlib import Path

import pytest

from cache_server.config import ConfigError
from cache_server.errors import Forbidden, Unauthenticated
from cache_server.tenants import (
    ANYONE,
    READ,
    WRITE,
    Guard,
    fingerprint_of,
    kept_as,
    new_token,
    proven_name,
    read_tokens,
)
from tests.security.harness import Tenants, named

FINGERPRINT = bytes(range(32))


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(tmp_path)


def header(token: str, name: str = "authorization") -> list[tuple[str, str | bytes]]:
    return [("user-agent", "grpc"), (name, f"Bearer {token}")]


def test_a_token_names_its_tenant_and_holds_256_random_bits() -> None:
    made = [new_token("team-a") for _ in range(20)]

    assert all(token.startswith("team-a.") and len(token) == len("team-a.") + 43 for token, _ in made)
    assert len({token for token, _ in made}) == 20
    assert all(hashlib.sha256(token.encode()).hexdigest() == digest for token, digest in made)


@pytest.mark.parametrize("name", ["", "Team", "a.b", "-a", "a b", "a" * 64])
def test_a_tenant_has_a_plain_name(name: str) -> None:
    with pytest.raises(ConfigError, match="lower-case"):
        new_token(name)


def test_who_calls(tenants: Tenants) -> None:
    """The right token is its tenant's; everything else is nobody, whatever it is like."""
    token = tenants.add("team-a")
    tenants.add("team-b")
    operator = tenants.add_operator()
    guard = Guard(read_tokens(tenants.write()))

    assert guard.caller(header(token)).tenant == "team-a"
    assert guard.caller(header(operator)).is_operator
    for wrong in ([], None, header(token[:-1]), header(token + "x"), header(""), header(token.upper()),
                  header(token, "x-token"), [("authorization", token)], [("authorization", f"bearer {token}")],
                  header(token) + header(token), [("authorization", f"Bearer {token}".encode())],
                  header("team-b." + token.split(".")[1]), header("\ud800")):  # fmt: skip
        with pytest.raises(Unauthenticated) as caught:
            guard.caller(wrong)
        assert token.split(".")[1] not in str(caught.value)


def test_without_a_file_anyone_is_the_operator_of_everything() -> None:
    assert Guard(None).caller(None) is ANYONE
    assert Guard(None).admit(ANYONE, FINGERPRINT, "", 16) == READ | WRITE


@pytest.mark.parametrize(
    ("lists", "name", "rights"),
    [
        ({}, "llama", READ | WRITE),
        ({"write": []}, "llama", READ),
        ({"read": []}, "llama", WRITE),
        ({"read": [], "write": []}, "llama", 0),
        ({"read": ["llama"], "write": ["llama"]}, "llama", READ | WRITE),
        ({"read": ["llama"], "write": ["other"]}, "llama", READ),
        ({"read": ["ll?ma*"], "write": ["LLAMA"]}, "llama-3", READ),
        ({"read": [f"sha256:{named('x')['fingerprint'].hex()}"], "write": []}, "x", READ),
        ({"read": [f"sha256:{named('x')['fingerprint'].hex()}"], "write": []}, "y", 0),
        ({"read": ["sha256:*"], "write": []}, "y", READ),
    ],
)
def test_what_a_token_may_do(tenants: Tenants, lists: dict[str, list[str]], name: str, rights: int) -> None:
    """Names of namespaces with wildcards, or fingerprints; both lists default to everything."""
    token = tenants.add("team-a", **lists)
    caller = Guard(read_tokens(tenants.write())).caller(header(token))
    namespace = named(name)

    assert caller.rights(namespace["fingerprint"], namespace["text"]) == rights


def test_a_name_is_believed_only_if_the_fingerprint_is_made_of_it() -> None:
    """A client that shows the text of one namespace and attaches under the fingerprint of another has no name."""
    mine, other = named("mine"), named("other")

    assert proven_name(mine["text"], mine["fingerprint"]) == "mine"
    assert proven_name(mine["text"], other["fingerprint"]) is None
    for text in ("", "[]", "{", "7", json.dumps({"model": "mine"}), json.dumps({"model": {"namespace": 7}})):
        assert proven_name(text, mine["fingerprint"]) is None
    fields = {"model": {"config": "c"}}
    assert proven_name(json.dumps(fields), fingerprint_of(fields)) is None


def test_the_connectors_text_proves_its_fingerprint(tmp_path: Path) -> None:
    """Connector and server encode alike: docs/formats.md."""
    from tests.connector.test_namespace import made, make_model, vllm_config

    namespace = made(vllm_config(make_model(tmp_path / "m")), namespace="llama")

    assert proven_name(namespace.text, namespace.fingerprint) == "llama"
    assert fingerprint_of(json.loads(namespace.text)) == namespace.fingerprint


def test_tenants_are_kept_apart() -> None:
    """Equal namespaces of two tenants are two; without tenants a namespace is kept as it is."""
    kept = {kept_as(tenant, FINGERPRINT) for tenant in ("", "a", "b", "ab")}

    assert len(kept) == 4
    assert kept_as("", FINGERPRINT) == FINGERPRINT
    assert kept_as("a", FINGERPRINT) == kept_as("a", FINGERPRINT)


def test_keys_of_16_bytes_need_permission(tenants: Tenants) -> None:
    """Prompts can be made up whose xxh3 keys collide."""
    token = tenants.add("team-a")
    registry = read_tokens(tenants.write())
    guard, lenient = Guard(registry), Guard(registry, allow_xxh3=True)
    caller = guard.caller(header(token))

    with pytest.raises(Forbidden, match="sha256"):
        guard.admit(caller, FINGERPRINT, "", 16)
    assert guard.admit(caller, FINGERPRINT, "", 32) == lenient.admit(caller, FINGERPRINT, "", 16) == READ | WRITE


def test_an_operator_does_not_attach(tenants: Tenants) -> None:
    tenants.add("team-a")
    operator = tenants.add_operator()
    guard = Guard(read_tokens(tenants.write()))

    with pytest.raises(Forbidden):
        guard.admit(guard.caller(header(operator)), FINGERPRINT, "", 32)


def test_shares_of_the_memory(tenants: Tenants) -> None:
    """Quotas as they are given, the rest in equal parts; never more than there is."""
    tenants.add("a", quota="3GiB")
    tenants.add("b")
    tenants.add("c")
    registry = read_tokens(tenants.write())

    assert registry.shares(8 << 30) == {"a": 3 << 30, "b": 5 << 29, "c": 5 << 29}
    for memory_gib in (2, 3):
        with pytest.raises(ConfigError, match="quota"):
            registry.shares(memory_gib << 30)


DIGEST = "ab" * 32
GOOD = f'[tenants.a]\n[[tokens]]\ntenant = "a"\nsha256 = "{DIGEST}"\n'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "at least one"),
        ("[tenants.a]", "at least one"),
        ("{", "TOML"),
        ("tenants = 3", "tables [tenants.NAME]"),
        (GOOD + "[tenant.b]", "tenant"),
        (GOOD.replace("[tenants.a]", "[tenants.A]"), "tenants.A"),
        (GOOD.replace("[tenants.a]", "[tenants.a]\nquta = '1GiB'"), "tenants.a.quta"),
        (GOOD.replace("[tenants.a]", "[tenants.a]\nquota = 7"), "quota"),
        (GOOD.replace("[tenants.a]", "[tenants.a]\nquota = '7'"), "quota"),
        (GOOD.replace("[tenants.a]", "[tenants.b]"), "token 1.tenant"),
        (GOOD + GOOD.replace("[tenants.a]", ""), "each sha256 once"),
        (GOOD.replace(DIGEST, "team-a.SECRET"), "the digest, not the token"),
        (GOOD + "read = '*'", "token 1.read"),
        (GOOD + "read = [3]", "token 1.read"),
        (GOOD + "rite = ['*']", "token 1.rite"),
        (GOOD + "operator = 'yes'", "token 1.operator"),
        (GOOD + "operator = true", "operator"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_not_quoted(tmp_path: Path, text: str, place: str) -> None:
    """One line with the place; neither digests nor what may be a token by mistake."""
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    message = str(caught.value)

    assert place in message
    assert "\n" not in message
    assert DIGEST not in message
    assert "SECRET" not in message


def test_the_positive_control(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(GOOD)

    assert read_tokens(path).quotas == {"a": None}
    assert DIGEST not in repr(read_tokens(path))
