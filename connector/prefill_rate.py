"""How fast this engine computes prompts: what the server weighs a load against.

A pure estimate, fed with (tokens, seconds) of the engine's steps. Invariant: it is a ratio of sums, of which older
steps fade, so that one slow first step (compilation, cold caches) is forgotten and one step does not decide.

Not here: when a step begins and ends (`scheduler.py`), and the decision (the server's gate).
"""

MIN_TOKENS = 64  # a step with fewer prompt tokens says more of decoding than of prefilling
FADE = 0.7  # weight of what was known, at each new step


class PrefillRate:
    """Tokens per second, over the last few steps that computed prompts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `seconds` computed `num_tokens` prompt tokens, perhaps beside decoding."""
        if num_tokens >= MIN_TOKENS and seconds > 0:
            self._tokens = FADE * self._tokens + num_tokens
            self._seconds = FADE * self._seconds + seconds

    def us_per_block(self, block_size: int) -> float:
        """Microseconds to compute one block; 0 while nothing was measured."""
        return block_size * self._seconds / self._tokens * 1e6 if self._tokens else 0.0
