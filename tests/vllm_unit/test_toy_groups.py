"""Models with several KV groups: vLLM's own scheduler, both sides of the connector and a store,
with right tokens in every life of an engine and hits as long as the rule allows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine
from toy_engine import BLOCK, LateStore, ToyEngine, expected
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from ucm.store import part_mask, record_ids

COUNT = 4
SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def full() -> KVCacheSpec:
    return FullAttentionSpec(block_size=BLOCK, **SHAPE)


def window(tokens: int, heads: int = 2) -> KVCacheSpec:
    """With one head, its blocks have twice as many tokens, because vLLM has pages of one size."""
    shape = SHAPE | {"num_kv_heads": heads}
    return SlidingWindowSpec(block_size=BLOCK, sliding_window=tokens, **shape)


def chunk(tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=tokens, **SHAPE)


def latent() -> KVCacheSpec:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 128, "dtype": torch.float32}
    if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__:  # every tensor rank has all of it
        shape["max_tp_shards"] = 1
    return MLAAttentionSpec(block_size=BLOCK, cache_dtype_str="auto", **shape)


def state() -> KVCacheSpec:
    """A state as large as a page of the others, kept where a step ends at the end of a block."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((2 * 2 * BLOCK * 32,),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
        mamba_cache_mode="align",
    )


MODELS = {
    "full and a window": [full(), window(40)],
    "full and a window of one block": [full(), window(BLOCK + 1)],
    "full and a window longer than prompts": [full(), window(400)],
    "full and two windows": [full(), window(40), window(100)],
    "windows before full": [window(70), full()],
    "full and chunks": [full(), chunk(64)],
    "windows alone": [window(50), window(50)],
    "full and a window of larger blocks": [full(), window(100, 1)],
    "full and a state": [full(), state()],
    "states, a window and full": [state(), window(40), full(), state()],
    "states alone": [state(), state()],
    "latent attention": [latent(), latent()],
}
#: Models with layers of a draft model in one KV group, and that group. vLLM itself refuses a draft
#: model's chunks.
DRAFTS = {
    "draft": ([full(), full()], 0),
    "latent draft": ([latent(), latent()], 0),
    "draft and a window": ([full(), window(40)], 0),
    "full and a draft with a window": ([full(), window(40)], 1),
    "windows alone with a draft": ([window(50), window(50)], 0),
    "window and a draft": ([window(50), full()], 1),
    "window and a draft with another": ([window(50), window(90)], 1),
    "draft and chunks": ([full(), chunk(64)], 0),
    "chunks and a draft": ([chunk(64), full()], 1),
}
#: Forms of an engine with several ranks.
RANKS = {
    "TP": {"tensor_parallel_size": 2},
    "PP": {"pipeline_parallel_size": 2},
    "TP + PP": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
OVERLAPS = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
PROMPT = [(11 * at) % 390 + 5 for at in range(9 * BLOCK + 7)]
Life = Callable[..., ToyEngine]


@pytest.fixture
def life(engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Makes engines, one after the other over the same store."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")

    def make(name: str, **args: Any) -> ToyEngine:
        args = {"specs": MODELS.get(name)} | args
        made.append(ToyEngine(engines, tiny, monkeypatch, **args))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts_of(rng: random.Random, count: int) -> dict[str, list[int]]:
    """Prompts that share beginnings, some of whole blocks."""
    made: dict[str, list[int]] = {}
    for at in range(count):
        before = rng.choice([*made.values(), []])
        kept = rng.choice((len(before), len(before) // BLOCK * BLOCK // 2, rng.randint(0, 150)))
        tail = [rng.randint(3, 400) for _ in range(rng.randint(1, 200))]
        made[f"prompt {at}"] = (before[:kept] + tail)[:400]
    return made


def right(name: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return {one: expected(tokens, COUNT, MODELS[name]) for one, tokens in prompts.items()}


@OVERLAPS
@pytest.mark.parametrize("name", MODELS)
def test_every_life_of_an_engine_gives_the_right_tokens(
    life: Life, name: str, overlap: bool
) -> None:
    rng = random.Random(name)
    prompts = prompts_of(rng, 12)
    for number in range(4):
        engine = life(name, blocks=40 if number % 2 else 120, overlap=overlap)
        asked = prompts | prompts_of(rng, 2)
        assert engine.generate(asked, COUNT) == right(name, asked)
        engine.until(engine.idle)
        assert not engine.off
        if number == 0:
            assert LateStore.blocks
            continue
        assert engine.loads, "nothing was loaded: the test proves nothing"
        # Some records are absent, of any group, as after an eviction.
        for key in rng.sample(sorted(LateStore.blocks), len(LateStore.blocks) // 10):
            del LateStore.blocks[key]


@pytest.mark.shows("DeepSeek", "V1", "V2", "0.30", "0.31", "0.33")
@pytest.mark.shows("gpt-oss", "0.30")
@pytest.mark.shows("Qwen3-Next, LFM2", "0.30", "0.31")
@OVERLAPS
@pytest.mark.parametrize("name", MODELS)
def test_a_restarted_engine_hits_all_it_may(life: Life, name: str, overlap: bool) -> None:
    """The whole prompt but for its last token: what a hit needs was stored, however short the
    windows are."""
    first = life(name, blocks=120, overlap=overlap)
    assert first.generate({"a": PROMPT}, COUNT) == right(name, {"a": PROMPT})
    first.until(first.idle)
    engine = life(name, blocks=120, overlap=overlap)
    request = engine.add("again", PROMPT, COUNT)
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT, MODELS[name])
    block = engine.scheduler.block_size
    assert engine.claimed["again"] == len(PROMPT) // block * block
    named = getattr(engine.connector, "get_loaded_kv_cache_group_ids", None)  # vLLM 0.32 and newer
    if named is not None:
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        assert named(request) == tuple(range(len(groups))), "every group is loaded"


@pytest.mark.parametrize("name", ["full and a window", "windows alone", "full and chunks"])
def test_a_record_that_is_lost_between_lookup_and_load_costs_what_needs_it(
    life: Life, name: str
) -> None:
    """The load fails as a whole. The next one is as long as every group can serve without it."""
    again = 0
    first = life(name, blocks=120)
    first.generate({"a": PROMPT}, COUNT)
    first.until(first.idle)
    for seed in range(6):
        engine = life(name, blocks=120)
        stored = dict(LateStore.blocks)
        request = engine.add("again", PROMPT, COUNT)
        engine.until(lambda: bool(engine.loads))  # noqa: B023 - it is called here
        lost = random.Random(seed).sample(sorted(stored), 3)
        for key in lost:
            del LateStore.blocks[key]
        engine.until(request.is_finished)
        assert list(request.output_token_ids) == expected(PROMPT, COUNT, MODELS[name])
        engine.until(engine.idle)
        assert not engine.off
        stats = engine.connector._scheduler.stats()
        assert stats["hit_blocks"] * BLOCK == sum(engine.claims)
        last = engine.claims[-1] // BLOCK
        assert stats["loaded_blocks"] in (0, last), "a load is of use whole or not"
        again += len(engine.claims) > 1 and stats["loaded_blocks"] == last
        LateStore.blocks.update(stored)
    assert again, "no shorter hit was loaded"


#: Blocks after which a state of a prompt of nine is stored, with this setting of vLLM's.
STATES = (4, 8, 9)


def kept(name: str) -> dict[str, int]:
    return {"prefix_cache_retention_interval": 4 * BLOCK} if "state" in name else {}


def servable(name: str, most: int) -> int:
    """The longest hit of at most ``most`` blocks of that prompt, whose blocks are all stored."""
    if "state" in name:
        return max((at for at in STATES if at <= most), default=0)
    return most // 2 * 2 if "larger blocks" in name else most


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_cuts_a_hit_to_a_length_that_every_group_can_serve(life: Life, name: str) -> None:
    right_ones = expected(PROMPT, COUNT, MODELS[name])
    first = life(name, blocks=120, **kept(name))
    first.generate({"a": PROMPT}, COUNT)
    first.until(first.idle)
    for most in (1, 5, 8):
        engine = life(name, blocks=120, **kept(name))
        policy = {"max_load_tokens": most * BLOCK + 3, "dump": False}
        request = engine.add("cut", PROMPT, COUNT, ucm=policy)
        engine.until(request.is_finished)
        assert list(request.output_token_ids) == right_ones
        assert engine.claimed["cut"] == servable(name, most) * BLOCK


@pytest.mark.parametrize("name", MODELS)
def test_the_limit_of_a_policy_counts_from_the_blocks_on_the_device(life: Life, name: str) -> None:
    """The lookup began before vLLM found them, so it was about another length."""
    first = life(name, blocks=120, **kept(name))
    first.generate({"a": PROMPT}, COUNT)
    first.until(first.idle)
    engine = life(name, blocks=120, **kept(name))
    begin = PROMPT[: 4 * BLOCK + 1]
    assert engine.generate({"begin": begin}, COUNT) == right(name, {"begin": begin})
    request = engine.add("cut", PROMPT, COUNT, ucm={"max_load_tokens": 4 * BLOCK})
    tracker = engine.connector._scheduler._live["cut"]
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT, MODELS[name])
    local = tracker.local // BLOCK
    assert local == servable(name, 4)
    assert engine.claimed["cut"] == (servable(name, local + 4) - local) * BLOCK


def test_blocks_that_leave_a_window_are_stored_though_the_store_is_slow(life: Life) -> None:
    """vLLM hands them out again in the very step that frees them, while the request runs: they are
    read before that step writes."""
    name = "full and a window of one block"
    rng = random.Random(3)
    prompts = {str(at): [rng.randint(3, 400) for _ in range(380)] for at in range(3)}
    engine = life(name, blocks=44)
    assert engine.generate(prompts, COUNT) == right(name, prompts)
    engine.until(engine.idle)
    # Every prefix can be hit, so the windows inside of the prompts are there and right.
    for number, end in enumerate(range(2 * BLOCK, 11 * BLOCK, 2 * BLOCK)):
        engine = life(name, blocks=44)
        cut = {f"{at} {number}": tokens[: end + 1] for at, tokens in prompts.items()}
        assert engine.generate(cut, COUNT) == right(name, cut)
        assert sorted(engine.loads) == sorted(cut)


@pytest.mark.parametrize("name", [name for name in MODELS if "state" in name])
def test_blocks_are_read_before_vllm_zeroes_them(
    life: Life, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It does so before it says which blocks a step hands out. The store reads as late as it may:
    if it were called then, it would store zeros as the KV of a prompt."""
    monkeypatch.setattr(toy_engine, "STAGE_POLLS", 1000)
    rng = random.Random(name)
    prompts = prompts_of(rng, 12)
    first = life(name, blocks=40)
    assert first.generate(prompts, COUNT) == right(name, prompts)
    second = life(name, blocks=120)
    assert second.generate(prompts, COUNT) == right(name, prompts)
    assert second.loads, "nothing was loaded: the test proves nothing"


def claimed(engine: ToyEngine, tokens: list[int], specs: list[KVCacheSpec]) -> int:
    """The blocks of a prompt that an engine loads, and does not store; its output is right."""
    request = engine.add("again", tokens, COUNT, ucm={"dump": False})
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(tokens, COUNT, specs)
    return engine.claimed["again"] // BLOCK


@pytest.mark.shows("Llama, Qwen", "drafter")
@pytest.mark.shows("DeepSeek", "drafter")
@pytest.mark.shows("Gemma 3", "drafter")
@pytest.mark.shows("gpt-oss", "drafter")
@pytest.mark.shows("Mistral", "drafter")
@pytest.mark.shows("Llama 4", "drafter")
@OVERLAPS
@pytest.mark.parametrize("name", DRAFTS)
def test_with_a_draft_model_a_hit_is_one_block_shorter(
    life: Life, name: str, overlap: bool
) -> None:
    """Its KV depends on the token behind, so the last block of a hit is computed again."""
    specs, group = DRAFTS[name]
    args = {"specs": specs, "drafts": [group], "blocks": 120, "overlap": overlap}
    first = life(name, **args)
    assert first.generate({"a": PROMPT}, COUNT) == {"a": expected(PROMPT, COUNT, specs)}
    first.until(first.idle)
    assert claimed(life(name, **args), PROMPT, specs) == 8
    for blocks in (1, 2, 6):
        shared = PROMPT[: blocks * BLOCK] + [1] * (2 * BLOCK)
        assert claimed(life(name, **args), shared, specs) == blocks - 1


@pytest.mark.parametrize("name", ["full and a window", "full and two windows", "windows alone"])
def test_windows_stored_at_boundaries_alone_serve_whole_prompts(life: Life, name: str) -> None:
    """Fewer records, and a prompt that shares a beginning is a hit only up to the end of one."""
    specs, stored = MODELS[name], {}
    for kept in ("all", "boundaries"):
        LateStore.blocks.clear()
        keys = {"window_records": kept}
        first = life(name, blocks=120, keys=keys)
        assert first.generate({"a": PROMPT}, COUNT) == right(name, {"a": PROMPT})
        first.until(first.idle)
        stored[kept] = len(LateStore.blocks)
        assert claimed(life(name, blocks=120, keys=keys), PROMPT, specs) == 9
        shared = PROMPT[: 6 * BLOCK] + [1] * (2 * BLOCK)
        assert claimed(life(name, blocks=120, keys=keys), shared, specs) == 6 * (kept == "all")
        begin = {"begin": PROMPT[: 4 * BLOCK + 3]}
        second = life(name, blocks=120, keys=keys)
        assert second.generate(begin, COUNT) == right(name, begin)
        second.until(second.idle)
        now = claimed(life(name, blocks=120, keys=keys), shared, specs)
        assert now == (6 if kept == "all" else 4)
    assert stored["boundaries"] < stored["all"]


def records_of(engine: ToyEngine, request: Any, pipeline: int) -> list[bytes]:
    """The names of a prompt's records of the first tensor rank."""
    return record_ids(engine.connector._scheduler._keys.first(request), part_mask(0, pipeline, 0))


def writes_of(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each record is written, from now on."""
    writes, dump = Counter[bytes](), LateStore.dump_data

    def dump_data(store: Any, block_ids: Any, *args: Any, **more: Any) -> Any:
        writes.update(set(block_ids))
        return dump(store, block_ids, *args, **more)

    monkeypatch.setattr(LateStore, "dump_data", dump_data)
    return writes


@pytest.mark.shows("DeepSeek", "TP 2", "PP 2", "TP + PP")
@OVERLAPS
@pytest.mark.parametrize("form", RANKS)
@pytest.mark.parametrize("name", ["full", "latent attention", "full and a window"])
def test_engines_of_several_ranks_hit_what_all_of_them_have(
    life: Life, monkeypatch: pytest.MonkeyPatch, name: str, form: str, overlap: bool
) -> None:
    """Each rank stores its own layers, and of latent attention one of the tensor ranks stores
    them."""
    specs = 2 * MODELS.get(name, [full(), full()])
    args = {"specs": specs, "blocks": 120, "overlap": overlap, **RANKS[form]}
    writes = writes_of(monkeypatch)
    first = life(name, **args)
    request = first.add("a", PROMPT, COUNT)
    first.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT, specs)
    planner = first.connector._scheduler.dumps
    first.until(lambda: first.idle() and not planner.under_way)
    copies = len({worker.connector._worker.rank.part for worker in first.ranks})
    alike = name == "latent attention" and hasattr(KVCacheConfig, "kv_tp_replicas")
    pipelines, tensors = ("PP" in form) + 1, ("TP" in form) + 1
    assert copies == pipelines * (1 if alike else tensors)
    groups = len(first.scheduler.kv_cache_config.kv_cache_groups)
    assert len(LateStore.blocks) == 9 * copies * groups
    assert set(writes.values()) == {1}
    assert claimed(life(name, **args), PROMPT, specs) == 9
    for pipeline in range(pipelines):
        lost = records_of(first, request, pipeline)[8 - pipeline]
        del LateStore.blocks[lost]
        assert claimed(life(name, **args), PROMPT, specs) == 8 - pipeline


@pytest.mark.shows("DeepSeek", "DP 2")
@pytest.mark.shows("gpt-oss", "DP 2")
@pytest.mark.parametrize("name", ["latent attention", "full and a window"])
def test_two_engines_of_one_deployment_share_the_store(
    life: Life, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What one has published the other loads and does not store again. If both compute a prompt at
    once, each writes it once at most."""
    writes, check, late = writes_of(monkeypatch), LateStore.check, [True]

    def publishes(store: Any, task: Any, *args: Any) -> bool:
        return not (late[0] and task.handle == "dump") and check(store, task, *args)

    monkeypatch.setattr(LateStore, "check", publishes)
    engines, specs = [life(name, blocks=120) for _ in "ab"], MODELS[name]
    for engine in engines:
        request = engine.add("at once", PROMPT, COUNT)
        engine.until(request.is_finished)
        assert list(request.output_token_ids) == expected(PROMPT, COUNT, specs)
    assert not LateStore.blocks, "the first one has published: the test proves nothing"
    late[0] = False
    published = []
    for engine in engines:
        planner = engine.connector._scheduler.dumps
        engine.until(lambda: engine.idle() and not planner.under_way)  # noqa: B023
        published.append(planner.published_blocks)
    assert set(writes) == set(LateStore.blocks)
    assert set(writes.values()) == {2}
    assert published == [len(LateStore.blocks)] * 2, "what was there counts as stored"
    later = [token + 1 for token in PROMPT]
    for engine in engines:
        request = engine.add("later", later, COUNT)
        engine.until(lambda: request.is_finished() and engine.idle())  # noqa: B023
        assert list(request.output_token_ids) == expected(later, COUNT, specs)
    assert (engines[0].claimed["later"], engines[1].claimed["later"]) == (0, 9 * BLOCK)
    assert max(writes[key] for key in LateStore.blocks) == 2
    assert sum(writes.values()) == len(LateStore.blocks) * 3 // 2, "the second one wrote nothing"
