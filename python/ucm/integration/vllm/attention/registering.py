"""Puts our attention backends behind vLLM's names, with :func:`register_backend`, vLLM's own way to override one.

A name is overridden by a path into :mod:`.backends`, which is looked up when an engine selects its backend: without
sparse attention in that engine's configuration the path leads to vLLM's own class, so nothing is different.
"""

from __future__ import annotations

#: Names of vLLM's attention backends that have a block table and lengths for each row, which is all that we change.
#: FlashInfer plans its kernels ahead from both, and sparse backends of vLLM's own choose tokens already.
OVERRIDDEN = (
    "CPU_ATTN",
    "FLASH_ATTN",
    "TRITON_ATTN",
    "CPU_MLA",
    "AMX_MLA",
    "TRITON_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "CUTLASS_MLA",
)

_BACKENDS = "ucm.integration.vllm.attention.backends"


def register() -> None:
    """Override what is not overridden yet: another plug-in may have been first, and then its class stays."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in OVERRIDDEN:
        backend = AttentionBackendEnum.__members__.get(name)
        if backend is not None and not backend.is_overridden():
            register_backend(backend, f"{_BACKENDS}.{name}")
