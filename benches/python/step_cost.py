"""Cost of ucm in an idle step of vLLM's scheduler, in microseconds.

Calls the real scheduler side with vLLM's own ``SchedulerOutput`` and ``Request`` objects of a step
with many decoding requests: every call of vLLM per step, while no block becomes full. Prints the
median and the tail, and the same with one request in sixteen filling a block. Run: ``python
benches/python/step_cost.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ucm.config import UcmConfig
from ucm.integration.vllm.connector.admission.admission import Admission
from ucm.integration.vllm.connector.admission.rates import ComputeRate
from ucm.integration.vllm.connector.guard import Background
from ucm.integration.vllm.connector.identity.keys import ExtraKeys
from ucm.integration.vllm.connector.identity.weights import WeightsReport
from ucm.integration.vllm.connector.metadata import (
    DumpResult,
    Handshake,
    RankReport,
    UCMConnectorWorkerMetadata,
)
from ucm.integration.vllm.connector.scheduler.readiness import Readiness, StoreSelection
from ucm.integration.vllm.connector.scheduler.scheduler import UCMConnectorScheduler
from ucm.integration.vllm.connector.stores import ConfiguredStore
from ucm.store.empty import UcmEmptyStore

BLOCK = 128


class Tables:
    """The block tables of the requests, over vLLM's own block pool."""

    def __init__(self, requests: int, blocks_each: int) -> None:
        self.block_pool = BlockPool(requests * blocks_each + 1, True, BLOCK)
        self._tables: dict[str, KVCacheBlocks] = {}
        self._each = blocks_each

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Results of vLLM's cache manager."""
        if request_id not in self._tables:
            self._tables[request_id] = KVCacheBlocks((self.block_pool.get_new_blocks(self._each),))
        return self._tables[request_id]


class Named:
    """A constant identity."""

    def text(self) -> str | None:
        return "{}"

    def why_invalid(self) -> str:
        return ""

    def forget(self) -> None:
        pass

    def update(self, _words: list[WeightsReport]) -> bool:
        return False


def open_scheduler(tables: Tables) -> UCMConnectorScheduler:
    """An open scheduler side with one rank."""
    background = Background("bench")
    readiness = Readiness(
        own_identity={},
        identity=Named(),
        selection=StoreSelection(
            [ConfiguredStore("Empty", "nowhere", {}, UcmEmptyStore)], 1, background, 5.0
        ),
        world=1,
        open_allowance=5.0,
    )
    scheduler = UCMConnectorScheduler(
        UcmConfig(),
        readiness,
        Admission("measured", 0.8, ComputeRate(0.2, 30.0)),
        ExtraKeys(BLOCK),
        background,
        BLOCK,
    )
    scheduler.bind_kv_cache_manager(tables)  # a step reads only tables of vLLM's manager
    scheduler.bind_gpu_block_pool(tables.block_pool)
    readiness.handshake([Handshake((0, 0, 0), 0, True, {}, {}, stores=("Empty",))])
    while readiness.phase != "open":
        readiness.report(RankReport(rank=0, ready=True, attempt=1))
        readiness.poll()
    readiness.report(RankReport(rank=0, weights=WeightsReport(readiness.generation, True, None, 0)))
    return scheduler


def step(requests: list[Request]) -> SchedulerOutput:
    """One decode step of all requests."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {request.request_id: 1 for request in requests}
    output.total_num_scheduled_tokens = len(requests)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(requests),
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[0] * len(requests),
    )
    return output


def one_step(
    scheduler: UCMConnectorScheduler, output: SchedulerOutput, answer: KVConnectorOutput
) -> Any:
    """Every call vLLM makes in a step without arrivals and departures."""
    plan = scheduler.build_connector_meta(output)
    scheduler.update_connector_output(answer)
    scheduler.has_pending_push_work  # noqa: B018 - vLLM reads it once per step
    scheduler.step_ended()
    scheduler.miss_stats.take()
    return plan


def publish(scheduler: UCMConnectorScheduler, plan: Any) -> None:
    """The rank reports that all dumps of the plan were published."""
    done = [DumpResult(dump.job) for dump in plan.dumps]
    last = max((dump.job for dump in plan.dumps), default=0)
    report = UCMConnectorWorkerMetadata(
        ranks=[RankReport(rank=0, ready=True, last_job=last, done=done)]
    )
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


def measure(run: Callable[[], Any], rounds: int) -> list[float]:
    """Microseconds of each round, sorted."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def show(name: str, times: list[float]) -> None:
    """One line of the table."""
    tail = times[int(len(times) * 0.99)]
    print(f"{name:48} median {statistics.median(times):8.1f} us   p99 {tail:8.1f} us")


def main() -> None:
    """Prints the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--requests", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=2000)
    chosen = arguments.parse_args()
    tables = Tables(chosen.requests, 16)
    scheduler = open_scheduler(tables)
    requests = []
    for number in range(chosen.requests):
        tokens = [(number * 7919 + position) % 30000 for position in range(8 * BLOCK + 10)]
        request = Request(f"r{number}", tokens, SamplingParams(max_tokens=512), None)
        scheduler.on_new_request(request)
        while scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
            pass
        scheduler.update_state_after_alloc(request, tables.get_blocks(request.request_id), 0)
        request.num_computed_tokens = request.num_tokens - 1
        requests.append(request)
    quiet = KVConnectorOutput()
    plan = scheduler.build_connector_meta(step(requests))
    while plan.dumps:  # earlier blocks are offered first
        publish(scheduler, plan)
        plan = scheduler.build_connector_meta(step(requests))

    output = step(requests)
    times = measure(lambda: one_step(scheduler, output, quiet), chosen.rounds)
    show(f"{chosen.requests} requests decode, nothing to do", times)

    fillers = requests[::16]
    times = []
    for number in range(min(chosen.rounds, 7)):
        for request in fillers:
            request.append_output_token_ids([number] * (BLOCK - request.num_tokens % BLOCK))
            request.num_computed_tokens = request.num_tokens - 1
        output = step(requests)
        start = time.perf_counter()
        plan = one_step(scheduler, output, quiet)
        times.append((time.perf_counter() - start) * 1e6)
        assert sum(len(dump.blocks) for dump in plan.dumps) == len(fillers)
        publish(scheduler, plan)
    show(f"{len(fillers)} of them fill a block", sorted(times))


if __name__ == "__main__":
    main()
