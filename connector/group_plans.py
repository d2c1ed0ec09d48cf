"""What the scheduler side says in a step of a model with several KV groups: specs made of tables, and nothing kept.

`scheduler.py` tells the story for the one table that most models have; here are the places where there are several
store groups (`groups.py`) to a unit. A unit is saved for each group by itself, and loaded for all as one load.

Not here: when anything is saved or loaded (`scheduler.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from connector.block_keys import BlockKeys
from connector.client import GroupAnswer, LookupAnswer, checksums_of
from connector.groups import Groups, StoreGroup
from connector.plan import NO_BLOCK, BlockName, BlockTableChange, LoadSpec, SaveSpec


class GroupPlans:
    """The specs of one engine."""

    def __init__(self, groups: Groups) -> None:
        self._unit = groups.unit
        self._stored = groups.stored

    @staticmethod
    def follow(tables: list[list[int]], change: BlockTableChange) -> None:
        """Keeps `tables`, one per KV group, as the worker's are."""
        if change.replaces:
            tables[:] = [list(block_ids) for block_ids in change.groups]
        else:
            for table, block_ids in zip(tables, change.groups, strict=True):
                table.extend(block_ids)

    def saves(
        self, tables: Sequence[Sequence[int]], unit: int, start: int, end: int, answer: LookupAnswer | None
    ) -> Iterator[SaveSpec]:
        """What of `unit`, which is full after this step, can be saved and is not there. The step computes tokens
        [start, end). A unit that was full before it (rejected drafts held its name back) may have left the window."""
        for index, group in enumerate(self._stored):
            if group.at_end_only and end != (unit + 1) * self._unit:
                continue
            if group.window and (unit + 1) * self._unit <= start and not group.is_alive(unit, start):
                continue
            if answer is None or not _of(answer, index).is_present(unit):
                yield from self._save(tables, index, group, unit, None)

    def saves_absent(
        self,
        tables: Sequence[Sequence[int]],
        keys: BlockKeys,
        stop: int,
        answer: LookupAnswer,
        *,
        is_late: bool,
    ) -> Iterator[SaveSpec]:
        """What of the units [0, stop), which the engine had itself, is not there. `is_late`: some steps have run since
        the tables were vLLM's, and it may have freed what has left its window."""
        for index, group in enumerate(self._stored):
            if is_late and group.window:
                continue
            for unit in range(max(0, stop - group.window) if group.window else 0, stop):
                if not _of(answer, index).is_present(unit):
                    yield from self._save(tables, index, group, unit, BlockName(*keys.key_and_parent(unit), unit))

    @staticmethod
    def _save(
        tables: Sequence[Sequence[int]], index: int, group: StoreGroup, unit: int, name: BlockName | None
    ) -> Iterator[SaveSpec]:
        pages = group.pages(tables, unit)
        if pages is not None:
            yield SaveSpec(pages[0], name, group=index, more=pages[1:])

    def load(
        self,
        request_id: str,
        tables: Sequence[Sequence[int]],
        keys: BlockKeys,
        start: int,
        stop: int,
        answer: LookupAnswer,
        lease_id: int,
        timeout_s: float,
    ) -> LoadSpec:
        """Units [start, stop): all of them of the groups that need all, the window before `stop` of the others."""
        assert stop == answer.hit_end, f"a load to {stop}: what is promised is enough to go on at {answer.hit_end}"
        specs: list[LoadSpec] = []
        for index, group in reversed(list(enumerate(self._stored))):
            of = _of(answer, index)
            begin = group.begin(start, stop)
            pages = [group.pages_to_load(tables, unit) for unit in range(begin, stop)]
            while pages and set(pages[0]) == {NO_BLOCK}:  # the window was rounded up to units
                pages.pop(0)
                begin += 1
            if not pages:
                continue
            columns = slice(begin - of.hit_start, stop - of.hit_start)
            spec = LoadSpec(
                request_id,
                tuple(block_id for unit in pages for block_id in unit),
                keys.packed(begin, stop),
                np.ascontiguousarray(of.slots[:, columns]).tobytes(),
                np.ascontiguousarray(of.generations[:, columns]).tobytes(),
                lease_id,
                answer.server_epoch,
                timeout_s,
                checksums_of(of, columns),
                group=index,
                num_tables=group.num_tables,
                num_tokens=(stop - start) * self._unit,
            )
            specs.append(spec)
        assert specs, f"nothing to load for {stop - start} units of request {request_id}"
        return replace(specs.pop(), others=tuple(reversed(specs)))

    @staticmethod
    def no_block_ids(num_units: int) -> tuple[int, ...]:
        """Of a load of the first group that is to fail."""
        return (NO_BLOCK,) * num_units


def _of(answer: LookupAnswer, index: int) -> LookupAnswer | GroupAnswer:
    return answer.others[index - 1] if index else answer
