"""A known sequence of calls to a server, and what every counter of it must say afterwards.

Blocks are 4 MiB, so that a server of 256 MiB holds 64 and evicts when it is told to.
"""

from typing import Any

import grpc
import pytest

from cache_server.metrics import Counters
from protos import kv_cache_pb2 as pb
from tests.cache_server.harness import MIB, Client, ServerProcess, chain, payload_of, put_messages, wait_until
from tests.cache_server.harness import batch as columns

PAYLOAD = 4 * MIB
NUM_SLOTS = 64
BATCH = 8


class Traffic:
    """Two workers, one that maps and one that streams, and their scheduler sides."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.expected = dict.fromkeys([*Counters().as_dict(), "calls_refused", "streams_refused"], 0)
        self.worker = Client(server.unix, 0, payload_bytes=PAYLOAD, descriptors=server.socket_path)
        wait_until(self.worker.is_mapped, "segments are handed out")
        self.scheduler = Client(server.unix)
        self.streamer = Client(server.tcp, 0, payload_bytes=PAYLOAD, engine_id="elsewhere")
        self._count(sessions_attached=3)

    def close(self) -> None:
        for client in (self.worker, self.scheduler, self.streamer):
            client.close()

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self.expected[name] += number

    def run(self) -> None:
        """All of it. Each step says what it adds."""
        keys = chain("one", 6)
        self._miss(keys[:4])
        self._save(keys[:4])
        self._save_again(keys[:2])
        self._hit(keys)
        self._ask_for_presence(keys)
        self._stream()
        self._refuse()
        self._evict()
        self._let_go()

    def _miss(self, keys: list[bytes]) -> None:
        reply = self.scheduler.lookup(keys)
        assert reply.hit_end == 0
        self._count(lookups=1, lookups_missed=1, lookup_asked_blocks=4, lookup_missed_blocks=4)

    def _save(self, keys: list[bytes]) -> None:
        assert set(self.worker.save(keys)) == {pb.COMMIT_STATUS_STORED}
        self._count(reserved_slots=4, commits_stored=4, commits_stored_bytes=4 * PAYLOAD)

    def _save_again(self, keys: list[bytes]) -> None:
        assert set(self.worker.save(keys)) == {pb.COMMIT_STATUS_ALREADY_PRESENT}
        self._count(reserved_slots=2, commits_already_present=2)

    def _hit(self, keys: list[bytes]) -> None:
        """The engine has one block itself; three of the other five are here. Released, and promised again."""
        first = self.scheduler.lookup(keys, first=1)
        self.scheduler.stub.Renew(pb.RenewRequest(session_id=self.scheduler.id, lease_ids=[first.lease_id]))
        self.scheduler.stub.Release(pb.ReleaseRequest(session_id=self.scheduler.id, lease_ids=[first.lease_id]))
        second = self.scheduler.lookup(keys, first=1)
        assert (first.hit_end, second.hit_end) == (4, 4)
        self.lease_id = second.lease_id
        self._count(lookups=2, lookups_hit=2, lookup_asked_blocks=10, lookup_hit_blocks=6, lookup_missed_blocks=4)
        self._count(promised_bytes=6 * PAYLOAD, leases_granted=2, leases_renewed=1, leases_released=1)

    def _ask_for_presence(self, keys: list[bytes]) -> None:
        self.scheduler.lookup(keys, lease=False)
        self._count(presence_lookups=1, presence_asked_blocks=6, presence_present_blocks=4)

    def _stream(self) -> None:
        """Two blocks come in and one that is here already; two go out, one is missing; one arrives damaged."""
        keys = chain("two", 2)
        assert self.streamer.put(keys) == [pb.COMMIT_STATUS_STORED] * 2
        assert self.streamer.put(keys[:1]) == [pb.COMMIT_STATUS_ALREADY_PRESENT]
        assert [payload is None for payload in self.streamer.get([*keys, bytes(16)])] == [False, False, True]
        bad = chain("bad", 1)
        header = pb.PutHeader(session_id=self.streamer.id, **columns(bad), checksums=(1).to_bytes(8, "little"))
        reply = self.streamer.stub.Put(put_messages(header, [payload_of(bad[0], PAYLOAD)]))
        assert list(reply.statuses) == [pb.COMMIT_STATUS_REFUSED]
        self._count(put_payloads=4, put_bytes=3 * PAYLOAD, commits_stored=2, commits_stored_bytes=2 * PAYLOAD)
        self._count(commits_already_present=1, commits_refused=1, put_checksum_mismatches=1)
        self._count(get_payloads=2, get_bytes=2 * PAYLOAD, get_missing=1)

    def _refuse(self) -> None:
        """Another layout of the same shard."""
        with pytest.raises(grpc.RpcError):
            Client(self.server.unix, 0, payload_bytes=PAYLOAD, descriptor=b"other")
        self._count(sessions_refused=1)

    def _evict(self) -> None:
        """One long chain, more than there are slots; what is leased (four blocks) stays."""
        keys = chain("three", NUM_SLOTS)
        for end in range(BATCH, NUM_SLOTS + 1, BATCH):
            slots = self.worker.reserve_all(BATCH)
            assert set(self.worker.commit(slots, keys[:end], end - BATCH)) == {pb.COMMIT_STATUS_STORED}
        num_stored = self.expected["commits_stored"] + NUM_SLOTS
        num_reserved = 2  # those of `_save_again`
        self._count(commits_stored=NUM_SLOTS, commits_stored_bytes=NUM_SLOTS * PAYLOAD)
        self._count(evicted_blocks_capacity=num_stored + num_reserved - NUM_SLOTS)
        # Reserve may have been answered with fewer slots while memory was being touched: how often is the machine's.
        counters = self.server.stats().counters
        self._count(reserved_slots=NUM_SLOTS, reserve_short=counters["reserve_short"])

    def _let_go(self) -> None:
        """The second lease of `_hit`; where all this took longer than a lease lasts, it has expired before."""
        self.scheduler.stub.Release(pb.ReleaseRequest(session_id=self.scheduler.id, lease_ids=[self.lease_id]))
        num_expired = self.server.stats().counters["leases_expired"]
        assert num_expired <= 1
        self._count(leases_expired=num_expired, leases_released=1 - num_expired)

    def flush(self) -> int:
        """Everything goes; a lease that is out ends with it."""
        num_hit = self.scheduler.lookup(chain("three", NUM_SLOTS)[:BATCH]).hit_end
        assert num_hit > 0
        self._count(lookups=1, lookups_hit=1, lookup_asked_blocks=BATCH, lookup_hit_blocks=num_hit)
        self._count(lookup_missed_blocks=BATCH - num_hit, promised_bytes=num_hit * PAYLOAD, leases_granted=1)
        reply = self.scheduler.stub.Flush(pb.FlushRequest())
        self._count(flushed_blocks=reply.num_blocks, leases_flushed=1)
        return int(reply.num_blocks)


def counters_of(server: ServerProcess) -> dict[str, Any]:
    return dict(server.stats().counters)
