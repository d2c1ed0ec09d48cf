"""Where a block's bytes lie in the KV tensors that the engine registered.

Owns the views: for each run of bytes that a page consists of one view `[num_blocks, run_words]`, int64 where the
alignment allows (one machine word per copy instead of one byte), so that "this run of block b" is a row. A *payload*
is the runs of one block, layer after layer, in the order of `KVLayout.layers`.

A payload may hold the pages of several block tables (`connector/groups.py`): vLLM keeps one table per KV group, and a
group whose blocks are shorter than our unit has several pages in it. `LayerPages.table` says which of the payload's
block ids names the page.

Rules taken from vLLM (0.26 and later): the block is a tensor's first dimension (or the second, behind one of two for
keys and values), in any order of the dimensions inside. Kernel blocks that are smaller than the engine's follow one
another within it. A page is one run of bytes in most layouts (LBHNC, LBNHC, BLHNC, BLNHC); where heads stand before
blocks or layers (LHBNC, BHLNC), and where keys and values are apart, it is one run per head or per half. The bytes of a
payload are in memory order of the dimensions inside a block, so a page that is found in one run and one that is found
in several give the same payload: what tells them apart is how they are found, not what is in them.

Groups of one model overlay the same memory, since a block id belongs to one group at a time. Layers that share a page
(cross-layer KV sharing) are stored once.

Not here: copying (`transfer.py`), and which blocks to copy (`plan.py`).
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

WORD_BYTES = 8
MAX_RUNS_PER_PAGE = 512  # more would be copied in crumbs: 256 heads, keys and values apart


class UnsupportedLayout(Exception):
    """The registered tensors cannot be seen as rows of pages; the text names the layer and its shape."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One run of bytes of a layer's pages: `pages[b]` is block b's, and fills columns [start, stop) of a payload, in
    words. `table`: which of the payload's block ids is b."""

    name: str
    pages: torch.Tensor
    start: int
    stop: int
    table: int = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All that one rank stores of a block. Invariant: the column ranges of `layers` tile [0, payload_words)."""

    layers: tuple[LayerPages, ...]
    num_blocks: int
    word_bytes: int
    payload_words: int
    descriptor: bytes
    num_tables: int = 1

    @property
    def payload_bytes(self) -> int:
        return self.payload_words * self.word_bytes

    @property
    def word_dtype(self) -> torch.dtype:
        return torch.int64 if self.word_bytes == WORD_BYTES else torch.uint8

    @property
    def device(self) -> torch.device:
        return self.layers[0].pages.device

    def runs_of_layers(self) -> dict[str, tuple[int, ...]]:
        """Layer name → its places in `layers`."""
        runs: dict[str, tuple[int, ...]] = {}
        for index, layer in enumerate(self.layers):
            runs[layer.name] = (*runs.get(layer.name, ()), index)
        return runs


def layout_of(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], page_bytes: Mapping[str, int], num_blocks: int
) -> KVLayout:
    """The layout of the layers `layer_names`, whose tensors `kv_caches` has, `page_bytes` each per block; one block
    table for all. Raises UnsupportedLayout.
    """
    return layout_of_tables(kv_caches, [layer_names], page_bytes, num_blocks)


def layout_of_tables(
    kv_caches: Mapping[str, torch.Tensor],
    tables: Sequence[Sequence[str]],
    page_bytes: Mapping[str, int],
    num_blocks: int,
) -> KVLayout:
    """As `layout_of`, for payloads of one page of each layer in `tables[t]` per table t. Raises UnsupportedLayout.

    page_bytes: without what pads a page. A tensor may show less of it (scales that the engine keeps behind the page).
    """
    rows: list[tuple[int, str, torch.Tensor]] = []
    described: list[object] = []
    for table, layer_names in enumerate(tables):
        seen: set[tuple[int, int]] = set()
        for name in layer_names:
            tensor = kv_caches[name]
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset() * tensor.element_size())
            if place in seen:
                continue
            seen.add(place)
            views = _runs(tensor, num_blocks, page_bytes[name])
            if views is None:
                raise UnsupportedLayout(
                    f"layer {name}: the {page_bytes[name]} bytes of a block are not up to {MAX_RUNS_PER_PAGE} runs "
                    f"in a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                )
            rows.extend((table, name, view) for view in views)
            described.append((table, str(tensor.dtype), _memory_order(tensor, num_blocks), page_bytes[name]))
    if not rows:
        raise UnsupportedLayout("this rank has no layer of the group")
    word_bytes = WORD_BYTES if all(_is_word_aligned(view) for _, _, view in rows) else 1
    layers = []
    start = 0
    for table, name, view in rows:
        pages = view.view(torch.int64) if word_bytes == WORD_BYTES else view
        layers.append(LayerPages(name, pages, start, start + pages.shape[1], table))
        start += pages.shape[1]
    descriptor = hashlib.sha256(repr(described).encode()).digest()
    return KVLayout(tuple(layers), num_blocks, word_bytes, start, descriptor, len(tables))


def _by_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor | None:
    """`tensor` with the engine's block as its first dimension, kernel blocks inside of it."""
    if tensor.dim() > 1 and tensor.shape[0] == 2 != num_blocks and tensor.shape[1] % num_blocks == 0:
        tensor = tensor.transpose(0, 1)  # keys and values apart
    if tensor.shape[0] == num_blocks:
        return tensor
    if tensor.shape[0] == 0 or tensor.shape[0] % num_blocks:
        return None
    return tensor.unflatten(0, (num_blocks, -1))  # the kernel's blocks are smaller than the engine's


def _inner(tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """(stride, size, dimension) of the dimensions inside a block, as they lie in memory, outermost first."""
    dims = [(tensor.stride(d), tensor.shape[d], d) for d in range(1, tensor.dim()) if tensor.shape[d] > 1]
    return sorted(dims, reverse=True)


def _runs(tensor: torch.Tensor, num_blocks: int, page_bytes: int) -> list[torch.Tensor] | None:
    """`tensor` as views uint8 `[num_blocks, run_bytes]` without a copy, whose rows are a block's bytes in memory order.
    None if there are too many runs, or if they overlap."""
    blocks = _by_block(tensor, num_blocks)
    if blocks is None:
        return None
    item = blocks.element_size()
    run = 1
    outer: list[tuple[int, int]] = []
    for stride, size, _ in reversed(_inner(blocks)):
        if stride == run and not outer:
            run *= size
        elif stride < (outer[-1][0] * outer[-1][1] if outer else run):
            return None  # overlapping, or interleaved
        else:
            outer.append((stride, size))
    offsets = [sum(parts) for parts in itertools.product(*(range(0, s * n, s) for s, n in reversed(outer)))]
    run_bytes, block_stride = run * item, blocks.stride(0) * item
    if not outer and run_bytes < page_bytes:
        run_bytes = page_bytes  # the engine keeps more in a page than the tensor shows
    if len(offsets) > MAX_RUNS_PER_PAGE or len(offsets) * run_bytes != page_bytes or block_stride < run_bytes:
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage, first = tensor.untyped_storage(), blocks.storage_offset()
    return [
        torch.empty_like(flat).set_(storage, (first + offset) * item, (num_blocks, run_bytes), (block_stride, 1))
        for offset in offsets
    ]


def _memory_order(tensor: torch.Tensor, num_blocks: int) -> list[tuple[int, int]]:
    """(dimension, size) inside a block in memory order: what the bytes of a payload mean."""
    blocks = _by_block(tensor, num_blocks)
    assert blocks is not None
    return [(dimension, size) for _, size, dimension in _inner(blocks)]


def _is_word_aligned(view: torch.Tensor) -> bool:
    return view.storage_offset() % WORD_BYTES == 0 and all(
        n % WORD_BYTES == 0 for n in (view.shape[1], view.stride(0), view.data_ptr())
    )
