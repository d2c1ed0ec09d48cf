"""Whether `prefixd serve` can run here with given settings, and an engine beside it: one finding per thing looked at.

Everything is tried, not guessed: memory is made, touched, sent over a socket and copied; ports are bound; Redis is
asked. What is made for it is gone afterwards. A server that runs already is no trouble: it is asked who it is.

Nothing of the engine is imported, only looked at on disk: the server's package depends on none of it.

Not here: how findings are printed (`commands/check.py`); GPU memory is in `doctor_gpu.py`.
"""

import importlib.metadata
import importlib.util
import mmap
import os
import re
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from cache_server.cgroup import memory_limit
from cache_server.config import BASE_BYTES, Address, ServerConfig, TcpAddress, UnixAddress
from cache_server.redis_config import RedisConfig
from cache_server.segments import SMALLEST_SEGMENT_BYTES, Segment, segment_bytes_for

State = Literal["ok", "warn", "fail"]

SLOW_COPY_BYTES_PER_S: Final = 2e9  # a copy slower than this is slower than most prefills of long prompts
DESCRIPTORS_PER_SEGMENT: Final = 4
DESCRIPTORS_BESIDE: Final = 512  # clients, connections to Redis, libraries
FIRST_VLLM: Final = (0, 26)
LAST_VLLM: Final = (0, 33)
_PACKAGES: Final = ("grpcio", "protobuf", "numpy", "redis", "aiohttp")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `todo`: what to do about it; empty where all is well."""

    name: str
    state: State
    text: str
    todo: str = ""


def findings(
    config: ServerConfig, redis: RedisConfig | None, ask: Callable[[Address], str | None]
) -> Iterator[Finding]:
    """All, in the order in which they matter. `ask`: what a prefixd at the address says of itself, None: no prefixd."""
    yield _packages()
    yield _budget(config, memory_limit(), _available_bytes())
    yield from _segment()
    yield _descriptor_limit(config)
    yield _shared_memory_folder()
    yield _huge_pages()
    for address in config.listen:
        yield _address("listen", address, ask)
    if config.http is not None:
        yield _address("http", config.http, _answers_http)
    if redis is not None:
        yield _redis(redis)
    yield _engine()
    from cache_server.doctor_gpu import pinning

    yield pinning()


def _packages() -> Finding:
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return Finding("packages", "ok", f"Python {sys.version.split()[0]}, {versions}")


# --- memory ---------------------------------------------------------------------------------------------------


def _budget(config: ServerConfig, limit_bytes: int | None, available_bytes: int | None) -> Finding:
    """`available_bytes`: what the machine could give now; a running server's memory is not in it."""
    needed = config.memory_bytes + BASE_BYTES
    said = f"--memory {_gib(config.memory_bytes)} and {_gib(BASE_BYTES)} for the process"
    if limit_bytes is not None and needed > limit_bytes:
        return Finding(
            "memory",
            "fail",
            f"{said} do not fit the container's limit of {_gib(limit_bytes)}",
            f"raise the limit to {_gib(needed)} or lower --memory to {_gib(limit_bytes - BASE_BYTES)}",
        )
    if available_bytes is not None and needed > available_bytes:
        return Finding(
            "memory",
            "fail",
            f"{said}; the machine has {_gib(available_bytes)} left",
            "lower --memory; where a prefixd runs here already, its memory counts as taken",
        )
    limit = "no container limit" if limit_bytes is None else f"the container's limit is {_gib(limit_bytes)}"
    left = "" if available_bytes is None else f", {_gib(available_bytes)} are left"
    return Finding("memory", "ok", f"{said}; {limit}{left}")


def _segment() -> Iterator[Finding]:
    """Make one, touch it, send it, map it, copy through it."""
    num_bytes = SMALLEST_SEGMENT_BYTES
    try:
        segment = Segment(0, num_bytes)
    except (OSError, ValueError) as error:
        yield Finding("map", "fail", f"no shared memory to be had: {_cause(error)}", _MEMORY_TODO)
        return
    try:
        started_at = time.perf_counter()
        segment.touch()
        touch_s = time.perf_counter() - started_at
        speed = f"{num_bytes / touch_s / 1e9:.1f} GB/s"
        yield Finding("map", "ok", f"{num_bytes >> 20} MiB of sealed shared memory, touched at {speed}")
        yield _pass_on(segment)
        yield _copy(segment)
    except (OSError, ValueError) as error:
        yield Finding("map", "fail", f"shared memory cannot be touched: {_cause(error)}", _MEMORY_TODO)
    finally:
        segment.close()


_MEMORY_TODO: Final = "free memory on this machine, raise the container's limit, or lift `ulimit -v`; see `ulimit -a`"


def _pass_on(segment: Segment) -> Finding:
    """As engines get it: a descriptor over a Unix socket, mapped anew."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            socket.send_fds(ours, [b"segment"], [segment.fd])
            _, (fd, *_), _, _ = socket.recv_fds(theirs, 16, 1)
            try:
                with mmap.mmap(fd, segment.num_bytes) as mapped:
                    segment.data[:4] = [1, 2, 3, 4]
                    is_shared = mapped[:4] == b"\x01\x02\x03\x04"
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            return Finding("share", "fail", f"a segment cannot be passed on: {_cause(error)}", _SHARE_TODO)
    if not is_shared:
        return Finding("share", "fail", "a segment that was passed on is another memory", _SHARE_TODO)
    return Finding("share", "ok", "a segment passed over a Unix socket maps to the same memory")


_SHARE_TODO: Final = "the sandbox forbids it; let engines connect by HOST:PORT instead, which costs one more copy"


def _copy(segment: Segment) -> Finding:
    half = segment.num_bytes // 2
    source, target = segment.data[:half], segment.data[half:]
    times = []
    for _ in range(5):
        started_at = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started_at)
    speed = half / min(times)
    text = f"one thread copies {speed / 1e9:.1f} GB/s"
    if speed < SLOW_COPY_BYTES_PER_S:
        return Finding("copy", "warn", text, "the machine is busy or throttled: loads will be slow")
    return Finding("copy", "ok", text)


def _descriptor_limit(config: ServerConfig) -> Finding:
    num_segments = -(-config.memory_bytes // segment_bytes_for(config.memory_bytes))
    needed = num_segments * DESCRIPTORS_PER_SEGMENT + DESCRIPTORS_BESIDE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Finding(
            "descriptors",
            "fail",
            f"at most {hard} open files, {needed} may be needed",
            f"raise the hard limit: `ulimit -Hn {needed}`, LimitNOFILE= of systemd, --ulimit of a container",
        )
    return Finding("descriptors", "ok", f"{needed} may be needed, {'no limit' if hard < 0 else hard} allowed")


def _shared_memory_folder(path: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - only looked at
    try:
        found = os.statvfs(path)
    except OSError:
        return Finding("shm", "ok", f"there is no {path}; it is not needed, memory is passed by descriptor")
    size = _gib(found.f_frsize * found.f_blocks)
    return Finding("shm", "ok", f"{path} has {size}; its size does not matter, memory is passed by descriptor")


def _huge_pages(root: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> Finding:
    try:
        chosen = re.search(r"\[(\w+)\]", (root / "shmem_enabled").read_text())
    except OSError:
        chosen = None
    if chosen is not None and chosen[1] in ("advise", "always", "within_size", "force"):
        return Finding("huge pages", "ok", f"used for shared memory ({chosen[1]})")
    return Finding("huge pages", "ok", "not used for shared memory; only the first touch is slower without")


def _available_bytes() -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


# --- addresses ------------------------------------------------------------------------------------------------


def _address(name: str, address: Address, ask: Callable[[Address], str | None]) -> Finding:
    said = ask(address)
    if said is not None:
        return Finding(name, "ok", f"{address}: {said}")
    cause = _cannot_bind(address)
    if cause is not None:
        todo = "stop what has it, or choose another" if "in use" in cause else "choose a place that this user may use"
        return Finding(name, "fail", f"{address}: {cause}", todo)
    return Finding(name, "ok", f"{address} is free")


def _cannot_bind(address: Address) -> str | None:
    if isinstance(address, TcpAddress):
        try:
            for family, kind, _, _, target in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(target)
        except OSError as error:
            return _cause(error)
        return None
    for path in (address.path, address.descriptor_path):
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                return f"{path} exists and is not a socket"
        except FileNotFoundError:
            pass
        except OSError as error:
            return _cause(error)
    folder = address.path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def _answers_http(address: Address) -> str | None:
    assert not isinstance(address, UnixAddress)
    import http.client

    line = http.client.HTTPConnection(address.host, address.port, timeout=2)
    try:
        line.request("GET", "/healthz")
        reply = line.getresponse()
        return "a prefixd answers there" if reply.status == 200 and reply.read() == b"ok\n" else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        line.close()


# --- neighbours -----------------------------------------------------------------------------------------------


def _redis(config: RedisConfig) -> Finding:
    from cache_server.redis_lanes import TierDownError
    from cache_server.redis_topology import TierRefusedError, resolve

    started_at = time.perf_counter()
    try:
        topology = resolve(config)
    except TierRefusedError as error:
        return Finding("redis", "fail", f"{config.text}: {error}", "correct --redis…; serve would refuse to start")
    except TierDownError as error:
        return Finding(
            "redis",
            "fail",
            f"{config.text}: {error}",
            "start it, or open the way to it; serve would go on without it",
        )
    took_ms = (time.perf_counter() - started_at) * 1000
    text = f"{config.text}: {topology.server}, connected and asked in {took_ms:.1f} ms"
    if topology.warning:
        return Finding("redis", "warn", f"{text}; {topology.warning}", "see docs/tuning.md, Redis")
    return Finding("redis", "ok", text)


def _engine() -> Finding:
    """The vLLM of this environment, by its files."""
    name, version = _engine_version()
    if version is None:
        return Finding("engine", "ok", "no vLLM in this environment; the server needs none")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    said = f"{name} {version}"
    known = f"{_dotted(FIRST_VLLM)} to {_dotted(LAST_VLLM)}"
    if numbers < FIRST_VLLM:
        return Finding("engine", "fail", f"{said} is too old for the connector", f"install vLLM {known}")
    if importlib.util.find_spec("connector") is None:
        return Finding("engine", "fail", f"{said} cannot find the connector", "install prefixd into this environment")
    if numbers > LAST_VLLM:
        return Finding("engine", "warn", f"{said} is newer than what was tested, {known}", "look for a newer prefixd")
    return Finding("engine", "ok", f"{said}, and the connector is installed beside it")


def _engine_version() -> tuple[str, str | None]:
    """The distribution that brings the module `vllm`, whatever it is called."""
    if importlib.util.find_spec("vllm") is None:
        return "", None
    for name in importlib.metadata.packages_distributions().get("vllm", ["vllm"]):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm", "0.0 (its distribution is not to be found)"


# --- words ----------------------------------------------------------------------------------------------------


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _cause(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
