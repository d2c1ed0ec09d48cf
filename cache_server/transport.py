"""Sockets and TLS: how an address is bound, and certificates that are read again when their files change.

TLS certificates are looked at anew with every handshake (grpc asks us), so a renewed one is used by the next client
and connections that stand go on. A file that is half written or does not fit its key changes nothing: the old
one stays in use and one line says so.

A Unix socket is made under a closed umask and then opened to whom it is meant for: there is no moment in which
others could connect.

Reflection tells anyone what could be called; where tokens are asked for, it asks for one as well. Health never does.

Not here: which options there are (`security_config.py`), who a token belongs to (`tenants.py`).
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from cache_server.config import ConfigError
from cache_server.errors import Unauthenticated
from cache_server.security_config import SecurityConfig, check_authorities, check_pair
from cache_server.tenants import Guard

_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """The server's certificate and whom it trusts. Called by grpc's threads, one at a time."""

    def __init__(self, config: SecurityConfig) -> None:
        assert config.cert_file is not None and config.key_file is not None
        self._cert, self._key, self._client_ca = config.cert_file, config.key_file, config.client_ca_file
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._told: _Stamp = ()

    def credentials(self) -> Any:
        """For `grpc.aio.Server.add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._fetch, require_client_authentication=self._client_ca is not None
        )

    def _fetch(self) -> Any:
        """What the next handshake uses; None: what the last one used."""
        with self._lock:
            stamp = self._look()
            if stamp in (self._stamp, self._told):
                return None
            try:
                check_pair(self._cert, self._key)
                if self._client_ca is not None:
                    check_authorities(self._client_ca)
                configuration = self._configuration()
            except (ConfigError, OSError) as error:
                self._told = stamp
                _log.error("the new TLS files are not used: %s", error)
                return None
            self._stamp = stamp
            _log.info("TLS files were read again: %s", self._cert)
            return configuration

    def _look(self) -> _Stamp:
        stamp = []
        for path in (self._cert, self._key, self._client_ca):
            if path is None:
                continue
            try:
                status = path.stat()
            except OSError:
                stamp.append((0, 0, 0))
                continue
            stamp.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(stamp)

    def _configuration(self) -> Any:
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        roots = None if self._client_ca is None else self._client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


@contextmanager
def socket_permissions(config: SecurityConfig, path: Path) -> Iterator[None]:
    """Whoever binds `path` inside makes a socket that only the configured users can open. OSError: it cannot be."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
    if path.exists():
        if (config.socket_uid, config.socket_gid) != (-1, -1):
            os.chown(path, config.socket_uid, config.socket_gid)
        path.chmod(config.socket_mode)


class GuardedHandlers:
    """Takes handlers in a server's place and lets calls through that bring a token: for services that are not ours."""

    def __init__(self, server: Any, guard: Guard) -> None:
        self._server = server
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Guarded(handler, self._guard) for handler in handlers))

    def add_registered_method_handlers(self, _service: str, _methods: Any) -> None:
        """A short cut of grpc around the generic handlers, which would be one around the guard."""


class _Guarded(grpc.GenericRpcHandler):
    def __init__(self, handler: Any, guard: Guard) -> None:
        self._handler = handler
        self._guard = guard

    def service(self, handler_call_details: Any) -> Any:
        found = self._handler.service(handler_call_details)
        if found is None:
            return None
        try:
            self._guard.caller(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return grpc.stream_stream_rpc_method_handler(_refusing(str(error)))
        return found


def _refusing(message: str) -> Callable[[Any, Any], Any]:
    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    return refuse
