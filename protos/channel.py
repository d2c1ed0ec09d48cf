"""A client's line to a server: TLS where certificates are given, and the token with every call.

Part of the wire, as the generated stubs are: the connector and the command line both use it. grpc's own call
credentials work over TLS only, its interceptors wrap every call and its future; here the header is added where a call
is made, and everything else is grpc's.

Not here: where files lie and what is allowed (`connector/config.py`, `cache_server`).
"""

from collections.abc import Sequence
from typing import Any, Self

import grpc


def open_channel(
    address: str,
    options: Sequence[tuple[str, Any]] = (),
    *,
    token: str | None = None,
    ca: bytes | None = None,
    cert: bytes | None = None,
    key: bytes | None = None,
    tls_server_name: str | None = None,
) -> Any:
    """A channel to `address` (`unix:///PATH` or `HOST:PORT`), with TLS if `ca` (PEM) says whom to trust."""
    if ca is None:
        channel = grpc.insecure_channel(address, options=list(options))
    else:
        named = [("grpc.ssl_target_name_override", tls_server_name)] if tls_server_name is not None else []
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        channel = grpc.secure_channel(address, credentials, options=[*options, *named])
    return channel if token is None else _WithToken(channel, token)


class _WithToken:
    """A `grpc.Channel` whose calls carry a token. Offers what stubs and clients of ours use of it."""

    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Call(self._channel.unary_unary(*args, **kwargs), self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Call(self._channel.unary_stream(*args, **kwargs), self._metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Call(self._channel.stream_unary(*args, **kwargs), self._metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Call(self._channel.stream_stream(*args, **kwargs), self._metadata)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Call:
    """One method of the channel."""

    def __init__(self, call: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._call = call
        self._metadata = metadata

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        return self._call(request, timeout=timeout, metadata=self._metadata)

    def future(self, request: Any, timeout: float | None = None) -> Any:
        return self._call.future(request, timeout=timeout, metadata=self._metadata)
