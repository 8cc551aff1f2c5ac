"""Shows tests a poorer processor than there is: ``UCM_TEST_ISA=avx2`` or ``avx512`` (all of
AVX-512, without AMX).

vLLM and torch choose kernels and the packing of pages by what torch says of the processor.
``conftest.py`` pins that in the process of pytest, ``sitecustomize.py`` in those of engines.
Kernels of ucm's are not pinned: tests name their sets.
"""

from __future__ import annotations

import os
from typing import Any

#: By name: the questions that torch answers with no, and what torch and oneDNN are limited to.
LOWER: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "avx2": (
        (
            "_is_avx512_supported",
            "_is_avx512_bf16_supported",
            "_is_vnni_supported",
            "_is_amx_tile_supported",
            "_is_amx_fp16_supported",
        ),
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
    "avx512": (
        ("_is_amx_tile_supported", "_is_amx_fp16_supported"),
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    ),
}


def pin() -> None:
    """Do so where the variable is set, before vLLM is imported; raises KeyError for another
    name."""
    if wanted := os.environ.get("UCM_TEST_ISA"):
        unsupported, limits = LOWER[wanted]
        os.environ.update(limits)
        import torch

        limit(torch.cpu, unsupported)


def limit(cpu: Any, unsupported: tuple[str, ...]) -> None:
    """Have torch's module for processors answer these questions with no."""
    for question in unsupported:
        setattr(cpu, question, lambda: False)
