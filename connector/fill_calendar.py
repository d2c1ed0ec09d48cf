"""When each request's next block may be full, so that a step need not look at every request.

Of 256 decoding requests sixteen fill a block in a step (block_size 16), and to read the other 240 took half of the
time that the scheduler side spends in it: requests lie far apart in memory.

Owns one entry per request: the step in which its block may be full at the earliest, if it gets one token in each step
until then. A request that gets more is looked at in that step, so an entry is never late. It may be early (steps in
which the request got nothing, drafts that were rejected); then the caller expects the request again.

Invariant: a request has one entry or none, and an entry lies at most as many steps ahead as its block lacks tokens.
"""

from collections.abc import Collection, Mapping


class FillCalendar:
    """Times are steps: the number of calls of `take`."""

    def __init__(self) -> None:
        self._step = 0
        self._entries: dict[int, dict[str, None]] = {}  # step → the requests due in it, in the order of their entry
        self._step_of: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of requests that are expected."""
        return len(self._step_of)

    def expect(self, request_id: str, num_tokens: int) -> None:
        """Its next block is full when it was given so many tokens more: 1 or less is the next step."""
        self.forget(request_id)
        step = self._step + max(num_tokens, 1)
        self._step_of[request_id] = step
        self._entries.setdefault(step, {})[request_id] = None

    def take(self, num_scheduled: Mapping[str, int], total: int) -> Collection[str]:
        """The requests to look at in this step: those due, scheduled or not, and those given more than one token.

        num_scheduled: tokens per request; total: their sum. Entries of those due are gone: an early one is made anew.
        """
        self._step += 1
        due = self._entries.pop(self._step, {})
        for request_id in due:
            del self._step_of[request_id]
        if total != len(num_scheduled):  # not one token for each
            due.update((request_id, None) for request_id, num_tokens in num_scheduled.items() if num_tokens > 1)
        return due

    def forget(self, request_id: str) -> None:
        """It has ended, or saves nothing for now."""
        step = self._step_of.pop(request_id, None)
        if step is not None:
            del self._entries[step][request_id]
