"""Stage 1: at temperature 0 an answer is the same, wherever the KV of its prompt is from."""

from __future__ import annotations

import secrets

import pytest
from e2e_target import Completion, Target, wait_until

pytestmark = [pytest.mark.stage(1), pytest.mark.feature("correctness")]

#: Blocks of a prompt.
BLOCKS = 16


@pytest.fixture
def prompt(target: Target, block: int) -> str:
    """A prompt that no store has."""
    return target.prompt(secrets.token_hex(8), BLOCKS * block + block // 2)


def emptied(target: Target) -> None:
    """Empties the device's cache; skips where the server does not allow it."""

    def done() -> bool:
        success = target.empty_device()
        if success is None:
            pytest.skip("the server keeps its device's cache: start it with VLLM_SERVER_DEV_MODE=1")
        return success

    wait_until(done, "the device's cache is empty")


def found(target: Target, prompt: str) -> tuple[Completion, float, float]:
    """An answer, and the tokens of the prompt that were found on the device and in a store."""
    before = target.hits()
    answer = target.ask(prompt)
    after = target.hits()
    return answer, after[0] - before[0], after[1] - before[1]


def from_the_store(target: Target, prompt: str, tokens: int) -> Completion:
    """The answer to a prompt of which a store has that many tokens, once it has them."""

    def whole() -> Completion | None:
        emptied(target)
        answer, device, store = found(target, prompt)
        assert device == 0
        return answer if store >= tokens else None

    answer = wait_until(whole, f"a store has {tokens} tokens of the prompt")
    assert answer is not None
    return answer


def test_the_first_answer_is_computed(target: Target, prompt: str) -> None:
    answer, device, store = found(target, prompt)
    assert (device, store) == (0, 0)
    assert answer.text


def test_a_hit_on_the_device(target: Target, prompt: str, block: int) -> None:
    first, again = target.ask(prompt), found(target, prompt)
    assert again[0].text == first.text
    assert again[1] >= (BLOCKS - 1) * block
    assert again[2] == 0


def test_a_hit_in_the_store(target: Target, prompt: str, block: int) -> None:
    first = target.ask(prompt)
    assert from_the_store(target, prompt, (BLOCKS - 1) * block).text == first.text


def test_part_on_the_device_part_in_the_store(target: Target, prompt: str, block: int) -> None:
    first, half = target.ask(prompt), BLOCKS // 2
    from_the_store(target, prompt, (BLOCKS - 1) * block)
    emptied(target)
    words = prompt.split()
    target.ask(" ".join(words[: len(words) // 2]), 1)
    answer, device, store = found(target, prompt)
    assert answer.text == first.text
    assert device >= (half - 1) * block
    assert store >= (half - 1) * block


def test_a_stored_beginning_of_another_prompt(target: Target, prompt: str, block: int) -> None:
    longer = f"{prompt} {target.prompt(secrets.token_hex(8), 2 * block)}"
    alone = target.ask(longer, cache_salt=secrets.token_hex(8))  # nothing of it is found
    target.ask(prompt)
    from_the_store(target, prompt, (BLOCKS - 1) * block)
    emptied(target)
    answer, device, store = found(target, longer)
    assert device == 0
    assert store >= (BLOCKS - 1) * block
    assert answer.text == alone.text
