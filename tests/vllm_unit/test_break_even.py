"""From which length on choosing pays, of the times that were measured."""

from __future__ import annotations

from typing import Any

import pytest

setup = pytest.importorskip("ucm.integration.vllm.attention.setup")


@pytest.mark.parametrize(
    ("shortest", "limit", "found"),
    [
        (0, 65536, 512),
        (513, 65536, 768),  # the middle between two lengths that were tried
        (4097, 65536, 6144),
        (6145, 65536, 8192),
        (8192, 8192, 8192),
        (8193, 8192, setup.NEVER),
        (700, 700, setup.NEVER),  # no length that is tried pays within reach
    ],
)
def test_the_first_length_that_pays(shortest: int, limit: int, found: int) -> None:
    tried: list[int] = []

    def pays(tokens: int) -> bool:
        tried.append(tokens)
        return tokens >= shortest

    assert setup._first_that_pays(pays, limit) == found
    assert all(tokens <= limit for tokens in tried)


class Timed(setup._Bench):
    """A layer whose times are given."""

    def __init__(self, dense: float, sparse: float, **fields: Any) -> None:
        super().__init__(None, None, "", None, None, block_tokens=1, blocks=1, **fields)
        self.given = dense, sparse

    def _times(self, tokens: int) -> tuple[float, float]:
        return self.given


@pytest.mark.parametrize(
    ("sparse", "pays"), [(0.9, True), (0.95, True), (0.97, False), (1.0, False), (2.0, False)]
)
def test_a_small_gain_does_not_count(sparse: float, pays: bool) -> None:
    assert Timed(1.0, sparse, layers=8, selecting=8).pays(4096) == pays
