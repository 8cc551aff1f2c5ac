"""Models with several KV groups: vLLM's own scheduler, both sides of the connector and a store,
with right tokens in every life of an engine and hits as long as the rule allows."""

from __future__ import annotations

import random
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
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

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
    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.float32, cache_dtype_str="auto"
    )


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
Life = Callable[..., ToyEngine]


@pytest.fixture
def life(engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Makes engines, one after the other over the same store."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")

    def make(name: str, **args: Any) -> ToyEngine:
        made.append(ToyEngine(engines, tiny, monkeypatch, specs=MODELS[name], **args))
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


@pytest.mark.parametrize("name", MODELS)
def test_every_life_of_an_engine_gives_the_right_tokens(life: Life, name: str) -> None:
    rng = random.Random(name)
    prompts = prompts_of(rng, 12)
    for number in range(4):
        engine = life(name, blocks=40 if number % 2 else 120)
        asked = prompts | prompts_of(rng, 2)
        assert engine.generate(asked, COUNT) == right(name, asked)
        engine.until(engine.idle)
        assert not engine.off
        if number == 0:
            assert LateStore.blocks
            continue
        assert engine.loads, "nothing was loaded: the test proves nothing"
        # Some records are gone, of any group, as after an eviction.
        for key in rng.sample(sorted(LateStore.blocks), len(LateStore.blocks) // 10):
            del LateStore.blocks[key]


@pytest.mark.shows("DeepSeek", "V1", "V2")
@pytest.mark.parametrize("name", MODELS)
def test_a_restarted_engine_hits_all_it_may(life: Life, name: str) -> None:
    """The whole prompt but for its last token: what a hit needs was stored, however short the
    windows are."""
    prompt = [(11 * at) % 390 + 5 for at in range(9 * BLOCK + 7)]
    first = life(name, blocks=120)
    assert first.generate({"a": prompt}, COUNT) == right(name, {"a": prompt})
    first.until(first.idle)
    engine = life(name, blocks=120)
    request = engine.add("again", prompt, COUNT)
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, MODELS[name])
    block = engine.scheduler.block_size
    assert engine.claimed["again"] == len(prompt) // block * block
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
    prompt = [(11 * at) % 390 + 5 for at in range(9 * BLOCK + 7)]
    first = life(name, blocks=120)
    first.generate({"a": prompt}, COUNT)
    first.until(first.idle)
    for seed in range(6):
        engine = life(name, blocks=120)
        stored = dict(LateStore.blocks)
        request = engine.add("again", prompt, COUNT)
        engine.until(lambda: bool(engine.loads))  # noqa: B023 - it is called here
        lost = random.Random(seed).sample(sorted(stored), 3)
        for key in lost:
            del LateStore.blocks[key]
        engine.until(request.is_finished)
        assert list(request.output_token_ids) == expected(prompt, COUNT, MODELS[name])
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
    prompt = [(11 * at) % 390 + 5 for at in range(9 * BLOCK + 7)]
    right_ones = expected(prompt, COUNT, MODELS[name])
    first = life(name, blocks=120, **kept(name))
    first.generate({"a": prompt}, COUNT)
    first.until(first.idle)
    for most in (1, 5, 8):
        engine = life(name, blocks=120, **kept(name))
        policy = {"max_load_tokens": most * BLOCK + 3, "dump": False}
        request = engine.add("cut", prompt, COUNT, ucm=policy)
        engine.until(request.is_finished)
        assert list(request.output_token_ids) == right_ones
        assert engine.claimed["cut"] == servable(name, most) * BLOCK


@pytest.mark.parametrize("name", MODELS)
def test_the_limit_of_a_policy_counts_from_the_blocks_on_the_device(life: Life, name: str) -> None:
    """The lookup began before vLLM found them, so it was about another length."""
    prompt = [(11 * at) % 390 + 5 for at in range(9 * BLOCK + 7)]
    first = life(name, blocks=120, **kept(name))
    first.generate({"a": prompt}, COUNT)
    first.until(first.idle)
    engine = life(name, blocks=120, **kept(name))
    begin = prompt[: 4 * BLOCK + 1]
    assert engine.generate({"begin": begin}, COUNT) == right(name, {"begin": begin})
    request = engine.add("cut", prompt, COUNT, ucm={"max_load_tokens": 4 * BLOCK})
    tracker = engine.connector._scheduler._live["cut"]
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, MODELS[name])
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
    where it were told then, it would store zeros as the KV of a prompt."""
    monkeypatch.setattr(toy_engine, "STAGE_POLLS", 1000)
    rng = random.Random(name)
    prompts = prompts_of(rng, 12)
    first = life(name, blocks=40)
    assert first.generate(prompts, COUNT) == right(name, prompts)
    second = life(name, blocks=120)
    assert second.generate(prompts, COUNT) == right(name, prompts)
    assert second.loads, "nothing was loaded: the test proves nothing"
