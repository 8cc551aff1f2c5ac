"""Detects that the weights in a rank's memory changed, by a fingerprint of the model's tensors.

vLLM can replace the weights of a running engine in many ways (``reload_weights``, weight transfer,
sleep level 2, a worker extension that writes them) and tells connectors of none. So each rank takes
a fingerprint right after loading, and compares when the scheduler side asks.

The fingerprint is a SHA-256 over samples of every parameter and persistent buffer: small ones
whole, of others :data:`SAMPLES` bytes at even distances. Training, merging and loading change every
sample of a tensor they touch; an edit of single numbers that misses all samples of a large tensor
is not seen. Some kernels pack a weight into an object of their own and leave an empty parameter
behind (oneDNN on a CPU): such an object counts as unchanged while it is the same object.
"""

from __future__ import annotations

import gc
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.identity.weight_files import WeightSource
from ucm.integration.vllm.connector.identity.weights_report import WeightsReport

#: A tensor of at most so many bytes is fingerprinted whole.
WHOLE = 64 << 10
#: Bytes that are looked at of a larger one, at least.
SAMPLES = 1024


@dataclass(frozen=True)
class Fingerprint:
    """What a model's tensors look like."""

    digest: bytes
    packed: tuple[weakref.ref[Any], ...]  # objects that hold weights which no tensor shows

    def equals(self, other: Fingerprint) -> bool:
        """Whether both are of the same weights, as far as this tells."""
        return (
            self.digest == other.digest
            and self.packed == other.packed
            and all(holder() is not None for holder in self.packed)
        )


class ModelMemory:
    """The weights of one rank. Every method takes milliseconds, and is called between two forward
    passes."""

    def __init__(
        self,
        layers: Callable[[], Sequence[torch.nn.Module]],
        source: Callable[[], WeightSource],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """``layers``: the attention layers whose KV is stored; ``source``: where vLLM says that the
        weights were read from last."""
        self._layers, self._source, self._now_ns = layers, source, now_ns
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._known: Fingerprint | None = None
        self._known_source: WeightSource | None = None
        self._seen_ns = 0  # when memory was last found to hold what is known

    def remember(self) -> None:
        """The weights have just been loaded: what is in memory now is what the files say."""
        try:
            self._models = [weakref.ref(model) for model in _models_with(self._layers())]
            self._known, self._known_source = self._look(), self._source()
        except Exception as error:  # later changes cannot be detected, which compare() says
            logger.warning("the model's weights cannot be looked at in memory: %r", error)
        self._seen_ns = self._now_ns()

    def compare(self, generation: int) -> WeightsReport:
        """Compare what is in memory with what is known, and know the present from now on. Never
        raises."""
        before, since = self._known, self._seen_ns
        named, self._known = None, None
        try:
            self._known = self._look()
            source = self._source()
            named = source if source != self._known_source else None
            self._known_source = source
        except Exception as error:
            logger.warning("the model's weights cannot be looked at in memory: %r", error)
        self._seen_ns = self._now_ns()
        now = self._known
        if before is None or now is None:
            return WeightsReport(generation, None, None, since)
        return WeightsReport(generation, before.equals(now), named, since)

    def _look(self) -> Fingerprint | None:
        models = [model() for model in self._models]
        if not models or any(model is None for model in models):
            return None
        return fingerprint([model for model in models if model is not None])


def _models_with(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The whole models that these layers are part of: modules that hold one of them and that no
    other module holds.

    A layer does not know what holds it, and vLLM hands its connector layers only, so all living
    modules are looked at.
    """
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    wanted = {id(layer) for layer in layers}
    tops = (module for module in modules if id(module) not in inner)
    return [top for top in tops if any(id(module) in wanted for module in top.modules())]


def fingerprint(models: Sequence[torch.nn.Module]) -> Fingerprint | None:
    """The fingerprint of these models, in the order of their tensors' names; None where they hide
    weights."""
    digest = hashlib.sha256()
    samples: list[torch.Tensor] = []
    packed: list[weakref.ref[Any]] = []
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            empty = False
            for key, tensor in _tensors(module):
                digest.update(
                    f"{number} {name} {key} {tensor.dtype} {tuple(tensor.shape)}\0".encode()
                )
                if tensor.numel():
                    samples.append(_samples(tensor))
                empty = empty or not tensor.numel()
            if empty:
                holders = _holders(module)
                if not holders:
                    return None
                packed += holders
    for device in {sample.device for sample in samples}:  # one copy from each device
        there = [sample for sample in samples if sample.device == device]
        digest.update(memoryview(torch.cat(there).cpu().numpy()))
    return Fingerprint(digest.digest(), tuple(packed)) if samples else None


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers; others are scratch, or made from these."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter.detach()
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer.detach()


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of the memory that a tensor spans, whatever its strides."""
    span = 1 + sum(
        (extent - 1) * abs(stride)
        for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    size = span * tensor.element_size()
    first = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    # An odd step meets high and low bytes of the numbers in turn.
    step = 1 if size <= WHOLE else (size // SAMPLES - 1) | 1
    return memory[first : first + size : step]


def _holders(module: torch.nn.Module) -> list[weakref.ref[Any]]:
    """The functions and objects in which a module may keep a weight that its empty parameter stands
    for."""
    found = []
    for value in vars(module).values():
        if callable(value) and not isinstance(value, type | torch.nn.Module):
            try:
                found.append(weakref.ref(value))
            except TypeError:
                # a bound method's object, a builtin: says nothing about this module's weight
                continue
    return found
