"""Redis as a tier: questions, loads into slots, saves from slots; awaited on the event loop.

    lengths ─ refresh ─ delete     short questions, pipelined, each node its keys, in the order they were asked
    load ─ save                    one payload

Commands: AUTH, SELECT, INFO, PING, STRLEN (presence and length in one), GET, SET with PX, PEXPIRE (refreshes and says
whether it is there), DEL, SCAN (after a flush); CLUSTER SLOTS; on sentinels SENTINEL GET-MASTER-ADDR-BY-NAME.

The breaker is one for the tier, also in a cluster: a chain of blocks lies on all nodes. It opens with the first
failure of any lane; then everything that no lane has taken is refused, and so is whatever is asked, at once, until a
look in the background (`redis_topology.py`) finds the tier answering. One log line per change. A tier that does not
answer *yet* is noticed before its timeout: `is_prompt` turns false, and lookups stop waiting.

Not here: what is saved when (`write_behind.py`), what is loaded for whom (`promotion.py`), whether it pays (`gate.py`).
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from cache_server import value_format
from cache_server.breaker import Breaker
from cache_server.gate import Estimate
from cache_server.redis_config import RedisAddress, RedisConfig
from cache_server.redis_lanes import (
    PROBE_BYTES,
    WINDOW,
    Ask,
    Load,
    Node,
    Operation,
    Outbox,
    Probe,
    Save,
    TierDownError,
    Work,
)
from cache_server.redis_line import ErrorReply, MovedError, pack
from cache_server.redis_topology import TierRefusedError, Topology, resolve
from cache_server.values import HeldPayload, PayloadName

PROMPT_S: Final = 0.02  # a question that waits longer than this, and than PROMPT_FACTOR times the usual,
PROMPT_FACTOR: Final = 4  # makes the tier one that nobody waits for
HEARTBEAT_S: Final = 2.0  # without any answer for so long, it is asked for one
FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 5.0
_WATCH_S: Final = 0.1

_log = logging.getLogger(__name__)
T = TypeVar("T")


class RedisTier:
    """Await its methods on the loop that made it. Each raises TierDownError at once while the breaker is open."""

    def __init__(self, config: RedisConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.text = config.text
        self.ttl_s = config.ttl_s
        self.window = WINDOW * config.connections
        self.estimate = Estimate()
        self._config = config
        self._ttl_ms = int(config.ttl_s * 1000)
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(self._loop)
        self._breaker = Breaker(now, FIRST_RETRY_S, LAST_RETRY_S)
        self._breaker.open()  # until it has answered
        self._up = asyncio.Event()
        self._topology: Topology | None = None
        self._nodes: dict[RedisAddress, Node] = {}
        self._asked_since: dict[int, float] = {}  # questions without an answer, oldest first
        self._answered_at = now()
        self._num_questions = 0
        self._warned = ""
        self._resolving: asyncio.Task[None] | None = None

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Asking makes sense."""
        return not self._breaker.is_open

    @property
    def is_prompt(self) -> bool:
        """It is up, and the oldest question has not been waiting for long: a lookup may wait for an answer."""
        if not self.is_up:
            return False
        oldest = next(iter(self._asked_since.values()), None)
        return oldest is None or self._now() - oldest < max(PROMPT_S, PROMPT_FACTOR * self.estimate.latency_s)

    @property
    def num_downs(self) -> int:
        """How often it was lost; not the time before the first answer."""
        return self._breaker.num_opened - 1

    async def wait_up(self) -> None:
        """Until it answers."""
        await self._up.wait()

    async def start(self) -> None:
        """Connect for the first time. TierRefusedError: the settings are wrong. A tier that is down is no error."""
        try:
            async with asyncio.timeout(4 * self._config.timeout_s):
                await self._connect()
        except TierDownError as error:
            self._breaker.try_failed()
            _log.warning("%s: %s; starting without it", self.text, error)
        except TimeoutError:
            self._breaker.try_failed()
            _log.warning("%s: timed out; starting without it", self.text)

    async def watch(self) -> None:
        """For ever: try again when it is down, ask for a sign of life when it is silent."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._breaker.may_try:
                try:
                    await self._connect()
                except TierRefusedError as error:
                    self._breaker.try_failed()
                    self._warn(f"{error}")
                except TierDownError:
                    self._breaker.try_failed()
            elif self.is_up and not self._asked_since and self._now() - self._answered_at > HEARTBEAT_S:
                with suppress(TierDownError):
                    await self._ask_all_nodes(pack(b"PING"))

    async def _connect(self) -> None:
        topology = await self._in_thread(lambda: resolve(self._config))
        down_s = self._breaker.open_s
        is_first = self._topology is None
        self._topology = topology
        if topology.warning:
            self._warn(topology.warning)
        for address in [address for address in self._nodes if address not in topology.addresses]:
            self._close_node(address, "it is not part of the cluster any more")
        for address in topology.addresses:
            if address not in self._nodes:
                failed = partial(self._failed, address)
                self._nodes[address] = Node(address, self._config, self._outbox, failed)
        self._answered_at = self._now()
        if self._breaker.close():
            self._up.set()
            nodes = f", {len(topology.addresses)} nodes" if len(topology.addresses) > 1 else ""
            if is_first:
                _log.info("%s: %s%s", self.text, topology.server, nodes)
            else:
                _log.info("%s: back after %.1f s", self.text, down_s)

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            _log.warning("%s: %s", self.text, text)

    def _failed(self, address: RedisAddress, cause: str) -> None:
        """A lane could not go on. One node that fails is the tier: a chain of blocks lies on all of them."""
        if address not in self._nodes:
            return
        self._up.clear()
        if self._breaker.open():
            _log.warning("%s: %s; going on without it", self.text, cause)
        for node in self._nodes.values():
            for operation in node.clear():
                operation.finish(TierDownError(cause))

    def close(self) -> None:
        """Nothing is asked any more."""
        self._up.clear()
        self._breaker.open()
        for address in list(self._nodes):
            self._close_node(address, "closed")

    def _close_node(self, address: RedisAddress, cause: str) -> None:
        node = self._nodes.pop(address)
        for operation in node.clear():
            operation.finish(TierDownError(cause))
        node.close()

    # --- questions --------------------------------------------------------------------------------------------

    async def lengths(self, names: Sequence[PayloadName]) -> list[int]:
        """How long the value of each payload is; 0: absent; -1: something else lies there."""
        replies = await self._ask([self._key(name) for name in names], lambda key: pack(b"STRLEN", key))
        return [reply if isinstance(reply, int) else -1 for reply in replies]

    async def refresh(self, names: Sequence[PayloadName]) -> list[bool]:
        """Let each live for another TTL; whether it is there."""
        ttl = b"%d" % self._ttl_ms
        replies = await self._ask([self._key(name) for name in names], lambda key: pack(b"PEXPIRE", key, ttl))
        return [reply == 1 for reply in replies]

    async def delete(self, names: Sequence[PayloadName]) -> None:
        """They are gone."""
        await self._ask([self._key(name) for name in names], lambda key: pack(b"DEL", key))

    async def ask(self, keys: Sequence[bytes], command: Callable[[bytes], bytes]) -> list[Any]:
        """The replies to one command per key, in the order of the keys; errors are values."""
        return await self._ask(keys, command)

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """All keys of all nodes that match, in portions. A key that is there throughout comes at least once."""
        for address in list(self._nodes):
            cursor = b"0"
            while address in self._nodes:
                command = pack(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
                [reply] = await self._question(self._nodes[address], [command])
                if isinstance(reply, ErrorReply):
                    self.warn(f"keys cannot be listed: {reply.text}")
                    return
                cursor, keys = reply
                yield keys
                if cursor == b"0":
                    break

    def warn(self, text: str) -> None:
        """One line, once."""
        self._warn(text)

    async def _ask(self, keys: Sequence[bytes], command: Callable[[bytes], bytes]) -> list[Any]:
        replies: list[Any] = await self._following(lambda: self._ask_once(keys, command))
        return replies

    async def _ask_once(self, keys: Sequence[bytes], command: Callable[[bytes], bytes]) -> list[Any]:
        """Each node gets its keys in one go; replies come back in the order of the keys."""
        places: dict[RedisAddress, list[int]] = {}
        for position, key in enumerate(keys):
            places.setdefault(self._node(key).address, []).append(position)
        replies: list[Any] = [None] * len(keys)
        asks = [
            self._question(self._nodes[address], [command(keys[position]) for position in positions])
            for address, positions in places.items()
        ]
        for positions, answers in zip(places.values(), await _all(asks), strict=True):
            for position, answer in zip(positions, answers, strict=True):
                replies[position] = answer
        return replies

    async def _ask_all_nodes(self, command: bytes) -> None:
        await _all([self._question(node, [command]) for node in self._nodes.values()])

    async def _question(self, node: Node, commands: Sequence[bytes]) -> list[Any]:
        """Watched: as long as one is not answered, lookups do not wait for others."""
        self._check_up()
        self._num_questions += 1
        number = self._num_questions
        started = self._asked_since[number] = self._now()
        try:
            answers: list[Any] = await self._run(Ask(commands), node.questions, is_urgent=True)
        finally:
            del self._asked_since[number]
        self._answered_at = self._now()
        if len(commands) <= 64:
            self.estimate.note_latency(self._answered_at - started)
        return answers

    # --- payloads ---------------------------------------------------------------------------------------------

    async def load(self, name: PayloadName, target: npt.NDArray[np.uint8]) -> int | str:
        """The payload into its slot: the checksum that it has, ABSENT or CORRUPT.

        Never cancel it: until it ends a thread may write into the slot.
        """
        key = self._key(name)
        result: int | str = await self._following(
            lambda: self._run(Load(key, name, target), self._node(key).payloads, is_urgent=True)
        )
        return result

    async def save(self, name: PayloadName, held: HeldPayload) -> tuple[str, int]:
        """The payload from its slot: STORED, FULL, REJECTED or CHANGED, and the checksum it was sent with."""
        key = self._key(name)
        checksum = 0

        async def once() -> str:
            nonlocal checksum
            operation = Save(key, name, held, self._ttl_ms)
            status: str = await self._run(operation, self._node(key).payloads, is_urgent=False)
            checksum = operation.checksum
            return status

        return await self._following(once), checksum

    async def probe(self) -> None:
        """Measure what it delivers, with a value of our own. Leaves the estimate as it is when that is not possible."""
        content = bytes(PROBE_BYTES)
        key = f"{self._config.prefix}:probe".encode()
        node = self._node(key)
        [length] = await self._question(node, [pack(b"STRLEN", key)])
        if length != PROBE_BYTES:
            command = pack(b"SET", key, content, b"PX", b"%d" % self._ttl_ms)
            [reply] = await self._run(Ask([command]), node.payloads, is_urgent=True)
            if isinstance(reply, ErrorReply):
                self._warn(f"cannot be measured: {reply.text}")
                return
        started = self._now()
        if await self._run(Probe(key), node.payloads, is_urgent=True):
            self.estimate.note_transfer(PROBE_BYTES, self._now() - started)

    # --- inside -----------------------------------------------------------------------------------------------

    def _key(self, name: PayloadName) -> bytes:
        return value_format.redis_key(self._config.prefix, name)

    def _node(self, key: bytes) -> Node:
        return self._nodes[self._check_up().address_of(key)]

    def _check_up(self) -> Topology:
        if self._breaker.is_open or self._topology is None:
            raise TierDownError("down")
        return self._topology

    async def _run(self, operation: Operation, work: Work, *, is_urgent: bool) -> Any:
        self._check_up()
        work.put(operation, is_urgent=is_urgent)
        return await operation.future

    async def _following(self, once: Callable[[], Any]) -> Any:
        """Once more when keys have moved to another node."""
        try:
            return await once()
        except MovedError:
            await self._refresh_topology()
        try:
            return await once()
        except MovedError:
            raise TierDownError("keys are being moved") from None

    async def _refresh_topology(self) -> None:
        if self._resolving is None or self._resolving.done():
            self._resolving = self._loop.create_task(self._connect())
        try:
            await asyncio.shield(self._resolving)
        except TierRefusedError as error:
            raise TierDownError(str(error)) from None

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """asyncio.to_thread without joining: a name that does not resolve must not hold up our exit."""
        future: asyncio.Future[T] = self._loop.create_future()

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        def succeed(result: T) -> None:
            if not future.done():
                future.set_result(result)

        def run() -> None:
            try:
                self._outbox.tell((succeed, function()))
            except Exception as error:  # noqa: BLE001 - the top of a thread: the caller gets it
                self._outbox.tell((fail, error))

        threading.Thread(target=run, name="redis-resolve", daemon=True).start()
        return await future


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    """All results; when one fails, its error, but only after the others have ended too."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
