"""`connector.transfer`: copies between pages and slots, and the slots that are free."""

import numpy as np
import pytest
import torch

from connector.kv_layout import layout_of
from connector.transfer import Gather, SlotMemory, SlotPool, contiguous_runs, new_staging, scatter

NUM_BLOCKS, PAGE_WORDS, NUM_LAYERS = 16, 600, 3


@pytest.fixture
def pages():
    generator = torch.Generator().manual_seed(7)
    return {
        f"layer.{i}": torch.randint(-(2**62), 2**62, (NUM_BLOCKS, PAGE_WORDS), dtype=torch.int64, generator=generator)
        for i in range(NUM_LAYERS)
    }


def _layout(pages):
    return layout_of(pages, list(pages), dict.fromkeys(pages, PAGE_WORDS * 8), NUM_BLOCKS)


def _memory(layout, num_slots=12):
    step = -(-layout.payload_bytes // 4096)
    memory = SlotMemory(layout, None, new_staging(num_slots * step * 4096))
    return memory, [i * step for i in range(num_slots)]


def _payload(memory, slot):
    return np.frombuffer(memory.payload(slot), dtype=np.int64)


def test_a_payload_is_the_pages_of_the_block_layer_after_layer(pages):
    layout = _layout(pages)
    memory, slots = _memory(layout)

    Gather(layout, memory, [9, 2], slots[:2]).copy_rest()

    assert np.array_equal(_payload(memory, slots[0]), torch.cat([layer[9] for layer in pages.values()]).numpy())
    assert np.array_equal(_payload(memory, slots[1]), torch.cat([layer[2] for layer in pages.values()]).numpy())


def test_a_layer_is_in_its_slot_when_copy_layer_returns_and_is_not_copied_again(pages):
    layout = _layout(pages)
    memory, slots = _memory(layout)
    gather = Gather(layout, memory, [4], slots[:1])

    gather.copy_layer(1)
    expected = pages["layer.1"][4].clone()
    pages["layer.1"][4].zero_()
    gather.copy_rest()

    assert np.array_equal(_payload(memory, slots[0])[PAGE_WORDS : 2 * PAGE_WORDS], expected.numpy())


@pytest.mark.parametrize("targets", [[3, 4, 5, 6, 7, 8, 9, 10], [15, 1, 8, 2, 11, 5, 13, 0], [6, 7, 8, 9, 1, 0, 12, 3]])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 3, 5, 6, 7, 9, 11]])
def test_what_was_gathered_is_scattered_to_the_byte(pages, targets, chosen):
    """Contiguous and scattered block_ids, contiguous and scattered slots."""
    layout = _layout(pages)
    memory, slots = _memory(layout)
    slots = [slots[i] for i in chosen]
    sources = [1, 3, 5, 7, 9, 11, 13, 15]
    before = {name: layer.clone() for name, layer in pages.items()}
    Gather(layout, memory, sources, slots).copy_rest()

    done = scatter(layout, memory, targets, slots, lambda: False)

    assert done
    for name, layer in pages.items():
        assert torch.equal(layer[targets], before[name][sources])
        others = [b for b in range(NUM_BLOCKS) if b not in targets]
        assert torch.equal(layer[others], before[name][others])


def test_a_cancelled_scatter_says_so_and_writes_no_further(pages):
    layout = _layout(pages)
    memory, slots = _memory(layout)
    before = {name: layer.clone() for name, layer in pages.items()}
    asked = iter([False, True])

    done = scatter(layout, memory, [3], slots[:1], lambda: next(asked))

    assert not done
    assert torch.equal(pages["layer.1"], before["layer.1"])
    assert torch.equal(pages["layer.2"], before["layer.2"])


def test_slots_are_taken_from_the_longest_run_first():
    pool = SlotPool(granules_per_slot=2)
    pool.give([0, 10, 12, 14, 20])

    assert pool.take(3) == [10, 12, 14]
    assert len(pool) == 2


def test_fewer_slots_than_asked_is_an_answer():
    pool = SlotPool(granules_per_slot=1)
    pool.give([5])

    assert pool.take(4) == [5]
    assert pool.take(1) == []
    assert pool.take(2) == []


def test_a_slot_given_back_twice_stops_the_program():
    pool = SlotPool(granules_per_slot=1)
    pool.give([5])

    with pytest.raises(AssertionError, match="twice"):
        pool.give([5])


def test_runs_break_where_a_slot_is_missing_and_at_segments():
    assert contiguous_runs([0, 3, 6, 12, (1 << 32), (1 << 32) + 3], 3) == [[0, 3, 6], [12], [1 << 32, (1 << 32) + 3]]
