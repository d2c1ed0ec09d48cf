"""`connector.groups`: vLLM's KV groups become store groups."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector.groups import Groups, fingerprint_of, groups_of, needed_pages
from connector.plan import NO_BLOCK


def spec(kind: str, block_size: int = 16, **fields: Any) -> Any:
    return type(kind, (), {"block_size": block_size, **fields})()


def full(block_size: int = 16, **fields: Any) -> Any:
    return spec("FullAttentionSpec", block_size, **fields)


def window(num_tokens: int, block_size: int = 16) -> Any:
    return spec("SlidingWindowSpec", block_size, sliding_window=num_tokens)


def stored(*specs: Any, tensor_parallel: int = 1, **of_config: Any) -> Groups:
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs], **of_config)
    return groups_of(config, SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel)))


@pytest.mark.parametrize(
    ("one", "pages"),
    [
        (full(), 0),
        (spec("MLAAttentionSpec"), 0),
        (full(sliding_window=64), 0),  # with the hybrid manager off all blocks are kept
        (spec("MambaSpec", 128), 1),
        (window(1), 1),
        (window(2), 1),
        (window(17), 1),
        (window(18), 2),  # 17 tokens before the next one
        (window(64, 32), 2),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=48), 3),
    ],
)
def test_how_many_blocks_before_a_boundary_are_needed(one: Any, pages: int) -> None:
    assert needed_pages(one) == pages


def test_groups_that_are_needed_alike_are_stored_together() -> None:
    """As Gemma-3: one payload for both window groups, the one with all blocks first."""
    groups = stored(window(64), window(64), full(), window(200))

    assert groups.unit == 16
    assert [(group.window, [m.group_id for m in group.members]) for group in groups.stored] == [
        (0, [2]),
        (13, [3]),
        (4, [0, 1]),
    ]
    assert groups.group_ids == (0, 1, 2, 3)
    assert not groups.is_plain


def test_one_group_of_full_attention_is_plain() -> None:
    assert stored(full()).is_plain
    assert stored(spec("MLAAttentionSpec")).is_plain
    assert not stored(window(64)).is_plain
    assert not stored(full(), spec("CircularBufferSpec", prefix_cacheable=False)).is_plain


def test_a_unit_is_a_multiple_of_every_groups_block() -> None:
    """Blocks of 16 and 48: three pages of the first to a unit; of a short window only those that are needed."""
    groups = stored(full(16), window(40, 48), window(20, 16))

    assert groups.unit == 48
    assert [(group.window, [(m.per_unit, m.kept) for m in group.members]) for group in groups.stored] == [
        (0, [(3, 3)]),
        (1, [(1, 1), (3, 2)]),
    ]


def test_pages_of_a_unit_are_those_of_all_tables_and_null_blocks_are_none() -> None:
    groups = stored(full(16), window(40, 48), window(20, 16))
    all_of, windows = groups.stored
    tables = [[1, 2, 3, 4, 5, 6], [0, 7], [0, 0, 0, 0, 8, 9]]

    assert all_of.pages(tables, 1) == (4, 5, 6)
    assert windows.pages(tables, 1) == (7, 8, 9)
    assert windows.pages(tables, 0) is None
    assert windows.pages([[], [1], [2]], 0) is None, "not allocated yet"
    assert windows.pages_to_load([[], [0, 7], [0, 0, 0, 0, 0, 9]], 1) == (7, NO_BLOCK, 9)


def test_a_unit_outside_the_window_of_the_next_token_may_be_freed() -> None:
    """Window of 40, blocks of 16: at token 100 vLLM keeps what is needed from token 61 on, block 3 and later."""
    (_, group) = stored(full(), window(40)).stored

    assert [group.is_alive(unit, 100) for unit in range(7)] == [False, False, False, True, True, True, True]
    (_, state) = stored(full(), spec("MambaSpec")).stored
    assert not state.is_alive(5, 97), "recurrent state moves on with every block"


@pytest.mark.parametrize(
    ("one", "of_config", "replicas"),
    [
        (full(), {}, 1),
        (spec("MLAAttentionSpec"), {}, 8),
        (spec("MambaSpec", tp_replicated=True), {}, 8),
        (full(max_tp_shards=2), {}, 4),  # two KV heads over eight ranks
        (full(max_tp_shards=8), {}, 1),
        (full(max_tp_shards=16), {}, 1),
        (full(), {"kv_tp_replicas": 4}, 4),
    ],
)
def test_ranks_that_hold_the_same_bytes(one: Any, of_config: dict[str, int], replicas: int) -> None:
    assert stored(one, tensor_parallel=8, **of_config).stored[0].replicas == replicas


def test_namespaces_of_store_groups_differ_and_a_single_one_is_the_engines() -> None:
    hybrid = stored(full(), window(40))
    names = {fingerprint_of(b"f" * 32, hybrid, 0), fingerprint_of(b"f" * 32, hybrid, 1), b"f" * 32}

    assert len(names) == 3
    assert {len(name) for name in names} == {32}
    assert fingerprint_of(b"f" * 32, stored(full()), 0) == b"f" * 32
