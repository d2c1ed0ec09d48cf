"""The namespace: what must separate two engines, what must not, and which engines prefixd leaves alone."""

import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector import namespace as namespace_module
from connector import weights
from connector.namespace import Namespace, features_name_content, namespace_of, why_unsupported


class Dtype:
    """Stands for a torch.dtype: known by its text only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


class KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8 = 1


class HfConfig:
    """Stands for a transformers configuration."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {
            "model_type": "llama",
            "hidden_size": 256,
            "rope_theta": 10_000.0,
            "id2label": {0: "A"},
            "dtype": Dtype("bfloat16"),
            "transformers_version": "5.0",
            "_name_or_path": "/models",
            **fields,
        }
        self.rope_parameters = self.fields.get("rope_parameters")
        self.max_position_embeddings = 4096

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    plain = {
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 32,
        "head_size_v": 32,
        "dtype": Dtype("bfloat16"),
        "page_size_bytes": 8192,
        "kv_quant_mode": KVQuantMode.NONE,
        "sliding_window": None,
    }
    return type(kind, (), {**plain, **fields})()


def uniform(*specs: Any) -> Any:
    """vLLM's `UniformTypeKVCacheSpecs`: one spec per layer."""
    per_layer = {f"layers.{number}": layer for number, layer in enumerate(specs)}
    return type("UniformTypeKVCacheSpecs", (), {"kv_cache_specs": per_layer, "block_size": specs[0].block_size})()


def kv_cache_config(*specs: Any, layout: str | None = "LBHNC", layers: tuple[str, ...] = ("layers.0",)) -> Any:
    groups = [SimpleNamespace(layer_names=list(layers), kv_cache_spec=one) for one in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_layout=layout, num_blocks=8)


def vllm_config(folder: Path | str, **fields: Any) -> Any:
    """A VllmConfig; `part__name=value` sets an attribute of a part."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            hf_config=HfConfig(),
            dtype=Dtype("bfloat16"),
            revision=None,
            seed=0,
            quantization=None,
            served_model_name="m",
            tokenizer=str(folder),
            max_model_len=192,
            multimodal_config=None,
        ),
        cache_config=SimpleNamespace(
            block_size=16, cache_dtype="auto", enable_prefix_caching=True, gpu_memory_utilization=0.9
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
    )
    for name, value in fields.items():
        part, _, attribute = name.partition("__")
        target = getattr(config, f"{part}_config") if attribute else config
        setattr(target, attribute or f"{part}_config", value)
    return config


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """A safetensors file: length of the header, header, data."""
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with two weight files."""
    return make_model(tmp_path / "models")


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    safetensors(folder / "model-1.safetensors", {"a": b"a" * 20_000, "b": b"b" * 20_000})
    safetensors(folder / "model-2.safetensors", {"c": b"c" * 20_000})
    return folder


def made(config: Any, kv: Any = None, **settings: Any) -> Namespace:
    asked = {
        "namespace": None,
        "weights_version": None,
        "hash_name": "xxh3_128",
        "platform": {"device": "cuda"},
        **settings,
    }
    return namespace_of(config, kv or kv_cache_config(), **asked)


def fingerprint(config: Any, kv: Any = None, **settings: Any) -> bytes:
    return made(config, kv, **settings).fingerprint


# --- what must separate


def rope(**fields: Any) -> HfConfig:
    return HfConfig(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 4096, **fields})


SEPARATING_FIELDS: dict[str, Callable[[Path], bytes]] = {
    "model dtype": lambda m: fingerprint(vllm_config(m, model__dtype=Dtype("float32"))),
    "kv cache dtype": lambda m: fingerprint(vllm_config(m, cache__cache_dtype="fp8")),
    "kv cache dtype of another kind": lambda m: fingerprint(vllm_config(m, cache__cache_dtype="fp8_e5m2")),
    "auto, resolved to another dtype": lambda m: fingerprint(
        vllm_config(m), kv_cache_config(spec(dtype=Dtype("float16")))
    ),
    "layers left out of kv quantization": lambda m: fingerprint(
        vllm_config(m, cache__kv_cache_dtype_skip_layers=["0"])
    ),
    "block size": lambda m: fingerprint(vllm_config(m, cache__block_size=32)),
    "block size of the group": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(block_size=32))),
    "kv heads": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(num_kv_heads=2))),
    "head size": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(head_size=64))),
    "kv heads and head size, same bytes": lambda m: fingerprint(
        vllm_config(m), kv_cache_config(spec(num_kv_heads=2, head_size=64))
    ),
    "head size of the values": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(head_size_v=64))),
    "page bytes": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(page_size_bytes=16384))),
    "kv quantization mode": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(kv_quant_mode=KVQuantMode.FP8))),
    "kind of the group": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec("MLAAttentionSpec"))),
    "sliding window": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(sliding_window=64))),
    "a second group": lambda m: fingerprint(vllm_config(m), kv_cache_config(spec(), spec())),
    "order within a page": lambda m: fingerprint(vllm_config(m), kv_cache_config(layout="LBNHC")),
    "order within a page unknown": lambda m: fingerprint(vllm_config(m), kv_cache_config(layout=None)),
    "tensor parallel size": lambda m: fingerprint(vllm_config(m, parallel__tensor_parallel_size=2)),
    "pipeline parallel size": lambda m: fingerprint(vllm_config(m, parallel__pipeline_parallel_size=2)),
    "quantization": lambda m: fingerprint(vllm_config(m, model__quantization="fp8")),
    "quantization config": lambda m: fingerprint(vllm_config(m, model__quantization_config={"bits": 4})),
    "rope theta (as by hf_overrides)": lambda m: fingerprint(vllm_config(m, model__hf_config=HfConfig(rope_theta=5.0))),
    "a nested field of the configuration": lambda m: fingerprint(
        vllm_config(m, model__hf_config=HfConfig(text_config={"layers": 3}))
    ),
    "long rope, short factors": lambda m: fingerprint(vllm_config(m, model__hf_config=rope())),
    "long rope, long factors": lambda m: fingerprint(
        vllm_config(m, model__hf_config=rope(), model__max_model_len=8192)
    ),
    "model class override": lambda m: fingerprint(vllm_config(m, model__model_class_overrides={"A": "B"})),
    "image processor": lambda m: fingerprint(
        vllm_config(m, model__multimodal_config=SimpleNamespace(mm_processor_kwargs={"max_pixels": 9}))
    ),
    "no image processor settings": lambda m: fingerprint(vllm_config(m, model__multimodal_config=SimpleNamespace())),
    "dummy weights": lambda m: fingerprint(vllm_config(m, load__load_format="dummy")),
    "dummy weights of another seed": lambda m: fingerprint(vllm_config(m, load__load_format="dummy", model__seed=1)),
    "another of vLLM's classes": lambda m: fingerprint(vllm_config(m, model__architecture="TransformersForCausalLM")),
    "the model's own program": lambda m: fingerprint(vllm_config(m, model__trust_remote_code=True)),
    "another revision of its own program": lambda m: fingerprint(
        vllm_config(m, model__trust_remote_code=True, model__code_revision="v2")
    ),
    "a loader that may read other files": lambda m: fingerprint(vllm_config(m, load__load_format="mistral")),
    "a loader with settings of its own": lambda m: fingerprint(
        vllm_config(m, load__load_format="tensorizer", load__model_loader_extra_config={"tensorizer_uri": "s3://a"})
    ),
    "other settings of the loader": lambda m: fingerprint(
        vllm_config(m, load__load_format="tensorizer", load__model_loader_extra_config={"tensorizer_uri": "s3://b"})
    ),
    "a long value of the configuration": lambda m: fingerprint(
        vllm_config(m, model__hf_config=HfConfig(layer_types=["full_attention"] * 40))
    ),
    "another long value of the configuration": lambda m: fingerprint(
        vllm_config(m, model__hf_config=HfConfig(layer_types=["full_attention"] * 41))
    ),
    "device": lambda m: fingerprint(vllm_config(m), platform={"device": "rocm"}),
    "the device's fp8": lambda m: fingerprint(vllm_config(m), platform={"device": "cuda", "fp8": "float8_e4m3fnuz"}),
    "order of a page on this processor": lambda m: fingerprint(
        vllm_config(m), platform={"device": "cpu", "page_format": "vec"}
    ),
    "order of a page on another processor": lambda m: fingerprint(
        vllm_config(m), platform={"device": "cpu", "page_format": "amx"}
    ),
    "hash": lambda m: fingerprint(vllm_config(m), hash_name="sha256"),
    "weights version": lambda m: fingerprint(vllm_config(m), weights_version="1"),
    "another weights version": lambda m: fingerprint(vllm_config(m), weights_version="2"),
    "operator's namespace": lambda m: fingerprint(vllm_config(m), namespace="m1"),
    "another operator's namespace": lambda m: fingerprint(vllm_config(m), namespace="m2"),
    "operator's namespace and weights version": lambda m: fingerprint(
        vllm_config(m), namespace="m1", weights_version="1"
    ),
}


def test_every_field_separates(model: Path) -> None:
    """Engines that differ in any one of these fields never share, and no two of these differences look alike (C23)."""
    by_fingerprint: dict[bytes, str] = {fingerprint(vllm_config(model)): "nothing"}
    for name, of_model in SEPARATING_FIELDS.items():
        other = by_fingerprint.setdefault(of_model(model), name)
        assert other == name, f"{name} looks like {other}"


def test_a_new_format_separates(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raises FORMAT_VERSION starts anew."""
    before = fingerprint(vllm_config(model))
    monkeypatch.setattr(namespace_module, "FORMAT_VERSION", namespace_module.FORMAT_VERSION + 1)

    assert fingerprint(vllm_config(model)) != before


# --- what must not


NEUTRAL_FIELDS: dict[str, Callable[[Path], bytes]] = {
    "served name": lambda m: fingerprint(vllm_config(m, model__served_model_name=["other"])),
    "tokenizer": lambda m: fingerprint(vllm_config(m, model__tokenizer="/elsewhere")),
    "memory for blocks": lambda m: fingerprint(vllm_config(m, cache__gpu_memory_utilization=0.5)),
    "number of blocks": lambda m: fingerprint(
        vllm_config(m), SimpleNamespace(**{**vars(kv_cache_config()), "num_blocks": 9})
    ),
    "longest sequence": lambda m: fingerprint(vllm_config(m, model__max_model_len=4096)),
    "seed, with real weights": lambda m: fingerprint(vllm_config(m, model__seed=1)),
    "layer names": lambda m: fingerprint(vllm_config(m), kv_cache_config(layers=("layers.16", "layers.17"))),
    "one spec per layer": lambda m: fingerprint(vllm_config(m), kv_cache_config(uniform(spec(), spec()))),
    "one spec per layer, other layers": lambda m: fingerprint(vllm_config(m), kv_cache_config(uniform(spec()))),
    "order of layers and blocks": lambda m: fingerprint(vllm_config(m), kv_cache_config(layout="BLHNC")),
    "the cache dtype said outright": lambda m: fingerprint(vllm_config(m, cache__cache_dtype="bfloat16")),
    "ngram speculator": lambda m: fingerprint(vllm_config(m, speculative=SimpleNamespace(method="ngram"))),
    "library version and path": lambda m: fingerprint(
        vllm_config(m, model__hf_config=HfConfig(transformers_version="6", _name_or_path="/elsewhere"))
    ),
    "key order": lambda m: fingerprint(
        vllm_config(m, model__hf_config=HfConfig(**dict(reversed(HfConfig().fields.items()))))
    ),
    "a name for the same loader": lambda m: fingerprint(vllm_config(m, load__load_format="safetensors")),
    "a tokenizer file": lambda m: with_file(m, "tokenizer.json"),
}


def with_file(folder: Path, name: str) -> bytes:
    (folder / name).write_text("{}")
    return fingerprint(vllm_config(folder))


@pytest.mark.parametrize("name", NEUTRAL_FIELDS)
def test_what_does_not_change_the_bytes_does_not_separate(model: Path, name: str) -> None:
    """Engines that differ in this only, share."""
    assert NEUTRAL_FIELDS[name](model) == fingerprint(vllm_config(model))


def test_the_models_own_program_counts_by_its_content(model: Path) -> None:
    """With trust_remote_code the folder's Python files compute the KV."""
    (model / "modeling.py").write_text("one")
    before = fingerprint(vllm_config(model, model__trust_remote_code=True))
    (model / "modeling.py").write_text("two")

    assert fingerprint(vllm_config(model, model__trust_remote_code=True)) != before
    assert len({fingerprint(vllm_config(model)) for _ in range(2)}) == 1


@pytest.mark.parametrize("changed", [0, 499, 1999])
def test_a_huge_configuration_has_a_short_text_and_counts_as_a_whole(model: Path, changed: int) -> None:
    """The server takes texts of 64 KiB."""

    def with_labels(**more: str) -> Namespace:
        tables = {f"table{n}": {f"key{i}": "x" * 60 for i in range(200)} for n in range(10)}
        tables[f"table{changed // 200}"].update({f"key{changed % 200}": "x" * 60, **more})
        return made(vllm_config(model, model__hf_config=HfConfig(**tables)))

    plain, other = with_labels(), with_labels(**{f"key{changed % 200}": "y" * 60})
    assert len(plain.text) < 1 << 16
    assert plain.fingerprint != other.fingerprint
    assert with_labels().fingerprint == plain.fingerprint


def test_fp8_is_its_long_name(model: Path) -> None:
    """`fp8` is vLLM's short name of fp8_e4m3."""
    short, long = (fingerprint(vllm_config(model, cache__cache_dtype=name)) for name in ("fp8", "fp8_e4m3"))

    assert short == long


def test_one_model_at_two_paths_shares(tmp_path: Path) -> None:
    """Equal files are one model wherever they lie (C24)."""
    here, there = make_model(tmp_path / "here"), make_model(tmp_path / "there" / "deeper")

    assert fingerprint(vllm_config(here)) == fingerprint(vllm_config(there))


def test_a_fingerprint_does_not_depend_on_the_process(model: Path) -> None:
    """Another PYTHONHASHSEED, the same namespace."""
    program = (
        "import sys; from tests.connector.test_namespace import *; print(fingerprint(vllm_config(sys.argv[1])).hex())"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": root}
    printed = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        env=environment,
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert printed.strip() == fingerprint(vllm_config(model)).hex()


# --- weights


def other_weights(folder: Path, **tensors: bytes) -> None:
    safetensors(folder / "model-1.safetensors", {"a": b"a" * 20_000, "b": b"b" * 20_000, **tensors})


WEIGHT_CHANGES: dict[str, Callable[[Path], Any]] = {
    "one tensor, same size": lambda m: other_weights(m, a=b"A" * 20_000),
    "the last tensor, same size": lambda m: other_weights(m, b=b"B" * 20_000),
    "tensors renamed": lambda m: safetensors(m / "model-2.safetensors", {"d": b"c" * 20_000}),
    "a file more": lambda m: safetensors(m / "model-3.safetensors", {"d": b"d"}),
    "a file less": lambda m: (m / "model-2.safetensors").unlink(),
    "a file renamed": lambda m: (m / "model-2.safetensors").rename(m / "model-4.safetensors"),
    "a pickle": lambda m: (m / "pytorch_model.bin").write_bytes(b"x"),
    "an empty file": lambda m: (m / "model-3.safetensors").write_bytes(b""),
    "a broken header": lambda m: (m / "model-2.safetensors").write_bytes(b"\xff" * 20_000),
}


@pytest.mark.parametrize("name", WEIGHT_CHANGES)
def test_other_weights_at_the_same_path_separate(model: Path, name: str) -> None:
    """Everybody mounts at /models: what lies there decides (C24)."""
    before = fingerprint(vllm_config(model))
    WEIGHT_CHANGES[name](model)

    assert fingerprint(vllm_config(model)) != before


def test_every_tensor_is_sampled(tmp_path: Path) -> None:
    """A fine-tuned model may differ from its base in its attention layers only."""
    tensors = {f"t{number}": bytes([number]) * 9_000 for number in range(40)}
    fingerprints = set()
    for changed in tensors:
        safetensors(tmp_path / "model.safetensors", {**tensors, changed: b"\xff" * 9_000})
        fingerprints.add(fingerprint(vllm_config(tmp_path)))

    assert len(fingerprints) == len(tensors)


def test_files_of_unknown_format_are_sampled_as_a_whole(tmp_path: Path) -> None:
    """A small file changed at any place is another file; no weights are ever taken for none."""
    weights = tmp_path / "model.npz"
    weights.write_bytes(bytes(300_000))
    before = fingerprint(vllm_config(tmp_path))
    for place in (0, 150_000, 299_999):
        weights.write_bytes(bytes(place) + b"x" + bytes(299_999 - place))

        assert fingerprint(vllm_config(tmp_path)) != before


def test_samples_are_bounded_and_reach_both_ends(tmp_path: Path) -> None:
    """A file of any size costs at most 128 reads."""
    starts = weights.sample_starts(b"", 70 << 30)

    assert len(starts) == 128
    assert starts[0] == 0
    assert starts[-1] > (70 << 30) - 8192


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    """A GGUF model is given as a file."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before = fingerprint(vllm_config(file))
    file.write_bytes(b"two")

    assert fingerprint(vllm_config(file)) != before


def hub_cache(root: Path, commit: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    repository = root / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return make_model(repository / "snapshots" / commit)


def test_a_hub_model_equals_its_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the hub is resolved to its cached snapshot: by branch, by default, by commit."""
    hub_cache(tmp_path / "hub", "c0ffee", monkeypatch)
    local = fingerprint(vllm_config(make_model(tmp_path / "copy")))

    for revision in (None, "main", "c0ffee"):
        assert fingerprint(vllm_config("org/name", model__revision=revision)) == local


def test_a_model_that_is_not_on_this_machine_goes_by_name_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better than nothing, and shown in the text."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    configs = [
        vllm_config("org/name"),
        vllm_config("org/other"),
        vllm_config("org/name", model__revision="v2"),
        vllm_config("s3://bucket/name"),
        vllm_config(tmp_path, model__model_weights="s3://bucket/other"),
    ]

    assert len({fingerprint(config) for config in configs}) == len(configs)
    assert '"name": "org/name"' in made(configs[0]).text


# --- what comes of it


@pytest.mark.parametrize(("hash_name", "key_bytes"), [("xxh3_128", 16), ("sha256", 32)])
def test_the_rest_of_a_namespace(model: Path, hash_name: str, key_bytes: int) -> None:
    """Key bytes follow from the hash, shards from the ranks; the text is JSON with every field."""
    parallel = {"parallel__tensor_parallel_size": 4, "parallel__pipeline_parallel_size": 2}
    namespace = made(vllm_config(model, **parallel), hash_name=hash_name)

    assert (len(namespace.fingerprint), namespace.key_bytes, namespace.num_shards) == (32, key_bytes, 8)
    assert json.loads(namespace.text)["kv_cache_dtype"] == "bfloat16"


def test_building_the_model_changes_nothing_and_what_was_given_does(tmp_path: Path) -> None:
    """Workers see a configuration that their model has changed in place; without this no Falcon-H1 ever hit."""
    folder = make_model(tmp_path / "m")
    given = {"hidden_size": 256, "text_config": {"rope_parameters": {"rope_theta": 1e4}}}
    (folder / "config.json").write_text(json.dumps(given))

    def of(**fields: Any) -> bytes:
        return fingerprint(vllm_config(folder, model__hf_config=HfConfig(hidden_size=256, **fields)))

    scheduler = of(text_config={"rope_parameters": {"rope_theta": 1e4}})
    worker = of(text_config={"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}})
    assert scheduler == worker
    assert of(text_config={"rope_parameters": {}, "head_dim": 64}) != scheduler
    given["text_config"]["rope_parameters"]["rope_theta"] = 1e6  # type: ignore[index]
    (folder / "config.json").write_text(json.dumps(given))
    assert of(text_config={"rope_parameters": {"rope_theta": 1e6}}) != scheduler


def test_rope_that_was_given_by_an_override_makes_a_difference(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    scaled = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}

    assert fingerprint(vllm_config(folder)) != fingerprint(vllm_config(folder, model__hf_overrides=scaled))


def test_the_operators_namespace_replaces_the_model_identity_and_nothing_else(tmp_path: Path) -> None:
    """Two models that the operator calls one share; another dtype still separates them."""
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    other_weights(two, a=b"A" * 20_000)
    other = vllm_config(two, model__hf_config=HfConfig(hidden_size=512))

    assert fingerprint(vllm_config(one), namespace="m") == fingerprint(other, namespace="m")
    other.model_config.dtype = Dtype("float16")
    assert fingerprint(vllm_config(one), namespace="m") != fingerprint(other, namespace="m")


# --- engines that prefixd leaves alone


@pytest.mark.parametrize(
    ("fields", "specs", "reason"),
    [
        ({"parallel__decode_context_parallel_size": 2}, (), "decode_context_parallel_size is 2"),
        ({"parallel__prefill_context_parallel_size": 2}, (), "prefill_context_parallel_size is 2"),
        ({"cache__calculate_kv_scales": True}, (), "calculate_kv_scales"),
        ({"speculative": SimpleNamespace(method="eagle")}, (), "'eagle'"),
        ({"speculative": SimpleNamespace(method="deepseek_mtp")}, (), "'deepseek_mtp'"),
        ({"speculative": SimpleNamespace(method=None)}, (), "'draft_model'"),
        ({}, (spec(), spec("CrossAttentionSpec")), "KV group 1 of 2: layers of kind CrossAttentionSpec"),
        ({}, (spec("MambaSpec"),), "mamba_cache_mode 'align', not 'none'"),
        ({}, (spec("MambaSpec", mamba_cache_mode="all"),), "mamba_cache_mode 'align', not 'all'"),
        (
            {"speculative": SimpleNamespace(method="ngram")},
            (spec(), spec("MambaSpec", mamba_cache_mode="align")),
            "KV group 1 of 2: speculative decoding",
        ),
        ({}, (spec(prefix_cacheable=False),), "(FullAttentionSpec) none has blocks"),
        ({}, (spec("SinkFullAttentionSpec"),), "SinkFullAttentionSpec"),
        ({}, (spec("RSWASpec"),), "RSWASpec"),
        ({}, (spec("HiddenStateCacheSpec"),), "HiddenStateCacheSpec"),
        ({}, (uniform(spec(), spec("SlidingWindowSpec", sliding_window=64)),), "windows of several lengths"),
        ({}, (spec(non_causal=True),), "later tokens"),
        ({}, (spec("MLAAttentionSpec", tokens_per_state=4),), "one KV state per 4 tokens"),
        ({}, (spec(block_size=32),), "block_size 32 differs"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], specs: tuple[Any, ...], reason: str) -> None:
    """One line for the log says what prefixd cannot do for this engine."""
    assert reason in str(why_unsupported(vllm_config("m", **fields), kv_cache_config(*specs)))


def test_a_model_without_attention_is_not_supported() -> None:
    """No group, nothing to keep."""
    kv = SimpleNamespace(kv_cache_groups=[], kv_cache_layout=None)

    assert "KV groups (none)" in str(why_unsupported(vllm_config("m"), kv))


@pytest.mark.parametrize(
    ("fields", "specs"),
    [
        ({}, (spec(),)),
        ({}, (uniform(spec(), spec(head_size=64)),)),
        ({}, (spec("MLAAttentionSpec"),)),
        ({"parallel__tensor_parallel_size": 2}, (uniform(spec("MLAAttentionSpec")),)),
        ({}, (spec(sliding_window=64),)),
        ({}, (spec(), spec("SlidingWindowSpec", sliding_window=64), spec("MambaSpec", mamba_cache_mode="align"))),
        ({}, (spec(), spec("CircularBufferSpec", prefix_cacheable=False))),
        ({}, (spec("ChunkedLocalAttentionSpec", attention_chunk_size=64),)),
        ({"parallel__tensor_parallel_size": 2, "parallel__pipeline_parallel_size": 2}, (spec(),)),
        ({"speculative": SimpleNamespace(method="ngram")}, (spec(),)),
        ({"speculative": SimpleNamespace(method="suffix")}, (spec(),)),
        ({"parallel__decode_context_parallel_size": 1}, (spec(),)),
    ],
)
def test_what_is_supported(fields: dict[str, Any], specs: tuple[Any, ...]) -> None:
    """Positive controls."""
    assert why_unsupported(vllm_config("m", **fields), kv_cache_config(*specs)) is None


@pytest.mark.parametrize("specs", [(spec(), spec()), (spec("SlidingWindowSpec", sliding_window=64),)])
def test_before_vllm_0_30_groups_and_windows_are_not_supported(specs: tuple[Any, ...]) -> None:
    """It could not be told that a load failed: block ids are not unique there, or say too little."""
    reason = why_unsupported(vllm_config("m"), kv_cache_config(*specs), can_fail_by_request=False)

    assert "need vLLM 0.30" in str(reason)
    assert why_unsupported(vllm_config("m"), kv_cache_config(spec()), can_fail_by_request=False) is None


@pytest.mark.parametrize(
    ("prefix_caching", "processor_cache_gb", "hashed"), [(True, 0, True), (False, 4, True), (False, 0, False)]
)
def test_when_identifiers_of_pictures_are_counters(prefix_caching: bool, processor_cache_gb: int, hashed: bool) -> None:
    """vLLM hashes pictures for its own two caches only (`_process_mm_uuids` of its renderer)."""
    multimodal = SimpleNamespace(mm_processor_cache_gb=processor_cache_gb)
    config = vllm_config("m", cache__enable_prefix_caching=prefix_caching, model__multimodal_config=multimodal)

    assert features_name_content(config) is hashed


def test_a_text_model_has_no_pictures() -> None:
    """Positive control."""
    assert features_name_content(vllm_config("m", cache__enable_prefix_caching=False))


def test_vllm_and_torch_are_not_imported() -> None:
    """The namespace is computed without the engine's libraries."""
    program = "import sys, connector.namespace; print(sorted({'vllm', 'torch', 'grpc', 'numpy'} & set(sys.modules)))"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True
    ).stdout

    assert printed.strip() == "[]"
