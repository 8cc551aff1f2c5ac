"""Kernels of sparse attention, and which of them read the tensors at hand.

Two sets do the same: :mod:`ucm.sparse.retrieval` (Rust) for tensors in the host's memory, :mod:`ucm.sparse.kernels.gpu`
(Triton) for those of a GPU that torch calls CUDA, which HIP's are too. Functions of one name take the same tensors and
mean the same. Where there is none, torch does the work: the selectors' own methods are that, and what both sets are held
against.

Triton is imported when the first tensor of a GPU comes, so this package needs none.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ucm.sparse import retrieval

_log = logging.getLogger("ucm.sparse")

#: Types of elements that kernels read.
_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8)

_gpu: ModuleType | None = None
_asked = False


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The module whose functions read all of these tensors; None: use torch."""
    if any(tensor.dtype not in _TYPES for tensor in tensors):
        return None
    if all(tensor.is_cpu for tensor in tensors):
        return retrieval
    if all(tensor.is_cuda for tensor in tensors):
        return _triton_kernels()
    return None


def switch_off(reason: str) -> None:
    """Use no kernels of a GPU in this process any more, and say why in the log."""
    global _gpu, _asked
    _gpu, _asked = None, True
    _log.warning("sparse attention computes with torch instead of Triton on this GPU: %s", reason)


def _triton_kernels() -> ModuleType | None:
    global _gpu, _asked
    if not _asked:
        _asked = True
        if find_spec("triton") is None:
            switch_off("triton is not installed")
        else:
            _gpu = import_module("ucm.sparse.kernels.gpu")
    return _gpu
