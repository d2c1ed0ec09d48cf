"""`prefixd serve` and `prefixd stats`.

Settings are checked before anything heavy is imported, mapped or bound: a wrong one costs one line on stderr and exit
status 2; so does a Redis that answers and refuses them. A server that cannot start (socket in use, port taken) and one
that cannot be reached: one line, status 1.
"""

import json
import logging
import os
import sys
from typing import Any, NoReturn

import click

from cache_server.cgroup import memory_limit
from cache_server.config import (
    DEFAULT_GATE_SHARE,
    DEFAULT_LISTEN,
    DEFAULT_MEMORY,
    ConfigError,
    check_limit,
    parse_address,
    parse_config,
)
from cache_server.process_title import hide_argument
from cache_server.redis_config import (
    DEFAULT_CONNECTIONS,
    DEFAULT_PREFIX,
    DEFAULT_QUEUE,
    DEFAULT_TIMEOUT,
    DEFAULT_TTL,
    PASSWORD_VARIABLE,
    RedisOptions,
    parse_redis,
    password_in,
)

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
    help="unix:///PATH or HOST:PORT (0: any free port); may be repeated.",
)
@click.option("--memory", default=DEFAULT_MEMORY, show_default=True, metavar="SIZE", help="With a unit: 512MiB, 20GiB.")
@click.option(
    "--redis",
    "url",
    metavar="URL",
    help="Keep blocks there too: redis://HOST:PORT/DB, rediss://, unix:///PATH, redis+cluster://HOST:PORT,…, "
    "redis+sentinel://HOST:PORT,…/MASTER.",
)
@click.option("--redis-password-file", metavar="FILE", help=f"Or the environment: {PASSWORD_VARIABLE}.")
@click.option("--redis-ca-file", metavar="FILE", help="rediss://: who is trusted.  [default: the system's]")
@click.option("--redis-cert-file", metavar="FILE", help="rediss://: our certificate, if Redis asks for one.")
@click.option("--redis-key-file", metavar="FILE", help="rediss://: its key.")
@click.option("--redis-ttl", metavar="TIME", help=f"How long unused blocks stay.  [default: {DEFAULT_TTL}]")
@click.option("--redis-prefix", metavar="TEXT", help=f"Of all keys.  [default: {DEFAULT_PREFIX}]")
@click.option("--redis-connections", type=int, help=f"For payloads, per node.  [default: {DEFAULT_CONNECTIONS}]")
@click.option("--redis-queue", metavar="SIZE", help=f"What may wait to be written.  [default: {DEFAULT_QUEUE}]")
@click.option("--redis-timeout", metavar="TIME", help=f"Without a byte from it.  [default: {DEFAULT_TIMEOUT}]")
@click.option(
    "--gate-share",
    type=float,
    default=DEFAULT_GATE_SHARE,
    show_default=True,
    help="A hit from a slower tier is promised if loading it takes less than this share of recomputing it.",
)
@click.option(
    "--persist",
    metavar="DIR",
    help="Keep the memory over a clean stop (SIGTERM), for the next server with the same DIR and --memory. "
    "On a tmpfs, with room for --memory and 1/256 more; one server per DIR.",
)
def serve(
    listen: tuple[str, ...], memory: str, gate_share: float, persist: str | None, url: str | None, **redis: Any
) -> None:
    """Serve until SIGTERM."""
    try:
        if url is not None:
            hide_argument(password_in(url))
        options = RedisOptions(url, **{name.removeprefix("redis_"): value for name, value in redis.items()})
        redis_config = parse_redis(options, os.environ)
        config = parse_config(listen, memory, gate_share, persist)
        check_limit(config, memory_limit())
    except ConfigError as error:
        _fail(2, str(error))

    import asyncio

    from cache_server import server

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(server.serve(config, redis_config))
    except ConfigError as error:
        _fail(2, str(error))
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
