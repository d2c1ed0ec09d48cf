"""Which weights lie where: a fingerprint of files that does not read terabytes.

A file counts by its name, its size, its safetensors header (names, types and places of the tensors) and samples of its
bytes: the middle of every tensor, at most 128 per file. That tells two models apart and a fine-tuned one from its base,
whose sizes and header are equal and which may differ in its attention layers only. It does not tell apart files that
were made to be confused: whoever can write the model's files is trusted.

Not here: what else a model is (`namespace.py`), LoRA adapters (`lora_identity.py`).
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 4096
# 128 per file bound the start-up to about ten thousand small reads for the largest models.
MAX_SAMPLES_PER_FILE = 128
_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own limit
_U32 = struct.Struct("<I")


def weight_files(name: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """The files that hold the weights, by name; none if they are not on this machine.

    A directory without files of a known kind counts as a whole: what is not understood must still make a difference.
    """
    path = Path(name)
    if path.is_file():
        return [path]
    directory = path if path.is_dir() else hub_snapshot(name, revision, download_dir)
    if directory is None:
        return []
    files = sorted((file for file in directory.iterdir() if file.is_file()), key=lambda file: file.name)
    weights = [file for file in files if file.suffix in WEIGHT_SUFFIXES]
    return weights or (files if directory == path else [])


def hub_snapshot(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where the Hugging Face cache keeps `name` at `revision`: <cache>/models--ORG--NAME/snapshots/<commit>."""
    if name.count("/") > 1 or "://" in name:
        return None
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = download_dir or os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"
    repository = Path(cache).expanduser() / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    reference = repository / "refs" / commit
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def files_fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over each file's name, size, safetensors header and samples."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header = _safetensors_header(stream, size) if file.suffix == ".safetensors" else b""
            for part in (file.name.encode(), str(size).encode(), header):
                digest.update(_with_length(part))
            for start in sample_starts(header, size):
                stream.seek(start)
                digest.update(_with_length(stream.read(SAMPLE_BYTES)))
    return digest.hexdigest()


def _safetensors_header(stream: BinaryIO, size: int) -> bytes:
    """The tensors' names, types and places: a JSON text after its length in the first eight bytes."""
    header_bytes = int.from_bytes(stream.read(8), "little")
    return stream.read(header_bytes) if header_bytes <= min(size, _MAX_SAFETENSORS_HEADER_BYTES) else b""


def sample_starts(header: bytes, size: int) -> list[int]:
    """The middle of every tensor; where they are too many or unknown, places spread evenly over them or the file."""
    try:
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        bounds = sorted((int(tensor["data_offsets"][0]), int(tensor["data_offsets"][1])) for tensor in tensors)
        starts = [8 + len(header) + max(start, (start + stop - SAMPLE_BYTES) // 2) for start, stop in bounds]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        starts = list(range(0, size, SAMPLE_BYTES))
    if len(starts) <= MAX_SAMPLES_PER_FILE:
        return starts
    last = len(starts) - 1
    return [starts[sample * last // (MAX_SAMPLES_PER_FILE - 1)] for sample in range(MAX_SAMPLES_PER_FILE)]


def _with_length(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data
