"""Common checks of an answer and of the disk."""

from __future__ import annotations

import ast
import math

from cases import Case
from harness import Engine, wait_until
from lives import Disk
from sparse_reference import Answer
from specs import Result


def assert_same(answer: Result, right: Result) -> None:
    """Equal tokens, and log-probabilities as close as two schedules of the same arithmetic are."""
    assert answer.tokens == right.tokens
    assert answer.finish == right.finish == "length"
    worst = max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True))
    assert worst < 1e-2, f"log-probabilities differ by {worst}"


def assert_reused(answer: Result, case: Case) -> None:
    """At least 95 % of the full blocks were not computed."""
    need = math.ceil(0.95 * case.full_blocks)
    assert answer.cached_blocks >= need, (
        f"{answer.cached_blocks} of {case.full_blocks} full blocks reused"
    )


def ask_until_reused(engine: Engine, case: Case, right: Result, **options: object) -> None:
    """Sends the prompt until it is reused; every answer must be right.

    After a failure the connector may pause before it offers blocks again, and it offers only those
    of a live request.
    """

    def reused() -> bool:
        engine.wait_idle()
        engine.reset()
        answer = engine.generate(case.ask(**options))[0]
        assert_same(answer, right)
        return answer.cached_blocks >= math.ceil(0.95 * case.full_blocks)

    wait_until(reused, "the prompt is stored and reused again")


def assert_stored(disk: Disk, before: int, blocks: int) -> None:
    """Exactly this number of additional blocks is published."""
    wait_until(
        lambda: len(disk.files()) >= before + blocks,
        f"{blocks} more blocks than {before} on the disk",
        60,
    )
    assert len(disk.files()) == before + blocks


def assert_as_computed(result: Result, answer: Answer) -> None:
    """Compares with torch: the same tokens, and log-probabilities within the error of different
    summation orders."""
    assert result.tokens == answer.tokens
    assert max(abs(a - b) for a, b in zip(result.logprobs, answer.logprobs, strict=True)) < 1e-2


def assert_chosen(engine: Engine, result: Result, answer: Answer) -> None:
    """On every rank each layer of each step kept the same blocks as torch, in an engine that
    records them."""
    for said in engine.rpc("probe_choices", result.id):
        kept, _ = ast.literal_eval(said)
        different = {
            at
            for at in kept.keys() | answer.choices.keys()
            if kept.get(at) != answer.choices.get(at)
        }
        assert not different, {
            at: (kept.get(at), answer.choices.get(at)) for at in sorted(different)[:3]
        }
