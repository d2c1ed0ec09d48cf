from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SCHEDULER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]

class CommitStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_STATUS_UNSPECIFIED: _ClassVar[CommitStatus]
    COMMIT_STATUS_STORED: _ClassVar[CommitStatus]
    COMMIT_STATUS_ALREADY_PRESENT: _ClassVar[CommitStatus]
    COMMIT_STATUS_REFUSED: _ClassVar[CommitStatus]
    COMMIT_STATUS_DROPPED: _ClassVar[CommitStatus]
ROLE_UNSPECIFIED: Role
ROLE_SCHEDULER: Role
ROLE_WORKER: Role
COMMIT_STATUS_UNSPECIFIED: CommitStatus
COMMIT_STATUS_STORED: CommitStatus
COMMIT_STATUS_ALREADY_PRESENT: CommitStatus
COMMIT_STATUS_REFUSED: CommitStatus
COMMIT_STATUS_DROPPED: CommitStatus

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "role", "engine_id", "client_name", "pid", "namespace", "shard", "wants_descriptors", "min_protocol_version", "num_replicas")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WANTS_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: Role
    engine_id: str
    client_name: str
    pid: int
    namespace: Namespace
    shard: Shard
    wants_descriptors: bool
    min_protocol_version: int
    num_replicas: int
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., engine_id: _Optional[str] = ..., client_name: _Optional[str] = ..., pid: _Optional[int] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., wants_descriptors: bool = ..., min_protocol_version: _Optional[int] = ..., num_replicas: _Optional[int] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("fingerprint", "text", "key_bytes", "num_shards")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    text: str
    key_bytes: int
    num_shards: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., text: _Optional[str] = ..., key_bytes: _Optional[int] = ..., num_shards: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("index", "payload_bytes", "descriptor", "replica")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload_bytes: int
    descriptor: bytes
    replica: int
    def __init__(self, index: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., descriptor: _Optional[bytes] = ..., replica: _Optional[int] = ...) -> None: ...

class AttachEvent(_message.Message):
    __slots__ = ("attached", "closing")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    closing: Closing
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("protocol_version", "session_id", "server_epoch", "limits", "descriptor_ticket", "server_version", "tenant", "read_denied", "write_denied")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_TICKET_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    READ_DENIED_FIELD_NUMBER: _ClassVar[int]
    WRITE_DENIED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    session_id: int
    server_epoch: int
    limits: Limits
    descriptor_ticket: bytes
    server_version: str
    tenant: str
    read_denied: bool
    write_denied: bool
    def __init__(self, protocol_version: _Optional[int] = ..., session_id: _Optional[int] = ..., server_epoch: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., descriptor_ticket: _Optional[bytes] = ..., server_version: _Optional[str] = ..., tenant: _Optional[str] = ..., read_denied: bool = ..., write_denied: bool = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_payload_bytes", "max_message_bytes", "chunk_bytes", "lease_ms", "max_reserved_bytes")
    MAX_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_payload_bytes: int
    max_message_bytes: int
    chunk_bytes: int
    lease_ms: int
    max_reserved_bytes: int
    def __init__(self, max_payload_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., lease_ms: _Optional[int] = ..., max_reserved_bytes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "keys", "first", "lease", "wait_ms", "recompute_us_per_block", "wants_checksums", "window", "groups")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    WANTS_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    keys: bytes
    first: int
    lease: bool
    wait_ms: int
    recompute_us_per_block: float
    wants_checksums: bool
    window: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    def __init__(self, session_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., first: _Optional[int] = ..., lease: bool = ..., wait_ms: _Optional[int] = ..., recompute_us_per_block: _Optional[float] = ..., wants_checksums: bool = ..., window: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("fingerprint", "window", "num_replicas")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    window: int
    num_replicas: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., window: _Optional[int] = ..., num_replicas: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("present", "hit_start", "hit_end", "lease_id", "lease_ms", "slots", "generations", "retry", "missing_workers", "retry_ms", "checksums", "groups")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    HIT_START_FIELD_NUMBER: _ClassVar[int]
    HIT_END_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKERS_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    hit_start: int
    hit_end: int
    lease_id: int
    lease_ms: int
    slots: bytes
    generations: bytes
    retry: bool
    missing_workers: int
    retry_ms: int
    checksums: bytes
    groups: _containers.RepeatedCompositeFieldContainer[KvGroupReply]
    def __init__(self, present: _Optional[bytes] = ..., hit_start: _Optional[int] = ..., hit_end: _Optional[int] = ..., lease_id: _Optional[int] = ..., lease_ms: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., retry: bool = ..., missing_workers: _Optional[int] = ..., retry_ms: _Optional[int] = ..., checksums: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[KvGroupReply, _Mapping]]] = ...) -> None: ...

class KvGroupReply(_message.Message):
    __slots__ = ("present", "hit_start", "slots", "generations", "checksums")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    HIT_START_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    hit_start: int
    slots: bytes
    generations: bytes
    checksums: bytes
    def __init__(self, present: _Optional[bytes] = ..., hit_start: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("renewed", "lease_ms")
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    renewed: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    def __init__(self, renewed: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "num_slots")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    num_slots: int
    def __init__(self, session_id: _Optional[int] = ..., num_slots: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("slots", "retry")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    retry: bool
    def __init__(self, slots: _Optional[bytes] = ..., retry: bool = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "slots", "keys", "parent_keys", "depths", "kv_group", "checksums")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    slots: bytes
    keys: bytes
    parent_keys: bytes
    depths: bytes
    kv_group: int
    checksums: bytes
    def __init__(self, session_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parent_keys: _Optional[bytes] = ..., depths: _Optional[bytes] = ..., kv_group: _Optional[int] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session_id", "keys", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    keys: bytes
    lease_id: int
    def __init__(self, session_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., lease_id: _Optional[int] = ...) -> None: ...

class GetChunk(_message.Message):
    __slots__ = ("index", "offset", "checksum", "missing", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    checksum: int
    missing: bool
    data: bytes
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., checksum: _Optional[int] = ..., missing: bool = ..., data: _Optional[bytes] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("session_id", "keys", "parent_keys", "depths", "kv_group", "checksums")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    keys: bytes
    parent_keys: bytes
    depths: bytes
    kv_group: int
    checksums: bytes
    def __init__(self, session_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., parent_keys: _Optional[bytes] = ..., depths: _Optional[bytes] = ..., kv_group: _Optional[int] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class PutChunk(_message.Message):
    __slots__ = ("header", "index", "offset", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    index: int
    offset: int
    data: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("session_id", "keys")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    keys: bytes
    def __init__(self, session_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("num_dropped",)
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    def __init__(self, num_dropped: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("fingerprint", "tenant")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    tenant: str
    def __init__(self, fingerprint: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("num_blocks", "lower_tier_pending")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOWER_TIER_PENDING_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    lower_tier_pending: bool
    def __init__(self, num_blocks: _Optional[int] = ..., lower_tier_pending: bool = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("server_version", "server_epoch", "uptime_s", "memory_bytes", "touched_bytes", "stored_bytes", "reserved_bytes", "leased_bytes", "counters", "namespaces", "sessions", "operation_bounds_s", "operations", "slowest", "recent_warnings", "draining")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OPERATION_BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    RECENT_WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    server_epoch: int
    uptime_s: float
    memory_bytes: int
    touched_bytes: int
    stored_bytes: int
    reserved_bytes: int
    leased_bytes: int
    counters: _containers.ScalarMap[str, int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    operation_bounds_s: _containers.RepeatedScalarFieldContainer[float]
    operations: _containers.RepeatedCompositeFieldContainer[OperationStats]
    slowest: _containers.RepeatedCompositeFieldContainer[SlowOperation]
    recent_warnings: _containers.RepeatedCompositeFieldContainer[LogLine]
    draining: bool
    def __init__(self, server_version: _Optional[str] = ..., server_epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., touched_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., operation_bounds_s: _Optional[_Iterable[float]] = ..., operations: _Optional[_Iterable[_Union[OperationStats, _Mapping]]] = ..., slowest: _Optional[_Iterable[_Union[SlowOperation, _Mapping]]] = ..., recent_warnings: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ..., draining: bool = ...) -> None: ...

class OperationStats(_message.Message):
    __slots__ = ("name", "counts", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    def __init__(self, name: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ...) -> None: ...

class SlowOperation(_message.Message):
    __slots__ = ("name", "seconds", "ended_s_ago")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_AGO_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    ended_s_ago: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ..., ended_s_ago: _Optional[float] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("s_ago", "level", "text")
    S_AGO_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    s_ago: float
    level: str
    text: str
    def __init__(self, s_ago: _Optional[float] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("fingerprint", "text", "num_blocks", "num_complete", "stored_bytes", "num_shards", "tenant", "age_s", "idle_s", "num_leased")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    text: str
    num_blocks: int
    num_complete: int
    stored_bytes: int
    num_shards: int
    tenant: str
    age_s: float
    idle_s: float
    num_leased: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., text: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_complete: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., num_shards: _Optional[int] = ..., tenant: _Optional[str] = ..., age_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., num_leased: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_id", "client_name", "engine_id", "role", "shard", "pid", "mapped", "reserved_bytes", "tenant")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    client_name: str
    engine_id: str
    role: Role
    shard: int
    pid: int
    mapped: bool
    reserved_bytes: int
    tenant: str
    def __init__(self, session_id: _Optional[int] = ..., client_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., shard: _Optional[int] = ..., pid: _Optional[int] = ..., mapped: bool = ..., reserved_bytes: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...
