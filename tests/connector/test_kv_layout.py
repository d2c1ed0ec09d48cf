"""`connector.kv_layout`: pages as rows of the engine's own tensors."""

import pytest
import torch

from connector.kv_layout import UnsupportedLayout, layout_of

NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 8, 4, 32, 64


def _block_major(dtype=torch.float32):
    """One tensor as vLLM's CPU backend registers it: [num_blocks, heads, block_size, 2 * head_size]."""
    count = NUM_BLOCKS * HEADS * BLOCK_SIZE * HEAD_SIZE
    return torch.arange(count).to(dtype).view(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE)


def _page_bytes(tensor):
    return tensor[0].numel() * tensor.element_size()


def test_a_row_of_a_layer_is_the_page_of_that_block():
    tensor = _block_major()
    layout = layout_of({"layer": tensor}, ["layer"], {"layer": _page_bytes(tensor)}, NUM_BLOCKS)

    assert torch.equal(layout.layers[0].pages[3].view(torch.float32), tensor[3].flatten())


def test_a_write_into_a_row_is_a_write_into_the_engines_tensor():
    tensor = _block_major()
    layout = layout_of({"layer": tensor}, ["layer"], {"layer": _page_bytes(tensor)}, NUM_BLOCKS)

    layout.layers[0].pages[5].zero_()

    assert not tensor[5].any()
    assert tensor[4].any()
    assert tensor[6].any()


def test_the_columns_of_the_layers_tile_the_payload():
    tensors = {f"layer.{i}": _block_major() for i in range(3)}
    layout = layout_of(tensors, list(tensors), {n: _page_bytes(t) for n, t in tensors.items()}, NUM_BLOCKS)

    assert [layer.start for layer in layout.layers] == [0, *(layer.stop for layer in layout.layers[:-1])]
    assert layout.layers[-1].stop == layout.payload_words
    assert layout.payload_bytes == 3 * _page_bytes(tensors["layer.0"])


def test_layers_that_share_one_tensor_are_stored_once():
    tensor = _block_major()
    page_bytes = _page_bytes(tensor)
    layout = layout_of({"a": tensor, "b": tensor}, ["a", "b"], {"a": page_bytes, "b": page_bytes}, NUM_BLOCKS)

    assert [layer.name for layer in layout.layers] == ["a"]


def test_strided_blocks_of_one_shared_buffer_are_rows_too():
    """Block-layer-major: the pages of two layers lie one behind the other within a block."""
    backing = torch.arange(NUM_BLOCKS * 2 * 64, dtype=torch.int64).view(NUM_BLOCKS, 2, 64)
    tensors = {"a": backing[:, 0], "b": backing[:, 1]}
    layout = layout_of(tensors, ["a", "b"], {"a": 512, "b": 512}, NUM_BLOCKS)

    assert torch.equal(layout.layers[1].pages[6], backing[6, 1])


def test_kernel_blocks_smaller_than_the_engines_are_joined():
    tensor = torch.arange(2 * NUM_BLOCKS * 16, dtype=torch.int64).view(2 * NUM_BLOCKS, 16)
    layout = layout_of({"layer": tensor}, ["layer"], {"layer": 256}, NUM_BLOCKS)

    assert torch.equal(layout.layers[0].pages[3], tensor[6:8].flatten())


def test_pages_that_are_no_whole_words_are_copied_by_bytes():
    tensor = torch.zeros(NUM_BLOCKS, 3, 5, dtype=torch.uint8)
    layout = layout_of({"layer": tensor}, ["layer"], {"layer": 15}, NUM_BLOCKS)

    assert layout.word_bytes == 1
    assert layout.payload_bytes == 15


def test_a_block_in_too_many_runs_is_refused_with_the_shape():
    tensor = torch.zeros(1024, NUM_BLOCKS, 16, dtype=torch.uint8).permute(1, 2, 0)

    with pytest.raises(UnsupportedLayout, match=r"layer: .*\(8, 16, 1024\)"):
        layout_of({"layer": tensor}, ["layer"], {"layer": 16384}, NUM_BLOCKS)


def test_blocks_that_overlap_are_refused():
    tensor = torch.zeros(NUM_BLOCKS, 1, 64).expand(NUM_BLOCKS, 4, 64)

    with pytest.raises(UnsupportedLayout, match="layer"):
        layout_of({"layer": tensor}, ["layer"], {"layer": 1024}, NUM_BLOCKS)


def test_a_rank_without_a_layer_is_refused():
    with pytest.raises(UnsupportedLayout, match="no layer"):
        layout_of({}, [], {}, NUM_BLOCKS)


def test_descriptors_differ_where_bytes_would_be_misread():
    def descriptor(tensor):
        return layout_of({"layer": tensor}, ["layer"], {"layer": _page_bytes(tensor)}, NUM_BLOCKS).descriptor

    heads_first = torch.zeros(NUM_BLOCKS, 4, 32, 64)
    tokens_first = torch.zeros(NUM_BLOCKS, 32, 4, 64).transpose(1, 2)

    assert descriptor(heads_first) == descriptor(torch.ones(NUM_BLOCKS, 4, 32, 64))
    assert descriptor(heads_first) != descriptor(tokens_first)
    assert descriptor(heads_first) != descriptor(torch.zeros(NUM_BLOCKS, 2, 64, 64))
    assert descriptor(heads_first) != descriptor(torch.zeros(NUM_BLOCKS, 4, 32, 64, dtype=torch.int32))
