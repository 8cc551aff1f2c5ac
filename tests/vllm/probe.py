"""A test's access to the inside of an engine, by vLLM's ``scheduler_cls`` and
``worker_extension_cls``.

On a CPU the scheduler and every worker are processes of their own. The worker part serves
``collective_rpc``; the scheduler part adds a method to the engine core of its process, which serves
a utility call of that name.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

#: Seconds for which an engine continues to step after the last query whether it is idle.
ASKED_S = 0.5


class ProbedScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler; its creation adds ``probe_scheduler`` and ``probe_eval`` to the engine
    core.

    After a call of ``probe_scheduler`` an engine steps while dumps are under way, as long as the
    calls continue: an idle engine would receive their results only with its next request.
    """

    asked = float("-inf")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from vllm.v1.engine.core import EngineCore

        EngineCore.probe_scheduler = _probe_scheduler
        EngineCore.probe_eval = _probe_eval

    def has_requests(self) -> bool:
        """True if there is work for a step: by vLLM, or for a waiting test."""
        return bool(
            super().has_requests()
            or (dumps_under_way(self) and time.monotonic() - self.asked < ASKED_S)
        )


def dumps_under_way(scheduler: Any) -> int:
    """Dump jobs whose end was not reported to this scheduler."""
    connector = scheduler.connector
    halves = [
        getattr(child, "_scheduler", None)
        for child in getattr(connector, "_connectors", [connector])
    ]
    # Builds of before there was this number (benches/python/beside.py) step by themselves until
    # their dumps have ended.
    return sum(getattr(half.dumps, "under_way", 0) for half in halves if half is not None)


def _probe_scheduler(core: Any) -> dict[str, Any]:
    """Free blocks of the pool, the number of requests known, whether something is under way, and
    more."""
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    scheduler.asked = time.monotonic()
    return {
        "free_blocks": pool.get_num_free_blocks(),
        "total_blocks": pool.num_gpu_blocks - 1,  # without the null block
        "running": len(scheduler.running),
        "requests": len(scheduler.requests),
        "transfers": scheduler.connector is not None
        and (scheduler.connector.has_pending_push_work() or dumps_under_way(scheduler) > 0),
        "groups": len(scheduler.kv_cache_config.kv_cache_groups),
        "kv_load_failure_policy": getattr(
            scheduler.vllm_config.kv_transfer_config, "kv_load_failure_policy", None
        ),
    }


def _probe_eval(core: Any, expression: str) -> str:
    """``repr`` of an expression over ``scheduler`` and ``connector`` (its scheduler side), for
    debugging."""
    names = {"scheduler": core.scheduler, "connector": core.scheduler.connector}
    return repr(eval(expression, names))  # noqa: S307 - written by the developer who debugs a test


class Probe:
    """Methods added to the worker; each answers through ``collective_rpc``."""

    def probe_runner(self) -> str:
        """Module of the GPU's model runner, of which the CPU's is made: that of the V1 or the V2
        runner."""
        line = type(self.model_runner).__mro__  # type: ignore[attr-defined]
        return next(each.__module__ for each in line if each.__name__ == "GPUModelRunner")

    def probe_scale_weights(self, factor: float) -> None:
        """Writes every writable weight, like a trainer's extension."""
        import torch

        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():  # type: ignore[attr-defined]
                parameter.mul_(factor)

    def probe_record_choices(self) -> None:
        """From now on records the blocks that each request keeps, and counts the sums of tensor
        ranks."""
        method = _connector()._sparse_worker.method
        if hasattr(method, "recorded"):
            return
        recorded, real, reduce = {}, method.select_rows, method._reduce
        method.recorded, method.reduced = recorded, []

        def select_rows(name: str, query: Any, table: Any) -> Any:
            rows, selection = method._sparse_metadata.rows, real(name, query, table)
            for number, place in enumerate([] if selection is None else selection.rows.tolist()):
                kept, row = selection.kept(number).tolist(), rows[place]
                if len(kept) < -(-row.tokens // method.selector.geometry.block_size):
                    of_request = recorded.setdefault(row.request_id, {})
                    of_request[row.tokens, method.layer_number(name)] = tuple(kept)
            return selection

        def counting(scores: Any, combine: str) -> Any:
            method.reduced.append((str(scores.dtype), tuple(scores.shape), combine))
            return reduce(scores, combine)

        method.select_rows = select_rows
        if reduce is not None:
            method._reduce = method.chooser._reduce = counting

    def probe_choices(self, request: str) -> str:
        """``repr`` of a request's kept blocks (see :class:`sparse_reference.Answer`), and of the
        ranks' sums so far, for all requests."""
        method = _connector()._sparse_worker.method
        found = [
            kept
            for name, kept in method.recorded.items()
            if request in (name, name.rpartition("-")[0])
        ]
        return repr((found[0] if found else {}, method.reduced))

    def probe_worker_eval(self, expression: str) -> str:
        """``repr`` of an expression over ``worker`` and ``connector`` (its worker side), for
        debugging."""
        return repr(eval(expression, {"worker": self, "connector": _connector()}))  # noqa: S307 - as above


def _connector() -> Any:
    """The worker side of this process, None where there is none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None
