"""Who is there: one look at Redis with a connection of its own, at start and whenever the tier was lost.

Answers where the keys lie (one server; the master that the sentinels name; the nodes of a cluster by hash slot), and
says what is wrong with the settings: `TierRefusedError` (user, password, database, certificate, a cluster that is none
or the other way round) in one line; a warning where blocks would not be evicted.

Blocks; whoever calls it does so in a thread.

Not here: when to look (`redis_tier.py`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_server.redis_config import RedisAddress, RedisConfig
from cache_server.redis_lanes import TierDownError
from cache_server.redis_line import AccessError, ErrorReply, Line, LineError, MovedError, UnusableReply, hash_slot

NUM_HASH_SLOTS = 16384
_NOBODY = 0xFFFF


class TierRefusedError(Exception):
    """It answers, and says that these settings are wrong. The message is one line without the password."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Which node has which hash slots; one node has them all, outside a cluster."""

    addresses: tuple[RedisAddress, ...]
    node_of_slot: npt.NDArray[np.uint16] | None  # None outside a cluster
    server: str
    warning: str

    def address_of(self, key: bytes) -> RedisAddress:
        """Where a key lies."""
        return self.addresses[0 if self.node_of_slot is None else self.node_of_slot[hash_slot(key)]]


def resolve(config: RedisConfig) -> Topology:
    """Ask who is there. Blocks: run it in a thread. Raises TierRefusedError, TierDownError."""
    cause = ""
    for address in config.addresses:
        try:
            if config.mode != "sentinel":
                return _look_at(address, config)
            line = Line(address, config, is_sentinel=True)
            try:
                line.connect()
                reply = line.ask(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", config.master.encode())
            finally:
                line.drop()
            if isinstance(reply, ErrorReply):
                cause = f"sentinel {address}: {reply.text}"
                continue
            if reply is None:
                raise TierRefusedError(f"sentinel {address} knows no master {config.master!r}")
            return _look_at(RedisAddress(reply[0].decode(), int(reply[1])), config)
        except AccessError as error:
            raise TierRefusedError(f"{address} refuses us: {error}") from None
        except (LineError, MovedError, UnusableReply) as error:
            cause = f"{address}: {error}"
    raise TierDownError(cause)


def _look_at(address: RedisAddress, config: RedisConfig) -> Topology:
    line = Line(address, config)
    try:
        line.connect()
        info = _info(line.ask(b"INFO"))
        is_cluster = info.get("cluster_enabled") == "1"
        if config.mode != "cluster" and is_cluster:
            raise TierRefusedError(f"{address} is a node of a cluster: use redis+cluster://")
        if config.mode == "cluster" and info and not is_cluster:
            raise TierRefusedError(f"{address} is a single server, not a node of a cluster: use redis://")
        if config.mode == "sentinel" and info.get("role", "master") != "master":
            raise LineError(f"{address} is not the master any more")
        addresses, node_of_slot = _cluster_slots(line, address) if config.mode == "cluster" else ((address,), None)
    finally:
        line.drop()
    kind = "valkey" if "valkey_version" in info else "redis"
    server = f"{kind} {info.get(f'{kind}_version', '?')}"
    return Topology(addresses, node_of_slot, server, _warning(info))


def _info(reply: Any) -> dict[str, str]:
    """Empty where the user may not ask."""
    if not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, separator, value in lines if separator}


def _warning(info: dict[str, str]) -> str:
    if info.get("maxmemory_policy") != "noeviction":
        return ""
    if info.get("maxmemory", "0") == "0":
        return "maxmemory-policy is noeviction and maxmemory is not set: it grows until the machine has no memory"
    return "maxmemory-policy is noeviction: when it is full nothing can be saved any more; allkeys-lru suits a cache"


def _cluster_slots(line: Line, asked: RedisAddress) -> tuple[tuple[RedisAddress, ...], npt.NDArray[np.uint16]]:
    reply = line.ask(b"CLUSTER", b"SLOTS")
    if isinstance(reply, ErrorReply):
        raise TierRefusedError(f"{asked} is not a node of a cluster: {reply.text}")
    addresses: list[RedisAddress] = []
    node_of_slot = np.full(NUM_HASH_SLOTS, _NOBODY, dtype=np.uint16)
    for first, last, master, *_ in reply:
        host = (master[0] or b"").decode()
        # A node that knows no name of its own is the one we talk to.
        address = RedisAddress(host if host not in ("", "?") else asked.host, int(master[1]))
        if address not in addresses:
            addresses.append(address)
        node_of_slot[int(first) : int(last) + 1] = addresses.index(address)
    if (node_of_slot == _NOBODY).any():
        raise LineError("the cluster has hash slots without a node")
    return tuple(addresses), node_of_slot
