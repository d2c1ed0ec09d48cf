"""`connector.kv_layout` against vLLM's own view maker: every layout it knows, kinds of specs, kernel blocks, padding.

What is right is read from vLLM's views, never from ours: blocks gathered from one buffer and scattered into another
must be equal there, and nothing else may have changed, not even the bytes that no view shows.
"""

import random

import pytest
import torch
from vllm.v1 import kv_cache_interface as vllm_kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from connector.kv_layout import layout_of, layout_of_tables
from connector.plan import NO_BLOCK
from connector.transfer import Gather, SlotMemory, new_staging, scatter

NUM_BLOCKS = 10
BF16, F32, FP8, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8
GQA = {"block_size": 32, "num_kv_heads": 4, "head_size": 16}
SPECS = {
    "full bf16": vllm_kv.FullAttentionSpec(**GQA, dtype=BF16),
    "full f32, one head": vllm_kv.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=F32),
    "full fp8": vllm_kv.FullAttentionSpec(**GQA, dtype=FP8, kv_quant_mode=vllm_kv.KVQuantMode.FP8_PER_TENSOR),
    "full, scales per token and head": vllm_kv.FullAttentionSpec(
        **GQA, dtype=torch.int8, state_content_bytes=2 * 16 + 8, kv_quant_mode=vllm_kv.KVQuantMode.INT8_PER_TOKEN_HEAD
    ),
    "full, two slots per head": vllm_kv.FullAttentionSpec(**GQA, dtype=U8, num_head_slots=8, state_content_bytes=9),
    "full, values of another size": vllm_kv.FullAttentionSpec(**GQA, head_size_v=8, dtype=BF16),
    "full, padded": vllm_kv.FullAttentionSpec(**GQA, dtype=BF16, page_size_padded=4 * 32 * 32 * 2 + 512),
    "mla": vllm_kv.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=BF16),
    "mla, padded": vllm_kv.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=U8, alignment=1024),
    "sliding window": vllm_kv.SlidingWindowSpec(**GQA, dtype=F32, sliding_window=40),
    "sliding window mla": vllm_kv.SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=36, dtype=BF16, sliding_window=40
    ),
    "chunked local": vllm_kv.ChunkedLocalAttentionSpec(**GQA, dtype=BF16, attention_chunk_size=64),
    "sinks": vllm_kv.SinkFullAttentionSpec(**GQA, dtype=BF16, sink_len=4),
    "mamba": vllm_kv.MambaSpec(block_size=64, shapes=((3, 40), (4, 8, 16)), dtypes=(BF16, F32)),
    "mamba, padded": vllm_kv.MambaSpec(block_size=64, shapes=((3, 8),), dtypes=(F32,), page_size_padded=256),
}
KERNEL_BLOCKS = {"whole blocks": 1, "kernel blocks of half": 2}


def views_of(raw, spec, layout, num_layers, split):
    """vLLM's views of a backing buffer, or None where it offers none; and where it places the layers."""
    try:
        kernel = spec.block_size // split if split > 1 else None
        layer_stride, block_stride, *_ = vllm_kv.compute_layout_strides(spec, NUM_BLOCKS, num_layers, layout)
        names = [f"layer.{i}" for i in range(num_layers)]
        tensor = vllm_kv.KVCacheTensor(raw.numel(), names, layer_stride, block_stride)
        views = vllm_kv.create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensor, kernel)
        return dict(zip(names, views, strict=True))
    except (AssertionError, ValueError, RuntimeError):  # the last: it would reach beyond the buffer
        return None


def buffer(spec, num_layers, seed):
    generator = torch.Generator().manual_seed(seed)
    size = spec.page_size_bytes * NUM_BLOCKS * num_layers
    return torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)


def content_bytes(spec):
    return getattr(spec, "unpadded_page_size_bytes", None) or spec.real_page_size_bytes


def as_bytes(view):
    """A layer's blocks as int8 `[num_blocks, …]`, in whatever order of the inside vLLM shows them."""
    blocks = vllm_kv.group_kernel_blocks(view, NUM_BLOCKS)
    return blocks.contiguous().view(torch.int8).reshape(NUM_BLOCKS, -1)


def our_layout(views, spec):
    return layout_of(views, list(views), dict.fromkeys(views, content_bytes(spec)), NUM_BLOCKS)


def move(source, target, from_blocks, to_blocks):
    """Our gather out of one layout and scatter into another; returns the payloads' bytes."""
    step = -(-source.payload_bytes // 4096)
    slots = [i * step for i in range(len(from_blocks) // source.num_tables)]
    memory = SlotMemory(source, None, new_staging(len(slots) * step * 4096))
    Gather(source, memory, from_blocks, slots).copy_rest()
    assert scatter(target, SlotMemory(target, None, memory._staging), to_blocks, slots, lambda: False)
    return [bytes(memory.payload(slot)) for slot in slots]


def offered():
    """What vLLM makes views of. State of recurrent layers has no kernel blocks."""
    return [
        pytest.param(layout, name, split, num_layers, id=f"{layout.name}-{name}-{kernel}-{num_layers} layers")
        for layout in KVCacheLayout
        for name, spec in SPECS.items()
        for kernel, split in KERNEL_BLOCKS.items()
        for num_layers in (1, 3)
        if split == 1 or isinstance(spec, vllm_kv.AttentionSpec)
        if views_of(buffer(spec, num_layers, 0), spec, layout, num_layers, split) is not None
    ]


@pytest.mark.parametrize(("layout", "name", "split", "num_layers"), offered())
def test_blocks_arrive_and_nothing_else_changes(layout, name, split, num_layers):
    spec, seed = SPECS[name], hash((layout.name, name)) % 1000
    raw, other = buffer(spec, num_layers, seed), buffer(spec, num_layers, seed + 1)
    views = views_of(raw, spec, layout, num_layers, split)
    other_views = views_of(other, spec, layout, num_layers, split)
    shown = torch.zeros_like(other, dtype=torch.bool)
    for view in views_of(shown.view(torch.int8), spec, layout, num_layers, split).values():
        view.view(torch.int8).fill_(1)
    before, before_raw = {n: as_bytes(v).clone() for n, v in other_views.items()}, other.clone()
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), 8)
    sources, targets = blocks[:4], blocks[4:]

    payloads = move(our_layout(views, spec), our_layout(other_views, spec), sources, targets)

    assert {len(payload) for payload in payloads} == {num_layers * content_bytes(spec)}
    others = [b for b in range(NUM_BLOCKS) if b not in targets]
    for layer, view in other_views.items():
        assert torch.equal(as_bytes(view)[targets], as_bytes(views[layer])[sources])
        assert torch.equal(as_bytes(view)[others], before[layer][others])
    assert torch.equal(other[~shown], before_raw[~shown])


def test_vllm_offers_most_of_these_views():
    """The control of the list above: every layout with every spec that it knows, and kernel blocks where L is first."""
    known = {(case.values[0].name, *case.values[1:3]) for case in offered()}

    assert {(layout.name, "full bf16", 1) for layout in KVCacheLayout} <= known
    assert {("LBHNC", name, 1) for name in SPECS} <= known
    assert {("LBNHC", "full bf16", 2), ("LBHNC", "mla", 2)} <= known
    assert len([case for case in known if case[2] == 1]) > 0.9 * len(KVCacheLayout) * len(SPECS)


@pytest.mark.parametrize(("one", "other"), [("LBHNC", "LHBNC"), ("LBHNC", "BHLNC"), ("LBNHC", "BLNHC")])
def test_layouts_of_one_page_order_have_the_same_payloads_and_descriptors(one, other):
    """How pages are found is no part of what is stored: these engines share."""
    spec = SPECS["full bf16"]
    raws = [buffer(spec, 2, seed) for seed in (1, 2)]
    views = [views_of(raw, spec, KVCacheLayout[layout], 2, 1) for raw, layout in zip(raws, (one, other), strict=True)]
    for name, view in views[1].items():
        view.copy_(views[0][name])
    layouts = [our_layout(each, spec) for each in views]

    assert move(layouts[0], layouts[0], [3, 5], [3, 5]) == move(layouts[1], layouts[1], [3, 5], [3, 5])
    assert layouts[0].descriptor == layouts[1].descriptor


def test_layouts_of_another_page_order_have_another_descriptor():
    spec = SPECS["full bf16"]
    heads_first, tokens_first = (
        our_layout(views_of(buffer(spec, 2, 1), spec, layout, 2, 1), spec)
        for layout in (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
    )

    assert heads_first.descriptor != tokens_first.descriptor


def test_groups_that_overlay_one_buffer_are_told_apart_by_their_tables():
    """Two groups of one model, the same memory: block 3 of the one and block 5 of the other make one payload."""
    spec = SPECS["sliding window"]
    raw, other = buffer(spec, 2, 1), buffer(spec, 2, 2)
    layouts, shown = [], []
    for each in (raw, other):
        views = views_of(each, spec, KVCacheLayout.LBHNC, 2, 1)
        both = {f"{group}.{name}": view for group in "ab" for name, view in views.items()}
        tables = [[name for name in both if name.startswith(group)] for group in "ab"]
        layouts.append(layout_of_tables(both, tables, dict.fromkeys(both, content_bytes(spec)), NUM_BLOCKS))
        shown.append(views)
    before = {name: as_bytes(view).clone() for name, view in shown[1].items()}

    payloads = move(layouts[0], layouts[1], [3, 5, 4, 6], [7, 8, NO_BLOCK, 9])

    assert layouts[0].num_tables == 2
    assert {len(payload) for payload in payloads} == {4 * content_bytes(spec)}
    for name, view in shown[1].items():
        assert torch.equal(as_bytes(view)[[7, 8, 9]], as_bytes(shown[0][name])[[3, 5, 6]])
        assert torch.equal(as_bytes(view)[:7], before[name][:7])


def test_keys_and_values_apart_and_kernel_blocks_within():
    """FlashAttention and the CPU backend up to vLLM 0.22: [2, num_blocks, …]."""
    for ratio in (1, 2):
        tensors = [torch.randn(2, NUM_BLOCKS * ratio, 8, 2, 16) for _ in range(2)]
        page_bytes = tensors[0].nbytes // NUM_BLOCKS
        layouts = [layout_of({"l": t}, ["l"], {"l": page_bytes}, NUM_BLOCKS) for t in tensors]
        before = tensors[1].clone().unflatten(1, (NUM_BLOCKS, ratio))

        move(*layouts, [2, 9], [4, 1])

        source, target = (t.unflatten(1, (NUM_BLOCKS, ratio)) for t in tensors)
        assert len(layouts[0].layers) == 2
        assert torch.equal(target[:, [4, 1]], source[:, [2, 9]])
        assert torch.equal(target[:, [0, 2, 3, 5, 6, 7, 8, 9]], before[:, [0, 2, 3, 5, 6, 7, 8, 9]])


def test_a_cross_layer_tensor_is_one_page_per_block():
    """vLLM 0.12 to 0.28 could register one tensor for all layers: [num_blocks, num_layers, …]."""
    tensor = torch.randn(NUM_BLOCKS, 3, 4, 8)
    layout = layout_of({"all": tensor}, ["all"], {"all": tensor[0].nbytes}, NUM_BLOCKS)

    assert len(layout.layers) == 1
    assert torch.equal(layout.layers[0].pages[6].view(torch.float32), tensor[6].flatten())
