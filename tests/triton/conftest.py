"""Kernels in Triton's interpreter, on a CPU: ``make test`` runs this directory in a process of its
own, because Triton decides when it is imported whether it compiles or interprets. On a GPU (``make
test-gpu``) they are compiled, and a kernel's arguments are on the GPU during the call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sparse"))  # what selection is held against

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _finds_gpu() -> bool:
    if find_spec("torch") is None or find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()


ON_GPU = not INTERPRETED and _finds_gpu()
if not INTERPRETED:
    # the interpreter is what counts bytes
    collect_ignore_glob = ["test_bytes.py" if ON_GPU else "test_*.py"]


def _multiply_bf16() -> None:
    """The interpreter (3.7) keeps bf16 as its bits, and a matrix product multiplies those as
    numbers, so they are widened first. Compiled kernels are unchanged."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(
            np.float32
        )
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


if INTERPRETED and find_spec("triton"):
    _multiply_bf16()


def _on_gpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same for tensors of the host: each has a copy on the GPU, with the same order and gaps,
    and the kernel's results are copied back."""
    import torch

    def apply(to: Callable[[Any], Any], value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to(value)
        return (
            type(value)(*(apply(to, part) for part in value))
            if hasattr(value, "_fields")
            else value
        )

    @wraps(kernel)
    def there(*arguments: Any, **named: Any) -> Any:
        twins: list[tuple[Any, Any]] = []

        def twin(tensor: Any) -> Any:
            if tensor.device.type == "cuda":
                return tensor
            storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            moved = storage.cuda().as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
            twins.append((tensor, moved))
            return moved

        def back(tensor: Any) -> Any:
            return next((host for host, moved in twins if moved is tensor), tensor.cpu())

        result = kernel(
            *(apply(twin, x) for x in arguments),
            **{name: apply(twin, x) for name, x in named.items()},
        )
        if not twins:
            return result
        for host, moved in twins:
            if not torch.equal(
                moved.cpu().contiguous().view(torch.uint8), host.contiguous().view(torch.uint8)
            ):
                host.copy_(moved)
        return apply(back, result)

    return there


if ON_GPU:
    from ucm.sparse.kernels import gpu

    for _name, _kernel in list(vars(gpu).items()):
        if getattr(_kernel, "__module__", "").startswith("ucm.sparse.kernels") and _name[0] != "_":
            setattr(gpu, _name, _on_gpu(_kernel))


@pytest.fixture(autouse=True)
def _one_thread_and_the_same_numbers() -> Iterator[None]:
    """Every run has the same random numbers: torch begins with a seed of its own choice."""
    import torch

    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
