"""vLLM's own scheduler and both sides of the connector around a model of arithmetic, without an
engine.

The KV of a token is a number made of its token id and of the KV of the token before it, which is
read from the cache; an output token is made of the KV of all tokens of its request that its layer
can see: in layers with windows or chunks the last ones. A layer that keeps a state has only the KV
of the last token of each step, in the block of that token. So a block with foreign bytes changes
every token after it. The store of these tests copies at the latest moment
that it may: a load when it is found finished, a dump when it is found staged. So a load that is
reported too early writes into blocks of other requests, and a dump that is forgotten stores bytes
of others.

Of several ranks each has a worker of its own, with the KV of its layers. With ``overlap`` a step is
scheduled before the one before it runs, as by vLLM's asynchronous scheduling.
"""

from __future__ import annotations

import copy
import ctypes
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from ucm.errors import NotFoundError, TaskError, UcmError
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1, Until

BLOCK, BLOCKS, HEADS, ELEMENTS, LAYERS, PRIME = 32, 24, 2, 64, 2, 65521
#: Polls after which a load has ended, and after which the blocks of a dump were read.
LOAD_POLLS, STAGE_POLLS = 4, 3
#: Steps that compute something after which a test fails: more than any run takes that goes on at
#: all; and as many times as many that compute nothing, for threads that a busy machine keeps from
#: their work.
STEPS, IDLE_STEPS = 3000, 20
#: Deadlines longer than any test: what is late is a miss, on a busy machine too.
PATIENT = {
    "lookup_ms": 20_000,
    "load_min_ms": 60_000,
    "load_unknown_s": 60.0,
    "load_max_s": 60.0,
    "dump_s": 600.0,
    "probe_s": 60.0,
    "shutdown_s": 1.0,
}


class _Task(Task):
    def __init__(self, rows: list[tuple[bytes, list[int]]], polls: int) -> None:
        super().__init__()
        self.rows, self.polls, self.left = rows, polls, polls
        self.missing: dict[int, UcmError] = {}  # by row


class LateStore(UcmKVStoreBaseV1):
    """Blocks in the memory of this process. A record that is there stays, as in every store."""

    blocks: ClassVar[dict[bytes, bytes]] = {}
    has_staged_level = True

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [block in self.blocks for block in block_ids]

    def for_part(self, index: int) -> UcmKVStoreBaseV1:
        return self if index == 0 else LateStore(self.config["own_parts"][index - 1])

    def load_data(self, block_ids: Any, shard_index: Any, addrs: Any) -> _Task:
        return _Task(list(zip(block_ids, addrs.tolist(), strict=True)), LOAD_POLLS)

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> _Task:
        task = _Task(list(zip(block_ids, addrs.tolist(), strict=True)), STAGE_POLLS)
        task.handle = "dump"
        return task

    def check(self, task: Any, until: Until = "published") -> bool:
        task.left -= 1
        if task.left <= 0:
            self._finish(task)
        return bool(task.left <= 0)

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        self._finish(task)
        if task.missing:
            raise TaskError("not there", failures=task.missing)

    def _finish(self, task: Any) -> None:
        task.left, rows, task.rows = 0, task.rows, []
        for row, (block, addresses) in enumerate(rows):
            size = (
                self.config["tensor_size_list"][0]
                if "tensor_size_list" in self.config
                else self.config["tensor_size"]
            )
            if task.handle == "dump":
                content = b"".join(ctypes.string_at(address, size) for address in addresses)
                self.blocks.setdefault(block, content)
            elif block in self.blocks:
                for at, address in enumerate(addresses):
                    ctypes.memmove(address, self.blocks[block][at * size : (at + 1) * size], size)
            else:
                task.missing[row] = NotFoundError(f"block {block.hex()} is not there")


def expected(prompt: Sequence[int], count: int, specs: Sequence[Any] = ()) -> list[int]:
    """The right output tokens of a model with these layers, of full attention if there are none."""
    tokens = list(prompt)
    states: list[list[int]] = [[] for _ in specs or (None,)]
    for _ in range(count):
        for layer, known in enumerate(states):
            spec = specs[layer] if specs else None
            while (at := len(known)) < len(tokens):
                goes_on = _keeps_state(spec) or _first_seen(spec, at) < at
                before = known[-1] if at and goes_on else 1 + layer
                known.append(_state(before, tokens[at]))
        end, seen = len(tokens), dict[int, list[int]]()
        for layer, known in enumerate(states):
            spec = specs[layer] if specs else None
            seen[layer] = known[_first_seen(spec, end - 1) : end]
        tokens.append(_answer(seen, end) if specs else _answer({0: seen[0]}, end))
    return tokens[len(prompt) :]


def _first_seen(spec: Any, at: int) -> int:
    """The first token whose KV the one at ``at`` can see in a layer of this spec."""
    if _keeps_state(spec):
        return at
    window, chunk = (getattr(spec, name, 0) for name in ("sliding_window", "attention_chunk_size"))
    return at - at % chunk if chunk else max(at - window + 1, 0) if window else 0


def _keeps_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_cache_mode")


def _state(before: int, token: int) -> int:
    return (before * 31 + token + 7) % PRIME


def _answer(seen: dict[int, list[int]], end: int) -> int:
    """The token after ``end`` ones, from the KV that each layer sees, the last of them."""
    return (
        sum(
            state * (at % 13 + 1 + layer)
            for layer, states in seen.items()
            for at, state in enumerate(states, end - len(states))
        )
        % 500
    )


@dataclass(frozen=True)
class Row:
    """What a step computes of a request, as it was scheduled."""

    request: Any
    #: Its tokens at the end of the step, and how many of them the step computes.
    end: int
    count: int
    #: Its block tables, by KV group.
    tables: Sequence[Sequence[int]]


class Rank:
    """The worker of one rank, with the KV of its layers."""

    def __init__(self, connector: Any, kv_cache: Any, first: int, apart: bool) -> None:
        """``first``: the number of its first layer; ``apart``: plans come from another process."""
        self.connector, self.first, self.apart = connector, first, apart
        self.caches: dict[str, Any] = {}
        self.layers: list[tuple[Any, int, Any]] = []  # of each its KV, KV group and spec
        every = [
            (name, group, one.kv_cache_spec)
            for group, one in enumerate(kv_cache.kv_cache_groups)
            for name in one.layer_names
        ]
        for name, group, spec in sorted(every, key=lambda layer: layer[0]):
            cache = torch.zeros(kv_cache.num_blocks, HEADS, spec.block_size, ELEMENTS)
            self.caches[name] = [cache] if _keeps_state(spec) else cache
            self.layers.append((cache, group, spec))
        connector.register_kv_caches(self.caches)

    def step(self, output: Any, forward: Callable[[], None]) -> Any:
        """What the connector does in a step, around the computation; what it reports."""
        from vllm.v1.outputs import KVConnectorOutput

        # Before any connector is called in the step.
        for number in output.new_block_ids_to_zero or ():
            for cache, _, spec in self.layers:
                if not _keeps_state(spec):
                    cache[number].zero_()
        connector, plan = self.connector, output.kv_connector_metadata
        if self.apart:
            plan = copy.deepcopy(plan)
        connector.bind_connector_metadata(plan)
        connector.start_load_kv(SimpleNamespace(attn_metadata=None))
        forward()
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        found = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return found

    def compute(self, row: Row) -> None:
        """Write the KV of a request's tokens in a step."""
        start, end, tokens = row.end - row.count, row.end, row.request.all_token_ids
        # a request that was aborted since has no token for its last step
        new = [tokens[at] if at < len(tokens) else 1 for at in range(start, end)]
        for layer, (cache, group, spec) in enumerate(self.layers, self.first):
            table, size = row.tables[group], spec.block_size
            if _keeps_state(spec):
                state = int(cache[table[(start - 1) // size], 0, 0, 0]) if start else 1 + layer
                for token in new:
                    state = _state(state, token)
                cache[table[(end - 1) // size]] = state
                continue
            for at, token in enumerate(new, start):
                if at and _first_seen(spec, at) < at:
                    before = int(cache[table[(at - 1) // size], 0, (at - 1) % size, 0])
                else:
                    before = 1 + layer
                cache[table[at // size], :, at % size] = _state(before, token)

    def seen(self, row: Row, layers: int) -> dict[int, list[int]]:
        """The KV that the last token of a step sees in the first ``layers`` layers."""
        found, end = {}, row.end
        for layer, (cache, group, spec) in enumerate(self.layers[:layers], self.first):
            table = row.tables[group]
            if _keeps_state(spec):
                found[layer] = [int(cache[table[(end - 1) // spec.block_size], 0, 0, 0])]
                continue
            places = np.arange(_first_seen(spec, end - 1), end)
            numbers = np.array(table)[places // spec.block_size]
            found[layer] = cache[numbers, 0, places % spec.block_size, 0].long().tolist()
        return found


class ToyEngine:
    """One life of an engine."""

    def __init__(
        self,
        engines: Any,
        model: Any,
        patch: Any,
        sparse: bool = False,
        specs: Sequence[Any] = (),
        blocks: int = BLOCKS,
        store: dict[str, Any] | None = None,
        keys: dict[str, Any] | None = None,
        drafts: Sequence[int] = (),
        overlap: bool = False,
        **args: Any,
    ) -> None:
        """``engines``: helpers of ``engine_free.py``; ``patch``: pytest's monkeypatch; ``sparse``:
        sparse attention is configured. No layer of this model attends, so it selects nothing.
        ``specs``: of its layers, where these are not the model's own; ``blocks`` of the device;
        ``store``: keys of a store of ours in place of :class:`LateStore`; ``keys``: further ones of
        the connector; ``drafts``: the KV groups with layers of a draft model; ``overlap``: each
        step is scheduled before the one before it runs; ``args``: further arguments of the engine.
        """
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        from ucm.integration.vllm.connector import UCMConnector

        def place(pipeline: int, tensor: int) -> None:
            for name, at in (("get_pp_group", pipeline), ("get_tp_group", tensor)):
                group = SimpleNamespace(rank_in_group=at, world_size=1)
                patch.setattr(parallel_state, name, lambda group=group: group)

        place(0, 0)
        entry = {
            "ucm_connector_name": "LateStore",
            "ucm_connector_module_path": __name__,
            "ucm_connector_config": {},
        }
        extra: dict[str, Any] = {
            **(store or {"ucm_connectors": [entry]}),
            "admission": "always",
            "identity": {"weights": "declared:toy"},
            "deadlines": PATIENT,
            **(keys or {}),
        }
        if sparse:
            from ucm.integration.vllm.connector.worker.sparse import SparseWorker

            extra["ucm_sparse_config"] = {"Quest": {"ratio": 0.2, "min_tokens": 0}}
            patch.setattr(SparseWorker, "register_kv_caches", lambda *_: None)
        transfer = KVTransferConfig(
            kv_connector="UCMConnector",
            kv_connector_module_path="ucm.integration.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        defaults: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 128}
        self.config = engines.engine_config(
            model,
            kv_transfer_config=transfer,
            max_num_seqs=4,
            num_gpu_blocks_override=blocks + 1,
            async_scheduling=False,
            enable_chunked_prefill=True,
            **defaults | args,
        )
        # vLLM has none on a CPU
        self.config.scheduler_config.async_scheduling = overlap
        if any(map(_keeps_state, specs)):  # as vLLM does with a model of such layers
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.mamba_block_size = BLOCK
        parallel = self.config.parallel_config
        pipelines, self._tensors = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
        each = -(-len(specs) // pipelines)  # layers of a pipeline rank
        named = [(f"model.layers.{at}.self_attn.attn", spec) for at, spec in enumerate(specs)]
        mine = [dict(named[at * each : (at + 1) * each]) for at in range(pipelines)]
        of_ranks = [layers for layers in mine for _ in range(self._tensors)]
        kv_cache, of_workers = engines.kv_configs(self.config, of_ranks if specs else None)
        for known in (kv_cache, *of_workers):
            for group in drafts:
                known.kv_cache_groups[group].is_eagle_group = True
        self.config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        sizes = [group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups]
        block, hashed = math.lcm(*sizes), math.gcd(*sizes)
        with set_current_vllm_config(self.config):
            unused: Any = SimpleNamespace(accept_tokens=lambda *_: True)
            self.scheduler = (AsyncScheduler if overlap else Scheduler)(
                self.config, kv_cache, unused, block, hash_block_size=hashed, log_stats=True
            )
            self.ranks: list[Rank] = []
            for number, known in enumerate(of_workers):
                pipeline, tensor = divmod(number, self._tensors)
                place(pipeline, tensor)
                worker = UCMConnector(self.config, KVConnectorRole.WORKER, known)
                self.ranks.append(Rank(worker, known, pipeline * each, len(of_workers) > 1))
            place(0, 0)
        self.connector: Any = self.scheduler.connector
        self.worker, self.caches = self.ranks[0].connector, self.ranks[0].caches
        self._aggregator = KVOutputAggregator(len(self.ranks))
        self._seen_layers = len(specs) or 1  # of the model's own only the first is seen
        self.specs, self._overlap = specs, overlap
        self._scheduled: list[tuple[Any, dict[str, Row]]] = []  # steps that did not run yet
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hashed, sha256)
        self.reported: list[str] = []  # requests whose load was reported as ended, by the worker
        self.loads: list[str] = []  # requests of which vLLM waits for a load from then on
        self.claimed: dict[str, int] = {}  # tokens of the first load of each request
        self.claims: list[int] = []  # tokens of every load
        allocated = self.connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            self.loads += [request.request_id] if tokens else []
            self.claimed.setdefault(request.request_id, tokens)
            self.claims += [tokens] if tokens else []
            allocated(request, blocks, tokens)

        self.connector.update_state_after_alloc = update_state_after_alloc
        self.hits: Counter[str] = Counter()  # tokens, as vLLM counts them by source
        self.answers: dict[str, dict[str, Any]] = {}  # the kv_transfer_params of ended requests
        self._pause = threading.Event()

    def generate(self, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
        """The output tokens of requests that run at the same time."""
        requests = {name: self.add(name, tokens, count) for name, tokens in prompts.items()}
        self.until(lambda: all(request.is_finished() for request in requests.values()))
        return {name: list(request.output_token_ids) for name, request in requests.items()}

    def add(
        self,
        name: str,
        tokens: list[int],
        count: int,
        salt: str | None = None,
        stop: int | None = None,
        **params: Any,
    ) -> Any:
        """A request for ``count`` output tokens, or up to a token ``stop``; the steps from now on
        run it. ``params``: its ``kv_transfer_params``."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        options = SamplingParams(
            max_tokens=count,
            ignore_eos=True,
            stop_token_ids=None if stop is None else [stop],
            temperature=0.0,
            extra_args={"kv_transfer_params": params or None},
        )
        request = Request(name, tokens, options, None, cache_salt=salt, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def until(self, so: Callable[[], bool]) -> None:
        """Steps until it is so."""
        steps = idle = 0
        while not so():
            if self.step():
                steps += 1
            else:
                idle += 1
                self.connector.has_pending_push_work()
                self.pause()
            assert steps < STEPS and idle < IDLE_STEPS * STEPS, "the engine goes on and on"

    def pause(self) -> None:
        """A moment for threads that look up and open stores."""
        self._pause.wait(0.001)

    def step(self) -> int:
        """One step of engine core and workers; the tokens that it computes."""
        output = self.scheduler.schedule()
        computed = output.num_scheduled_tokens
        rows = {name: self._row(name, count) for name, count in computed.items()}
        self._scheduled.append((output, rows))
        if len(self._scheduled) > self._overlap:
            self._run(*self._scheduled.pop(0))
        return int(output.total_num_scheduled_tokens)

    def _row(self, name: str, count: int) -> Row:
        request = self.scheduler.requests[name]
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        # counted ahead by the scheduler
        return Row(request, request.num_computed_tokens, count, tables)

    def _run(self, output: Any, rows: dict[str, Row]) -> None:
        """A step that was scheduled: every rank computes it, and vLLM is sent the results."""
        from vllm.v1.outputs import ModelRunnerOutput

        found = []
        for rank in self.ranks:

            def forward(rank: Rank = rank) -> None:
                for row in rows.values():
                    self._forward(rank, row)

            names = list(rows)
            found.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: at for at, name in enumerate(names)},
                    sampled_token_ids=[],
                    kv_connector_output=rank.step(output, forward),
                )
            )
        every = self._aggregator.aggregate(found)
        every.sampled_token_ids = [self._sampled(row) for row in rows.values()]
        self.reported += sorted(every.kv_connector_output.finished_recving or ())
        outputs = self.scheduler.update_from_output(output, every)
        for of_client in outputs.values():
            answers = {one.request_id: one.kv_transfer_params for one in of_client.outputs}
            self.answers.update({name: params for name, params in answers.items() if params})
            if of_client.scheduler_stats is not None:
                hits = of_client.scheduler_stats.connector_prefix_cache_stats
                self.hits.update(getattr(hits, "hits_by_source", {}))

    def _forward(self, rank: Rank, row: Row) -> None:
        """Computes a request's tokens of a step on a rank."""
        rank.compute(row)

    def _sampled(self, row: Row) -> list[int]:
        """The next token, where the step computes all; every tensor rank has the same."""
        if row.end < len(row.request.all_token_ids):
            return []
        answers = set()
        for tensor in range(self._tensors):
            seen: dict[int, list[int]] = {}
            for rank in self.ranks[tensor :: self._tensors]:
                seen |= rank.seen(row, self._seen_layers)
            answers.add(_answer(seen, row.end))
        (answer,) = answers
        return [answer]

    @property
    def off(self) -> bool:
        """Whether the cache is off, as it is once the scheduler side knows that either side was
        given up."""
        return self.connector._scheduler.readiness.phase == "off"

    def idle(self) -> bool:
        """Whether every block is free and nothing is waited for."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return not self.scheduler.requests and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def close(self) -> None:
        """The end of both sides."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.connector.shutdown()
