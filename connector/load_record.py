"""What became of the loads lately, so that nothing is promised that has just been seen to fail.

vLLM computes what a failed load did not bring and asks again for the next request. Nothing in its interface keeps
it from being promised the same again, so that is remembered here, in two kinds:

    a block       failed twice in a row: it is not promised for a while. Once is no sign: it may have been evicted.
    loads at all  one ended incomplete at its deadline, so the way is too slow or broken: none is promised for a while

Either pause doubles with each failure in a row and stays short enough that a cache which is well again is used again
within ten seconds. A success ends it at once.

Not here: the request whose load failed, which is computed whatever is said here (`scheduler.py`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from connector.backoff import Backoff

PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 8.0
MAX_BAD_KEYS = 4096  # the oldest are forgotten


class LoadRecord:
    """Of one engine. Called by the scheduler's thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, clock)
        self._bad: OrderedDict[bytes, Backoff | None] = OrderedDict()  # None: it failed once

    def ended(self, keys: Sequence[bytes], failed: Sequence[bool], *, late: bool) -> None:
        """A load of `keys` ended. `late`: at its deadline, so that what failed was not there in time."""
        for key, has_failed in zip(keys, failed, strict=True):
            if has_failed and not late:
                self._note_failure(key)
            elif not has_failed:
                self._bad.pop(key, None)
        if late:
            self._loads.failed()
        elif not all(failed):
            self._loads.worked()

    def _note_failure(self, key: bytes) -> None:
        if key not in self._bad:
            self._bad[key] = None
            if len(self._bad) > MAX_BAD_KEYS:
                self._bad.popitem(last=False)
            return
        backoff = self._bad[key]
        if backoff is None:
            backoff = self._bad[key] = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, self._clock)
        backoff.failed()

    def withholds_loads(self) -> bool:
        """Whether no load is to be promised now."""
        return self._loads.left_s() > 0

    def num_good(self, keys: Iterable[bytes], num_keys: int) -> int:
        """How many of the leading `num_keys` blocks may be promised. `keys` is not touched while all is well."""
        if not self._bad:
            return num_keys
        for number, key in enumerate(keys):
            backoff = self._bad.get(key)
            if backoff is not None and backoff.left_s() > 0:
                return number
        return num_keys
