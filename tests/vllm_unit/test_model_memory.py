"""Whether a rank notices that the weights in its memory are others: what it looks at, and what it
cannot see."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from ucm.integration.vllm.connector.identity.weights import ModelMemory, WeightSource, fingerprint


class Attention(torch.nn.Module):
    """What vLLM hands to connectors: a layer that does not know its model."""


class Packed(torch.nn.Module):
    """A linear layer whose weight a kernel has packed away, as on a CPU."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.linear = lambda x: x * value


class Model(torch.nn.Module):
    """A model with every kind of tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = torch.nn.Parameter(torch.ones(64, dtype=dtype), requires_grad=False)
        self.large = torch.nn.Parameter(torch.ones(512, 300, dtype=dtype), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.ones(300, 512, dtype=dtype).t(), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)
        self.packed = Packed(1.0)


class Watched:
    """A model, what watches it, and where vLLM says its weights come from."""

    def __init__(self) -> None:
        self.model, self.source, self.now = Model(), WeightSource("/a"), 1
        holder = torch.nn.ModuleList([self.model])  # as wrappers do
        self.wrapper = holder
        self.memory = ModelMemory(
            lambda: [self.model.attention], lambda: self.source, lambda: self.now
        )
        self.memory.remember()


def set_all(tensor: torch.Tensor) -> None:
    tensor.data.fill_(2.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: set_all(model.norm),
        lambda model: set_all(model.large),
        lambda model: set_all(model.turned),
        lambda model: model.norm.data.view(-1)[17].add_(1.0),  # one number of a small tensor
        lambda model: model.scale.fill_(2.0),
        lambda model: setattr(model.packed, "linear", lambda x: x),
        lambda model: setattr(model, "norm", torch.nn.Parameter(torch.zeros(64))),
        lambda model: setattr(model, "norm", torch.nn.Parameter(torch.ones(65))),
    ],
    ids=["small", "large", "strided", "one number", "buffer", "packed", "replaced", "reshaped"],
)
def test_a_change_is_noticed_once(change: Callable[[Model], object]) -> None:
    watched = Watched()
    assert watched.memory.compare(1).unchanged is True
    watched.now = 5
    change(watched.model)
    word = watched.memory.compare(2)
    assert (word.generation, word.unchanged, word.named, word.since_ns) == (2, False, None, 1)
    word = watched.memory.compare(3)
    assert (word.unchanged, word.since_ns) == (True, 5)


def test_scratch_is_no_weight() -> None:
    watched = Watched()
    watched.model.scratch.fill_(3.0)  # type: ignore[operator]
    assert watched.memory.compare(1).unchanged is True


def test_other_files_are_named_once() -> None:
    watched = Watched()
    set_all(watched.model.norm)
    watched.source = WeightSource("/b")
    assert watched.memory.compare(1).named == WeightSource("/b")
    set_all(watched.model.large)
    assert watched.memory.compare(2).named is None


def test_a_freed_model_reports_unknown() -> None:
    watched = Watched()
    attention = watched.model.attention
    watched.memory = ModelMemory(lambda: [attention], lambda: watched.source)
    watched.memory.remember()
    del watched.model, watched.wrapper
    gc.collect()
    assert watched.memory.compare(1).unchanged is None


def test_a_weight_that_cannot_be_read_reports_unknown() -> None:
    watched = Watched()
    del watched.model.packed.linear
    assert fingerprint([watched.model]) is None
    assert watched.memory.compare(1).unchanged is None
    watched.model.packed.linear = lambda x: x  # type: ignore[assignment]
    assert watched.memory.compare(2).unchanged is None, "what it was before is not known"
    assert watched.memory.compare(3).unchanged is True


def test_a_rank_without_the_layers_reports_unknown() -> None:
    memory = ModelMemory(lambda: [][0], lambda: WeightSource("/a"))
    memory.remember()
    assert memory.compare(1).unchanged is None


def test_half_precision() -> None:
    one, two = Model(torch.bfloat16), Model(torch.bfloat16)
    two.packed = one.packed
    first, second = fingerprint([one]), fingerprint([two])
    assert first is not None
    assert second is not None
    assert first.equals(second)
    two.large.data.mul_(1.01)
    changed = fingerprint([two])
    assert changed is not None
    assert not first.equals(changed)
