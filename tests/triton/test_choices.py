"""A request keeps the same blocks whether Triton or torch chooses them, for every method that has
kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from formulas import BLOCK, Engine  # noqa: E402

import ucm.sparse.kernels as kernels  # noqa: E402
from ucm.sparse.base import UcmSparseRole  # noqa: E402
from ucm.sparse.factory import UcmSparseFactory  # noqa: E402
from ucm.sparse.kernels import gpu  # noqa: E402
from ucm.sparse.selector import Geometry  # noqa: E402
from ucm.sparse.selectors.hash import Hash  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "ESA": {"stride": 1, "min_blocks": 0},
    "GSA": {
        "init_blocks": 1,
        "local_blocks": 2,
        "min_blocks": 1,
        "rep_dtype": "int8",
        "score": "l2",
    },
    "GSAOnDevice": {"init_blocks": 1, "local_blocks": 2, "topk_blocks": 6},
    "Quest": {},
    "InfLLM": {"rep_tokens": 2},
}


def run(name: str, settings: dict[str, Any], device: str = "cpu") -> dict[Any, list[int]]:
    """The kept blocks of two requests in a batch, by step and layer."""
    method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.WORKER, settings)  # type: ignore[arg-type]
    engine = Engine(method, layers=1, device=device)
    engine.run("a", 10 * BLOCK + 1, 0)
    engine.run("b", 13 * BLOCK, 0)
    for _ in range(3):
        engine.step({"a": 1, "b": 1})
    return engine.kept


def kept(
    name: str, monkeypatch: pytest.MonkeyPatch, triton: bool
) -> tuple[dict[Any, Any], set[str]]:
    """The same, with the called kernels."""
    called: set[str] = set()

    class Counted:
        def __getattr__(self, kernel: str) -> Any:
            called.add(kernel)
            return getattr(gpu, kernel)

    with monkeypatch.context() as patch:
        # Tensors of the host stand for those of a GPU, with a type that no kernel reads: torch
        # computes.
        patch.setattr(kernels, "retrieval", Counted())
        if not triton:
            patch.setattr(kernels, "_TYPES", ())
        return run(name, SETTINGS[name]), called


@pytest.mark.parametrize("name", list(SETTINGS))
def test_triton_and_torch_keep_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, called = kept(name, monkeypatch, triton=True)
    expected, none = kept(name, monkeypatch, triton=False)
    assert found == expected and not none
    assert called & {"select_blocks", "hash_select"} and len(called) > 1
    assert any(
        len(ids) < 10 for (request, step, _), ids in found.items() if request == "a" and step
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="of a GPU")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", [*SETTINGS, "KVStarMultiStep"])
def test_a_gpu_and_the_host_keep_the_same(name: str, lag: int) -> None:
    """Everything on the GPU: representations, selections, and with a lag the streams of the
    selecting threads."""
    settings = SETTINGS.get(name, {}) | ({"lag": lag} if lag else {})
    expected = run(name, settings)
    assert any(
        len(ids) < 10 for (request, step, _), ids in expected.items() if request == "a" and step
    )
    assert run(name, settings, "cuda") == expected
    assert kernels.triton_kernels(torch.empty(0, device="cuda").device) is not None


def test_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(block_size=16, kv_heads=1, head_dim=48, rope_dim=16)
    selector = Hash(geometry, reduction_heads=2)
    query, keys = torch.randn(2, 8, 48), torch.randn(12, 16, 1, 48)
    table = torch.stack([torch.randperm(12)[:9], torch.randperm(12)[:9]]).int()
    reps, blocks = selector.encode(0, keys), torch.tensor([9, 5], dtype=torch.int32)
    monkeypatch.setattr(kernels, "retrieval", gpu)
    assert torch.equal(selector.encode(0, keys), reps)
    found = selector.fused_scores(0, query, reps, table, blocks, init=0, local=0, apart=False)
    assert found is not None
    monkeypatch.setattr(kernels, "_TYPES", ())
    for row in range(2):
        n = int(blocks[row])
        assert torch.equal(
            found[row, :, :n], selector.score(0, query[row : row + 1], reps[table[row, :n].long()])
        )


def test_codes_of_tokens_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As :class:`~ucm.sparse.rep_store.RepStore` requests it on a GPU."""
    geometry = Geometry(block_size=4, kv_heads=1, head_dim=48, rope_dim=16)
    selector, keys = Hash(geometry), torch.randn(5, 1, 48)
    slots = torch.tensor([11, 0, 6, 9, 7])
    plain = torch.zeros((3, *selector.rep_shape()[0]), dtype=torch.uint8)
    selector.encode_tokens(0, keys, plain, slots)
    direct = torch.zeros_like(plain)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("ucm.sparse.selectors.hash.kernels_for", lambda *_: gpu)
    selector.encode_tokens(0, keys, direct, slots)
    assert torch.equal(direct, plain) and int(plain.count_nonzero()) > 0
