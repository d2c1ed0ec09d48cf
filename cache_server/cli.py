"""`prefixd serve` and `prefixd stats`.

Settings are checked before anything heavy is imported, mapped or bound: a wrong one costs one line on stderr and exit
status 2. A server that cannot start (socket in use, port taken) and one that cannot be reached: one line, status 1.
"""

import json
import logging
import sys
from typing import NoReturn

import click

from cache_server.cgroup import memory_limit
from cache_server.config import DEFAULT_LISTEN, DEFAULT_MEMORY, ConfigError, check_limit, parse_address, parse_config

STATS_TIMEOUT_S = 5.0


@click.group()
def main() -> None:
    """The prefix cache server of prefixd."""


@main.command()
@click.option(
    "--listen",
    multiple=True,
    default=(DEFAULT_LISTEN,),
    show_default=True,
    metavar="ADDRESS",
    help="unix:///PATH or HOST:PORT; may be repeated.",
)
@click.option("--memory", default=DEFAULT_MEMORY, show_default=True, metavar="SIZE", help="With a unit: 512MiB, 20GiB.")
def serve(listen: tuple[str, ...], memory: str) -> None:
    """Serve until SIGTERM."""
    try:
        config = parse_config(listen, memory)
        check_limit(config, memory_limit())
    except ConfigError as error:
        _fail(2, str(error))

    import asyncio

    from cache_server import server

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(server.serve(config))
    except server.StartError as error:
        _fail(1, str(error))


@main.command()
@click.option("--server", "address", default=DEFAULT_LISTEN, show_default=True, metavar="ADDRESS")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def stats(address: str, as_json: bool) -> None:
    """Print the server's figures."""
    try:
        target = str(parse_address("server", address))
    except ConfigError as error:
        _fail(2, str(error))

    import grpc
    from google.protobuf.json_format import MessageToDict

    from protos import kv_cache_pb2 as pb
    from protos import kv_cache_pb2_grpc as pb_grpc

    with grpc.insecure_channel(target) as channel:
        try:
            reply = pb_grpc.KvCacheStub(channel).Stats(pb.StatsRequest(), timeout=STATS_TIMEOUT_S)
        except grpc.RpcError as error:
            _fail(1, f"server: {address!r} does not answer: {error.code().name}")
    if as_json:
        click.echo(json.dumps(MessageToDict(reply, preserving_proto_field_name=True), indent=2, sort_keys=True))
        return
    click.echo(f"prefixd {reply.server_version}, epoch {reply.server_epoch:016x}, up {reply.uptime_s:.0f} s")
    for name in ("memory", "touched", "stored", "reserved", "leased"):
        click.echo(f"{name:>10} {getattr(reply, name + '_bytes') / (1 << 20):12.1f} MiB")
    for namespace in reply.namespaces:
        click.echo(
            f"namespace {namespace.fingerprint.hex()[:12]}: {namespace.num_complete} of {namespace.num_blocks} blocks "
            f"complete, {namespace.num_shards} shards, {namespace.stored_bytes / (1 << 20):.1f} MiB"
        )
    for session in reply.sessions:
        role = f"worker {session.shard}" if session.role == pb.ROLE_WORKER else "scheduler"
        click.echo(
            f"session {session.session_id:016x}: {session.client_name} pid {session.pid}, engine {session.engine_id}, "
            f"{role}{', mapped' if session.mapped else ''}, {session.reserved_bytes / (1 << 20):.1f} MiB reserved"
        )
    for name, count in sorted(reply.counters.items()):
        if count:
            click.echo(f"{name:>28} {count}")


def _fail(status: int, line: str) -> NoReturn:
    click.echo(f"prefixd: {line}", err=True)
    sys.exit(status)
