"""vLLM's choice of a kernel's block size, in the form of the installed version."""

from __future__ import annotations

import inspect
from typing import Any


def common_block_size(block_size: int, backend: type, spec: Any) -> int:
    """Tokens of a block that this backend computes with, where vLLM keeps blocks of ``block_size``.

    vLLM 0.30 and 0.31 do not take the specs.
    """
    from vllm.v1.worker.utils import select_common_block_size

    arguments: list[Any] = [block_size, [backend], [spec]]
    taken = len(inspect.signature(select_common_block_size).parameters)
    return int(select_common_block_size(*arguments[:taken]))
