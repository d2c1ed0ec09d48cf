"""Which adapter a LoRA name stands for: its content, as far as the files can be read.

An adapter that was trained anew is often put where the old one lay, under its old name. So a request's keys hold the
content of its adapter (name, size, header and samples of each file, as for the model), and where that cannot be
read its path.

Invariant: one adapter of one engine has one content for ever. vLLM loads an adapter's files when it needs them, perhaps
again later, and nobody tells us when. So content is fixed when the adapter is first seen here, and when its files
change afterwards its requests have no key any more (no hit, no save) until the engine starts anew or the adapter is
loaded under another id.

Cost: the files are sampled once; then each request stats the adapter's few files, on the scheduler's thread.

Not here: adapters that vLLM reloads under one id (`load_inplace`); `block_keys.cannot_be_keyed` turns them away.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.weights import files_fingerprint, weight_files

_CONFIG = "adapter_config.json"  # rank, scale, target modules: the same weights act otherwise under another one
_Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What was found when the adapter was first seen. `content` None: nothing that can be read."""

    content: str | None
    signature: _Signature


class Adapters:
    """The adapters that this engine has seen. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], _Adapter] = {}

    def content_of(self, lora: Any) -> str | None:
        """The content of a vLLM `LoRARequest`'s adapter, or None: its path has to do."""
        return self._adapter(lora).content

    def why_doubtful(self, request: Any) -> str | None:
        """Why the blocks of this vLLM request have no key, or None."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        known = self._adapter(lora)
        if _signature(_files(lora)) != known.signature:
            return "a LoRA adapter whose files changed while the engine runs"
        return None

    def _adapter(self, lora: Any) -> _Adapter:
        name = (getattr(lora, "lora_int_id", 0), str(lora.lora_name), str(getattr(lora, "lora_path", "")))
        known = self._known.get(name)
        if known is None:
            files = _files(lora)
            signature = _signature(files)
            try:
                content = files_fingerprint(files) if files else None
            except OSError:  # gone in between: the next request finds another signature
                content = None
            known = self._known[name] = _Adapter(content, signature)
        return known


def _files(lora: Any) -> list[Path]:
    """The weights and the configuration of an adapter; none if they are not on this machine."""
    path = str(getattr(lora, "lora_path", "") or "")
    try:
        weights = weight_files(path, None, None) if path else []
        return weights + [file for file in {weight.parent / _CONFIG for weight in weights} if file.is_file()]
    except OSError:
        return []


def _signature(files: list[Path]) -> _Signature:
    """What changes when a file is written or replaced."""
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)
