"""The prompts of these tests, by name. Every one is a function of its seed, so that any process can
reproduce it."""

from __future__ import annotations

from dataclasses import dataclass

from specs import BLOCK, Ask, Result, prompt


@dataclass(frozen=True)
class Case:
    """A prompt and how many tokens to produce from it."""

    tokens: list[int]
    max_tokens: int = 8

    def ask(self, **options: object) -> Ask:
        """As a request."""
        return Ask(self.tokens, self.max_tokens, **options)  # type: ignore[arg-type]

    @property
    def full_blocks(self) -> int:
        """Full blocks of the prompt; the last token is computed even if it ends a block."""
        return (len(self.tokens) - 1) // BLOCK


_SHARED = prompt(3, 320)

#: Sent to the cold engine, in this order; stored when it ends.
STORED = {
    "short": Case(prompt(1, 70), 12),
    "long": Case(prompt(2, 1000)),  # four chunks of prefill
    "exact": Case(prompt(4, 128)),  # ends with its last block
    "shared_a": Case(_SHARED + prompt(31, 100)),
    "shared_b": Case(_SHARED + prompt(32, 130)),
    "turn": Case(prompt(5, 100), 60),  # output fills two more blocks
    "middle": Case(prompt(6, 420)),
    "last": Case(prompt(7, 200)),  # the engine is ended right after this one
}
#: Sent to the cold engine at the same time; the first and the last are the same prompt.
CROWD = {f"crowd_{i}": Case(prompt(40 + i % 5, 130 + 25 * (i % 5)), 16) for i in range(6)}
#: Sent with a cache salt, and compared with other salts.
SALTED = Case(prompt(8, 200))
#: Never sent before the tests that use them.
FRESH = {
    "less_than_a_block": Case(prompt(9, 20)),
    "bystander": Case(prompt(50, 40), 40),
    "crowding": Case(prompt(51, 500), 40),
    "refused": Case(prompt(52, 300)),
    "busy": Case(prompt(53, 130), 100),
    "slow_dump": Case(prompt(54, 260)),
    "drained": Case(prompt(55, 400)),
    "shared_c": Case(_SHARED + prompt(33, 60)),
    "blind": Case(prompt(56, 150)),
}
#: Together larger than the pool of the warm engine.
PRESSURE = {f"pressure_{i}": Case(prompt(60 + i, 200), 150) for i in range(4)}

#: Sent to an engine with weights of another checkpoint, by the name of their answers.
REPLACED = {name: f"{name} of the other checkpoint" for name in ("middle", "shared_b")}

ALL = STORED | CROWD | FRESH | PRESSURE | {"salted": SALTED}


def next_turn(first: Result) -> Case:
    """The follow-up of the conversation that began with ``turn``: its prompt, its answer, and a new
    question."""
    return Case(STORED["turn"].tokens + first.tokens + prompt(34, 40))


def output_blocks(case: Case) -> int:
    """Full blocks held at the end of the request: the token sampled last has no KV."""
    return (len(case.tokens) + case.max_tokens - 1) // BLOCK
