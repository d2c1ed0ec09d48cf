"""What a namespace is called in Redis, and how it is flushed there for everybody.

Several daemons share one Redis, each with blocks of the namespace in its own memory. Deleting keys would be no flush:
a daemon that has not heard of it would write the old blocks back, and all others would load them. So a namespace has
a *generation*, random, and it is part of the names of its values:

    NAMESPACE of a value's key = fingerprint (32) ‖ generation of all (8) ‖ generation of it (8) ‖ layout (8)

    PREFIX:generation:FINGERPRINT   holds the second; none: zeros.    PREFIX:generation:   holds the first
    layout                          the first 8 bytes of SHA-256 of the shard descriptor: two nodes whose engines lay
                                    the same blocks out otherwise must not read each other's

A flush sets a new generation. From then on this daemon neither reads nor writes anything older; every other one looks
every FOLLOW_S, and when it finds another generation it flushes its memory too. What it wrote meanwhile has an old
name. Old values are deleted as they are found (SCAN), twice, and the rest goes with its TTL.

Redis down: the new generation holds here at once and is set there as soon as it answers (`pending`). A marker that
Redis lost (it may evict anything under allkeys-*) is set again by the daemons that know it.

Not here: memory (`cache.py`); commands and their answers (`redis_tier.py`).
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_server.redis_config import RedisConfig
from cache_server.redis_lanes import TierDownError
from cache_server.redis_line import ErrorReply, pack
from cache_server.redis_tier import RedisTier
from cache_server.values import HeldPayload, PayloadName

FOLLOW_S: Final = 1.0  # how long another daemon may serve what was flushed
CLEAN_AGAIN_S: Final = 5.0  # when all daemons have noticed: what they still wrote under the old name
GENERATION_BYTES: Final = 8
NO_GENERATION: Final = bytes(GENERATION_BYTES)
ALL: Final = b""  # every namespace

_log = logging.getLogger(__name__)


def stored_namespace(fingerprint: bytes, of_all: bytes, of_it: bytes, descriptor: bytes) -> bytes:
    """56 bytes, see above."""
    return fingerprint + of_all + of_it + hashlib.sha256(descriptor).digest()[:8]


def _set_if_absent(generation: bytes, key: bytes) -> bytes:
    return pack(b"SET", key, generation, b"NX")


class GenerationTier(RedisTier):
    """The tier, by the names that payloads have in memory."""

    def __init__(
        self,
        config: RedisConfig,
        descriptor_of: Callable[[bytes, int], bytes],
        generations_of_blocks: Callable[[bytes], set[bytes]],
        note: Callable[[bytes, bytes, bytes], None],
        changed: Callable[[bytes], None],
    ) -> None:
        """`descriptor_of` (namespace, shard); `generations_of_blocks`: under which memory has blocks of a namespace, or
        of ALL; `note` hears of a namespace's generations, of ALL and its own; `changed` of one that others flushed."""
        super().__init__(config)
        self._prefix = config.prefix
        self._descriptor_of = descriptor_of
        self._generations_of_blocks = generations_of_blocks
        self._note = note
        self._changed = changed
        self._known: dict[bytes, bytes] = {}  # namespace or ALL → generation
        self._pending: set[bytes] = set()  # not set in Redis yet
        self._stored: dict[tuple[bytes, bytes], bytes] = {}  # (namespace, descriptor) → `stored_namespace`
        self._cleaning: set[asyncio.Task[None]] = set()
        self.num_deleted = 0

    # --- the tier's methods ---------------------------------------------------------------------------------

    async def lengths(self, names: Sequence[PayloadName]) -> list[int]:
        return await super().lengths(await self._renamed(names))

    async def refresh(self, names: Sequence[PayloadName]) -> list[bool]:
        return await super().refresh(await self._renamed(names))

    async def delete(self, names: Sequence[PayloadName]) -> None:
        await super().delete(await self._renamed(names))

    async def load(self, name: PayloadName, target: npt.NDArray[np.uint8]) -> int | str:
        [renamed] = await self._renamed([name])
        return await super().load(renamed, target)

    async def save(self, name: PayloadName, held: HeldPayload) -> tuple[str, int]:
        [renamed] = await self._renamed([name])
        return await super().save(renamed, held)

    async def _renamed(self, names: Sequence[PayloadName]) -> list[PayloadName]:
        unknown = {ALL, *(name.namespace for name in names)} - self._known.keys()
        if unknown:
            await self._learn(list(unknown))
        return [name._replace(namespace=self._stored_as(name.namespace, name.shard)) for name in names]

    def _stored_as(self, namespace: bytes, shard: int) -> bytes:
        descriptor = self._descriptor_of(namespace, shard)
        found = self._stored.get((namespace, descriptor))
        if found is None:
            found = stored_namespace(namespace, self._known[ALL], self._known[namespace], descriptor)
            self._stored[namespace, descriptor] = found
        return found

    # --- generations ----------------------------------------------------------------------------------------

    async def flush(self, namespace: bytes) -> bool:
        """Nothing of before is read or written from here on. Whether Redis knows it too; else it will."""
        self._set(namespace, secrets.token_bytes(GENERATION_BYTES))
        self._pending.add(namespace)
        if not self.is_up:
            return False
        with suppress(TierDownError):
            await self._publish(namespace)
        return namespace not in self._pending

    async def meet(self, namespace: bytes) -> None:
        """An engine attached to it: what generation it has is to be known before there are blocks."""
        unknown = {ALL, namespace} - self._known.keys()
        if unknown and self.is_up:
            with suppress(TierDownError):
                await self._learn(list(unknown))
        self._tell_generations()

    async def follow(self) -> None:
        """For ever: tell Redis what it could not be told, and look what others have flushed."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            if not self.is_up:
                continue
            with suppress(TierDownError):
                for namespace in list(self._pending):
                    await self._publish(namespace)
                if self._known:
                    await self._learn(list(self._known))

    async def _learn(self, namespaces: Sequence[bytes]) -> None:
        before = {namespace: self._known.get(namespace) for namespace in namespaces}
        values = await self.ask([self._marker(namespace) for namespace in namespaces], lambda key: pack(b"GET", key))
        for namespace, value in zip(namespaces, values, strict=True):
            known = before[namespace]
            if self._known.get(namespace) is not known or namespace in self._pending:
                continue  # flushed here meanwhile, or learnt by another question
            found = value if isinstance(value, bytes) and len(value) == GENERATION_BYTES else NO_GENERATION
            if known is None:
                # Saved before Redis could be asked, or by the server before this one: nobody knows which came first.
                is_doubtful = bool(self._generations_of_blocks(namespace) - {found})
                self._set(namespace, found)
                if is_doubtful:
                    self._changed(namespace)
            elif found == NO_GENERATION != known:
                await self.ask([self._marker(namespace)], partial(_set_if_absent, known))
            elif found != known:
                self._set(namespace, found)
                self._changed(namespace)

    async def _publish(self, namespace: bytes) -> None:
        generation = self._known[namespace]
        [reply] = await self.ask([self._marker(namespace)], lambda key: pack(b"SET", key, generation))
        if isinstance(reply, ErrorReply):
            self.warn(f"a flush is not known to it: {reply.text}")
            return
        if self._known.get(namespace) is generation:
            self._pending.discard(namespace)
        task = asyncio.create_task(self._clean(namespace))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    def _set(self, namespace: bytes, generation: bytes) -> None:
        self._known[namespace] = generation
        self._stored.clear()
        self._tell_generations()

    def _tell_generations(self) -> None:
        for namespace in self._known:
            if namespace != ALL:
                self._note(namespace, self._known.get(ALL, NO_GENERATION), self._known[namespace])

    def _marker(self, namespace: bytes) -> bytes:
        return f"{self._prefix}:generation:{namespace.hex()}".encode()

    # --- what is left of the old ------------------------------------------------------------------------------

    async def _clean(self, namespace: bytes) -> None:
        """Delete values of older generations. What is missed goes with its TTL."""
        pattern = f"{self._prefix}:{namespace.hex()}*:*:*".encode()
        start = len(self._prefix) + 1 + 64 + (0 if namespace == ALL else 2 * GENERATION_BYTES)
        with suppress(TierDownError):
            for _ in range(2):
                async for keys in self.scan(pattern):
                    current = self._known.get(namespace, NO_GENERATION).hex().encode()
                    old = [key for key in keys if key[start : start + len(current)] != current]
                    if old:
                        await self.ask(old, lambda key: pack(b"DEL", key))
                        self.num_deleted += len(old)
                await asyncio.sleep(CLEAN_AGAIN_S)

    def close(self) -> None:
        for task in self._cleaning:
            task.cancel()
        super().close()
