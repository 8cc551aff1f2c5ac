"""Keys and values of single tokens in pages that vLLM's own writers filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ucm.errors import InvalidInputError, UnsupportedError
from ucm.integration.vllm.attention.pages import TokenPages
from ucm.integration.vllm.attention.setup import ask_for_tiles

ops = pytest.importorskip("vllm._custom_ops")

HEADS, BLOCKS = 3, 5
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    """vLLM's CPU operators are loaded."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not the one for CPUs")


def slots_of(tokens: int, count: int, seed: int = 0) -> Tensor:
    """Slots of ``count`` tokens, in no order, in pages of ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(BLOCKS * tokens, generator=generator)[:count]


def random(count: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Keys or values; of a cache of 8 bits its codes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(256, (count, heads, size), generator=generator).to(dtype)
    return torch.randn(count, heads, size, generator=generator).to(dtype)


def packed_layer(isa: str, size: int, dtype: torch.dtype, kind: str = "auto") -> Any:
    """What vLLM's layer says of itself."""
    given = torch.bfloat16 if dtype == torch.uint8 else dtype
    return SimpleNamespace(
        num_kv_heads=HEADS, head_size=size, isa=isa, dtype=given, kv_cache_dtype=kind
    )


def vllm_writes(layer: Any, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """As its CPU implementation does."""
    size = layer.head_size
    parts = cache.view(len(cache), HEADS, -1, size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, values, *parts, slots, layer.isa, kv_cache_dtype=layer.kv_cache_dtype
    )


def need(isa: str) -> None:
    """Skips where this processor lacks the tiles."""
    if isa == "amx":
        if not torch.cpu._is_amx_tile_supported():
            pytest.skip("this processor has no AMX")
        ask_for_tiles()


PACKED = [
    ("vec", 64, 32, dtype, "auto") for dtype in FLOATS
] + [
    ("vec16", 80, 16, torch.float32, "auto"),
    ("vec16", 80, 16, torch.bfloat16, "auto"),
    ("vec16", 64, 32, torch.float16, "auto"),
    ("amx", 64, 32, torch.bfloat16, "auto"),
    ("amx", 128, 64, torch.bfloat16, "auto"),
    ("vec", 64, 32, torch.uint8, "fp8"),
    ("vec", 64, 32, torch.uint8, "fp8_e5m2"),
    ("amx", 64, 32, torch.uint8, "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("isa", "size", "tokens", "dtype", "kind"), PACKED)
def test_packed_pages_are_read_and_written_as_vllm_writes_them(
    isa: str, size: int, tokens: int, dtype: torch.dtype, kind: str
) -> None:
    need(isa)
    layer = packed_layer(isa, size, dtype, kind)
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * size, dtype=dtype)
    pages, slots = TokenPages(layer, "CPU_ATTN", cache), slots_of(tokens, 3 * tokens)
    keys, values = (random(len(slots), HEADS, size, layer.dtype, seed) for seed in (1, 2))
    vllm_writes(layer, cache, slots, keys, values)
    found = pages.read(cache, slots)
    if dtype != torch.uint8:
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
    copy = torch.zeros_like(cache)
    pages.write(copy, slots, *found)
    assert torch.equal(copy.view(torch.uint8), cache.view(torch.uint8)), "every bit is vLLM's"
    # Some tokens of a page are changed, and the others stay.
    new = [random(7, HEADS, size, dtype, seed) for seed in (3, 4)]
    pages.write(copy, slots[:7], *new)
    both = pages.read(copy, slots)
    for after, change, before in zip(both, new, found, strict=True):
        assert torch.equal(after[:7], change)
        assert torch.equal(after[7:], before[7:])


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
@pytest.mark.parametrize("order", ["NHD", "HND", "layers together"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.float8_e4m3fn])
def test_pages_of_accelerators_in_every_order(backend: str, order: str, dtype: torch.dtype) -> None:
    """Their writers take ``kv_cache.transpose(1, 2).split(head_size, -1)``, as here."""
    size, value_size, tokens, layers = 24, 16, 16, 2
    content = size + value_size
    if order == "HND":
        cache = torch.zeros(BLOCKS, HEADS, tokens, content).to(dtype)
    elif order == "NHD":
        cache = torch.zeros(BLOCKS, tokens, HEADS, content).to(dtype).transpose(1, 2)
    else:
        cache = torch.zeros(BLOCKS, layers, tokens, HEADS, content).to(dtype)[:, 1].transpose(1, 2)
    layer = SimpleNamespace(num_kv_heads=HEADS, head_size=size, head_size_v=value_size)
    pages, slots = TokenPages(layer, backend, cache), slots_of(tokens, 50)
    keys, values = random(50, HEADS, size, dtype, 1), random(50, HEADS, value_size, dtype, 2)
    pages.write(cache, slots, keys, values)
    by_vllm = cache.view(torch.uint8) if dtype == torch.float8_e4m3fn else cache
    split = by_vllm.transpose(1, 2).split([size, value_size], dim=-1)
    for part, token in zip(split, (keys, values), strict=True):
        shown = token.view(torch.uint8) if dtype == torch.float8_e4m3fn else token
        assert torch.equal(part[slots // tokens, slots % tokens], shown)
    found = pages.read(cache, slots)
    assert torch.equal(found[0].contiguous().view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(found[1].contiguous().view(torch.uint8), values.view(torch.uint8))
    assert int((cache.contiguous().view(torch.uint8) != 0).sum()) <= 50 * HEADS * content * (
        cache.element_size()
    ), "nothing else was written"


@pytest.mark.parametrize("name", ["CPU_MLA", "AMX_MLA"])
@pytest.mark.parametrize("with_head", [True, False])
def test_latent_pages(name: str, with_head: bool) -> None:
    from vllm.v1.attention.backends.mla import amx_mla, cpu_mla

    kind = {"CPU_MLA": cpu_mla.CPUMLAImpl, "AMX_MLA": amx_mla.AMXMLAImpl}[name]
    impl = kind.__new__(kind)
    rank, rope, tokens = 512, 64, 16
    cache = torch.zeros(BLOCKS, tokens, rank + rope, dtype=torch.bfloat16)
    layer = SimpleNamespace(head_size=rank + rope, kv_lora_rank=rank)
    view = cache[:, None] if with_head else cache
    pages, slots = TokenPages(layer, name, view), slots_of(tokens, 40)
    latent = random(40, 1, rank + rope, torch.bfloat16, 1)
    impl.do_kv_cache_update(
        latent[:, 0, :rank].clone(), latent[..., rank:].clone(), cache, slots, "auto",
        torch.ones(()),
    )  # fmt: skip
    keys, values = pages.read(view, slots)
    assert torch.equal(keys, latent)
    assert torch.equal(values, latent[..., :rank])
    copy = torch.zeros_like(view)
    pages.write(copy, slots, keys, values)
    assert torch.equal(copy, view)


def test_unreadable_pages_are_refused() -> None:
    layer = packed_layer("vec", 64, torch.float32)
    plain = torch.zeros(BLOCKS, HEADS, 32, 128)
    with pytest.raises(UnsupportedError, match="ROCM_ATTN are not read by token"):
        TokenPages(layer, "ROCM_ATTN", plain)
    with pytest.raises(UnsupportedError, match="unquantized"):
        TokenPages(layer, "TRITON_ATTN", torch.zeros(BLOCKS, HEADS, 32, 2 * (64 + 4)))
    with pytest.raises(UnsupportedError, match="unquantized"):
        TokenPages(layer, "FLASH_ATTN", torch.zeros(BLOCKS, 2 * HEADS, 32, 128))
    with pytest.raises(UnsupportedError, match="another form"):
        TokenPages(packed_layer("neon", 64, torch.float32), "CPU_ATTN", plain)
    pages = TokenPages(layer, "FLASH_ATTN", plain)
    token = torch.zeros(1, HEADS, 64)
    for slot in (-1, BLOCKS * 32):
        with pytest.raises(InvalidInputError, match=r"0\.\.159"):
            pages.read(plain, torch.tensor([slot]))
        with pytest.raises(InvalidInputError, match=r"0\.\.159"):
            pages.write(plain, torch.tensor([slot]), token, token)
    with pytest.raises(InvalidInputError, match="type of the cache"):
        pages.write(plain, torch.tensor([0]), token.half(), token.half())


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_chunks_move_to_their_places_within_the_blocks_of_one_request(isa: str) -> None:
    """Loaded one behind the other, then read, turned and written to where they belong: the pages
    are those that vLLM writes for fresh keys at the new positions."""
    need(isa)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from ucm.sparse.blend.chunks import Hit
    from ucm.sparse.blend.rotation import Rotation
    from ucm.sparse.blend.tokens import positions_of

    size, tokens = 64, 32
    dtype = torch.bfloat16 if isa == "amx" else torch.float32
    parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(size, 4096, True, parameters, dtype)
    layer = packed_layer(isa, size, dtype)
    hits = [Hit(21, 70, 900), Hit(75, 140, 3)]
    new, old = positions_of(hits)
    raw, values = (random(len(new), HEADS, size, dtype, seed) for seed in (1, 2))

    def rotated(positions: Tensor) -> Tensor:
        given = raw.clone().flatten(1)
        turned: Tensor = rotary(positions, given.clone(), given)[1]
        return turned.view(raw.shape)

    table = torch.tensor([3, 0, 4, 1, 2])
    compact = torch.arange(len(new))
    slots, before = (table[at // tokens] * tokens + at % tokens for at in (new, compact))
    cache, fresh = (torch.zeros(BLOCKS, HEADS, tokens, 2 * size, dtype=dtype) for _ in range(2))
    vllm_writes(layer, cache, before, rotated(old), values)
    vllm_writes(layer, fresh, slots, rotated(new), values)
    pages = TokenPages(layer, "CPU_ATTN", cache)
    keys, held = pages.read(cache, before)
    rotation = Rotation(rotary, size, 4096, dtype=dtype)
    pages.write(cache, slots, rotation.turn(keys, rotation.factors(old, new)), held)
    expected, found = pages.read(fresh, slots), pages.read(cache, slots)
    assert torch.equal(found[1], expected[1])
    off = (found[0].float() - expected[0].float()).abs().max()
    assert off <= (1e-5 if dtype == torch.float32 else 3 * 2**-8 * expected[0].abs().max())
