"""Addresses of blocks, compared with torch's own for the same tensors."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ucm.errors import InvalidInputError  # noqa: E402
from ucm.store.kv_layout import KVLayout, model_order  # noqa: E402

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 5, 2, 4, 8, 3


def layers_in(order: str, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    """Views [block, head, token, element] of one buffer whose physical order is ``order``."""
    extents = {"L": LAYERS, "B": blocks, "H": HEADS, "N": TOKENS, "C": SIZE}
    buffer = torch.arange(LAYERS * blocks * HEADS * TOKENS * SIZE, dtype=torch.int32)
    shaped = buffer.view([extents[dim] for dim in order])
    ordered = shaped.permute([order.index(dim) for dim in "LBHNC"])
    return {f"model.layers.{layer}.attn": ordered[layer] for layer in range(LAYERS)}


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_pieces_are_exactly_the_bytes_of_the_block(order: str) -> None:
    caches = layers_in(order)
    layout = KVLayout(caches, list(caches))
    sizes = layout.sizes()
    row = sizes["tensor_size_list"] * (sizes["shard_size"] // sum(sizes["tensor_size_list"]))
    addresses = layout.addresses(np.array([3, 0], dtype=np.int64))
    assert addresses.shape == (2, len(row)) == (2, layout.pieces)
    for block, pieces in zip([3, 0], addresses, strict=True):
        read = b"".join(ctypes.string_at(int(a), n) for a, n in zip(pieces, row, strict=True))
        values = sorted(np.frombuffer(read, dtype=np.int32).tolist())
        right = sorted(
            value for tensor in caches.values() for value in tensor[block].flatten().tolist()
        )
        assert values == right
        layer_bytes = len(read) // LAYERS
        for index, tensor in enumerate(caches.values()):  # layer by layer, in model order
            part = np.frombuffer(
                read[index * layer_bytes : (index + 1) * layer_bytes], dtype=np.int32
            )
            assert sorted(part.tolist()) == sorted(tensor[block].flatten().tolist())


def test_dense_blocks_are_one_piece_and_split_heads_one_each() -> None:
    assert KVLayout(layers_in("LBNHC"), []).pieces == LAYERS
    assert KVLayout(layers_in("LHBNC"), []).pieces == LAYERS * HEADS


def test_one_head_and_padding() -> None:
    buffer = torch.zeros(BLOCKS, TOKENS + 1, SIZE, dtype=torch.bfloat16)
    layout = KVLayout({"layers.0": buffer[:, :TOKENS].unsqueeze(1)}, [])
    assert layout.block_bytes == TOKENS * SIZE * 2
    step = np.diff(layout.addresses(np.array([0, 1], dtype=np.int64))[:, 0].astype(np.int64))
    assert step.tolist() == [(TOKENS + 1) * SIZE * 2]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_of_several_kernel_blocks(order: str) -> None:
    """A kernel that takes smaller blocks has its own count of them in the first dimension."""
    caches = layers_in(order, BLOCKS * 2)
    layout = KVLayout(caches, num_blocks=BLOCKS)
    sizes = layout.sizes()
    row = sizes["tensor_size_list"] * (sizes["shard_size"] // sum(sizes["tensor_size_list"]))
    (pieces,) = layout.addresses([3])
    read = b"".join(ctypes.string_at(int(a), n) for a, n in zip(pieces, row, strict=True))
    right = [tensor[6:8].flatten() for tensor in caches.values()]
    assert sorted(np.frombuffer(read, dtype=np.int32).tolist()) == sorted(torch.cat(right).tolist())
    with pytest.raises(InvalidInputError, match="outside"):
        layout.addresses([BLOCKS])
    with pytest.raises(InvalidInputError, match="no multiple of 4 blocks"):
        KVLayout(caches, num_blocks=4)


def test_a_layer_may_be_several_tensors() -> None:
    """K and V apart, and the parts of MLA, which are not of one size."""
    nope, rope = torch.zeros(BLOCKS, TOKENS, 1, 16), torch.zeros(BLOCKS, TOKENS, 1, 4)
    other = torch.zeros(BLOCKS, TOKENS, 1, 16), torch.zeros(BLOCKS, TOKENS, 1, 4)
    layout = KVLayout({"layers.1": other, "layers.0": (nope, rope), "layers.2": (nope, rope)}, [])
    sizes = [TOKENS * 16 * 4, TOKENS * 4 * 4]
    assert layout.sizes() == {
        "tensor_size_list": sizes,
        "shard_size": 2 * sum(sizes),
        "block_size": 2 * sum(sizes),
    }
    (pieces,) = layout.addresses([2])
    bases = [tensor.data_ptr() for tensor in (nope, rope, *other)]
    assert pieces.tolist() == [base + 2 * size for base, size in zip(bases, sizes * 2, strict=True)]
    assert layout.device_type == "cpu"
    with pytest.raises(InvalidInputError, match="different devices"):
        KVLayout({"layers.0": (nope, rope.to("meta"))}, [])


def test_layers_that_share_kv_count_once() -> None:
    tensor = torch.zeros(BLOCKS, HEADS, TOKENS, SIZE)
    assert KVLayout({"layers.0": tensor, "layers.7": tensor}, []).names == ["layers.0"]


def test_layers_of_different_size_are_one_shard_of_unequal_pieces() -> None:
    caches = {f"layers.{i}": torch.zeros(BLOCKS, HEADS, TOKENS, SIZE * (i + 1)) for i in range(2)}
    sizes = KVLayout(caches, []).sizes()
    assert sum(sizes["tensor_size_list"]) == sizes["shard_size"] == sizes["block_size"]


def test_wrong_forms_are_named() -> None:
    good = torch.zeros(BLOCKS, HEADS, TOKENS, SIZE)
    with pytest.raises(InvalidInputError, match="no KV cache"):
        KVLayout({}, [])
    with pytest.raises(InvalidInputError, match="numbers of blocks"):
        KVLayout({"layers.0": good, "layers.1": torch.zeros(BLOCKS + 1, HEADS, TOKENS, SIZE)}, [])
    with pytest.raises(InvalidInputError, match="overlapping"):
        KVLayout(
            {"layers.0": torch.zeros(BLOCKS, 1, 1, SIZE).expand(BLOCKS, HEADS, TOKENS, SIZE)}, []
        )
    for number in (-1, BLOCKS):
        with pytest.raises(InvalidInputError, match="outside"):
            KVLayout({"layers.0": good}, []).addresses(np.array([number], dtype=np.int64))


def test_model_order_counts() -> None:
    names = [f"model.layers.{i}.attn" for i in range(12)]
    for shuffled in itertools.islice(itertools.permutations(names), 0, 5000, 977):
        assert model_order(dict.fromkeys(shuffled)) == names
