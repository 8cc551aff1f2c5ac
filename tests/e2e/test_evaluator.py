"""Stage 3: answers to a data set, dense beside sparse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2e_target import Target
from evaluator import Question, Scores, evaluate, read

pytestmark = [pytest.mark.stage(3), pytest.mark.feature("evaluation")]

#: Of the sparse server that is started here: 9 of 47 blocks.
CHOSEN = {"init_blocks": 1, "local_blocks": 1, "topk_blocks": 7, "windows_inside": False}
SPARSE = {
    "sparse_type": "GSAOnDevice",
    "ucm_sparse_config": {"GSAOnDevice": {**CHOSEN, "min_tokens": 0}},
}
#: Most by which the F1 of sparse attention may be below the dense one.
TOLERANCE = 0.1

Servers = Callable[[str, dict[str, Any]], Target]
Given = Callable[[str], str | None]


@pytest.fixture(scope="module")
def questions(given: Given, tmp_path_factory: pytest.TempPathFactory) -> list[Question]:
    """Those of ``--dataset``; else keys that the recall model looks up in two hops: the second one
    is decoded, so sparse attention chooses its block."""
    if path := given("--dataset"):
        return read(Path(path))
    if given("--url"):
        pytest.skip("--dataset names the questions for this server")
    from recall_task import SECOND, recall

    path = tmp_path_factory.mktemp("data") / "two-hops.jsonl"
    with path.open("w") as file:
        for seed in range(8):
            prompt = recall(seed, 1500, 32)
            tokens, kinds = prompt.queries.tokens, prompt.queries.kinds
            for end in (place for place, kind in enumerate(kinds) if kind == SECOND):
                asked, answer = (
                    " ".join(f"w{token}" for token in part)
                    for part in (
                        prompt.tokens + tokens[end - 3 : end - 1],
                        tokens[end - 1 : end + 1],
                    )
                )
                line = {"prompt": asked, "answers": [answer], "max_tokens": 2}
                file.write(json.dumps(line) + "\n")
    return read(path)


def scores(target: Target, questions: list[Question], name: str) -> Scores:
    found = evaluate(questions, lambda prompt, tokens: target.ask(prompt, tokens).text)
    print(f"{name}: exact match {found.exact:.3f}, F1 {found.f1:.3f}, {found.count} questions")
    return found


@pytest.fixture
def sparse_target(given: Given, servers: Servers) -> Iterator[Callable[[], Target]]:
    """The server with sparse attention, once the dense one is no longer needed."""
    with ExitStack() as stack:

        def start() -> Target:
            if given("--url") is None:
                return servers("sparse", SPARSE)
            url = given("--sparse-url")
            if url is None:
                pytest.skip("--sparse-url names a server of the same model with sparse attention")
            key = os.environ.get("OPENAI_API_KEY", "")
            return stack.enter_context(Target(url, key=key))

        yield start


def test_sparse_answers_are_as_good_as_dense_ones(
    target: Target,
    questions: list[Question],
    given: Given,
    sparse_target: Callable[[], Target],
) -> None:
    dense = scores(target, questions, "dense")
    assert given("--url") or dense.exact > 0.8, "the recall model was trained for these questions"
    other = sparse_target()
    sparse = scores(other, questions, "sparse")
    counts = other.metrics()
    kept, seen = (counts.get(f"ucm_sparse_{name}_blocks_total", 0.0) for name in ("kept", "seen"))
    assert 0 < kept < 0.5 * seen, "the server read all blocks"
    assert sparse.f1 >= dense.f1 - TOLERANCE
