"""Where a block's bytes lie in the KV tensors that the engine registered.

Owns the views: for each layer one view `[num_blocks, page_words]`, int64 where the alignment allows (one machine
word per copy instead of one byte), so that "the page of block b in layer l" is a row. A *payload* is the pages of
one block, layer after layer, in the order of `KVLayout.layers`.

Rule taken from vLLM (0.26 and later): a layer's tensor has the block as its first dimension, in any order of the
dimensions inside, and `page_size_bytes` from its spec. The page is a row of the tensor's storage if the bytes of a
block are one run; where they are not, `KVLayout` refuses with a reason, and the connector switches itself off.

Not here: copying (`transfer.py`), and which blocks to copy (`plan.py`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

WORD_BYTES = 8


class UnsupportedLayout(Exception):
    """The registered tensors cannot be seen as rows of pages; the text names the layer and its shape."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer: `pages[b]` is block b's page; it fills columns [start, stop) of a payload, in words."""

    name: str
    pages: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layers of one rank. Invariant: the column ranges of `layers` tile [0, payload_words)."""

    layers: tuple[LayerPages, ...]
    num_blocks: int
    word_bytes: int
    payload_words: int
    descriptor: bytes

    @property
    def payload_bytes(self) -> int:
        return self.payload_words * self.word_bytes

    @property
    def word_dtype(self) -> torch.dtype:
        return torch.int64 if self.word_bytes == WORD_BYTES else torch.uint8

    @property
    def device(self) -> torch.device:
        return self.layers[0].pages.device


def layout_of(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], page_bytes: Mapping[str, int], num_blocks: int
) -> KVLayout:
    """The layout of the layers `layer_names`, whose tensors `kv_caches` has, `page_bytes` each per block.

    Layers that share one tensor (cross-layer KV sharing) are stored once. Raises UnsupportedLayout.
    """
    rows: list[tuple[str, torch.Tensor]] = []
    seen: set[tuple[int, int]] = set()
    for name in layer_names:
        tensor = kv_caches[name]
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset() * tensor.element_size())
        if place in seen:
            continue
        seen.add(place)
        view = _page_view(tensor, num_blocks, page_bytes[name])
        if view is None:
            raise UnsupportedLayout(
                f"layer {name}: the {page_bytes[name]} bytes of a block are not one run in a tensor of shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        rows.append((name, view))
    word_bytes = WORD_BYTES if all(_is_word_aligned(view) for _, view in rows) else 1
    layers = []
    start = 0
    for name, view in rows:
        pages = view.view(torch.int64) if word_bytes == WORD_BYTES else view
        layers.append(LayerPages(name, pages, start, start + pages.shape[1]))
        start += pages.shape[1]
    descriptor = hashlib.sha256(
        repr([(kv_caches[name].dtype, tuple(kv_caches[name].shape[1:]), _inner_strides(kv_caches[name], num_blocks),
               page_bytes[name]) for name, _ in rows]).encode()
    ).digest()  # fmt: skip
    return KVLayout(tuple(layers), num_blocks, word_bytes, start, descriptor)


def _page_view(tensor: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor | None:
    """`tensor` as uint8 `[num_blocks, page_bytes]` without a copy, or None if a block is not one run of bytes."""
    if tensor.shape[0] != num_blocks and tensor.shape[0] % num_blocks == 0:
        tensor = tensor.unflatten(0, (num_blocks, -1))  # the kernel's blocks are smaller than the engine's
    if tensor.shape[0] != num_blocks:
        return None
    item = tensor.element_size()
    run = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != run:
            return None
        run *= size
    if run * item > page_bytes or tensor.stride(0) * item < page_bytes:
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(
        tensor.untyped_storage(), tensor.storage_offset() * item, (num_blocks, page_bytes), (tensor.stride(0) * item, 1)
    )


def _inner_strides(tensor: torch.Tensor, num_blocks: int) -> tuple[int, ...]:
    if tensor.shape[0] != num_blocks and tensor.shape[0] % num_blocks == 0:
        tensor = tensor.unflatten(0, (num_blocks, -1))
    return tuple(tensor.stride()[1:])


def _is_word_aligned(view: torch.Tensor) -> bool:
    return view.storage_offset() % WORD_BYTES == 0 and all(
        n % WORD_BYTES == 0 for n in (view.shape[1], view.stride(0), view.data_ptr())
    )
