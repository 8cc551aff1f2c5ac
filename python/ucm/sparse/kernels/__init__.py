"""Kernels of sparse attention, and which of them read the tensors at hand.

Two modules have the same functions: :mod:`ucm.sparse.retrieval` (Rust) for tensors in the host's
memory, :mod:`ucm.sparse.kernels.gpu` (Triton) for those of a GPU that torch calls CUDA, also AMD's.
Where neither runs, the selectors' own methods compute with torch; both are tested against them.

Triton is imported with the first tensor of a GPU, and its kernels are tried there on a small
example (:func:`ucm.sparse.kernels.gpu.try_all`): where it cannot compile, or computes something
else, torch is used and the log says so.

Codes of sign bits are little-endian: bit ``j`` of byte ``i`` is direction ``8i + j``."""

from __future__ import annotations

import logging
import threading
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ucm.sparse import retrieval

_log = logging.getLogger("ucm.sparse")

#: Types of elements that kernels read.
_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8)

#: The kernels of each GPU; None: torch is used there.
_tried: dict[torch.device, ModuleType | None] = {}
_lock = threading.Lock()


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The module whose functions read all of these tensors; None: use torch."""
    on_host = True
    for tensor in tensors:  # no generators: this runs several times a layer
        if tensor.dtype not in _TYPES:
            return None
        on_host = on_host and tensor.is_cpu
    if on_host:
        return retrieval
    device = tensors[0].device
    if all(tensor.is_cuda and tensor.device == device for tensor in tensors):
        return triton_kernels(device)
    return None


def triton_kernels(device: torch.device) -> ModuleType | None:
    """Those of a GPU, once they have been tried there; None: they do not run."""
    with _lock:
        if device not in _tried:
            _tried[device], reason = _try(device)
            if reason:
                text = "sparse attention computes with torch instead of Triton on %s: %s"
                _log.warning(text, device, reason)
        return _tried[device]


def _try(device: torch.device) -> tuple[ModuleType | None, str]:
    if find_spec("triton") is None:
        return None, "triton is not installed"
    try:
        with torch.cuda.device(device):
            kernels = import_module("ucm.sparse.kernels.gpu")
            kernels.try_all(device)
        return kernels, ""
    except Exception as error:  # whatever a compiler or a driver raises
        return None, f"{type(error).__name__}: {error}"


def made_code(x: Tensor, weights: Tensor) -> Tensor:
    """:func:`code` by a kernel, where there is one: the same bits, but where ``x·W`` is as small as
    its rounding."""
    kernels = kernels_for(x, weights)
    if kernels is None or x.dim() < 2 or not x.numel():
        return code(x, weights)
    made: Tensor = kernels.hash_encode(x.reshape(-1, *x.shape[-2:]), weights)
    return made.view(*x.shape[:-1], -1)


def code(x: Tensor, weights: Tensor) -> Tensor:
    """Codes ``[..., bits/8]`` of vectors ``x [..., d]`` by directions ``weights [d, bits]``: uint8,
    packed little-endian."""
    # On a CPU in float64: rounding depends on how many vectors are encoded together, and must not
    # turn a bit.
    wide = torch.float64 if x.device.type == "cpu" else torch.float32
    bits = (x.to(wide) @ weights.to(wide) > 0).view(*x.shape[:-1], weights.shape[1] // 8, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return (bits * powers).sum(dim=-1, dtype=torch.int32).to(torch.uint8)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Bits in which codes differ, over the last dimension; the others are broadcast. int32."""
    x = a ^ b
    x = x - ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return ((x + (x >> 4)) & 0x0F).sum(dim=-1, dtype=torch.int32)
