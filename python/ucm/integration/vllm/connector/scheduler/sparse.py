"""Sparse attention in the scheduler side: the hooks of the method's scheduler side, which tokens
are exact, and what is sent to the workers with each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.config import UcmConfig
from ucm.integration.vllm.attention.offload import spare_rows
from ucm.integration.vllm.attention.plan import SparsePlan
from ucm.integration.vllm.attention.setup import NEVER, length_text, make_method
from ucm.integration.vllm.attention.spec import ExactTokens, SparseManager, SparseMLAAttentionSpec
from ucm.integration.vllm.connector.guard import logger, throttle
from ucm.integration.vllm.connector.identity.engine_identity import block_tokens
from ucm.integration.vllm.connector.scheduler.offload import OffloadPlanner
from ucm.sparse.base import SparseRow, UcmSparseBase, UcmSparseRole
from ucm.sparse.method import BlockSparse
from ucm.sparse.state import get_ucm_sparse, has_ucm_sparse, set_ucm_sparse

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class BreakEven:
    """The length from which choosing blocks pays in this engine: the measurement of its slowest
    rank, remembered with the speeds of this machine. Until it is known every request is dense; a
    configured ``min_tokens`` replaces it. vLLM caches blocks as exact before the workers are sent
    the step that computes them, so a new value holds from the next step on
    (:meth:`take_effect`)."""

    def __init__(self, method: UcmSparseBase, world: int) -> None:
        self._method = method if isinstance(method, BlockSparse) else None
        self._world = world
        self._measured: list[int] = []
        self.asked = False
        self._known = self._method is None or self._method.settings.min_tokens is not None
        self._next = 0 if self._known else NEVER
        self.take_effect()

    @property
    def tokens(self) -> int:
        """Requests with fewer tokens are dense."""
        return 0 if self._method is None else self._method.break_even_tokens

    def ask(self) -> bool:
        """Whether the ranks are to measure now; true once."""
        if self._known or self.asked:
            return False
        self.asked = True
        return True

    def report(self, tokens: list[int]) -> None:
        """Ranks have measured. Until all have, nothing is chosen: they would not agree."""
        self._measured += tokens
        if len(self._measured) >= self._world:
            self.asked, self._known = False, True
            self._next = max(self._measured)

    def known(self) -> dict[str, Any]:
        """The entry to be remembered; empty where a rank failed to measure."""
        if self._method is None or not self._measured or not self._known or self._next > NEVER:
            return {}
        return {"sparse": {"method": self._named(), "tokens": self._next}}

    def recall(self, entry: Mapping[str, Any]) -> None:
        """Use an earlier process's measurement; a malformed one counts as missing."""
        stored = entry.get("sparse")
        if self._known or not isinstance(stored, dict) or stored.get("method") != self._named():
            return
        tokens = stored.get("tokens")
        if isinstance(tokens, int) and 0 <= tokens <= NEVER:
            self._known, self.asked, self._next = True, False, tokens
            text = "sparse attention pays from %s tokens on: remembered of this machine"
            logger.info(text, length_text(tokens))

    def _named(self) -> str:
        assert self._method is not None
        return f"{type(self._method).__qualname__} {self._method.settings!r}"

    def take_effect(self) -> None:
        """A step was planned: a value measured since the one before holds for the next."""
        if self._method is not None:
            self._method.break_even_tokens = self._next


class SparseScheduler:
    """One engine's method, on the scheduler side."""

    def __init__(
        self,
        method: UcmSparseBase,
        block_tokens: int,
        world: int = 1,
        num_blocks: int = 0,
        *,
        latent: bool = False,
    ) -> None:
        """``world`` is the number of ranks, ``num_blocks`` of device blocks; ``latent``: latent
        attention."""
        self.method = method
        self.break_even = BreakEven(method, world)
        self._block_tokens = block_tokens
        self._requests: dict[str, Request] = {}
        self._finished: list[str] = []
        self._found: dict[str, int] = {}  # tokens on the device of requests that may be admitted
        self._given: list[int] = []  # device blocks that requests were given since the last plan
        self._manager: KVCacheManager | None = None
        #: Tokens of a request whose KV is exact: dumps and vLLM's prefix cache stop there.
        self.exact_tokens = ExactTokens(method)
        #: Which blocks leave the device; None where all stay.
        self.offload: OffloadPlanner | None = None
        if not isinstance(method, BlockSparse) and method.overrides("estimate_num_slots_sparsed"):
            logger.warning(
                "sparse attention: estimate_num_slots_sparsed of %s is not called: blocks leave the"
                " device only with a subclass of BlockSparse and `offload`",
                type(method).__name__,
            )
        if isinstance(method, BlockSparse) and method.settings.offload:
            self.offload = OffloadPlanner(
                method,
                self._requests,
                self.exact_tokens,
                block_tokens,
                spare_rows(num_blocks),
                several_queries=not latent,
            )

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Bind the block tables, and the managers that fill vLLM's prefix cache."""
        self._manager = manager
        for each in manager.coordinator.single_type_managers:
            if isinstance(each, SparseManager):
                each.exact_tokens = self.exact_tokens
                each.offload = self.offload

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._requests[request.request_id] = request
        self._hook("request_begin", request.request_id, request.prompt_token_ids or [])

    def found_on_device(self, request: Request, tokens: int) -> None:
        """vLLM may admit a request, whose first ``tokens`` are in its prefix cache."""
        self._found[request.request_id] = tokens

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks) -> None:
        """A request was given blocks. Another connector may load into them, of which the workers
        see no keys: they are sent the blocks' numbers, so that no old representation is used for
        the new content."""
        if (found := self._found.pop(request.request_id, None)) is not None:
            table = blocks.blocks[0][found // self._block_tokens :]
            self._given += [block.block_id for block in table if not block.is_null]
        self.exact_tokens.prefill_tokens(request)
        self._hook("update_state_after_alloc", request, len(blocks.blocks[0]))

    def request_finished(self, request: Request) -> None:
        """It ended, or was aborted."""
        self._found.pop(request.request_id, None)
        if self.offload is not None:
            self.offload.forget(request.request_id)
        if self._requests.pop(request.request_id, None) is not None:
            self._finished.append(request.request_id)
        self._hook("request_finished_in_scheduler", request.request_id)

    def measuring(self) -> bool:
        """Whether the workers are to measure, and have not reported."""
        return self.break_even.asked

    def measured(self, tokens: list[int]) -> None:
        """The measurements of ranks."""
        if tokens:
            self.break_even.report(tokens)

    def plan(self, output: SchedulerOutput, settled: bool) -> SparsePlan:
        """The plan of a step for the workers. They call the method before the model runs, so the
        connector is called then, as if it had something to load in the step. ``settled``: the
        measurement of other runs was read."""
        output.has_sync_kv_loads = True
        plan = SparsePlan(block_tokens=self._block_tokens, break_even=self.break_even.tokens)
        plan.metadata = self._hook("build_sparse_meta", output, self._requests)
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._add(plan, name, computed, scheduled[name])
        for new in output.scheduled_new_reqs:
            self._add(plan, new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        plan.finished, self._finished = self._finished, []
        plan.given, self._given = np.array(self._given, dtype=np.int64), []
        if self.offload is not None:  # last: a change that is taken must arrive
            plan.offloaded, plan.given_back = self.offload.take()
        # Only with a step that vLLM computes: the ranks measure after it, by the kernels that it
        # ran. They measure once, so this stands behind all that may fail.
        plan.measure = settled and bool(plan.rows) and self.break_even.ask()
        self.break_even.take_effect()
        return plan

    def _add(self, plan: SparsePlan, name: str, computed: int, scheduled: int) -> None:
        request = self._requests.get(name)
        if request is None or self._manager is None:
            return
        tokens = computed + scheduled
        table = self._manager.get_blocks(name).blocks[0]
        plan.last_blocks.append(table[(tokens - 1) // self._block_tokens].block_id)
        row = SparseRow(
            request_id=name,
            tokens=tokens,
            prefill_tokens=self.exact_tokens.prefill_tokens(request),
            prompt_tokens=request.num_prompt_tokens,
            queries=scheduled,
        )
        plan.rows.append(row)

    def _hook(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self.method, name)(*args)
        except Exception as error:
            kind = type(self.method).__name__
            throttle.warning(f"hook {name}", "%s of %s failed: %r", name, kind, error)
            return None

    def close(self) -> None:
        """The engine ends."""
        if has_ucm_sparse() and get_ucm_sparse() is self.method:
            set_ucm_sparse(None)
        self._hook("close")


def make_sparse_scheduler(
    config: UcmConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> SparseScheduler:
    """The scheduler side of an engine's method. Raises :class:`~ucm.errors.ConfigError`."""
    method = make_method(config, vllm_config, UcmSparseRole.SCHEDULER)
    if not has_ucm_sparse():  # a worker in the same process has precedence
        set_ucm_sparse(method)
    tokens = block_tokens(vllm_config, kv_cache_config)
    world = vllm_config.parallel_config.world_size
    latent = isinstance(kv_cache_config.kv_cache_groups[0].kv_cache_spec, SparseMLAAttentionSpec)
    return SparseScheduler(method, tokens, world, int(kv_cache_config.num_blocks), latent=latent)
