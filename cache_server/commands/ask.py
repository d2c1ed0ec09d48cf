"""Asking a running server: its address, one call, and one line when it does not answer."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cache_server.cli_security import client_options, current_client
from cache_server.commands.text import fail
from cache_server.config import DEFAULT_LISTEN, ConfigError, parse_address
from protos import kv_cache_pb2 as pb

TIMEOUT_S = 5.0
_JSON_HELP = "One JSON value, for programs."
_Command = TypeVar("_Command", bound=Callable[..., Any])


def server_option(command: _Command) -> _Command:
    """--server, for a command with a parameter `address`, and what a closed server asks for."""
    option = click.option(
        "--server",
        "address",
        default=DEFAULT_LISTEN,
        show_default=True,
        envvar="PREFIXD_SERVER",
        show_envvar=True,
        metavar="ADDRESS",
        help="Where the server listens: unix:///PATH or HOST:PORT.",
    )
    return client_options(option(command))


def json_option(command: _Command) -> _Command:
    """--json, for a command with a parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)(command)


def json_parameter() -> click.Option:
    """The same, for a command that is put together of parameters."""
    return click.Option(["--json", "as_json"], is_flag=True, help=_JSON_HELP)


class Server:
    """One connection, for one command. Every failure ends the process with one line."""

    def __init__(self, address: str) -> None:
        import grpc

        from protos import kv_cache_pb2_grpc as pb_grpc

        try:
            self._channel = current_client().open(parse_address("server", address))
        except ConfigError as error:
            fail(2, str(error))
        self._grpc = grpc
        self._address = address
        self._stub = pb_grpc.KvCacheStub(self._channel)

    def stats(self) -> pb.StatsReply:
        """All figures."""
        reply: pb.StatsReply = self._call(self._stub.Stats, pb.StatsRequest())
        return reply

    def try_stats(self) -> pb.StatsReply | str:
        """All figures, or why there are none."""
        try:
            reply: pb.StatsReply = self._stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
        except self._grpc.RpcError as error:
            return str(error.code().name)
        return reply

    def flush(self, fingerprint: bytes, tenant: str = "") -> pb.FlushReply:
        """Drop a namespace, or all (empty): how many blocks went, and whether Redis knows it yet."""
        request = pb.FlushRequest(fingerprint=fingerprint, tenant=tenant)
        reply: pb.FlushReply = self._call(self._stub.Flush, request)
        return reply

    def health(self, timeout_s: float) -> str:
        """What it says of itself, by the standard health service: SERVING, or another of its words."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        check = health_pb2_grpc.HealthStub(self._channel).Check
        reply = self._call(check, health_pb2.HealthCheckRequest(), timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def _call(self, method: Any, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except self._grpc.RpcError as error:
            if error.code() in (self._grpc.StatusCode.UNAUTHENTICATED, self._grpc.StatusCode.PERMISSION_DENIED):
                fail(1, f"server: {self._address!r} refuses: {error.details()}")
            fail(1, f"server: {self._address!r} does not answer: {error.code().name}")
