"""What one request may ask of the cache: two keys of its `kv_transfer_params`.

    "prefixd.save"   "all": every full block (the default), "prompt": no decoded tokens, "none": nothing
    "prefixd.load"   false: compute the prompt, whatever the cache has; true is the default

The names carry our prefix because MultiConnector hands one and the same dictionary to all its connectors. A client's
mistake never costs it its request: a value that is not one of these counts as absent, a key with our prefix that we do
not know does nothing, and either is named in one warning per key.

Not here: the engine-wide settings (`config.py`); what a role or a kind of request forbids anyway (`scheduler.py`).
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.prefixd")

PREFIX = "prefixd."
SAVE = f"{PREFIX}save"
LOAD = f"{PREFIX}load"
SAVES = ("all", "prompt", "none")
# Clients choose the keys: so many different ones are named in the log, and no more.
MAX_WARNINGS = 32


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """`save` None: the request has no wish, the engine's setting holds."""

    save: str | None = None
    load: bool = True


class OptionReader:
    """Reads the options of requests, and remembers which keys it has warned of."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, request: Any) -> RequestOptions:
        params = getattr(request, "kv_transfer_params", None)
        if not params or not isinstance(params, Mapping):
            return RequestOptions()
        for key, complaint in _complaints(params):
            self._warn(key, complaint)
        save, load = params.get(SAVE), params.get(LOAD)
        return RequestOptions(
            save=save if isinstance(save, str) and save in SAVES else None,
            load=load if isinstance(load, bool) else True,
        )

    def _warn(self, key: str, complaint: str) -> None:
        if key not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(key)
            logger.warning("prefixd: kv_transfer_params %r: %s; ignored (reported once per key)", key[:100], complaint)


def _complaints(params: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in params.items():
        if not isinstance(key, str) or not key.startswith(PREFIX):
            continue  # another connector's
        if key == SAVE:
            if not isinstance(value, str) or value not in SAVES:
                yield key, f"{repr(value)[:100]} is not one of {', '.join(map(repr, SAVES))}"
        elif key == LOAD:
            if not isinstance(value, bool):
                yield key, f"{repr(value)[:100]} is neither true nor false"
        else:
            yield key, f"unknown, {SAVE!r} and {LOAD!r} are known"
