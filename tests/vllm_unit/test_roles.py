"""Prefill and decode on separate engines: two of vLLM's own schedulers, both sides of the connector
in each, over one store; the ``kv_transfer_params`` of one's answer go to the other unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from toy_engine import BLOCK, LateStore, ToyEngine, expected
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from ucm.integration.vllm.connector.scheduler import scheduler

#: What proxies send to the prefill engine, as vLLM's toy proxy does.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = [(7 * at) % 400 + 3 for at in range(6 * BLOCK + 5)]
COUNT = 5
SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=BLOCK, **SHAPE)
#: Layers of models with several KV groups; the window of the last one has larger blocks.
MODELS: dict[str, list[Any]] = {
    "one group": [],
    "full and a window": [FULL, SlidingWindowSpec(block_size=BLOCK, sliding_window=40, **SHAPE)],
    "full and chunks": [
        FULL,
        ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=64, **SHAPE),
    ],
    "full and a state": [
        FULL,
        MambaSpec(
            block_size=BLOCK,
            shapes=((2 * 2 * BLOCK * 32,),),
            dtypes=(torch.float32,),
            mamba_type=MambaAttentionBackendEnum.MAMBA2,
            mamba_cache_mode="align",
        ),
    ],
    "full and a window of larger blocks": [
        FULL,
        SlidingWindowSpec(block_size=BLOCK, sliding_window=100, **SHAPE | {"num_kv_heads": 1}),
    ],
}
#: Milliseconds: longer than any test.
PATIENT = {"pd_wait_ms": 600_000}
Life = Callable[..., ToyEngine]


@pytest.fixture
def life(engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Makes engines over the same store."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")

    def make(**args: Any) -> ToyEngine:
        args["keys"] = PATIENT | args.get("keys", {})
        made.append(ToyEngine(engines, tiny, monkeypatch, **args))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prefill(engine: ToyEngine, tokens: list[int], name: str = "p") -> dict[str, Any] | None:
    """The answer of the prefill engine, whose blocks may still be on their way."""
    request = engine.add(name, tokens, 1, **PREFILL)
    engine.until(request.is_finished)
    return engine.answers.get(name)


def stored(engine: ToyEngine) -> None:
    """Steps until an engine has stored what it computed."""
    engine.until(lambda: not engine.connector.has_pending_push_work() and engine.idle())
    engine.until(lambda: not engine.connector._scheduler.dumps.under_way)


def waits(engine: ToyEngine, steps: int = 50) -> None:
    """The engine takes steps, and computes nothing in any of them."""
    for _ in range(steps):
        assert engine.step() == 0
        engine.pause()


def test_the_consumer_loads_what_the_producer_computed(life: Life) -> None:
    producer, consumer = life(), life()
    answer = prefill(producer, PROMPT)
    assert answer is not None
    assert (answer["do_remote_prefill"], answer["ucm"]["tokens"]) == (True, 6 * BLOCK)
    stored(producer)
    before = dict(LateStore.blocks)
    request = consumer.add("d", PROMPT, 2 * BLOCK, **answer)
    consumer.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, 2 * BLOCK)
    assert consumer.claimed["d"] == 6 * BLOCK
    assert consumer.answers == {}
    stored(consumer)
    assert LateStore.blocks == before, "its output is not stored"


def test_consumer_dump_stores_what_the_consumer_computes(life: Life) -> None:
    producer, consumer = life(), life(keys={"consumer_dump": True})
    answer = prefill(producer, PROMPT)
    assert answer is not None
    stored(producer)
    before = len(LateStore.blocks)
    request = consumer.add("d", PROMPT, 2 * BLOCK, **answer)
    consumer.until(request.is_finished)
    stored(consumer)
    assert len(LateStore.blocks) == before + 2


@pytest.mark.parametrize("name", MODELS)
def test_the_consumer_waits_until_the_last_block_is_published(life: Life, name: str) -> None:
    """Blocks appear one after the other; the engine's other requests are not held up."""
    specs = MODELS[name]
    producer, consumer = life(specs=specs, blocks=120), life(specs=specs, blocks=120)
    answer = prefill(producer, PROMPT)
    assert answer is not None
    stored(producer)
    hidden = dict(LateStore.blocks)
    LateStore.blocks.clear()
    request = consumer.add("d", PROMPT, COUNT, **answer)
    waits(consumer)
    for key in list(hidden)[:-1]:
        LateStore.blocks[key] = hidden.pop(key)
        waits(consumer, 3)
    other = [11] * (BLOCK + 3)
    assert consumer.generate({"other": other}, COUNT) == {"other": expected(other, COUNT, specs)}
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 0)
    LateStore.blocks.update(hidden)
    consumer.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT, specs)
    block = consumer.scheduler.block_size
    assert consumer.claimed["d"] == len(PROMPT) // block * block
    assert answer["ucm"]["tokens"] == len(PROMPT) // block * block


@pytest.mark.parametrize("name", MODELS)
def test_of_whole_blocks_the_consumer_loads_what_every_group_can_serve(
    life: Life, name: str
) -> None:
    """vLLM computes the last token, so a hit ends before its block; the wait ends with that."""
    specs, prompt = MODELS[name], PROMPT[: 6 * BLOCK]
    producer, consumer = life(specs=specs, blocks=120), life(specs=specs, blocks=120)
    answer = prefill(producer, prompt)
    if answer is None and "state" in name and vllm.__version__.startswith(("0.30", "0.31")):
        pytest.skip("these versions keep no state at the end of whole blocks")
    assert answer is not None
    stored(producer)
    request = consumer.add("d", prompt, COUNT, **answer)
    consumer.until(request.is_finished)
    assert list(request.output_token_ids) == expected(prompt, COUNT, specs)
    block = consumer.scheduler.block_size
    assert consumer.claimed["d"] == (6 * BLOCK - 1) // block * block


def test_a_prompt_below_one_block_has_no_answer(life: Life) -> None:
    producer, consumer = life(), life()
    short = PROMPT[: BLOCK - 1]
    assert prefill(producer, short) is None
    assert consumer.generate({"d": short}, COUNT) == {"d": expected(short, COUNT)}


def test_after_the_time_the_consumer_computes(life: Life) -> None:
    producer, consumer = life(), life(keys={"pd_wait_ms": 1})
    answer = prefill(producer, PROMPT)
    assert answer is not None
    stored(producer)
    LateStore.blocks.clear()
    request = consumer.add("d", PROMPT, COUNT, **answer)
    consumer.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT)
    assert consumer.loads == []


def test_requests_that_wait_are_cancelled_and_leave_nothing(life: Life) -> None:
    producer, consumer = life(), life()
    answers = [prefill(producer, [at, *PROMPT], f"p{at}") for at in range(3)]
    stored(producer)
    LateStore.blocks.clear()
    for at, answer in enumerate(answers):
        consumer.add(f"d{at}", [at, *PROMPT], COUNT, **(answer or {}))
    waits(consumer)
    consumer.scheduler.finish_requests(["d0", "d1", "d2"], RequestStatus.FINISHED_ABORTED)
    consumer.until(consumer.idle)
    assert consumer.connector._scheduler._live == {}
    assert not consumer.connector.has_pending_push_work()
    assert (consumer.loads, consumer.answers) == ([], {})
    assert consumer.generate({"next": PROMPT}, COUNT) == {"next": expected(PROMPT, COUNT)}


def test_a_producer_under_kv_both_hits_its_own_prefixes(life: Life) -> None:
    """Also after a restart, and of prompts that a consumer got."""
    first = life()
    prefill(first, PROMPT)
    stored(first)
    second = life()
    longer = [*PROMPT[: 6 * BLOCK], *range(20, 20 + 2 * BLOCK)]
    answer = prefill(second, longer)
    assert second.claimed["p"] == 6 * BLOCK
    assert answer is not None
    assert answer["ucm"]["tokens"] == 8 * BLOCK


def segments(root: Path) -> dict[str, Any]:
    """Keys of a store that publishes after a minute what nothing flushes."""
    return {
        "storage_backends": str(root / "blocks"),
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "staging_capacity": "16MiB",
        "layout": "segment",
        "segment_age": 60,
    }


def test_a_segment_is_published_and_found_without_waiting_for_its_age(
    life: Life, tmp_path: Path
) -> None:
    producer, consumer = (life(store=segments(tmp_path)) for _ in range(2))
    assert consumer.generate({"first": [9] * 40}, 1)  # its store is open, and listed nothing
    answer = prefill(producer, PROMPT)
    assert answer is not None
    request = consumer.add("d", PROMPT, COUNT, **answer)

    def ended() -> bool:
        producer.step()  # an engine that has dumps to report goes on stepping
        return bool(request.is_finished())

    consumer.until(ended)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT)
    assert consumer.claimed["d"] == 6 * BLOCK


def test_engines_of_other_weights_say_so_and_do_not_wait(
    life: Life, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer = life(store=segments(tmp_path))
    other = life(store=segments(tmp_path), keys={"identity": {"weights": "declared:others"}})
    answer = prefill(producer, PROMPT)
    assert answer is not None
    caplog.set_level(logging.WARNING, "ucm")
    for name in ("d1", "d2"):
        request = other.add(name, PROMPT, COUNT, **answer)
        other.until(request.is_finished)
        assert list(request.output_token_ids) == expected(PROMPT, COUNT)
    other.until(lambda: "another identity" in caplog.text)
    (line,) = [one for one in caplog.messages if "another identity" in one]
    assert 'weights is "declared:others" here and "declared:toy" there' in line
    assert other.loads == []


def test_a_failing_wait_is_a_miss(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every failure of the scheduler side."""
    producer, consumer = life(), life()
    answer = prefill(producer, PROMPT)
    stored(producer)
    monkeypatch.setattr(scheduler.PublishWaits, "go_on", lambda *_: 1 / 0)
    LateStore.blocks.clear()
    request = consumer.add("d", PROMPT, COUNT, **(answer or {}))
    consumer.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT)
