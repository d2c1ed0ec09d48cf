"""What a namespace is made of, and why two engines do not share: for people who wonder where their hits are.

Every engine sends the text of its namespace when it attaches, and writes it into its log: the fields behind the
fingerprint, as JSON. Here it is read from either, checked against the fingerprint, and compared field by field.

Not here: how the fields are found (`connector/namespace.py`); the command (`commands/keys.py`).
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_server.tenants import FOR_PEOPLE, fingerprint_of

# As the connector logs it, with whatever the logger puts before it.
_LOGGED = re.compile(r"prefixd: namespace ([0-9a-f]{64}) is (\{.*\})")
_ABSENT = "(not there)"

# Field → what it means when engines differ in it.
HINTS = {
    "block_size": "the engines' --block-size differs",
    "format_version": "another version of prefixd: old blocks are left to expire",
    "hash": "the connector's `hash` differs",
    "kv_cache_dtype": "--kv-cache-dtype, or --dtype where it is auto",
    "kv_groups": "another model, another --block-size, --dtype or tensor parallel size",
    "model.architecture": "another class of vLLM runs the model (--model-impl)",
    "model.code": "trust_remote_code: the model's own program differs",
    "model.config": "another model, or --hf-overrides",
    "model.load_format": "--load-format: other files may be read",
    "model.loader": "--model-loader-extra-config",
    "model.name": "the weights are not on one of the machines: the name has to do",
    "model.namespace": "the connector's `namespace` differs, or is set in one engine only",
    "model.revision": "the weights are not on one of the machines: the revision has to do",
    "model.seed": "--load-format dummy: weights are made from the seed",
    "model.weights": "other weights: another file, size, header or sample",
    "model_dtype": "--dtype differs",
    "page_order": "another KV-cache layout",
    "pipeline_parallel_size": "engines share with the same number of ranks only",
    "platform": "another kind of device or, on CPUs, of processor: its pages are ordered otherwise",
    "tensor_parallel_size": "engines share with the same number of ranks only",
    "weights_version": "the connector's `weights_version` differs",
}


class ExplainError(ValueError):
    """There is nothing to explain; the text is one line."""


@dataclass(frozen=True, slots=True)
class Described:
    """A namespace by its text."""

    fingerprint: bytes
    fields: dict[str, Any]

    @property
    def is_proven(self) -> bool:
        """The text is what the fingerprint was made of."""
        return fingerprint_of(self.fields) == self.fingerprint


def described(fingerprint: bytes, text: str) -> Described:
    """From the two halves. ExplainError."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ExplainError(f"namespace {fingerprint.hex()[:16]} was described with something else than JSON")
    return Described(fingerprint, fields)


def in_file(path: Path) -> Described:
    """The last namespace in an engine's log, or the one whose text is the whole file. ExplainError."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ExplainError(f"{path} cannot be read: {error.strerror}") from None
    logged = _LOGGED.findall(content)
    if logged:
        fingerprint, text = logged[-1]
        return described(bytes.fromhex(fingerprint), text)
    try:
        fields = json.loads(content)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ExplainError(f"{path} is neither an engine's log with a line of prefixd's namespace nor its text as JSON")
    return Described(fingerprint_of(fields), fields)


def lines_of(one: Described) -> Iterator[str]:
    """What went into it, a field a line."""
    yield f"namespace {one.fingerprint.hex()}"
    if not one.is_proven:
        yield "  this text is not what the fingerprint was made of: another version, or made up"
    for name, value in _flat(one.fields):
        yield f"  {name} = {value}"


def differences(one: Described, other: Described) -> Iterator[str]:
    """Why they do not share, a field a line; or that they do."""
    if one.fingerprint == other.fingerprint:
        yield f"one namespace, {one.fingerprint.hex()}: these engines share"
        return
    here, there = dict(_flat(one.fields)), dict(_flat(other.fields))
    names = [name for name in sorted({*here, *there}) if here.get(name, _ABSENT) != there.get(name, _ABSENT)]
    names = [name for name in names if name not in FOR_PEOPLE]
    yield f"{one.fingerprint.hex()[:16]} and {other.fingerprint.hex()[:16]} differ in {len(names)} fields"
    for name in names:
        yield f"  {name}: {here.get(name, _ABSENT)} | {there.get(name, _ABSENT)}"
    for hint in _hints(names):
        yield f"  -> {hint}"


def _hints(names: Iterable[str]) -> Iterator[str]:
    """The longest known beginning of each name, once."""
    told = set()
    for name in names:
        known = [key for key in HINTS if name == key or name.startswith((f"{key}.", f"{key}["))]
        if known and (key := max(known, key=len)) not in told:
            told.add(key)
            yield f"{key}: {HINTS[key]}"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Leaves by their path: 'kv_groups[0][0].head_size'."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from _flat(value[key], f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{name}[{number}]")
    else:
        yield name, json.dumps(value)
