"""Requests that end while their blocks wait for the store, or go on without them: vLLM's own
scheduler, both sides of the connector, and a store that has few slots and may stall."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import toy_engine
from toy_engine import BLOCK, STAGE_POLLS, LateStore, ToyEngine, expected
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from ucm.errors import BusyError
from ucm.integration.vllm.connector.metadata import (
    DumpResult,
    RankReport,
    UCMConnectorWorkerMetadata,
)
from ucm.integration.vllm.connector.scheduler import dumps
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1, Until

COUNT = 4
#: Libraries of the last test.
DRIVERS = ("DRIVER", "SOFT3FS")
SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def window(tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=BLOCK, sliding_window=tokens, **SHAPE)


FULL = FullAttentionSpec(block_size=BLOCK, **SHAPE)
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((2 * 2 * BLOCK * 32,),),
    dtypes=(torch.float32,),
    mamba_type=MambaAttentionBackendEnum.MAMBA2,
    mamba_cache_mode="align",
)
MODELS: dict[str, list[KVCacheSpec]] = {
    "full": [FULL, FULL],
    "full and a window": [FULL, window(70)],
    "windows alone": [window(50), window(50)],
    "full and a state": [FULL, STATE],
}


class SlowStore(LateStore):
    """Has room for a few blocks that were read and not published yet; while it is stalled it
    publishes none."""

    slots: ClassVar[int] = 3
    stalled: ClassVar[bool] = False
    #: Slots that it says it has and refuses.
    boasts: ClassVar[int] = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unpublished: dict[Any, int] = {}

    def for_part(self, index: int) -> UcmKVStoreBaseV1:
        if index == 0:
            return self
        part = SlowStore(self.config["own_parts"][index - 1])
        part.unpublished = self.unpublished
        return part

    def free_dump_slots(self) -> int:
        return max(self.slots + self.boasts - sum(self.unpublished.values()), 0)

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Any:
        if len(set(block_ids)) > self.free_dump_slots() - self.boasts:
            raise BusyError("no slot is free")
        task = super().dump_data(block_ids, shard_index, addrs, prerequisite_handle)
        self.unpublished[task] = len(set(block_ids))
        return task

    def check(self, task: Any, until: Until = "published") -> bool:
        if task.handle != "dump" or until == "staged" or task not in self.unpublished:
            return super().check(task, until)
        task.left -= 1
        if task.left > -STAGE_POLLS or self.stalled:
            return False
        del self.unpublished[task]
        return True


ENTRY = {
    "ucm_connector_name": "SlowStore",
    "ucm_connector_module_path": __name__,
    "ucm_connector_config": {},
}
Life = Callable[..., ToyEngine]


@pytest.fixture
def life(engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Makes engines, one after the other over the same store."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})
    monkeypatch.setattr(SlowStore, "stalled", False)
    monkeypatch.setattr(SlowStore, "slots", 3)
    monkeypatch.setattr(SlowStore, "boasts", 0)
    monkeypatch.setattr(dumps, "ROOM_S", 60.0)  # a busy machine is no stalled store

    def make(name: str = "full", slow: bool = True, **args: Any) -> ToyEngine:
        store = {"ucm_connectors": [ENTRY], **args.pop("keys", {})} if slow else None
        made.append(ToyEngine(engines, tiny, monkeypatch, specs=MODELS[name], store=store, **args))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def lost_of(engine: ToyEngine) -> Counter[str]:
    """Blocks that are not stored, by reason, from now on."""
    stats, lost = engine.connector._scheduler.miss_stats, Counter[str]()
    count = stats.unstored

    def unstored(reason: str, blocks: int) -> None:
        lost[reason] += blocks
        count(reason, blocks)

    stats.unstored = unstored
    return lost


def prompt_of(seed: int, blocks: int) -> list[int]:
    """A prompt of some blocks and a token."""
    rng = random.Random(seed)
    return [rng.randint(3, 400) for _ in range(blocks * BLOCK + 1)]


def answers(engine: ToyEngine, prompts: Sequence[list[int]], name: str = "full") -> None:
    """Asserts the right output of some prompts that run at the same time."""
    named = {str(random.random()): prompt for prompt in prompts}
    right = {one: expected(prompt, COUNT, MODELS[name]) for one, prompt in named.items()}
    assert engine.generate(named, COUNT) == right


def waiting(engine: ToyEngine) -> int:
    """Blocks of ended requests that wait for the store."""
    return len(list(engine.connector._scheduler._deferred._blocks()))


def stored(engine: ToyEngine) -> bool:
    """Whether nothing waits for the store, or is being stored."""
    return engine.idle() and not waiting(engine) and not engine.connector._scheduler.dumps.under_way


def opened(engine: ToyEngine, name: str = "full") -> ToyEngine:
    """The engine, when its store is open."""
    answers(engine, [prompt_of(99, 1)], name)
    readiness = engine.connector._scheduler.readiness
    engine.until(lambda: engine.off or (readiness.phase == "open" and engine.idle()))
    assert not engine.off, readiness.why_off
    return engine


def hit(engine: ToyEngine, prompt: list[int], name: str = "full") -> int:
    """The blocks of a prompt that another engine loads; its output is right."""
    request = engine.add("again", prompt, COUNT)
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, MODELS[name])
    return engine.claimed["again"] // BLOCK


@pytest.mark.parametrize("name", [name for name in MODELS if STATE not in MODELS[name]])
def test_waiting_blocks_are_stored_though_others_use_the_whole_pool(life: Life, name: str) -> None:
    """The pool has twenty blocks besides those that wait, and others, which are not stored, use
    four times as many."""
    groups = len({type(spec) for spec in MODELS[name]})
    engine = opened(life(name, blocks=30 * groups), name)
    lost = lost_of(engine)
    SlowStore.stalled = True
    answers(engine, [prompt_of(1, 10)], name)
    engine.step()
    left = lost["overwritten"]  # of its windows, while it ran
    before = waiting(engine)
    assert before >= 2, "the store had room: the test proves nothing"
    for seed in range(10, 30):
        other = engine.add(str(seed), prompt_of(seed, 4), COUNT, ucm={"dump": False})
        engine.until(other.is_finished)
        assert list(other.output_token_ids) == expected(prompt_of(seed, 4), COUNT, MODELS[name])
    assert lost["overwritten"] == left
    assert waiting(engine) == before
    SlowStore.stalled = False
    engine.until(lambda: stored(engine))
    assert hit(life(name, slow=False, blocks=120), prompt_of(1, 10), name) == 10


EARLY = [name for name in MODELS if name != "full"]


@pytest.mark.parametrize("boasts", [0, 100])
@pytest.mark.parametrize("name", EARLY)
def test_blocks_that_leave_a_running_request_are_stored(life: Life, name: str, boasts: int) -> None:
    """Blocks before its windows and states before its last one, which find no slot when they are
    computed; also where the store refuses them then."""
    # vLLM keeps the state after every fourth block of a prompt and after its last one; of windows
    # it keeps all blocks, since it reuses one that it does not keep in the step that frees it.
    kept = 4 * BLOCK if STATE in MODELS[name] else None
    engine = opened(life(name, blocks=150, prefix_cache_retention_interval=kept), name)
    lost = lost_of(engine)
    SlowStore.stalled, SlowStore.boasts = True, boasts
    prompt = prompt_of(1, 10)
    request = engine.add("long", prompt, 3 * BLOCK)
    engine.until(lambda: len(request.output_token_ids) > 2 * BLOCK)
    assert boasts or waiting(engine), "the store had room: the test proves nothing"
    assert not boasts or lost["busy"]
    SlowStore.stalled, SlowStore.boasts = False, 0
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, 3 * BLOCK, MODELS[name])
    engine.until(lambda: stored(engine))
    assert not lost["overwritten"]
    assert not lost["ended"]
    for blocks in (4, 8, 10):
        again = life(name, slow=False, blocks=120)
        assert hit(again, prompt[: blocks * BLOCK + 1], name) == blocks


@pytest.mark.parametrize("name", [name for name in EARLY if STATE not in MODELS[name]])
def test_reused_blocks_that_left_a_running_request_are_counted(life: Life, name: str) -> None:
    """vLLM hands out a window's blocks in the step that frees them, if it does not keep them."""
    groups = len({type(spec) for spec in MODELS[name]})
    engine = opened(life(name, blocks=60), name)
    lost, planner = lost_of(engine), engine.connector._scheduler.dumps
    engine.until(lambda: stored(engine))
    before = planner.published_blocks
    SlowStore.stalled = True
    prompt = prompt_of(1, 10)
    request = engine.add("long", prompt, COUNT)
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, MODELS[name])
    SlowStore.stalled = False
    engine.until(lambda: stored(engine))
    assert lost["overwritten"]
    published = planner.published_blocks - before
    assert published + lost["overwritten"] == groups * (len(prompt) // BLOCK)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("name", "args"),
    [("full and a window", {}), ("windows alone", {}), ("full", {"enable_prefix_caching": False})],
)
def test_what_vllm_does_not_keep_is_stored_after_the_end(
    life: Life, name: str, args: dict[str, Any], overlap: bool
) -> None:
    """Blocks that are not in vLLM's prefix cache: of windows in the output, or all. With steps that
    overlap vLLM holds them until the step has ended that still runs."""
    engine = opened(life(name, blocks=150, overlap=overlap, **args), name)
    engine.until(lambda: stored(engine))
    lost = lost_of(engine)
    SlowStore.slots = 0
    prompt = prompt_of(1, 1)
    right = expected(prompt, 96, MODELS[name])
    end = next(at for at in range(70, 96) if right[at] not in right[:at])
    request = engine.add("long", prompt, 96, stop=right[end])
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == right[: end + 1]
    assert waiting(engine), "the store had room: the test proves nothing"
    for _ in range(5):
        engine.step()
    SlowStore.slots = 3
    engine.until(lambda: stored(engine))
    assert not lost["overwritten"] + lost["ended"]  # what is refused is offered again
    again = prompt + right[: end + 1]
    assert hit(life(name, slow=False, blocks=120), again, name) == len(again) // BLOCK


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_in_a_full_pool_a_new_request_waits_for_running_ones(
    life: Life, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are those that wait for the store, unless ``hold_share`` keeps them."""
    monkeypatch.setattr(dumps, "KNOWN_S", 60.0)  # ranks stay full while a thread is slow
    engine = opened(life(blocks=24, keys={"hold_share": share}))
    lost = lost_of(engine)
    SlowStore.stalled = True
    answers(engine, [prompt_of(1, 10)])
    running = engine.add("running", prompt_of(2, 9), 40)
    engine.until(lambda: len(running.output_token_ids) > 2)
    new = engine.add("new", prompt_of(3, 9), COUNT)
    lookup = engine.connector._scheduler._live["new"].lookup
    while not lookup.done:  # or it would wait for that
        engine.pause()
    engine.until(running.is_finished)
    assert new.num_computed_tokens == 0 if share else new.is_finished()
    assert bool(lost["overwritten"]) == (not share)
    SlowStore.stalled = False
    engine.until(new.is_finished)
    assert list(running.output_token_ids) == expected(prompt_of(2, 9), 40, MODELS["full"])
    assert list(new.output_token_ids) == expected(prompt_of(3, 9), COUNT, MODELS["full"])
    engine.until(lambda: stored(engine))
    assert (hit(life(slow=False, blocks=40), prompt_of(1, 10)) == 10) == bool(share)


def test_a_request_that_nothing_else_can_free_blocks_for_does_not_wait(life: Life) -> None:
    engine = opened(life(blocks=24, keys={"hold_share": 1.0}))
    lost = lost_of(engine)
    SlowStore.stalled = True
    answers(engine, [prompt_of(1, 13)])
    assert waiting(engine) >= 10
    answers(engine, [prompt_of(2, 13)])
    assert lost["overwritten"]


def with_pins(life: Life) -> tuple[ToyEngine, Any]:
    """An engine with a stalled store, a request that runs, and one for which vLLM held back blocks
    of an ended one."""
    engine = opened(life(blocks=24, keys={"hold_share": 1.0}))
    SlowStore.stalled = True
    answers(engine, [prompt_of(1, 10)])
    running = engine.add("running", prompt_of(2, 9), 60)
    engine.until(lambda: len(running.output_token_ids) > 2)
    deferred = engine.connector._scheduler._deferred
    touched: list[int] = []
    unpin = deferred.unpin

    def noting() -> None:
        touched.append(len(deferred._pinned))
        unpin()

    deferred.unpin = noting
    engine.add("new", prompt_of(3, 9), COUNT)
    engine.until(lambda: max(touched, default=0) > 0)
    return engine, running


@pytest.mark.parametrize("connector", [True, False])
def test_a_reset_succeeds_at_any_time(life: Life, connector: bool) -> None:
    """vLLM counts the blocks in use before it calls a connector."""
    engine, running = with_pins(life)
    reset = engine.scheduler.reset_prefix_cache
    assert reset(reset_running_requests=True, reset_connector=connector)
    engine.until(running.is_finished)
    assert list(running.output_token_ids) == expected(prompt_of(2, 9), 60, MODELS["full"])
    engine.until(lambda: not engine.scheduler.requests)
    engine.until(lambda: not engine.scheduler.has_finished_requests())
    answers(engine, [prompt_of(4, 10)])
    assert reset(reset_connector=connector), "right after a request, without another step"
    SlowStore.stalled = False
    engine.until(engine.idle)
    assert hit(life(slow=False, blocks=40), prompt_of(2, 9)) < 9, "other weights may be in memory"


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_waits_for_no_store(life: Life, state: PauseState) -> None:
    """It is complete when vLLM has nothing to do."""
    engine, running = with_pins(life)
    engine.scheduler.set_pause_state(state)
    engine.until(lambda: not engine.scheduler.has_requests())
    assert waiting(engine), "the test proves nothing"
    assert running.is_finished() == (state == PauseState.PAUSED_NEW)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert all(block.ref_cnt == 0 for block in engine.connector._scheduler._deferred._blocks())
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.until(running.is_finished)
    assert list(running.output_token_ids) == expected(prompt_of(2, 9), 60, MODELS["full"])


def test_an_idle_engine_stops_when_the_store_stalls(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause of an idle engine, too, which vLLM's calls do not tell apart."""
    engine = opened(life(blocks=60))
    SlowStore.stalled = True
    answers(engine, [prompt_of(1, 10)])
    assert engine.scheduler.has_requests()
    monkeypatch.setattr(dumps, "ROOM_S", 0.0)
    engine.until(lambda: not engine.scheduler.has_requests())
    assert waiting(engine)
    assert engine.scheduler.reset_prefix_cache()


def test_a_sleep_drops_what_waits(life: Life) -> None:
    engine, running = with_pins(life)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.worker.unregister_kv_caches()
    for cache in engine.caches.values():
        cache.fill_(-1.0)
    engine.worker.restore_kv_caches()
    SlowStore.stalled = False
    engine.until(running.is_finished)
    assert list(running.output_token_ids) == expected(prompt_of(2, 9), 60, MODELS["full"])
    engine.until(lambda: stored(engine))
    again = life(slow=False, blocks=120)
    answers(again, [prompt_of(at, blocks) for at, blocks in ((1, 10), (2, 9), (3, 9))])
    assert again.loads


def with_a_second_rank(engine: ToyEngine, rng: random.Random) -> None:
    """Dumps end when a second rank has reported, too. It has read the blocks of a job after the
    step with it, and publishes them some steps later. It writes no records: this engine's are those
    of its one worker."""
    scheduler, step = engine.connector._scheduler, engine.step
    jobs = scheduler.dumps._jobs
    scheduler.dumps.open([0, 1])

    def both() -> int:
        computed = step()
        sent = [number for number in jobs if number <= scheduler.dumps._seen.get(0, 0)]
        done = [DumpResult(number) for number in sent if rng.random() < 0.1]
        report = RankReport(1, ready=True, attempt=1, last_job=max(sent, default=0))
        report.staged, report.done = sent, done
        scheduler._on_rank_reports(UCMConnectorWorkerMetadata(ranks=[report]))
        return computed

    engine.step = both


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("seed", "overlap"),
    [
        pytest.param(seed, overlap, marks=[pytest.mark.long] * (seed >= short))
        for overlap, short, count in ((False, 3, 6), (True, 2, 3))
        for seed in range(count)
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_foreign_is_stored(
    life: Life, name: str, seed: int, overlap: bool, ranks: int
) -> None:
    """Whatever vLLM hands out while the store stalls and goes on, in a pool that is full: every
    record that another engine loads gives the right tokens. The first of two ranks refuses
    blocks that the second one has read. With steps that overlap, requests end, by a stop token or
    aborted, while a step of them runs."""
    rng = random.Random(seed)
    SlowStore.slots = rng.choice((1, 3))
    groups = len({type(spec) for spec in MODELS[name]})
    share = rng.choice((0.0, 0.125, 0.6))
    pool = groups * rng.randint(17, 30)
    engine = opened(life(name, blocks=pool, keys={"hold_share": share}, overlap=overlap), name)
    if ranks > 1:
        SlowStore.boasts = 100
        with_a_second_rank(engine, rng)
    prompts: list[list[int]] = []
    running: dict[str, tuple[Any, list[int]]] = {}
    for number in range(30):
        before = rng.choice([*prompts, []])
        kept = rng.choice((len(before), len(before) // BLOCK * BLOCK // 2, 0))
        tail = [rng.randint(3, 400) for _ in range(rng.randint(1, 160))]
        prompts.append((before[:kept] + tail)[:380])
        right = expected(prompts[-1], rng.randint(1, 12), MODELS[name])
        more, stop = (5, right[-1]) if overlap else (0, None)
        request = engine.add(f"{number}", prompts[-1], len(right) + more, stop=stop)
        running[f"{number}"] = request, right[: right.index(right[-1]) + 1] if overlap else right
        for _ in range(rng.randint(1, 12)):
            SlowStore.stalled = rng.random() < 0.8
            engine.step()
        if overlap and rng.random() < 0.2:
            engine.scheduler.finish_requests(f"{number}", RequestStatus.FINISHED_ABORTED)
    SlowStore.stalled, SlowStore.boasts = False, 0
    engine.until(lambda: all(one.is_finished() for one, _ in running.values()))
    for request, right in running.values():
        tokens = list(request.output_token_ids)
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        assert tokens == (right[: len(tokens)] if aborted else right)
    engine.until(lambda: stored(engine))
    SlowStore.stalled = True
    ended = engine.add("ended", prompt_of(seed, 9), 1)
    engine.until(ended.is_finished)
    assert waiting(engine)  # at least its blocks; before, that depended on threads
    SlowStore.stalled = False
    engine.until(lambda: stored(engine))
    # The first of these lives stores what is missing, so that the second one loads every record.
    for again in (life(name, slow=False, blocks=200, overlap=overlap) for _ in "ab"):
        for at in range(0, len(prompts), 4):
            answers(again, prompts[at : at + 4], name)
        again.until(lambda again=again: stored(again))
    assert again.loads, "nothing was loaded: the test proves nothing"


# A long prompt over a device and a medium
# --------------------------------------------------------------------------------------------------

#: Tokens of a step, and steps of the prompt.
STEP, STEPS = 8192, 4
#: The longest request, in tokens.
LONGEST = STEP * STEPS + 4 * BLOCK


class Medium:
    """3FS in software, which begins no operation while it is held."""

    def __init__(self, directory: Path) -> None:
        (directory / "3fs-virt").mkdir(parents=True)
        self._hold = ctypes.CDLL(os.environ["UCM_TEST_SOFT3FS"]).soft3fs_hold
        self.store = {
            "ucm_connector_name": "UcmDs3fsStore",
            "storage_backends": str(directory / "root"),
            "hf3fs_library": os.environ["UCM_TEST_SOFT3FS"],
            "storage_capacity": "1GiB",
            "free_space_floor": 0,
            "staging_capacity": "1MiB",
            "platform": "cuda",
        }

    def hold(self, held: bool) -> None:
        """Holds its operations, or begins them."""
        self._hold(ctypes.c_bool(held))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """KV of engines is memory of the software driver's device."""
    from software_driver import driver, ok

    from ucm.integration.vllm.connector import UCMConnector, platforms

    rows, accepted = list(platforms.PLATFORMS), list[ctypes.c_size_t]()
    import accelerated

    platforms.PLATFORMS[:] = rows  # it adds one
    row = platforms.Platform("cuda", ("cpu",), "cpu", accelerated.mark)
    monkeypatch.setattr(platforms, "PLATFORMS", [*rows, row])
    register = UCMConnector.register_kv_caches

    def accept(connector: Any, caches: dict[str, torch.Tensor]) -> None:
        for tensor in caches.values():
            memory = tensor.untyped_storage()
            start = ctypes.c_size_t(memory.data_ptr())
            ok(driver().softcuda_accept(start, ctypes.c_size_t(memory.nbytes())))
            accepted.append(start)
        register(connector, caches)

    monkeypatch.setattr(UCMConnector, "register_kv_caches", accept)
    yield
    for start in accepted:
        ok(driver().softcuda_forget(start))
    driver().softcuda_jitter(ctypes.c_uint64(0), ctypes.c_uint64(0))  # it has its streams late


@pytest.mark.skipif(
    not all(os.path.exists(os.environ.get(f"UCM_TEST_{name}", "")) for name in DRIVERS),
    reason="UCM_TEST_DRIVER or UCM_TEST_SOFT3FS is missing; make test-py builds them",
)
@pytest.mark.timeout(600)  # 30 s of computing on an idle machine
@pytest.mark.usefixtures("device")
def test_a_prompt_of_32k_tokens_is_stored_whole_and_hit_whole(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium takes nothing until the prompt has ended, and others that are not stored have used
    more blocks than the pool has besides. Then it takes a little at a time."""
    model = engines.make_model(tmp_path / "model", max_position_embeddings=LONGEST)
    monkeypatch.setattr(toy_engine, "STEPS", 1_000_000)  # as long as the medium takes
    medium, prompt = Medium(tmp_path / "mount"), prompt_of(7, STEP * STEPS // BLOCK)
    right = expected(prompt, COUNT)

    def begin() -> ToyEngine:
        return ToyEngine(
            engines,
            model,
            monkeypatch,
            store=medium.store,
            blocks=len(prompt) // BLOCK + 40,
            max_model_len=LONGEST,
            max_num_batched_tokens=STEP,
        )

    engine = begin()
    engine.generate({"opens": prompt_of(99, 1)}, 1)
    readiness = engine.connector._scheduler.readiness
    engine.until(lambda: engine.off or (readiness.phase == "open" and engine.idle()))
    assert not engine.off, readiness.why_off
    engine.generate({"has room": prompt_of(98, 1)}, 1)
    engine.until(lambda: stored(engine))
    lost = lost_of(engine)
    medium.hold(True)
    try:
        assert engine.generate({"long": prompt}, COUNT) == {"long": right}
        assert waiting(engine) > STEP * STEPS // BLOCK * 0.9, "staging held it: this proves nothing"
        for seed in range(20):
            other = engine.add(str(seed), prompt_of(seed, 4), COUNT, ucm={"dump": False})
            engine.until(other.is_finished)
        turns = itertools.count()

        def taken() -> bool:
            medium.hold(next(turns) % 8 > 0)
            return stored(engine)

        engine.until(taken)
    finally:
        medium.hold(False)
    assert (+lost).keys() <= {"busy"}, "the rest is offered again"
    engine.close()
    again = begin()
    request = again.add("again", prompt, COUNT)
    again.until(request.is_finished)
    assert list(request.output_token_ids) == right
    assert again.claimed["again"] == STEP * STEPS
    again.close()
