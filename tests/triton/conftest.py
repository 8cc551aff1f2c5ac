"""Kernels in Triton's interpreter, on a CPU: ``make test`` runs this directory in a process of its own, because Triton
decides when it is imported whether it compiles or interprets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sparse"))  # what selection is held against

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def _multiply_bf16() -> None:
    """The interpreter (3.7) keeps bf16 as its bits, and a product of matrices multiplies those as if they were numbers:
    widen them first. What is compiled is not touched."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


if "TRITON_INTERPRET" in os.environ and find_spec("triton"):
    _multiply_bf16()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
