"""Hash codes: what is known of them, and that they are the same everywhere."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import BLOCK, DIM, GEOMETRY, GROUP, HEADS, keys, query
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.errors import ConfigError
from ucm.sparse.kernels import code, distance, made_code
from ucm.sparse.selector import Geometry
from ucm.sparse.selectors.hash import Hash, directions

FEW = settings(max_examples=30, deadline=None)
#: Codes of the two heads of the first token of the keys that the test makes.
KNOWN = "c338fbbfda859de19097a2d9d26e6420"
LATENT = Geometry(block_size=BLOCK, kv_heads=1, head_dim=24, rope_dim=8)


def bits_of(codes: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(codes.numpy(), axis=-1, bitorder="little"))


@pytest.mark.parametrize(
    ("size", "bits"), [(32, 32), (64, 128), (64, 64), (128, 128), (16, 200), (48, 24)]
)
def test_directions_are_orthogonal_within_a_rotation(size: int, bits: int) -> None:
    w = directions(size, bits, seed=7, layer=3)
    assert w.shape == (size, bits)
    for start in range(0, bits, size):
        block = w[:, start : start + size]
        assert np.abs(block.T @ block - np.eye(block.shape[1])).max() < 1e-12


def test_directions_differ_by_seed_layer_and_part() -> None:
    same = directions(16, 32, seed=1, layer=2)
    assert np.array_equal(same, directions(16, 32, seed=1, layer=2))
    for other in (
        directions(16, 32, seed=2, layer=2),
        directions(16, 32, seed=1, layer=3),
        directions(16, 32, seed=1, layer=2, part=1),
    ):
        assert np.abs(same - other).max() > 0.1
    assert np.abs(same[:, :16] - same[:, 16:]).max() > 0.1
    # more bits add to those there are
    assert np.array_equal(directions(16, 16, seed=1, layer=2), same[:, :16])


def test_codes_are_the_same_in_another_process_and_whatever_drew_numbers_before() -> None:
    """Every rank and every restart: the generator of the process has no part in it."""
    script = (
        "import torch, sys; torch.manual_seed(int(sys.argv[1])); torch.rand(5)\n"
        "from ucm.sparse.selector import Geometry\n"
        "from ucm.sparse.selectors.hash import Hash\n"
        "k = torch.sin(torch.arange(4 * 2 * 8, dtype=torch.float32) ** 2).view(1, 4, 2, 8)\n"
        "print(Hash(Geometry(4, 2, 8), bits=64).encode(5, k).numpy().tobytes().hex())\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, "1"], capture_output=True, text=True, check=True
    ).stdout
    k = torch.sin(torch.arange(4 * 2 * 8, dtype=torch.float32) ** 2).view(1, 4, 2, 8)
    assert made.strip() == Hash(Geometry(4, 2, 8), bits=64).encode(5, k).numpy().tobytes().hex()


def test_known_codes() -> None:
    """Frozen: stored codes must mean the same in the next version, or its signature must say that
    they do not."""
    k = torch.sin(torch.arange(4 * 2 * 8, dtype=torch.float32) ** 2).view(1, 4, 2, 8)
    selector = Hash(Geometry(4, 2, 8), bits=64)
    assert selector.signature() == "hash:b4h2d8r0:bits=64:directions=haar1.0"
    assert selector.encode(5, k)[0, 0].numpy().tobytes().hex() == KNOWN


def test_packing_is_little_endian() -> None:
    """Bit j of byte i is direction 8i + j."""
    w = torch.eye(16)
    for channel in range(16):
        x = torch.full((16,), -1.0)
        x[channel] = 1.0
        assert code(x, w).tolist() == [(1 << channel) & 0xFF, (1 << channel) >> 8]


@FEW
@given(st.integers(0, 2**31), st.floats(0.01, 100))
def test_a_code_knows_the_direction_and_not_the_length(seed: int, factor: float) -> None:
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(seed))
    w = torch.from_numpy(directions(32, 64, seed=0, layer=0)).float()
    assert torch.equal(code(x * factor, w), code(x, w))
    assert torch.equal(code(-x, w), ~code(x, w))


def test_distance_is_popcount() -> None:
    a = torch.randint(0, 256, (40, 13), dtype=torch.uint8)
    b = torch.randint(0, 256, (40, 13), dtype=torch.uint8)
    expected = (bits_of(a) != bits_of(b)).sum(dim=-1)
    found = distance(a, b)
    assert found.dtype == torch.int32 and torch.equal(found.long(), expected)
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    assert distance(every, torch.zeros_like(every)).tolist() == [
        bin(i).count("1") for i in range(256)
    ]


@pytest.mark.parametrize("angle", [0.1, 0.5, 1.0, math.pi / 2, 2.5])
def test_the_share_of_bits_that_differ_is_the_angle(angle: float) -> None:
    """E[dist]/bits = angle/pi. 4000 pairs of 256 bits: the error of the mean is below 1e-3."""
    generator = torch.Generator().manual_seed(11)
    x = torch.nn.functional.normalize(torch.randn(4000, 64, generator=generator), dim=-1)
    y = torch.randn(4000, 64, generator=generator)
    y = torch.nn.functional.normalize(y - (y * x).sum(-1, keepdim=True) * x, dim=-1)
    z = math.cos(angle) * x + math.sin(angle) * y
    w = torch.from_numpy(directions(64, 256, seed=3, layer=0)).float()
    share = distance(code(x, w), code(z, w)).float().mean() / 256
    assert float(share) == pytest.approx(angle / math.pi, abs=3e-3)


def test_scores_are_the_formula() -> None:
    """-min over tokens (and heads) of popcount(code(q̄_h) xor code(K[t,h]))."""
    k, q, selector = keys(9), query(), Hash(GEOMETRY, bits=64)
    w = selector.weights_of(4, k.device)[0]
    kb, qb = bits_of(code(k, w)), bits_of(code(q[0].view(HEADS, GROUP, DIM).mean(1), w))
    expected = -(kb != qb).sum(-1).amin(1).T  # [h, n]
    scores = selector.score(4, q, selector.encode(4, k))
    assert scores.dtype == torch.int32 and torch.equal(scores.long(), expected)
    assert torch.equal(scores.amax(0).long(), -(kb != qb).sum(-1).amin(2).amin(1))


def test_bits_do_not_depend_on_the_head_size() -> None:
    assert Hash(GEOMETRY, bits=128).rep_shape() == ((BLOCK, HEADS, 16), torch.uint8)
    assert Hash(GEOMETRY).bits == 128
    # 1/16 of bf16 keys
    assert Hash(Geometry(128, 8, 128)).rep_shape() == (
        (128, 8, 16),
        torch.uint8,
    )


def test_latent_attention_has_two_codes_and_adds_up_the_heads() -> None:
    """dist[t] = sum over (reduced) heads of both popcounts, exact: 64 heads of 576 bits are 36864,
    beyond fp16."""
    selector = Hash(LATENT)
    assert selector.parts == [(16, 16), (8, 8)]
    k, q = (
        keys(7, geometry=LATENT),
        torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(1)),
    )
    nope, rope = selector.weights_of(2, k.device)
    for reduction in (1, 2, 3):
        heads = q[0].view(reduction, -1, 24).mean(0) if reduction > 1 else q[0]
        expected = sum(
            (bits_of(code(k[..., 0, :16], nope)) != bits_of(code(one[:16], nope))).sum(-1)
            + (bits_of(code(k[..., 0, 16:], rope)) != bits_of(code(one[16:], rope))).sum(-1)
            for one in heads
        )
        reduced = Hash(LATENT, reduction_heads=reduction)
        assert torch.equal(reduced.score(2, q, reduced.encode(2, k))[0].long(), -expected.amin(1))
    wide = Hash(Geometry(block_size=4, kv_heads=1, head_dim=576, rope_dim=64))
    assert wide.rep_shape() == ((4, 1, 72), torch.uint8)
    far = wide.score(0, torch.ones(1, 64, 576), wide.encode(0, -torch.ones(1, 4, 1, 576)))
    assert far.tolist() == [[-64 * 576]]


def test_learned_directions_come_from_a_file(tmp_path: Path) -> None:
    learned = {
        f"layer.{layer}": np.random.default_rng(layer).standard_normal((DIM, 32))
        for layer in (0, 1)
    }
    file = tmp_path / "w.npz"
    np.savez(file, **learned)
    selector = Hash(GEOMETRY, bits=32, weights_file=str(file))
    assert torch.equal(
        selector.encode(1, keys(3)), code(keys(3), torch.from_numpy(learned["layer.1"]).float())
    )
    assert "learned." in selector.signature()
    assert selector.signature() != Hash(GEOMETRY, bits=32).signature()
    with pytest.raises(ConfigError, match=r"layer\.2"):
        selector.encode(2, keys(1))
    with pytest.raises(ConfigError, match=r"layer\.0 must have shape \(8, 64\)"):
        Hash(GEOMETRY, bits=64, weights_file=str(file)).encode(0, keys(1))


@pytest.mark.parametrize("content", [b"", b"not an archive", None])
def test_a_wrong_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "w.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"hash_weights_file .*w\.npz"):
        Hash(GEOMETRY, weights_file=str(file))


@pytest.mark.parametrize(
    ("geometry", "given"), [(GEOMETRY, {"bits": 12}), (Geometry(4, 1, 20, 4), {})]
)
def test_bits_fill_bytes(geometry: Geometry, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        Hash(geometry, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 64, 200])
def test_the_kernels_codes_are_those_of_torch(dtype: torch.dtype, bits: int) -> None:
    """Bit by bit, but where the product is as small as its rounding."""
    x = torch.randn(5, 7, 2, 48, generator=torch.Generator().manual_seed(bits)).to(dtype)
    w = torch.from_numpy(directions(48, bits, seed=1, layer=0)).float()
    differ = bits_of(made_code(x, w)) != bits_of(code(x, w))
    product = (x.double() @ w.double()).abs()
    assert not bool((differ.bool() & (product > 1e-5)).any())
    assert int(differ.sum()) <= 2
