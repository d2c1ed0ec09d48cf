"""The composition root: one event loop, one arena, one cache, all addresses; from start to drained exit.

Start: refuse what cannot work (a live server on the socket, a port in use, a Redis that refuses the password) with one
line; take over what an earlier server has kept (`--persist`); touch the first segment, so that whoever sees 'ready'
can save at once; serve. Stop, on SIGTERM or SIGINT: health says NOT_SERVING, clients get a Closing event, calls in
flight may finish for GRACE_S, what is queued for Redis is written for DRAIN_S at most, names are kept for the next
server, socket files go, exit status 0.

Not here: what is served (`service.py`), the command line (`cli.py`).
"""

import asyncio
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from cache_server.admission import MAX_CALLS, Admission
from cache_server.arena import Arena
from cache_server.cache import Cache
from cache_server.config import Address, ConfigError, ServerConfig, TcpAddress, UnixAddress
from cache_server.descriptors import DescriptorServer
from cache_server.gate import Gate
from cache_server.growth import Growth
from cache_server.logs import Recent
from cache_server.lower_tier import LowerTier
from cache_server.persist import FolderInUseError, PersistError
from cache_server.redis_config import RedisConfig
from cache_server.redis_topology import TierRefusedError
from cache_server.security_config import SecurityConfig
from cache_server.segments import segment_bytes_for
from cache_server.service import SERVICE_NAME, Service
from cache_server.sessions import MAX_SESSIONS
from cache_server.status_http import StatusServer
from cache_server.tenants import Guard, Registry
from cache_server.transport import Certificates, GuardedHandlers, socket_permissions
from cache_server.warm_restart import WarmRestart
from protos import __version__

GRACE_S: Final = 3.0
DRAIN_S: Final = 20.0  # with GRACE_S less than the 30 s that Kubernetes waits before it kills
LEAVE_S: Final = 1.0  # for mapped clients to let go of their slots, if the memory is kept
LEAVE_STEP_S: Final = 0.02
TELL_PER_TTL: Final = 4  # how often within a TTL Redis hears of a block that is used in memory
TICK_S: Final = 1.0  # how late a deadline may be noticed when nothing else happens
RECEIVE_LIMIT_BYTES: Final = 6 << 20  # grpc's own; ours (MAX_MESSAGE_BYTES) answers with the figures

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", RECEIVE_LIMIT_BYTES),
    ("grpc.max_send_message_length", RECEIVE_LIMIT_BYTES),
    ("grpc.so_reuseport", 0),  # else two servers on one port share its calls silently
    # Clients may ping every 10 s, also without calls, to see early that we are gone.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # And we ping them: a client whose machine is gone must not count as attached.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
_log = logging.getLogger(__name__)


class StartError(Exception):
    """The server cannot start here; the message says why, on one line."""


async def serve(
    config: ServerConfig,
    redis: RedisConfig | None = None,
    recent: Recent | None = None,
    security: SecurityConfig | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP: look at the files of `security` now.

    `recent`: the last warnings, for the status page.
    """
    security = security or SecurityConfig()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    # Four descriptors per segment and some per client: the usual soft limit of 1024 is for others.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for address in (*config.listen, *([config.http] if config.http else [])):
        _claim(address)
    warm = _open_persist(config.persist, config.memory_bytes) if config.persist else None
    arena = warm.arena if warm else Arena(config.memory_bytes)
    cache = Cache(arena, tell_every_s=redis.ttl_s / TELL_PER_TTL if redis else None)
    growth = Growth(arena)
    gate = Gate(config.gate_share)
    lower = await _connect(redis, cache, growth, gate) if redis else None
    registry = security.registry()
    quotas = _quotas(registry, arena)
    guard = Guard(registry, allow_xxh3=security.allow_xxh3)
    admission = Admission(SERVICE_NAME, "Attach", MAX_CALLS, MAX_SESSIONS)
    recent_warnings = recent.lines if recent is not None else list
    epoch = secrets.randbits(64) or 1
    service = Service(cache, growth, epoch, __version__, gate, lower, admission, recent_warnings, guard)
    status = StatusServer(service.stats)
    server = grpc.aio.server(options=_OPTIONS, interceptors=(admission,))
    server.add_generic_rpc_handlers((service.handler(),))
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)),
        GuardedHandlers(server, guard),
    )
    certificates = Certificates(security) if security.has_tls else None

    descriptor_servers: list[DescriptorServer] = []
    paths: list[Path] = []
    background: list[asyncio.Task[None]] = []
    try:
        bound = []
        for address in config.listen:
            if isinstance(address, UnixAddress):
                # First, because it is ours alone from then on: grpc would replace another server's socket silently.
                descriptors = _bind_descriptors(address, service, security)
                descriptor_servers.append(descriptors)
                service.serve_descriptors(descriptors)
                paths.append(address.path)
            bound.append(_bind(server, address, security, certificates))
        if warm is not None:
            warm.reopen(cache)
        cache.set_quotas(quotas)
        if config.http is not None:
            _log.info("status page and /metrics on http://%s", await _start_http(status, config.http))
        await growth.make_spare()
        if not arena.num_segments:
            raise StartError(f"memory: the machine has none for the first segment of {arena.segment_bytes} bytes")
        background = [asyncio.create_task(growth.run()), asyncio.create_task(_tick(cache, warm))]
        hurry = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hurry.set)
        if security.tokens_file is not None:
            background.append(asyncio.create_task(_watch_tokens(security, guard, cache, service, hurry)))
        await server.start()
        for name in ("", SERVICE_NAME):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        # What exists now lives as long as the process; collecting garbage need not look at it again.
        gc.freeze()
        status.is_ready = True
        _log.info(
            "ready on %s, memory %d MiB in segments of %d MiB",
            " ".join(bound),
            config.memory_bytes >> 20,
            arena.segment_bytes >> 20,
        )
        if security.is_open_to_all:
            _log.warning("--insecure: whoever reaches the port can read and plant blocks")
        await stop.wait()
        status.is_ready = False
        _log.info("stopping: up to %.0f s for calls in flight", GRACE_S)
        await health_servicer.enter_graceful_shutdown()
        service.drain("the server is shutting down")
        await server.stop(GRACE_S)
        if lower is not None:
            await lower.drain(DRAIN_S)
        if warm is not None:
            await _let_clients_leave(cache)
            growth.close()
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            warm.keep(cache)
        _log.info("stopped")
    finally:
        growth.close()
        for task in background:
            task.cancel()
        await server.stop(0)
        await status.close()
        if lower is not None:
            await lower.close()
        # In this order: as long as the descriptor socket answers, no other server takes the path we remove.
        for path in paths:
            path.unlink(missing_ok=True)
        for descriptors in descriptor_servers:
            descriptors.close()


async def _connect(redis: RedisConfig, cache: Cache, growth: Growth, gate: Gate) -> LowerTier:
    lower = LowerTier(redis, cache, growth, gate)
    try:
        await lower.start()
    except TierRefusedError as error:
        await lower.close()
        raise ConfigError("redis", redis.text, str(error)) from None
    return lower


async def _start_http(status: StatusServer, address: TcpAddress) -> str:
    try:
        return await status.start(address)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror}") from None


async def _tick(cache: Cache, warm: WarmRestart | None) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        cache.expire()
        if warm is not None:
            warm.give_back_held(cache)


def _open_persist(path: Path, memory_bytes: int) -> WarmRestart:
    try:
        return WarmRestart(path, memory_bytes, segment_bytes_for(memory_bytes))
    except FolderInUseError as error:
        raise StartError(f"persist: {error}") from None
    except PersistError as error:
        raise ConfigError("persist", str(path), str(error)) from None


async def _let_clients_leave(cache: Cache) -> None:
    """They were told; who is in the middle of a copy is not waited for: its slots are held."""
    for _ in range(int(LEAVE_S / LEAVE_STEP_S)):
        if not any(session.is_mapped for session in cache.sessions):
            return
        await asyncio.sleep(LEAVE_STEP_S)


def _quotas(registry: Registry | None, arena: Arena) -> dict[str, int]:
    """Bytes per tenant; memory is given to tenants in whole segments."""
    shares = registry.shares(arena.budget_bytes) if registry is not None else {}
    for tenant, share in shares.items():
        if share < arena.segment_bytes:
            raise ConfigError("quota", f"{tenant}: {share}", f"at least one segment of {arena.segment_bytes} bytes")
    return shares


async def _watch_tokens(
    security: SecurityConfig, guard: Guard, cache: Cache, service: Service, hurry: asyncio.Event
) -> None:
    """Read the tokens again when their file changes. A file that cannot be used changes nothing, and is told once."""
    assert security.tokens_file is not None
    before = _stamp(security.tokens_file)
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await hurry.wait()
        is_asked, stamp = hurry.is_set(), _stamp(security.tokens_file)
        hurry.clear()
        if stamp == before and not is_asked:
            continue
        before = stamp
        try:
            registry = security.registry()
            assert registry is not None
            quotas = _quotas(registry, cache.arena)
        except ConfigError as error:
            _log.error("the tokens stay as they were: %s", error)
            continue
        guard.replace(registry)
        cache.set_quotas(quotas)
        ended = service.end_unauthorised()
        _log.info("tokens were read again: %d tenants, %d tokens, %d sessions ended",
                  len(registry.quotas), len(registry.callers), ended)  # fmt: skip


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size


def _bind(server: Any, address: Address, security: SecurityConfig, certificates: Certificates | None) -> str:
    try:
        if isinstance(address, UnixAddress):
            with socket_permissions(security, address.path):
                server.add_insecure_port(str(address))
            return str(address)
        if certificates is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), certificates.credentials())
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror}") from None
    return str(type(address)(address.host, port))


def _bind_descriptors(address: UnixAddress, service: Service, security: SecurityConfig) -> DescriptorServer:
    path = address.descriptor_path
    try:
        with socket_permissions(security, path):
            return DescriptorServer(path, service.redeem, service.segments_of, service.descriptors_ended)
    except OSError as error:
        raise StartError(f"cannot listen on {path}: {error.strerror}") from None


def _claim(address: Address) -> None:
    """Make room for our sockets: remove what a dead server left, refuse to take a live one's place."""
    if isinstance(address, TcpAddress):
        _try_port(address)
        return
    try:
        address.path.parent.mkdir(parents=True, exist_ok=True)
        for path, kind in (
            (address.path, socket.SOCK_STREAM),
            (address.descriptor_path, socket.SOCK_SEQPACKET),
        ):
            if not os.path.lexists(path):
                continue
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise StartError(f"cannot listen on {address}: {path} exists and is not a socket")
            if _somebody_answers(path, kind):
                raise StartError(f"cannot listen on {address}: another server answers on {path}")
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror}: {error.filename}") from None


def _try_port(address: TcpAddress) -> None:
    """Bind once ourselves: grpc tells the cause of a failure in its own log only, in its own words."""
    try:
        for family, kind, _, _, target in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror}") from None


def _somebody_answers(path: Path, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            # Of the wrong kind, not permitted, backlog full: something is there that we must not remove.
            return error.errno != errno.ECONNRESET
        return True
