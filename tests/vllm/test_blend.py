"""Blend in real engines of an unpatched vLLM, with the recall model: prompts whose chunks were
stored in other prompts, in another order, are answered as if they were computed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Engine, EngineHost
from lives import Disk, new_disk
from software_driver import IN_USE
from specs import BLOCK, ON_GPU, Ask, EngineSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sparse"))

from blend_harness import Recall, prefill
from recall_model import WEIGHTS
from recall_task import ASK, recall

pytestmark = pytest.mark.skipif(ON_GPU or IN_USE, reason="attention of the CPU backend")

LENGTH, RECORDS, CHUNK, PROMPTS = 1024, 64, 128, 12
#: The order of the chunks of a prompt: none stands where it was stored.
ORDER = (5, 2, 7, 0, 3, 6, 1, 4)
SHARE = 0.15


@dataclass(frozen=True)
class Question:
    """A prompt in another order, and the dense answer of the model."""

    context: list[int]
    asked: list[int]
    dense: list[int]

    def ask(self) -> Ask:
        return Ask([*self.context, *self.asked], len(self.dense))


def stored(seed: int) -> list[int]:
    return recall(seed, LENGTH, RECORDS).tokens


def in_order(tokens: Sequence[int], order: Sequence[int]) -> list[int]:
    return [token for at in order for token in tokens[at * CHUNK : (at + 1) * CHUNK]]


@cache
def model() -> Any:
    return Recall()


def answered(tokens: list[int], count: int) -> list[int]:
    """The likeliest next tokens by the whole attention, in torch."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(prefill(model(), torch.tensor(found))[0][-1].argmax()))
    return found[len(tokens) :]


@cache
def questions(seed: int) -> list[Question]:
    """Those of a prompt that the model can answer: a border of chunks may lie inside a record."""
    context, task = in_order(stored(seed), ORDER), recall(seed, LENGTH, RECORDS).queries.tokens
    starts = [at for at, token in enumerate(task) if token == ASK] + [len(task)]
    found = []
    for start, end in pairwise(starts):
        asked, right = task[start : start + 2], task[start + 2 : end]
        dense = answered([*context, *asked], len(right))
        if dense == right:
            found.append(Question(context, asked, dense))
    return found


def spec_of(disk: Disk, runner: str, ratio: float, label: str) -> EngineSpec:
    keys = {"ratio": ratio, "chunk_size": CHUNK, "min_hit_blocks": 4}
    return EngineSpec(
        WEIGHTS,
        runner,
        disk.store(),
        budget=2048,
        extra_config={"blend": keys},
        args={"max_model_len": 2048},
        label=label,
    )


def counted(engine: Engine) -> tuple[float, float, float]:
    """Tokens of chunks, of these computed, and between chunks."""
    found = engine.metrics()
    return tuple(found[f"ucm_blend_{name}_tokens_total"] for name in ("hit", "computed", "missed"))  # type: ignore[return-value]


def store(engine: Engine, seeds: range) -> None:
    for seed in seeds:
        engine.ask(stored(seed), 1)
        engine.wait_idle()


@pytest.fixture(scope="module", params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def disk(host: EngineHost, work: Path, runner: str) -> Disk:
    """With the prompts."""
    found = new_disk(work, f"blend-{runner}")
    store(host.get(spec_of(found, runner, SHARE, f"blend-{runner}")), range(PROMPTS))
    return found


@pytest.mark.versions
def test_chunks_in_another_order_are_reused(host: EngineHost, disk: Disk, runner: str) -> None:
    """Nothing of them is stored again, nor hit as if it were exact."""
    engine = host.get(spec_of(disk, runner, SHARE, f"blend-{runner}"))
    before = disk.files()
    assert len(before) == PROMPTS * LENGTH // BLOCK
    assert counted(engine) == (0, 0, 0)
    asked = right = 0
    for seed in range(PROMPTS):
        each = questions(seed)
        answers = [engine.generate(one.ask())[0] for one in each[:1]]
        answers += engine.generate(*(one.ask() for one in each[1:]))
        asked += len(each)
        right += sum(a.tokens == one.dense for a, one in zip(answers, each, strict=True))
        assert all(answer.cached == LENGTH for answer in answers)
    assert asked >= 4 * PROMPTS
    assert right >= 0.99 * asked, f"{right} of {asked}"
    each = LENGTH, int(SHARE * LENGTH), 0
    assert counted(engine) == tuple(asked * tokens for tokens in each)
    engine.wait_idle()
    assert disk.files() == before


@pytest.mark.long
def test_ranks_choose_the_same_tokens(host: EngineHost, work: Path) -> None:
    spec = spec_of(new_disk(work, "blend-ranks"), "v1", SHARE, "blend-ranks")
    # All requests at once have room in a step for what is computed of their chunks.
    engine = host.get(spec.but(tensor_parallel=2, budget=4096))
    store(engine, range(2))
    each = [*questions(0), *questions(1)]
    answers = engine.generate(*(one.ask() for one in each))
    assert [answer.tokens for answer in answers] == [one.dense for one in each]
    assert counted(engine) == (len(each) * LENGTH, len(each) * int(SHARE * LENGTH), 0)


def test_requests_that_share_a_small_pool_are_answered_as_alone(
    host: EngineHost, work: Path
) -> None:
    """Also while others are aborted."""
    spec = spec_of(new_disk(work, "blend-crowd"), "v1", SHARE, "blend-crowd")
    engine = host.get(spec.but(blocks=84))
    store(engine, range(1))
    asks = [Ask([*one.context, *one.asked], 60) for one in questions(0)]
    alone = [engine.generate(ask)[0].tokens for ask in asks]
    ids = engine.submit(*asks, *asks)
    engine.abort(*ids[4:7])
    together = [answer.tokens for answer in engine.collect(ids)]
    assert together[:4] + together[7:] == alone[:4] + alone[1:]
    engine.wait_idle()


@pytest.mark.one_runner
def test_after_a_restart_all_tokens_computed_are_dense(
    host: EngineHost, disk: Disk, runner: str
) -> None:
    """The chunks of a prompt are known again when it is found. Its own first chunks are exact."""
    engine = host.get(spec_of(disk, runner, 1.0, f"blend-{runner}-again"))
    one = questions(0)[0]
    engine.generate(one.ask())
    assert counted(engine) == (0, 0, 0)
    engine.wait_idle()
    stored_now = disk.files()
    store(engine, range(2))
    assert disk.files() == stored_now
    other = questions(1)[0]
    (answer,) = engine.generate(other.ask())
    assert answer.tokens == other.dense and answer.cached == LENGTH
    assert counted(engine) == (LENGTH, LENGTH, 0)
    order = (0, 1, 5, 3, 2, 6, 7, 4)
    context = [*in_order(stored(1), order), *other.asked]
    engine.wait_idle()
    engine.reset()
    reused = LENGTH
    for _ in range(2):  # its exact prefix is in the store, then on the device
        found = engine.ask(context, 2)
        assert found.tokens == answered(context, 2) and found.cached == LENGTH
        reused += LENGTH - 2 * CHUNK
        assert counted(engine) == (reused, reused, 0)
    behind = [*stored(50)[:45], *in_order(stored(1), (3, 6, 2)), *other.asked]  # new tokens
    found = engine.ask(behind, 2)
    assert found.tokens == answered(behind, 2)
    end = (45 + 3 * CHUNK) // BLOCK * BLOCK
    assert found.cached == end
    assert counted(engine) == (reused + end - 45, reused + end - 45, 45)
