"""What these tests put around a scheduler side: background work done on request, a store in memory,
a manual clock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from blocks import PATIENT, await_room
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ucm.config import UcmConfig
from ucm.integration.vllm.connector.admission.admission import (
    UNKNOWN_LOAD_S,
    Admission,
    RateMemory,
)
from ucm.integration.vllm.connector.admission.rates import ComputeRate
from ucm.integration.vllm.connector.groups import Group
from ucm.integration.vllm.connector.guard import URGENT, Background
from ucm.integration.vllm.connector.identity.keys import ExtraKeys, KeyMaker
from ucm.integration.vllm.connector.identity.weights import WeightSource, WeightsReport
from ucm.integration.vllm.connector.metadata import (
    DumpResult,
    Handshake,
    RankReport,
    UCMConnectorMetadata,
    UCMConnectorWorkerMetadata,
)
from ucm.integration.vllm.connector.scheduler.blend import BlendPlanner
from ucm.integration.vllm.connector.scheduler.readiness import Readiness, StoreSelection
from ucm.integration.vllm.connector.scheduler.scheduler import UCMConnectorScheduler
from ucm.integration.vllm.connector.stores import ConfiguredStore
from ucm.store import part_mask, record_ids
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

if TYPE_CHECKING:
    from ucm.store.posix import UcmPosixStore

BLOCK = 4
init_none_hash(sha256)


class Clock:
    """Seconds that pass when advanced."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Later(Background):
    """Background work that runs when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None], priority: int = URGENT) -> bool:
        self.jobs.append(job)
        return True

    def stalled(self) -> bool:
        return False

    def run(self) -> None:
        """Do all that waits."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


class Question:
    """A lookup on a thread of a store, answered when a test says so."""

    def __init__(self, ask: Callable[[], tuple[bytes, str]]) -> None:
        self.ask = ask
        self.answered = False

    def answer(self) -> tuple[bytes, str, float] | None:
        return (*self.ask(), 0.25) if self.answered else None


class Memory(UcmKVStoreBaseV1):
    """Ids that are there; used for lookups only."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or {})
        self.ids: set[bytes] = set()
        self.touched: list[bytes] = []
        self.lower: set[bytes] = set()  # of these, those that only a lower tier has
        self.at_once = False
        self.questions: list[Question] | None = None  # begun so far, where it has a thread

    def begin_locate_on_prefix(self, block_ids: Sequence[bytes]) -> Question | None:
        if self.questions is None:
            return None
        self.questions.append(Question(lambda: self.locate_on_prefix(block_ids)))
        return self.questions[-1]

    @property
    def answers_at_once(self) -> bool:
        return self.at_once

    def locate(self, block_ids: Sequence[bytes]) -> bytes:
        found = zip(block_ids, super().locate(block_ids), strict=True)
        return bytes(1 if block in self.lower else tier for block, tier in found)

    def locate_on_prefix(self, block_ids: Sequence[bytes]) -> tuple[bytes, str]:
        tiers, reason = super().locate_on_prefix(block_ids)
        return bytes(block in self.lower for block in block_ids[: len(tiers)]), reason

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [block in self.ids for block in block_ids]

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self.touched += block_ids

    def load_data(self, block_ids: Any, shard_index: Any, addrs: Any) -> Task:
        raise NotImplementedError

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Task:
        raise NotImplementedError

    def wait(self, task: Any, timeout: float | None = None, until: Any = "published") -> None:
        raise NotImplementedError


def configured_store(name: str, make: Callable[[dict[str, Any]], Any]) -> ConfiguredStore:
    """A configured store."""
    return ConfiguredStore(name, f"{name} on /nowhere", {"storage_backends": ["/nowhere"]}, make)


def small_store(path: Path) -> dict[str, Any]:
    """Keys of one of our stores, of blocks of 4096 bytes below this directory."""
    return {
        "storage_backends": str(path / "root"),
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "staging_capacity": "1MiB",
        "identity": "tests",
        "tensor_size": 4096,
        "shard_size": 4096,
        "block_size": 4096,
        "deadlines": PATIENT,
    }


def dump(store: UcmPosixStore, ids: list[bytes]) -> None:
    """Store blocks of zeros in one such store."""
    await_room(store)
    memory = np.zeros((len(ids), 4096), dtype=np.uint8)
    rows = np.array([[row.ctypes.data] for row in memory], dtype=np.uint64)
    store.wait(store.dump_data(ids, [0] * len(ids), rows))


def eventually(what: str, so: Callable[[], bool]) -> None:
    """Returns when it is so, which others are at."""
    end, pause = time.monotonic() + 120, threading.Event()
    while not so():
        assert time.monotonic() < end, f"never: {what}"
        pause.wait(0.002)


class Tables:
    """vLLM's block pool and the tables of the requests."""

    def __init__(self, blocks: int = 64) -> None:
        self.block_pool = BlockPool(blocks + 1, True, BLOCK)
        # Something is cached there, as on an engine that has computed before.
        self.block_pool.cached_block_hash_to_block.insert(b"of before", self.block_pool.null_block)
        self.tables: dict[str, list[Any]] = {}
        managers = [SimpleNamespace(req_to_blocks=self.tables, exact_tokens=None)]  # as of Blend
        self.coordinator = SimpleNamespace(single_type_managers=managers)

    def allocate(self, request: Request, blocks: int) -> KVCacheBlocks:
        """Give a request blocks."""
        self.tables[request.request_id] = self.block_pool.get_new_blocks(blocks)
        return self.get_blocks(request.request_id)

    def free(self, request: Request) -> None:
        """Take them back."""
        self.block_pool.free_blocks(reversed(self.tables.pop(request.request_id)))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """As vLLM's cache manager answers."""
        return KVCacheBlocks((self.tables.get(request_id, []),))


class Named:
    """The engine's identity: its text, and what became of it when the ranks had checked their
    weights."""

    def __init__(self) -> None:
        self.now: str | None = '{"weights":"w"}'
        # by the text before, where memory was found to hold other weights
        self.after: dict[str, str | None] = {}
        self.words: list[WeightsReport] = []
        self.forgotten = 0  # how often it was to be another one
        self._pending = False

    def forget(self) -> None:
        self.forgotten += 1
        self.now, self._pending = f'{{"weights":"reset {self.forgotten}"}}', True

    def text(self) -> str | None:
        return self.now

    def why_invalid(self) -> str:
        return ""

    def update(self, words: list[WeightsReport]) -> bool:
        self.words = words
        forgotten, self._pending = self._pending, False
        if all(word.unchanged for word in words):
            return forgotten
        self.now = self.after[self.now or ""]
        return True


class Rig:
    """A scheduler side with everything around it."""

    def __init__(
        self,
        ranks: int = 1,
        opened: bool = True,
        stores: Sequence[ConfiguredStore] = (),
        **settings: Any,
    ) -> None:
        """``stores``: the configured stores, one in memory when there are none."""
        self.clock, self.later, self.store = Clock(), Later(), Memory()
        self.tables = Tables(settings.pop("blocks", 64))
        self.ranks = ranks
        self.groups: Sequence[Group] = settings.pop("groups", (Group(0, 0, BLOCK),))
        self.extra_keys = settings.pop("extra_keys", None) or ExtraKeys(BLOCK)
        stores = stores or [configured_store("Memory", lambda config: self.store)]
        self.names = tuple(one.name for one in stores)
        self.named = Named()
        self.pauses: list[float] = []  # of the scheduler's thread
        self.readiness = Readiness(
            own_identity={"dtype": "float32"},
            identity=self.named,
            selection=StoreSelection(stores, ranks, self.later, 5.0, self.clock),
            world=ranks,
            open_allowance=5.0,
            clock=self.clock,
        )
        self.admission = Admission(
            settings.pop("admission", "measured"),
            0.8,
            ComputeRate(0.2, 30.0, settings.pop("step_tokens", 0)),
            self.clock,
            settings.pop("unknown_load_s", UNKNOWN_LOAD_S),
        )
        root = settings.pop("root", None)
        self.rates = RateMemory(
            root, self.admission, self.later, lambda: "this machine", self.clock
        )
        self.blend: BlendPlanner | None = settings.pop("blend", None)
        if self.blend is not None:
            self.blend.bind_kv_cache_manager(self.tables)
        self.scheduler = UCMConnectorScheduler(
            UcmConfig(
                min_hit_tokens=settings.pop("min_hit_tokens", 0),
                dump=settings.pop("dump", "all"),
                min_dump_tokens=settings.pop("min_dump_tokens", 0),
                on_reset=settings.pop("on_reset", "keep"),
                debug=settings.pop("debug", False),
                block_trace=settings.pop("block_trace", None),
                consumer_dump=settings.pop("consumer_dump", False),
                pd_wait_ms=settings.pop("pd_wait_ms", 2000),
                storage_backends=settings.pop("roots", ("/nowhere",)),
            ),
            self.readiness,
            self.admission,
            self.extra_keys,
            self.later,
            BLOCK,
            rates=self.rates,
            groups=self.groups,
            blend=self.blend,
            chance=settings.pop("chance", random.random),
            events=settings.pop("events", None),
            mode=settings.pop("mode", None),
            clock=self.clock,
            pause=self.pauses.append,
        )
        self.scheduler.bind_kv_cache_manager(self.tables)
        self.scheduler.bind_gpu_block_pool(self.tables.block_pool)
        if opened:
            self.open()

    def keys(self, text: str) -> KeyMaker:
        """The hasher of an identity."""
        return KeyMaker(text, BLOCK, "sha256", self.extra_keys)

    def shake(self, **changes: Any) -> None:
        """All workers answer, in their first step."""
        fields = {"identity": {"dtype": "float32"}, "stores": self.names} | changes

        def rest(rank: int) -> tuple[tuple[tuple[int, int, int], dict[str, Any]], ...]:
            return tuple(((group.number, 0, rank), {}) for group in self.groups[1:])

        self.report(
            *(
                RankReport(tp, Handshake((0, 0, tp), tp, True, shapes={}, rest=rest(tp), **fields))
                for tp in range(self.ranks)
            )
        )

    def open(self) -> None:
        """Open the cache on every rank."""
        self.shake()
        self.later.run()
        self.ready()
        self.readiness.request_weights_check()
        self.weights_checked(self.step())

    def ready(self, attempt: int = 1) -> None:
        """Every rank has opened its store."""
        self.report(*(RankReport(rank, ready=True, attempt=attempt) for rank in range(self.ranks)))

    def weights_checked(
        self,
        plan: UCMConnectorMetadata,
        unchanged: bool | None = True,
        named: WeightSource | None = None,
    ) -> None:
        """Every rank has checked its weights, as a plan requests."""
        assert plan.check_weights is not None
        word = WeightsReport(plan.check_weights, unchanged, named, 0)
        self.report(
            *(RankReport(rank, ready=True, attempt=1, weights=word) for rank in range(self.ranks))
        )

    def report(self, *ranks: RankReport, recved: set[str] | None = None) -> None:
        """Ranks report."""
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_recving=recved,
                kv_connector_worker_meta=UCMConnectorWorkerMetadata(ranks=list(ranks)),
            )
        )

    def request(
        self,
        name: str,
        length: int,
        seed: int = 0,
        adapter: LoRARequest | None = None,
        salt: str | None = None,
        params: Any = None,
        tokens: list[int] | None = None,
        hashed: bool = True,
    ) -> Request:
        """A new request of ``length`` tokens, or of these, of the tenant with this salt; ``params``
        are its ``kv_transfer_params``. ``hashed``: vLLM hashes its blocks, as for its events."""
        tokens = tokens or [(seed * 131 + index) % 1000 for index in range(length)]
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=64, extra_args={"kv_transfer_params": params}),
            None,
            lora_request=adapter,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(BLOCK, sha256) if hashed else None,
        )
        self.scheduler.on_new_request(request)
        return request

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of a request's full blocks."""
        return self.keys(self.readiness.identity_text).first(request)

    def stored(self, request: Request, blocks: int, ranks: Sequence[int] | None = None) -> None:
        """Put the first blocks of a request into the store."""
        keys = self.keys_of(request)[:blocks]
        for rank in range(self.ranks) if ranks is None else ranks:
            self.store.ids.update(record_ids(keys, part_mask(0, 0, rank)))

    def step(
        self, *requests: Request, new: bool = False, sync: bool = False, most: int = 1 << 30
    ) -> UCMConnectorMetadata:
        """One step that computes all tokens of these requests that are not computed yet, at most
        ``most`` of each; ``sync``: on what another connector loads in it."""
        output = SchedulerOutput.make_empty()
        output.has_sync_kv_loads = sync
        missing = {
            request.request_id: min(request.num_tokens - request.num_computed_tokens, most)
            for request in requests
        }
        output.num_scheduled_tokens = missing
        output.total_num_scheduled_tokens = sum(missing.values())
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id for request in requests],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None for _ in requests],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[request.num_output_tokens for request in requests],
        )
        plan = self.scheduler.build_connector_meta(output)
        if self.blend is not None:
            plan = replace(plan, blends=self.blend.plan(output))
        for request in requests:
            request.num_computed_tokens += missing[request.request_id]
        return plan

    def admit(self, request: Request) -> None:
        """vLLM's first steps with a request of which nothing is stored."""
        self.later.run()
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(
            request, self.tables.allocate(request, -(-request.num_tokens // BLOCK) + 8), 0
        )

    def no_room(self, request: Request, hit: int) -> None:
        """vLLM's first steps with a request of which ``hit`` blocks could be loaded, had it room
        for that."""
        self.later.run()
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (hit * BLOCK, True)
        self.scheduler.update_state_after_alloc(request, self.tables.allocate(request, 6), 0)

    def ended(
        self,
        plan: UCMConnectorMetadata,
        rank: int = 0,
        failed: tuple[int, ...] = (),
        busy: bool = False,
    ) -> RankReport:
        """A rank's report that all dumps of a plan ended."""
        done = [DumpResult(dump.job, failed, busy) for dump in plan.dumps]
        return RankReport(
            rank, ready=True, last_job=max((d.job for d in plan.dumps), default=0), done=done
        )
