"""Items are what their data are, each hashed once; a name is trusted while it stood for one content
alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from ucm.integration.vllm.connector.identity import keys as module
from ucm.integration.vllm.connector.identity.keys import Items, UnkeyableError
from ucm.reasons import MissReason

#: The first import of vLLM takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)


def item(
    name: str = "cat", mask: torch.Tensor | None = None, **fields: Any
) -> MultiModalFeatureSpec:
    elems = {
        key: MultiModalFieldElem(data=data, field=MultiModalBatchedField())
        for key, data in fields.items()
    }
    place = PlaceholderRange(offset=0, length=4, is_embed=mask)
    return MultiModalFeatureSpec(MultiModalKwargsItem(elems), "image", name, place)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


@dataclass
class Opaque:
    """A value of no kind that can be described."""


def test_data_that_differ_in_anything_have_other_digests() -> None:
    contents: list[dict[str, Any]] = [
        {"a": ones(2, 3)},
        {"b": ones(2, 3)},
        {"a": ones(3, 2)},
        {"a": ones(6)},
        {"a": ones(2, 3, dtype=torch.bfloat16)},
        {"a": ones(2, 3, dtype=torch.float16)},
        {"a": ones(2, 3) * 2},
        {"a": ones(2, 3).numpy()},
        {"a": [ones(2, 3)]},
        {"a": [ones(1, 3), ones(1, 3)]},
        {"a": [[ones(1, 3)], [ones(1, 3)]]},
        {"a": [[ones(1, 3), ones(1, 3)]]},
        {"a": ones(2, 3), "b": 1},
        {"a": ones(2, 3), "b": 1.0},
        {"a": ones(2, 3), "b": True},
        {"a": ones(2, 3), "b": "1"},
        {"a": ones(2, 3), "b": b"1"},
        {"a": ones(2, 3), "b": np.float32(1)},
        {"a": ones(2, 3), "b": {"x": 1}},
        {"a": ones(2, 3), "b": {"x": None}},
        {"a": ones(0, 3)},
        {"a": torch.tensor(1.0)},
    ]
    items = Items()
    digests = [items.digest(item(**content)) for content in contents]
    assert len(set(digests)) == len(contents)
    assert digests == [Items().digest(item(name="dog", **content)) for content in contents]


def test_data_in_another_memory_layout_are_the_same() -> None:
    items, straight = Items(), torch.arange(6.0).reshape(2, 3)
    expected = items.digest(item(a=straight, b=1))
    assert items.digest(item(b=1, a=straight)) == expected
    assert items.digest(item(a=straight.t().contiguous().t(), b=1)) == expected
    assert items.digest(item(a=torch.nn.Parameter(straight), b=1)) == expected


def test_the_tokens_that_take_the_embeddings_count() -> None:
    masks = [None, torch.tensor([True, True, False, True]), torch.tensor([True, False, True, True])]
    assert len({Items().digest(item(mask=mask, a=ones(2))) for mask in masks}) == 3


def test_data_that_cannot_be_described_are_unsupported() -> None:
    with pytest.raises(UnkeyableError, match="Opaque") as refused:
        Items().digest(item(a=Opaque()))
    assert refused.value.reason == MissReason.UNSUPPORTED


def test_data_that_requests_share_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    real = module._digest_data
    monkeypatch.setattr(module, "_digest_data", lambda data: hashed.append(1) or real(data))
    items, first = Items(), item(a=ones(2))
    second = MultiModalFeatureSpec(first.data, "image", "dog", first.mm_position)
    assert items.digest(first) == items.digest(second) == items.digest(first)
    assert len(hashed) == 1
    assert items.digest(item(a=ones(2))) == items.digest(first)
    assert len(hashed) == 2
    del first, second
    gc.collect()
    assert len(items._contents) == 0, "digests are kept only as long as the data"


def later() -> tuple[list[Callable[[], None]], Callable[[Callable[[], None]], bool]]:
    """Jobs that wait, and what takes them."""
    jobs: list[Callable[[], None]] = []

    def submit(job: Callable[[], None]) -> bool:
        jobs.append(job)
        return True

    return jobs, submit


def test_a_name_is_not_known_until_its_contents_are_hashed() -> None:
    jobs, submit = later()
    items, first, again, other = Items(submit), item(a=ones(2)), item(a=ones(2)), item(a=ones(3))
    items.digest(first)
    items.used([first])
    assert not jobs
    assert items.current([first])
    items.used([again])
    assert items.current([first]) is None
    jobs.pop()()
    assert items.current([first])
    items.used([other])
    assert items.current([first]) is None
    jobs.pop()()
    assert items.current([first]) is False
    items.used([item(a=ones(2))])
    assert items.current([first]) is False, "for good"


def test_data_freed_before_hashing_invalidate_their_name() -> None:
    items, first = Items(lambda job: False), item(a=ones(2))
    items.digest(first)
    items.used([first])
    items.used([item(a=ones(2))])
    gc.collect()
    assert items.current([first]) is False


def test_names_are_bounded_and_one_that_was_forgotten_is_not_trusted() -> None:
    items, kept = Items(names=2), [item(name, a=ones(2)) for name in ("a", "b", "c")]
    for each in kept:
        items.digest(each)
    items.used(kept[:2])
    items.used(kept[:1])
    items.used(kept[2:])
    assert [items.current([each]) for each in kept] == [True, False, True]
    assert items.current(kept) is False
