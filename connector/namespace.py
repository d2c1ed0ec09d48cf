"""The namespace: everything that makes the bytes of one engine useless to another.

This file reads vLLM's configuration, decides whether prefixd can serve it (`why_unsupported`) and reduces it to a
32-byte fingerprint (`namespace_of`) with which every key begins. Invariant: engines whose payloads may not be
exchanged have different fingerprints. The other direction is best effort: an object without a stable text or a newer
library that adds a default to a model's configuration costs hits, never a wrong one.

Model identity is what the model *is*: its resolved configuration (after `hf_overrides`) and its weights. Weights are
recognised by samples (`weights.py`), not by reading terabytes. Where the model lies and what it is called for its users
does not enter: everybody mounts at /models.

Read from fields that all ranks share. Not here: which blocks the kinds of layers need (`groups.py`), a rank's layer
names, padding and strides (the shard descriptor, `kv_layout.py`), what differs from request to request
(`block_keys.py`). vLLM and torch are never imported: their objects are recognised by attributes and class names, and
those of newer versions may be missing.
"""

import enum
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.block_keys import KEY_BYTES
from connector.groups import KINDS, STATE, cacheable_group_ids, groups_of, layer_specs, needed_pages
from connector.weights import files_fingerprint, hub_snapshot, weight_files

FORMAT_VERSION = 2  # raised with every change of the key encoding, of these fields or of a payload's bytes

_MAGIC = b"prefixd namespace"
_U32 = struct.Struct("<I")

# Speculators that keep no KV of their own: the target model's pages are all there is.
_SPECULATORS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})

_KIND_NAMES = {"FullAttentionSpec": "full_attention", "MLAAttentionSpec": "mla_attention"}

_CACHE_DTYPE_ALIASES = {"fp8": "fp8_e4m3", "half": "float16", "float": "float32"}

# Load formats that read the same safetensors files; all others may read others of the same folder.
_SAFETENSORS_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})
# Of the model's configuration: longer values, larger tables, and a configuration that would be longer than that as a
# whole, enter as their hash. The server takes a text of 64 KiB.
_MAX_SHOWN_VALUE = 80
_MAX_SHOWN_KEYS = 200
_MAX_SHOWN_CONFIG = 32 << 10

# Says where the configuration was read and by which library, not what it is.
_CONFIG_KEYS_LEFT_OUT = frozenset({"_name_or_path", "transformers_version", "name_or_path", "_commit_hash"})
_ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling"})


@dataclass(frozen=True, slots=True)
class Namespace:
    """What an engine's keys begin with. `text` is for people: the fields behind the fingerprint as JSON."""

    fingerprint: bytes
    text: str
    key_bytes: int
    num_shards: int


def namespace_of(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    namespace: str | None,
    weights_version: str | None,
    hash_name: str,
    platform: Mapping[str, str],
) -> Namespace:
    """The namespace of an engine that `why_unsupported` has nothing against.

    The operator's `namespace` replaces the model identity (configuration and weights) and nothing else;
    `weights_version` is added to either. `platform`: what decides how numbers lie within a page and cannot be seen in
    its shape (`plugin.platform_of`).
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    groups = [_group_fields(group) for group in kv_cache_config.kv_cache_groups]
    replicas = groups_of(kv_cache_config, vllm_config).stored[0].replicas
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "hash": hash_name,
        "model": _model_identity(vllm_config) if namespace is None else {"namespace": namespace},
        "weights_version": weights_version,
        "model_dtype": _dtype_name(model.dtype),
        "kv_cache_dtype": _resolved_cache_dtype(cache, kv_cache_config),
        "kv_cache_dtype_skip_layers": _plain(getattr(cache, "kv_cache_dtype_skip_layers", None) or []),
        "kv_groups": groups,
        "page_order": _page_order(kv_cache_config),
        "platform": dict(platform),
        "block_size": cache.block_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "quantization": _plain(getattr(model, "quantization", None)),
        "quantization_config": _plain(getattr(model, "quantization_config", None)),
        "long_rope": _long_rope(model),
        "multimodal": _multimodal(model),
    }
    return Namespace(
        fingerprint=_fingerprint(fields),
        text=json.dumps(fields, sort_keys=True),
        key_bytes=KEY_BYTES[hash_name],
        num_shards=num_shards(vllm_config, replicas),
    )


def num_shards(vllm_config: Any, replicas: int) -> int:
    """Parts in which the ranks of one engine hold a block, `replicas` tensor-parallel ranks holding the same one."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size // replicas * parallel.pipeline_parallel_size)


def why_unsupported(
    vllm_config: Any, kv_cache_config: Any, *, can_fail_by_request: bool = True, kinds: Mapping[str, str] = KINDS
) -> str | None:
    """Why prefixd does nothing for this engine, in words for its log, or None if it serves it.

    can_fail_by_request: this vLLM can be told which request's load failed (0.30), not only which blocks.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1) or 1) > 1:
            return f"{name} is {size}: blocks that are spread over context-parallel ranks are not supported"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales is on: scales found at run time are not part of a block's name"
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculator := _speculator_with_kv(speculative):
        return f"speculative decoding by {speculator!r}: the draft model's KV is not saved (ngram and suffix work)"

    kv_groups = kv_cache_config.kv_cache_groups
    cacheable = cacheable_group_ids(kv_cache_config)
    if not cacheable:
        names = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_groups) or "none"
        return f"of the model's KV groups ({names}) none has blocks that a token prefix names"
    for group_id in cacheable:
        specs = layer_specs(kv_groups[group_id].kv_cache_spec)
        for spec in specs:
            if reason := _why_unsupported_kind(spec, kinds, speculative is not None):
                return f"KV group {group_id} of {len(kv_groups)}: {reason}"
        if len({needed_pages(spec) for spec in specs}) > 1:
            return f"KV group {group_id} of {len(kv_groups)}: its layers have windows of several lengths"
    if len(kv_groups) == 1 and kv_groups[0].kv_cache_spec.block_size != vllm_config.cache_config.block_size:
        return (
            f"the KV group's block_size {kv_groups[0].kv_cache_spec.block_size} differs from the engine's "
            f"{vllm_config.cache_config.block_size}"
        )
    if not can_fail_by_request and not groups_of(kv_cache_config, vllm_config).is_plain:
        names = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_groups)
        return f"the model's KV groups ({names}) need vLLM 0.30 or later, which can be told that a load of them failed"
    return None


def _why_unsupported_kind(spec: Any, kinds: Mapping[str, str], has_speculator: bool) -> str | None:
    """The same for the layers of one spec."""
    name = type(spec).__name__
    if name not in kinds:
        return f"layers of kind {name} are not supported ({', '.join(kinds)} are)"
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        return "the model attends to later tokens: a block's KV does not follow from its token prefix"
    if kinds[name] == STATE:
        mode = getattr(spec, "mamba_cache_mode", "none")
        if mode != "align":
            return f"recurrent state is kept at block boundaries only with mamba_cache_mode 'align', not {mode!r}"
        if has_speculator:
            return "speculative decoding beside recurrent state: vLLM moves its blocks about"
    elif getattr(spec, "tokens_per_state", 1) != 1:
        return f"the model keeps one KV state per {spec.tokens_per_state} tokens: only one per token is supported"
    return None


def features_name_content(vllm_config: Any) -> bool:
    """Whether a multimodal feature's identifier is a hash of its content.

    With prefix caching and the processor cache both off, vLLM saves itself the hashing and counts: the first picture
    of every process is `renderer0-mm-1-image-0`.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is None
        or bool(vllm_config.cache_config.enable_prefix_caching)
        or getattr(multimodal, "mm_processor_cache_gb", 0) != 0
    )


def _fingerprint(fields: Mapping[str, Any]) -> bytes:
    """SHA-256 over (name, value as JSON), by name; each with its length before it."""
    encoded = [_with_length(_MAGIC)]
    for name in sorted(fields):
        encoded.append(_with_length(name.encode()))
        encoded.append(_with_length(json.dumps(fields[name], sort_keys=True).encode()))
    return hashlib.sha256(b"".join(encoded)).digest()


# --- what the engine keeps of a block


def _group_fields(group: Any) -> list[dict[str, Any]]:
    """The distinct specs of a group. Layer names and counts stay out: pipeline ranks differ in them."""
    distinct = {json.dumps(_spec_fields(spec), sort_keys=True) for spec in layer_specs(group.kv_cache_spec)}
    return [json.loads(fields) for fields in sorted(distinct)]


def _spec_fields(spec: Any) -> dict[str, Any]:
    kind = type(spec).__name__
    fields = {
        "kind": _KIND_NAMES.get(kind, kind),
        "block_size": spec.block_size,
        "num_kv_heads": _plain(getattr(spec, "num_kv_heads", None)),
        "head_size": _plain(getattr(spec, "head_size", None)),
        "head_size_v": _plain(getattr(spec, "head_size_v", None)),
        "dtype": _dtype_name(getattr(spec, "dtype", None)),
        "page_bytes": spec.page_size_bytes,
        "quant_mode": _plain(getattr(spec, "kv_quant_mode", None)),
        "cache_dtype": _plain(getattr(spec, "cache_dtype_str", None)),
        "sliding_window": _plain(getattr(spec, "sliding_window", None)),
        "attention_chunk_size": _plain(getattr(spec, "attention_chunk_size", None)),
    }
    if kind not in _KIND_NAMES:  # recurrent state; the fields of the others are what they have always been
        fields["state"] = _plain([getattr(spec, name, None) for name in ("shapes", "dtypes", "mamba_type")])
    return fields


def _resolved_cache_dtype(cache: Any, kv_cache_config: Any) -> str:
    """The element type of the KV tensors, never `auto`, which is what an engine of another dtype says too."""
    name = getattr(cache, "cache_dtype", None) or "auto"
    if name == "auto":
        dtypes = {
            _dtype_name(getattr(spec, "dtype", None))
            for group in kv_cache_config.kv_cache_groups
            for spec in layer_specs(group.kv_cache_spec)
        }
        name = "+".join(sorted(dtypes))
    return _CACHE_DTYPE_ALIASES.get(name, name)


def _page_order(kv_cache_config: Any) -> str | None:
    """The order of heads, tokens and content within a page, of a `KVCacheLayout` name such as LBHNC (vLLM 0.30).

    Where layers (L) and blocks (B) stand in it changes how pages are found, not what is in them.
    """
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    return None if layout is None else "".join(letter for letter in str(layout) if letter not in "LB")


def _long_rope(model: Any) -> bool | None:
    """Whether a model of rope type `longrope` uses its long factors: vLLM decides it by `max_model_len`."""
    config = getattr(model, "hf_text_config", None) or model.hf_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" not in json.dumps(_plain(rope)):
        return None
    original = getattr(config, "original_max_position_embeddings", None)
    if original is None and isinstance(rope, Mapping):
        original = rope.get("original_max_position_embeddings")
    return bool(model.max_model_len > (original or config.max_position_embeddings))


def _multimodal(model: Any) -> dict[str, Any] | None:
    """What an operator can set of how pictures become vectors; it is not in their identifiers for certain."""
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return None
    names = ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method")
    return {name: _plain(getattr(multimodal, name, None)) for name in names}


def _speculator_with_kv(speculative: Any) -> str | None:
    if speculative is None:
        return None
    method = str(getattr(speculative, "method", None) or "draft_model")
    return None if method in _SPECULATORS_WITHOUT_KV else method


# --- what the model is


def _model_identity(vllm_config: Any) -> dict[str, Any]:
    model, load = vllm_config.model_config, vllm_config.load_config
    identity: dict[str, Any] = {
        "config": _shown(_config_identity(model, getattr(load, "download_dir", None))),
        # Which of vLLM's classes runs it: its own or the Transformers one, which may order a head's numbers otherwise.
        "architecture": _plain(getattr(model, "architecture", None)),
    }
    if overrides := getattr(model, "model_class_overrides", None):
        identity["model_class_overrides"] = _plain(overrides)
    if getattr(model, "trust_remote_code", False):
        identity["code"] = _remote_code(model)
    load_format = getattr(load.load_format, "value", load.load_format)
    if load_format == "dummy":
        return {**identity, "load_format": "dummy", "seed": model.seed}
    identity["load_format"] = "safetensors" if load_format in _SAFETENSORS_FORMATS else load_format
    # A loader with settings of its own may take the weights from where these say (tensorizer: its URI).
    if settings := getattr(load, "model_loader_extra_config", None):
        identity["loader"] = _plain(settings)
    # `model_weights` is set where the weights stay in an object store and `model` is a local copy of the rest.
    name = getattr(model, "model_weights", None) or model.model
    files = weight_files(name, model.revision, getattr(load, "download_dir", None))
    if files:
        return {**identity, "weights": files_fingerprint(files)}
    return {**identity, "name": str(name), "revision": model.revision}


def _remote_code(model: Any) -> dict[str, Any]:
    """The model's own program, where the operator lets it run: its files if they lie here, else its revision."""
    directory = Path(str(model.model))
    files = sorted(directory.glob("*.py")) if directory.is_dir() else []
    return {"files": files_fingerprint(files), "revision": _plain(getattr(model, "code_revision", None))}


def _shown(fields: Any) -> Any:
    """Short values as they are, for people who ask why two engines do not share; long ones as their SHA-256."""
    shown = _shown_value(fields)
    return shown if len(json.dumps(shown)) <= _MAX_SHOWN_CONFIG else _digest(fields)


def _shown_value(value: Any) -> Any:
    if isinstance(value, dict) and len(value) <= _MAX_SHOWN_KEYS:
        return {name: _shown_value(item) for name, item in value.items()}
    return value if len(json.dumps(value)) <= _MAX_SHOWN_VALUE else _digest(value)


def _digest(value: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()}"


def _config_identity(model: Any, download_dir: str | None) -> Any:
    """The resolved configuration, with the rotary embedding's part as it was given.

    Building a model changes that part in place (vLLM 0.32: `rope_parameters["partial_rotary_factor"] = 1.0`, in 33
    places): only in the workers, where it has happened when this is called, and not on the scheduler side. Their
    namespaces would differ and nothing would ever hit. Where it was given cannot be read, it stays as it is here.
    """
    resolved = _hf_config_fields(model.hf_config)
    overrides = getattr(model, "hf_overrides", None) or {}
    path = Path(getattr(model, "hf_config_path", None) or model.model)
    directory = path if path.is_dir() else hub_snapshot(str(path), model.revision, download_dir)
    file = directory / "config.json" if directory is not None else None
    if file is None or not file.is_file() or not isinstance(overrides, Mapping):
        return resolved
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return resolved
    return {"resolved": _split_rope(resolved)[0], "rope": _split_rope(given)[1], "overrides": _plain(overrides)}


def _split_rope(value: Any) -> tuple[Any, Any]:
    """(`value` without what configures the rotary embedding, that alone), in configurations within it too."""
    if not isinstance(value, Mapping):
        return value, None
    rest, rope = {}, {}
    for key, item in value.items():
        if key in _ROPE_KEYS:
            rope[str(key)] = item
            continue
        rest[str(key)], inner = _split_rope(item)
        if inner:
            rope[str(key)] = inner
    return rest, rope


def _hf_config_fields(hf_config: Any) -> Any:
    fields = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    return _without_provenance(_plain(fields))


def _without_provenance(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_provenance(item) for key, item in value.items() if key not in _CONFIG_KEYS_LEFT_OUT}
    return [_without_provenance(item) for item in value] if isinstance(value, list) else value


# --- values as JSON


def _plain(value: Any) -> Any:
    """`value` as JSON: mappings with text keys, lists, and the text of what JSON does not know (dtypes, objects)."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return str(value)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _with_length(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data
