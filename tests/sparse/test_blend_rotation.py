"""Keys turned to another position, against the keys that a rotary embedding rotates there: vLLM's
own classes, with their own code."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ucm.errors import InvalidInputError, UnsupportedError
from ucm.sparse.blend.rotation import Rotation

pytest.importorskip("vllm")

SIZE, POSITIONS, HEADS = 64, 8192, 2
DEEPSEEK = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.01 * i for i in range(SIZE // 2)],
    "long_factor": [2.0 + 0.5 * i for i in range(SIZE // 2)],
    "original_max_position_embeddings": 1024,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "large base": {"rope_type": "default", "rope_theta": 5e7},
    "part of a head": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "deepseek": DEEPSEEK,
    "longrope": LONG,
    "mrope": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
}


@pytest.fixture(scope="module", autouse=True)
def _engine() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    # Of a model, embeddings read its longest request alone.
    object.__setattr__(config, "model_config", SimpleNamespace(max_model_len=POSITIONS))
    with set_current_vllm_config(config):
        yield


def embedding(kind: str, dtype: torch.dtype = torch.float32, neox: bool = True) -> Any:
    """One of vLLM's, as a model makes it."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = KINDS[kind]
    return get_rope(SIZE, POSITIONS, neox, dict(parameters), dtype)


def rotate(rotary: Any, positions: Tensor, keys: Tensor, latent: bool = False) -> Tensor:
    """Keys ``[t, heads, d]`` at these positions, as a model calls its embedding."""
    given = keys.clone() if latent else keys.clone().flatten(1)
    found: Tensor = rotary(positions, given.clone(), given)[1]
    return found.reshape(keys.shape)


def tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Unrotated keys, and two positions of each."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(count, HEADS, SIZE, generator=generator).to(dtype)
    old, new = torch.randint(POSITIONS, (2, count), generator=generator)
    return keys, old, new


@pytest.mark.parametrize(
    ("kind", "neox"),
    [(kind, True) for kind in KINDS] + [(kind, False) for kind in KINDS if kind != "longrope"],
)
def test_a_turned_key_is_the_key_of_the_new_position(kind: str, neox: bool) -> None:
    latent = kind == "deepseek"
    rotary = embedding(kind, neox=neox)
    rotation = Rotation(rotary, SIZE, POSITIONS, latent=latent)
    keys, old, new = tokens(300)
    cached, fresh = (rotate(rotary, at, keys, latent) for at in (old, new))
    turned = rotation.turn(cached, rotation.factors(old, new))
    assert (turned - fresh).abs().max() <= 1e-5
    assert (fresh - cached).abs().max() > 0.1, "the positions do differ"


@pytest.mark.parametrize(("kind", "scaled"), [("yarn", True), ("deepseek", True), ("plain", False)])
def test_the_scale_of_yarn_is_applied_once(kind: str, scaled: bool) -> None:
    """A rotation by the table's row of the distance would apply it a second time."""
    rotary, latent = embedding(kind), kind == "deepseek"
    keys, old, new = tokens(100)
    cached, distance = rotate(rotary, old, keys, latent), (new - old).clamp(min=0)
    twice = rotate(rotary, distance, cached, latent)[new >= old]
    fresh = rotate(rotary, new, keys, latent)[new >= old]
    assert ((twice - fresh).abs().max() > 0.05) == scaled
    rotation = Rotation(rotary, SIZE, POSITIONS, latent=latent)
    turned = rotation.turn(cached, rotation.factors(old, new))[new >= old]
    assert (turned - fresh).abs().max() <= 1e-5
    assert turned.norm() == pytest.approx(float(fresh.norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shorter_types_differ_by_their_own_rounding(dtype: torch.dtype) -> None:
    rotary = embedding("yarn", dtype)
    rotation = Rotation(rotary, SIZE, POSITIONS, dtype=dtype)
    table = rotary.cos_sin_cache
    keys, old, new = tokens(300, dtype)
    turned = rotation.turn(rotate(rotary, old, keys), rotation.factors(old, new))
    assert turned.dtype == dtype
    fresh = rotate(rotary, new, keys).float()
    step = torch.finfo(dtype).eps * fresh.abs().max()
    assert (turned.float() - fresh).abs().max() <= 3 * step
    assert rotary.cos_sin_cache is table, "the model's own table is not replaced"


def test_the_last_channels_of_latent_keys_are_turned() -> None:
    rotary = embedding("deepseek", neox=False)
    rotation = Rotation(rotary, SIZE, POSITIONS, latent=True)
    keys, old, new = tokens(40)
    latent = torch.randn(40, HEADS, 128)
    cached = torch.cat([latent, rotate(rotary, old, keys, latent=True)], dim=-1)
    turned = rotation.turn(cached, rotation.factors(old, new))
    assert torch.equal(turned[..., :128], latent)
    assert (turned[..., 128:] - rotate(rotary, new, keys, latent=True)).abs().max() <= 1e-5
    assert torch.equal(cached[..., :128], latent), "what was passed in is not written to"


def test_the_same_position_changes_nothing_and_there_and_back_is_the_key() -> None:
    rotary = embedding("llama3")
    rotation = Rotation(rotary, SIZE, POSITIONS)
    keys, old, new = tokens(64)
    assert torch.equal(rotation.turn(keys, rotation.factors(old, old)), keys)
    there = rotation.turn(keys, rotation.factors(old, new))
    assert (rotation.turn(there, rotation.factors(new, old)) - keys).abs().max() <= 1e-5
    none = torch.empty(0, dtype=torch.int64)
    assert rotation.turn(keys[:0], rotation.factors(none, none)).shape == (0, HEADS, SIZE)


def test_what_it_cannot_turn_is_refused() -> None:
    class Additive:
        rotary_dim, is_neox_style = SIZE, True

        def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return query, key + positions[:, None]

    with pytest.raises(UnsupportedError, match="differ from its own"):
        Rotation(Additive(), SIZE, POSITIONS)
    with pytest.raises(UnsupportedError, match="no even rotary_dim"):
        Rotation(torch.nn.Identity(), SIZE, POSITIONS)
    rotation = Rotation(embedding("plain"), SIZE, POSITIONS)
    for old, new in ((0, POSITIONS), (-1, 0)):
        with pytest.raises(InvalidInputError, match=r"0\.\.8191"):
            rotation.factors(torch.tensor([old]), torch.tensor([new]))
    with pytest.raises(InvalidInputError, match="equal length"):
        rotation.factors(torch.arange(2), torch.arange(3))
