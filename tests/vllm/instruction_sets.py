"""Limits tests to a smaller instruction set: ``UCM_TEST_ISA=avx2`` or ``avx512`` (all of AVX-512,
without AMX).

vLLM and torch choose kernels and the packing of pages by torch's detection of the processor.
``conftest.py`` sets that in the process of pytest, ``sitecustomize.py`` in those of engines. ucm's
kernels are not affected: tests name their sets.
"""

from __future__ import annotations

import os
from typing import Any

#: By name: the capabilities that torch reports as missing, and the limits of torch and oneDNN.
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
    """Apply the variable, if set, before vLLM is imported; raises KeyError for an unknown name."""
    if wanted := os.environ.get("UCM_TEST_ISA"):
        unsupported, limits = LOWER[wanted]
        os.environ.update(limits)
        import torch

        limit(torch.cpu, unsupported)


def limit(cpu: Any, unsupported: tuple[str, ...]) -> None:
    """Make torch's processor module report these capabilities as missing."""
    for question in unsupported:
        setattr(cpu, question, lambda: False)
