"""The method of this process: one at most, made when an engine starts, found by the code that calls
its hooks."""

from __future__ import annotations

from typing import Any

from ucm.errors import InvalidInputError
from ucm.refused import refuse
from ucm.sparse.base import UcmSparseBase, UcmSparseRole

_method: UcmSparseBase | None = None


def has_ucm_sparse() -> bool:
    """Whether this process has a method of sparse attention."""
    return _method is not None


def get_ucm_sparse() -> UcmSparseBase:
    """The method of this process. Raises :class:`~ucm.errors.InvalidInputError` where there is
    none."""
    if _method is None:
        raise InvalidInputError(
            "this process has no method of sparse attention; configure one (`ucm_sparse_config`),"
            " or check has_ucm_sparse() first"
        )
    return _method


def set_ucm_sparse(method: UcmSparseBase | None) -> None:
    """Make ``method`` the one of this process (None: none) and close the one before it."""
    global _method
    before, _method = _method, method
    if before is not None and before is not method:
        before.close()


def ensure_ucm_sparse_initialized(
    vllm_config: Any, role: UcmSparseRole = UcmSparseRole.WORKER
) -> UcmSparseBase | None:
    """The method that ``vllm_config`` (vLLM's ``VllmConfig``) names, made on the first call;
    None if it names none. Raises :class:`~ucm.errors.ConfigError`."""
    if _method is None:
        from ucm.sparse.factory import UcmSparseFactory  # it imports the methods, which need torch

        set_ucm_sparse(UcmSparseFactory.create_configured(vllm_config, role))
    return _method


def __getattr__(name: str) -> Any:
    raise refuse(__name__, name)
