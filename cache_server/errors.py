"""What can be wrong with a request, as values that `service.py` turns into status codes.

    RequestError
    ├── InvalidRequest      the request contradicts itself, its limits or its session   INVALID_ARGUMENT
    ├── SessionEnded        attach again                                                FAILED_PRECONDITION
    ├── Mismatch            another session fixed this otherwise                        FAILED_PRECONDITION
    ├── TooMany             a bound that other clients use up                           RESOURCE_EXHAUSTED
    ├── Unauthenticated     no token, or one that is not valid here                     UNAUTHENTICATED
    └── Forbidden           the token does not permit it                                PERMISSION_DENIED

Not here: absence. A missing block, a full memory or a lost race are answers, not errors. Whoever raises one of
these has not changed any state.
"""


class RequestError(Exception):
    """The request was not carried out and nothing changed."""


class InvalidRequest(RequestError):
    """The request contradicts itself, its limits or its session; sending it again will not help."""


class SessionEnded(RequestError):
    """The session is unknown or over; the client attaches again. The message starts with 'session'."""


class Mismatch(RequestError):
    """Another session has fixed this otherwise (layout, payload size, number of shards)."""


class TooMany(RequestError):
    """A bound that protects the server is reached; later may be better, `retry_ms` from now if that is known."""

    def __init__(self, text: str, retry_ms: int = 0) -> None:
        super().__init__(text)
        self.retry_ms = retry_ms


class Unauthenticated(RequestError):
    """Nobody we know. The message never holds what was sent."""


class Forbidden(RequestError):
    """Somebody we know, who may not."""
