"""Where a sequence can be gone on with, when several kinds of blocks are needed for it: arithmetic, no state.

A *boundary* is a number of leading blocks. To go on there every kind (*group*) needs the blocks right before it: all of
them, or the last `window` ones (sliding-window attention), or the last one (recurrent state). What lies before `first`
the asker has itself. So boundary b > first is *open* for a group when its blocks [max(first, b - window), b) are
present, and open when it is for every group.

    blocks     0 1 2 3 4 5 6 7 8           first = 2
    all        x x x x x x x . x           → b = 3 … 7
    window 2   . . . . x x . x .           → b = 6 (needs 4, 5); b = 8 (needs 6, 7) is not
    last       . . . x . x . . .           → b = 4, 6
                             ^ b = 6: the answer
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


def runs_before(present: Flags) -> Numbers:
    """For each boundary 0 … n: how many present blocks stand right before it."""
    n = len(present)
    absent = np.where(present, -1, np.arange(n))
    last_absent = np.concatenate(([-1], np.maximum.accumulate(absent))) if n else np.array([-1])
    runs: Numbers = np.arange(n + 1) - 1 - last_absent
    return runs


def open_boundaries(present: Sequence[Flags], windows: Sequence[int], first: int) -> Flags:
    """For each boundary 0 … n: whether it is open. `windows`: 0 needs all."""
    boundaries = np.arange(len(present[0]) + 1)
    is_open = boundaries > first
    for flags, window in zip(present, windows, strict=True):
        needed = boundaries - first
        if window:
            needed = np.minimum(needed, window)
        is_open &= runs_before(flags) >= needed
    return is_open


def starts(present: Flags, window: int) -> Numbers:
    """For each boundary: where the group's run before it begins, no earlier than its window."""
    run = runs_before(present)
    return np.arange(len(present) + 1) - (np.minimum(run, window) if window else run)
