"""Tests of sparse attention: they need torch, and neither vLLM nor an accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "store"))

try:
    import torch
except ImportError:
    collect_ignore_glob = ["test_*.py"]
else:
    # Sums must not depend on what other tests of the process set.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every run has the same random numbers: torch begins with a seed of its own choice."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_method_is_left() -> object:
    """A test that made a method the one of the process takes it back."""
    yield
    from ucm.sparse.state import set_ucm_sparse

    set_ucm_sparse(None)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selectors that a test registers are known to that test alone."""
    from ucm.config import sparse
    from ucm.sparse import selector

    for algorithm in sparse.algorithms():
        sparse.keys_of(algorithm)  # imported now, not in a test
    for module, name in (
        (sparse, "_SECTIONS"),
        (sparse, "_SPELLINGS"),
        (selector, "_SELECTORS"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
