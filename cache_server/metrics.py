"""Counters. Each field says what it counts and what it leaves out; `StatsReply.counters` carries them by name.

Plain integers, written on the event loop only, never reset. Gauges (bytes stored, reserved, leased) are not
here: they are sums over state that exists anyway and are computed when asked for.

Where the tier below is concerned, `lower_tier.py` adds gauges to the same map (redis_up, redis_bytes_per_s, …).

`exposition.py` says under which names they are in `/metrics`, and what its help texts say: a counter that is not in its
table fails a test.

Equations that must hold:
    lookups_hit + lookups_missed == lookups
    lookup_hit_blocks + lookup_missed_blocks == lookup_asked_blocks
"""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """What happened since the server started."""

    lookups: int = 0  # Lookup calls that asked for a promise and were answered; again when asked again
    lookups_hit: int = 0  # of those: the first block that the engine lacked was promised
    lookups_missed: int = 0  # of those: it was not, absent or not
    lookup_asked_blocks: int = 0  # keys from `first` on, over those lookups
    lookup_hit_blocks: int = 0  # of those: in the run that starts at `first`; not what lies behind a hole
    lookup_missed_blocks: int = 0  # of those: all others, also present ones behind a hole or beyond the lease cap
    promised_bytes: int = 0  # of lookup_hit_blocks, all shards: what engines were told that they may load
    lookups_without_workers: int = 0  # lookups that promised nothing because workers of the engine were missing

    presence_lookups: int = 0  # Lookup calls without a lease, only to know what need not be saved; in nothing above
    presence_asked_blocks: int = 0  # keys over those
    presence_present_blocks: int = 0  # of those: here with all shards

    leases_granted: int = 0  # by Lookup; not the short holds of Get
    leases_released: int = 0  # by Release
    leases_expired: int = 0  # by their deadline
    leases_renewed: int = 0  # prolonged by Renew, each time
    leases_flushed: int = 0  # ended because their namespace was flushed
    leases_capped: int = 0  # lookups that promised less because too much memory is leased

    reserved_slots: int = 0  # slots handed out by Reserve; not those that Put takes for itself
    reserve_short: int = 0  # Reserve calls that got fewer slots than they asked for

    commits_stored: int = 0  # payloads that got their name, by Commit or Put
    commits_stored_bytes: int = 0  # of those, without the rounding up to slots; not what came from Redis
    commits_already_present: int = 0  # payloads whose name was taken; the earlier one stays
    commits_refused: int = 0  # payloads written before a flush, or whose checksum did not match

    get_payloads: int = 0  # payloads sent in full
    get_missing: int = 0  # asked by Get and not here
    get_bytes: int = 0  # payload bytes sent by Get, also of streams that broke
    put_payloads: int = 0  # payloads received in full
    put_bytes: int = 0  # payload bytes received by Put and written into slots
    put_dropped: int = 0  # payloads for which there was no room
    put_checksum_mismatches: int = 0  # payloads that arrived other than they were sent; counted in refused too

    evicted_blocks_capacity: int = 0  # their own class needed room
    evicted_blocks_unsettled: int = 0  # could not be reached or lacked a shard for too long; not in capacity
    evicted_blocks_recut: int = 0  # another class took their segment, or a block they extend
    flushed_blocks: int = 0  # by Flush, here or at another server; not counted as evicted
    flushes_followed: int = 0  # flushes of other servers on the same Redis
    recut_segments: int = 0  # segments that changed their class; not the first assignment

    sessions_attached: int = 0  # Attach calls that got a session
    sessions_refused: int = 0  # Attach calls that did not
    sessions_ended: int = 0  # sessions that are over, their slots given back
    reserved_slots_returned: int = 0  # slots without a name that came back when their session ended

    gate_open: int = 0  # tails found in Redis that were promised: loading them pays
    gate_shut: int = 0  # tails that were not asked for or not loaded, because recomputing is expected to be faster
    gate_cut: int = 0  # tails whose loading was stopped on the way: it turned out slower than recomputing
    gate_stream_shut: int = 0  # lookups whose memory hits were not promised: the engine's stream is too slow for them

    promoted_payloads: int = 0  # payloads that came from Redis and got their name
    promoted_bytes: int = 0  # of those
    promotions_missed: int = 0  # payloads that Redis had when asked and not when loaded
    promotions_dropped: int = 0  # payloads for which there was no room in memory, or whose namespace was flushed
    promotions_failed: int = 0  # payloads whose load ended with a failure of Redis or of the line to it
    integrity_failures: int = 0  # values of Redis, and payloads in memory, that did not verify; they were dropped

    redis_asked_blocks: int = 0  # blocks whose presence in Redis was asked for by lookups
    redis_present_blocks: int = 0  # of those: there with all their shards
    redis_saved_payloads: int = 0  # payloads written to Redis
    redis_saved_bytes: int = 0  # of those, without headers
    redis_already_present: int = 0  # queued payloads that Redis had; their TTL was refreshed
    redis_queue_dropped: int = 0  # queued payloads pushed out by younger ones, or left behind at the end
    redis_saves_evicted: int = 0  # queued payloads that memory did not have any more when their turn came
    redis_saves_refused: int = 0  # payloads that Redis refused: full, or another error

    def as_dict(self) -> dict[str, int]:
        """By name, for the wire."""
        return asdict(self)
