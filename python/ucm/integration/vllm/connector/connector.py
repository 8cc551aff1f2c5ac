"""The class vLLM calls: it builds the side for its role and passes every call on.

Nothing raises into vLLM once the engine runs: a failure becomes a miss and a log line, and after a
bounded number of failures the side is given up. The other side is informed by the next metadata or
report, and every load that vLLM waits for is still reported. A wrong configuration is reported by
the constructor, before the engine starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from ucm.config import UcmConfig, load, parse
from ucm.errors import ConfigError, UnsupportedError
from ucm.integration.vllm.attention.rerope import refuse_unsupported as refuse_unsupported_rule
from ucm.integration.vllm.compat.versions import installed, why_unserved, why_untested
from ucm.integration.vllm.connector.factory import make_scheduler, make_worker, step_tokens, why_off
from ucm.integration.vllm.connector.guard import Failures, P, R, harmless, logger, throttle
from ucm.integration.vllm.connector.identity.engine_identity import block_tokens
from ucm.integration.vllm.connector.identity.weights import models_of
from ucm.integration.vllm.connector.metadata import (
    Blended,
    Load,
    RankReport,
    UCMConnectorMetadata,
    UCMConnectorWorkerMetadata,
)
from ucm.integration.vllm.connector.scheduler import blend
from ucm.integration.vllm.connector.scheduler.readiness import OFF, OPEN
from ucm.integration.vllm.connector.scheduler.scheduler import NOTHING, UCMConnectorScheduler
from ucm.integration.vllm.connector.stats import MissStats, UcmPromMetrics, UcmStats
from ucm.integration.vllm.connector.stores import refuse_missing_store, refuse_model_directory
from ucm.integration.vllm.connector.worker.transfers import PendingLoads
from ucm.integration.vllm.connector.worker.worker import UCMConnectorWorker
from ucm.integration.vllm.early import refuse_wrong
from ucm.logger import init_logger
from ucm.metrics.names import AT
from ucm.profiling import profile
from ucm.reasons import MissReason
from ucm.store.factory import UcmConnectorFactoryV1

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ucm.integration.vllm.connector.scheduler.sparse import SparseScheduler
    from ucm.integration.vllm.connector.worker.blend import BlendWorker
    from ucm.integration.vllm.connector.worker.sparse import SparseWorker


class UCMConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefix caching through a store, for one engine. ``docs/configuration-connector.md`` has its
    keys."""

    _exports_metrics = True
    # Sparse attention, where it is configured.
    _sparse_scheduler: SparseScheduler | None = None
    _sparse_worker: SparseWorker | None = None
    # Blend, where it is configured.
    _blend_planner: blend.BlendPlanner | None = None
    _blend_worker: BlendWorker | None = None
    _blended: tuple[Blended, ...] = ()  # since the last report

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Reads the configuration; raises :class:`~ucm.errors.ConfigError` when it is wrong."""
        super().__init__(vllm_config, role, kv_cache_config)
        config = load(self._kv_transfer_config.kv_connector_extra_config)
        init_logger("ucm", config.log.level, config.log.file, log_format=config.log.format)
        if config.enabled and config.profile.enabled:
            profile.open(config.profile.output, role.name.lower())
        for store in (config, *config.alternatives):
            UcmConnectorFactoryV1.resolve(store.ucm_connector_name, store.ucm_connector_module_path)
        if isinstance(self, UCMBlendConnector) and config.enabled and config.sparse.blend is None:
            raise ConfigError('UCMBlendConnector needs Blend: write "blend": {} for its defaults')
        if config.enabled:
            refuse_model_directory(config, models_of(vllm_config))
            if config.require_store:
                refuse_missing_store(config)
        self._exports_metrics = config.metrics.enabled
        self._scheduler: UCMConnectorScheduler | None = None
        self._worker: UCMConnectorWorker | None = None
        # tokens that vLLM found on the device, of requests that it may admit
        self._found: dict[str, int] = {}
        # loads that vLLM waits for, until the workers are sent them
        self._unsent: dict[str, Load] = {}
        self._pending = PendingLoads()  # of this rank
        version = installed()
        if config.enabled and config.sparse.selects and not why_unserved(version):
            self._make_sparse(config, vllm_config, role, kv_cache_config)
        if config.enabled and config.rerope.enabled:
            refuse_unsupported_rule(vllm_config)
        self._off: MissReason | None = None
        self._miss_stats: MissStats | None = None
        if (text := why_untested(version)) and role == KVConnectorRole.SCHEDULER:
            logger.warning("%s", text)
        if off := why_off(
            config, vllm_config, kv_cache_config, decides=role == KVConnectorRole.SCHEDULER
        ):
            if config.enabled and config.require_store:
                raise ConfigError(f"require_store is true, and the cache would be off: {off[1]}")
            if role == KVConnectorRole.SCHEDULER:
                self._off, why = off
                self._miss_stats = MissStats(vllm_config.cache_config.block_size, time.monotonic())
                logger.warning("the cache is off: %s", why)
        elif role == KVConnectorRole.WORKER:
            self._worker = make_worker(config, vllm_config, kv_cache_config, self._sparse_worker)
            if (keys := config.sparse.blend) is not None:
                from ucm.integration.vllm.connector.worker.blend import BlendWorker

                self._blend_worker = BlendWorker(keys, vllm_config, kv_cache_config)
        else:
            self._recompute_failed_loads()
            self._block_tokens = block_tokens(vllm_config, kv_cache_config)
            if (keys := config.sparse.blend) is not None:
                self._blend_planner = blend.BlendPlanner(
                    keys,
                    self._block_tokens,
                    step_tokens=step_tokens(vllm_config),
                    separators=blend.separators_in(keys, vllm_config),
                    why_not=blend.why_not_blended(vllm_config, kv_cache_config),
                )
            self._scheduler = make_scheduler(
                config, vllm_config, kv_cache_config, self._sparse_scheduler, self._blend_planner
            )
            self._miss_stats = self._scheduler.miss_stats
            for line in config.describe():
                logger.debug("configuration: %s", line)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nothing is done layer by layer inside of a graph. vLLM calls this in its first process,
        where a wrong configuration is refused."""
        refuse_wrong(extra_config)
        return False

    def _make_sparse(
        self,
        config: UcmConfig,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """The side of sparse attention for this role; it needs torch and a model, so it is imported
        here."""
        from ucm.integration.vllm.attention.setup import refuse_unsupported

        refuse_unsupported(vllm_config, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            from ucm.integration.vllm.connector.worker.sparse import SparseWorker

            self._sparse_worker = SparseWorker(config, vllm_config, kv_cache_config)
        else:
            from ucm.integration.vllm.connector.scheduler.sparse import make_sparse_scheduler

            self._sparse_scheduler = make_sparse_scheduler(config, vllm_config, kv_cache_config)

    @classmethod
    def create(
        cls,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> Self:
        """A connector, as the original makes it. Raises :class:`~ucm.errors.ConfigError` without
        ``kv_cache_config``: vLLM lays its KV cache out before it makes a connector."""
        if kv_cache_config is None:
            raise ConfigError(
                "this vLLM lays the KV cache out before it makes a connector: give its"
                " KVCacheConfig as third argument"
            )
        return cls(vllm_config, role, kv_cache_config)

    def _recompute_failed_loads(self) -> None:
        """vLLM's default ends the request of a failed load with an error; it reads the setting
        after this. Inside a MultiConnector this is a copy that vLLM does not read: see
        :func:`.factory._only_stores`."""
        transfer = self._kv_transfer_config
        if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.info(
                'kv_load_failure_policy of this connector set to "recompute": a failed load is no'
                " error"
            )

    @property
    def failures(self) -> Failures | None:
        """Those of the side of this connector; None where the cache is off."""
        return getattr(self._scheduler or self._worker, "failures", None)

    @property
    def given_up(self) -> str:
        """Why the side is given up, empty while it is not."""
        return "" if self.failures is None else self.failures.why

    def _give_up(self, why: str) -> None:
        if self.failures is not None:
            self.failures.give_up(why)

    def _call(self, default: R, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a method of this side; ``default`` if it raises, or the side is given
        up."""
        if not self.given_up:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                (self.failures or Failures("connector")).note(method.__name__, error)
        return default

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache delivers nothing that a request depends on."""
        return False

    # Scheduler side
    # -----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's block tables and pool. Sparse attention and Blend are not guarded here: without
        them vLLM's own prefix cache would keep approximate KV, so the engine does not start."""
        super().bind_kv_cache_manager(kv_cache_manager)
        for approximate in (self._sparse_scheduler, self._blend_planner):
            if approximate is not None:
                approximate.bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            bind = self._scheduler.bind_kv_cache_manager
            if self._call(True, bind, kv_cache_manager):
                self._give_up("vLLM's block tables could not be bound")

    @harmless(None, vital=True)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's pool of blocks."""
        if self._scheduler is not None:
            self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Another connector's, inside a MultiConnector: our workers answer in their first step."""

    def on_new_request(self, request: Request) -> None:
        """A request arrived: its lookup begins."""
        if self._sparse_scheduler is not None:
            self._sparse(self._sparse_scheduler.on_new_request, request)
        if self.given_up and self._miss_stats is not None:
            self._miss_stats.bypassed(request, MissReason.INTERNAL)
        if self._scheduler is not None:
            self._call(None, self._scheduler.on_new_request, request)
        elif self._miss_stats is not None and self._off is not None:
            self._call(None, self._miss_stats.bypassed, request, self._off)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded, None while they are looked up; loads are asynchronous."""
        if self._sparse_scheduler is not None:
            self._sparse(self._sparse_scheduler.found_on_device, request, num_computed_tokens)
        if self._blend_planner is not None:
            self._blend_planner.asked(request)
        self._found[request.request_id] = num_computed_tokens
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.get_num_new_matched_tokens
        return self._call((0, False), matched, request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated. From here on vLLM waits for the load of the external tokens."""
        if self._sparse_scheduler is not None:
            self._sparse(self._sparse_scheduler.update_state_after_alloc, request, blocks)
        found = self._found.pop(request.request_id, 0)
        if self._miss_stats is not None:
            self._miss_stats.admitted(request, found)
        if self._scheduler is None:
            return
        if num_external_tokens > 0:
            # Its blocks are reported if it cannot be planned, or it as a whole where these are not
            # all of one group.
            first, count = found // self._block_tokens, num_external_tokens // self._block_tokens
            table = blocks.blocks[0][first : first + count]
            ids = np.array([block.block_id for block in table if not block.is_null], np.int64)
            self._unsent[request.request_id] = Load(request.request_id, first, b"", ids)
        allocated = self._scheduler.update_state_after_alloc
        self._call(None, allocated, request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """The tokens of the load just planned, by the kind of tier in which they were found. Older
        vLLMs do not call this."""
        found = self._hit_sources(request, num_external_tokens)
        if found is None:
            found = super().get_external_cache_hit_sources(request, num_external_tokens)
        return found

    @harmless(None)
    def _hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int] | None:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # newer vLLMs alone have it

        if self._scheduler is None:
            return None
        words = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        found = self._scheduler.hit_media(request, tokens)
        return {
            words.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED): count
            for medium, count in found.items()
            if count
        }

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers do in this step."""
        planned: UCMConnectorMetadata | None = NOTHING
        if self._scheduler is not None:
            planned = self._call(None, self._scheduler.build_connector_meta, scheduler_output)
            if planned is None and self._call(True, self._scheduler.drop_unsent):
                self._give_up("the dumps of a step could not be dropped")
        plan = self._with_unplanned_loads(planned)
        # Also of a side that is given up: the blocks of these requests have foreign KV.
        if self._blend_planner is not None:
            blends = self._blend_planner.plan(scheduler_output)
            plan = replace(plan, blends=blends) if blends else plan
        if self._sparse_scheduler is None:
            return plan
        settled = self._scheduler is None or self._scheduler.readiness.phase in (OPEN, OFF)
        sparse = self._sparse(self._sparse_scheduler.plan, scheduler_output, settled)
        return plan if sparse is None else replace(plan, sparse=sparse)

    def _with_unplanned_loads(self, plan: UCMConnectorMetadata | None) -> UCMConnectorMetadata:
        """A step's plan, with the loads that vLLM waits for and that it lacks. ``plan`` is None
        where planning failed: the next one has these loads then, unless the side is given up."""
        why = self.given_up
        if plan is None and not why:
            return UCMConnectorMetadata(flush_all=True)
        planned = {sent.request for sent in plan.loads} if plan is not None else set()
        undone = [lost for name, lost in self._unsent.items() if name not in planned]
        self._unsent.clear()
        if why or undone:
            flush = plan is None or bool(why)
            plan = replace(plan or NOTHING, undone=undone, given_up=why, flush_all=flush)
        assert plan is not None
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers did."""
        news = connector_output.kv_connector_worker_meta
        if self._sparse_scheduler is not None and isinstance(news, UCMConnectorWorkerMetadata):
            self._sparse(self._sparse_scheduler.measured, news.break_even)
        if (scheduler := self._scheduler) is None:
            return
        opening = scheduler.readiness.phase not in (OPEN, OFF)
        if self._call(True, scheduler.update_connector_output, connector_output) and opening:
            self._give_up("a report of the workers that is sent once was not read")

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its blocks may be freed, and are read before others write them."""
        found, answer = self._found.pop(request.request_id, 0), None
        if self._miss_stats is not None:
            self._miss_stats.admitted(request, found)
        if self._blend_planner is not None:
            self._blend_planner.finished(request)
        if self._scheduler is not None:
            answer = self._call(None, self._scheduler.request_finished, request)
        if self._sparse_scheduler is not None:
            self._sparse(self._sparse_scheduler.request_finished, request)
        return False, answer

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where vLLM may have several KV groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @harmless(list, after=True)
    def take_events(self) -> list[KVCacheEvent]:
        """The events of stored blocks since vLLM's last call, where it publishes events."""
        return [] if self._scheduler is None else self._scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should go on stepping."""
        sparse = self._sparse_scheduler
        measuring = sparse is not None and self._sparse(sparse.measuring)
        return bool(measuring) or self._has_work()

    @harmless(False)
    def _has_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_push_work

    @harmless(True, vital=True)
    def reset_cache(self) -> bool | None:
        """vLLM resets its caches together with this one: see ``on_reset`` in
        ``docs/configuration-connector.md``. vLLM takes None for success, and raises where the
        result is False, also in a pause and before a sleep. A side that is given up serves nothing
        that was stored."""
        return True if self._scheduler is None else self._scheduler.reset_cache()

    # Worker side
    # --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Where the KV lies."""
        if self._sparse_worker is not None:
            self._sparse_worker.register_kv_caches(kv_caches)
        if self._worker is not None:
            if self._blend_worker is not None:
                self._blend_worker.register_kv_caches(kv_caches)
                self._worker.no_blend = self._blend_worker.why_not
            self._worker.register_kv_caches(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """vLLM may sleep: it calls the next two methods. It calls this one in its first process,
        where a wrong configuration is refused."""
        refuse_wrong(kv_transfer_config.kv_connector_extra_config)
        return True

    def unregister_kv_caches(self) -> None:
        """vLLM is about to unmap the KV, for a sleep. Loads that were not reported are lost."""
        self._pending.lost_but(())
        self._unregister()

    @harmless(None, vital=True, after=True)
    def _unregister(self) -> None:
        if self._worker is not None:
            self._worker.unregister_kv_caches()

    @harmless(None, vital=True, after=True)
    def restore_kv_caches(self) -> None:
        """The KV is mapped again, after the sleep."""
        if self._worker is not None:
            self._worker.restore_kv_caches()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The plan of the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is None or not isinstance(connector_metadata, UCMConnectorMetadata):
            return
        plan = connector_metadata
        self._pending.sent([*plan.loads, *plan.undone])
        self._pending.lost(plan.undone)
        if plan.given_up:
            self._give_up(plan.given_up)
        if not self._call(True, self._worker.bind_connector_metadata, plan):
            return
        if plan.setup is not None or plan.check_weights is not None:
            self._give_up("a step's metadata that are sent once were not read")
        self._drop_step()

    def _drop_step(self) -> None:
        """The plan of a step was not read, or in part."""
        try:
            if self._worker is not None:
                self._worker.drop_step()
        except Exception as error:
            self._give_up(f"a step could not be dropped: {error!r}")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step's loads; before or after the forward pass, vLLM decides: before it where
        there are chunks. Raises where their tokens cannot be computed: vLLM would go on with
        foreign KV."""
        plan = self._get_connector_metadata() if self.has_connector_metadata() else None
        ours = plan if isinstance(plan, UCMConnectorMetadata) else NOTHING
        if ours.blends:
            if self._blend_worker is None:
                raise UnsupportedError("chunks were loaded, and this rank has no Blend")
            done = self._blend_worker.run(ours.blends)
            if self._worker is not None and self._worker.rank.number == 0:
                self._blended += tuple(done)
        if self._sparse_worker is not None and ours.sparse is not None:
            self._sparse(self._sparse_worker.begin_step, ours.sparse, forward_context)
        if self._worker is not None:
            self._call(None, self._worker.start_load_kv)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests run when all their layers are loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to do by layer: whole blocks are dumped after the step."""

    def wait_for_save(self) -> None:
        """Begin the step's dumps; their sources do not change yet, so there is nothing to wait
        for."""
        if self._sparse_worker is not None:
            self._sparse(self._sparse_worker.end_step)
        if self._worker is not None:
            self._call(None, self._worker.start_dumps)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load ended, each once, and those of them that must be computed as a
        whole."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        _, ended = self.get_finished(finished_req_ids)
        results = KVConnectorTransferResults(finished_recving=ended or set())
        if self._worker is not None and self._worker.rank.fails_whole:
            failed = self._call(None, self._worker.loads.take_failed)
            lost = self._pending.reported if failed is None else self._pending.unfilled
            names = {load.request for load in lost}
            results.failed_recving = ((failed or set()) | names) & results.finished_recving
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load ended, each once."""
        if self._worker is None:
            return None, None
        ended = self._call(None, self._worker.take_ended_loads)
        if ended is None or self._worker.failures.count:  # a load may be lost
            under_way = self._worker.loads_under_way(poll=ended is None)
            self._pending.lost_but(under_way | (ended or set()))
        names = self._pending.report(ended or ())
        for lost in self._pending.unfilled:
            self._worker.loads.forget(lost)
        return None, names or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks a load did not fill."""
        worker, unfilled = self._worker, self._pending.unfilled
        if worker is None or worker.rank.fails_whole:
            return set()  # see get_transfer_results
        bad = self._call(None, worker.get_block_ids_with_load_errors)
        if bad is None:
            unfilled = self._pending.reported
            for lost in unfilled:
                worker.loads.forget(lost)
        return (bad or set()).union(*(lost.blocks.tolist() for lost in unfilled))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """News for the scheduler side."""
        news: UCMConnectorWorkerMetadata | None = None
        if self._worker is not None:
            news = self._call(None, self._worker.build_connector_worker_meta)
            if self.given_up:
                number, broken = self._worker.rank.number, f"given up: {self.given_up}"
                news = UCMConnectorWorkerMetadata(ranks=[RankReport(number, broken=broken)])
        sparse = self._sparse_worker
        measured = None if sparse is None else self._sparse(sparse.take_measured)
        lost = (None if sparse is None else self._sparse(sparse.take_lost)) or []
        if measured is not None or lost:
            news = news or UCMConnectorWorkerMetadata()
            news.break_even, news.lost = [] if measured is None else [measured], lost
        if self._blended:
            news = news or UCMConnectorWorkerMetadata()
            news.blended, self._blended = list(self._blended), ()
        return news

    @staticmethod
    def _sparse(function: Callable[..., Any], *args: Any) -> Any:
        """The result of a method of sparse attention, None where it raises: loads and dumps go
        on."""
        try:
            return function(*args)
        except Exception as error:
            name = function.__name__
            throttle.warning(f"sparse {name}", "%s of sparse attention failed: %r", name, error)
            return None

    # Both
    # ----------------------------------------------------------------------------------------------

    @harmless(None, after=True)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counts of this side since vLLM's last call, None without any."""
        news: dict[str, Any] = {}
        if self._scheduler is not None and not self.given_up:
            self._scheduler.step_ended()  # vLLM calls this at the end of every step
        if self._miss_stats is not None:
            news |= self._miss_stats.take() or {}
        elif self._worker is not None:
            worker = self._worker
            news |= worker.take_transfers() | worker.take_tiers()
        if self._sparse_worker is not None:
            news |= self._sparse(self._sparse_worker.take_counts) or {}
        if self._scheduler is not None:
            news |= self._scheduler.take_tiers()
        return UcmStats(data={AT: time.time(), **news}) if news and self._exports_metrics else None

    @classmethod
    @harmless(None)
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """The counts, in the process that logs."""
        return UcmStats(data=dict(data or {}))

    @classmethod
    @harmless(None)
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The counters in vLLM's Prometheus registry; None where ``metrics.enabled`` is false."""
        config = parse(getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None))
        if not config.metrics.enabled:
            return None
        cls._serve_metrics(config)
        sparse = config.sparse.selects
        return UcmPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, sparse=sparse
        )

    @staticmethod
    @harmless(None)
    def _serve_metrics(config: UcmConfig) -> None:
        """Serve vLLM's registry on a further port, where one is configured: an engine without an
        API server has no other."""
        port, path = config.metrics.port, config.metrics.config_path
        if port is None and path is None:
            return
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        from ucm.metrics.serving import port_of, serve

        serve(port_of(port, path), get_prometheus_registry())

    @harmless(dict, after=True)
    def stats(self) -> dict[str, Any]:
        """Counters of this side since it began; those of the store with the worker's."""
        if self._scheduler is not None:
            return dict(self._scheduler.stats())
        return {} if self._worker is None else self._worker.stats()

    def shutdown(self) -> None:
        """Let dumps end, within the shutdown deadline, and close the stores."""
        for sparse in (self._sparse_worker, self._sparse_scheduler):
            if sparse is not None:
                self._sparse(sparse.close)
        self._blend_worker = None  # it holds the model
        self._close()

    @harmless(None, after=True)
    def _close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
        profile.close()


class UCMDirectConnector(UCMConnector):
    """The direct mode by its own name: a block of all layers is one row of a load or dump."""


class UCMBlendConnector(UCMConnector):
    """The connector with Blend, which its configuration must have."""
