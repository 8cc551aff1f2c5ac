"""Which kernels read a tensor, and that torch computes where none do."""

from __future__ import annotations

import logging

import pytest
import torch

import ucm.sparse.kernels as kernels
from ucm.sparse import retrieval
from ucm.sparse.kernels import kernels_for, triton_kernels


def test_tensors_of_the_host_are_read_by_the_kernels_of_the_cpu() -> None:
    assert kernels_for(torch.zeros(1), torch.zeros(1, dtype=torch.uint8)) is retrieval
    assert kernels_for(torch.zeros(1), torch.zeros(1, dtype=torch.float64)) is None
    assert kernels_for(torch.zeros(1), torch.zeros(1, device="meta")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the trial passes")
def test_where_triton_cannot_run_torch_computes_and_the_log_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_tried", {})
    monkeypatch.setattr(logging.getLogger("ucm"), "propagate", True)
    for _ in range(2):
        assert triton_kernels(torch.device("cuda", 0)) is None
    assert caplog.text.count("torch instead of Triton on cuda:0") == 1


def test_without_triton_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_tried", {})
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    monkeypatch.setattr(logging.getLogger("ucm"), "propagate", True)
    assert triton_kernels(torch.device("cuda", 1)) is None
    assert "triton is not installed" in caplog.text
