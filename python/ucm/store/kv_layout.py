"""From the KV tensors of a model to the addresses of the pieces of a block, and the sizes of a
block as a configuration names them. Arithmetic only; torch is never imported.

Every layer is a view ``[block, head, token, element]`` of one buffer in one of several physical
orders; MLA has one head. Others keep several tensors for a layer: K and V, or the parts of MLA with
and without a position. A block of a tensor is one or several contiguous runs of bytes, given by the
strides. A tensor without ``data_ptr()`` is a NumPy array.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import InvalidInputError


def address_of(tensor: Any, **where: int) -> int:
    """The address of a contiguous tensor; ``where`` (row, column) is context of the error
    otherwise."""
    if hasattr(tensor, "data_ptr"):
        contiguous, address = tensor.is_contiguous(), tensor.data_ptr()
    elif isinstance(tensor, np.ndarray):
        contiguous, address = tensor.flags.c_contiguous, tensor.ctypes.data
    else:
        raise InvalidInputError(
            "a tensor is a torch tensor or a NumPy array",
            context={**where, "type": type(tensor).__name__},
        )
    if not contiguous:
        raise InvalidInputError("a tensor must be contiguous", context=dict(where))
    return int(address)


def bytes_of(tensor: Any) -> int:
    """The size of a tensor in bytes."""
    return int(
        tensor.nbytes if isinstance(tensor, np.ndarray) else tensor.numel() * tensor.element_size()
    )


def on_host(tensor: Any) -> bool:
    """Whether a tensor lies in memory that this process can read itself."""
    device = getattr(tensor, "device", None)
    return getattr(device, "type", "cpu") == "cpu"


@dataclass(frozen=True)
class BlockShape:
    """Sizes in bytes."""

    #: Contiguous pieces of one shard, in the order of a row's addresses.
    pieces: tuple[int, ...]
    #: What one row of a load or dump moves.
    shard: int
    #: All shards.
    block: int

    @property
    def shards(self) -> int:
        """Shards of a block."""
        return self.block // self.shard

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockShape:
        """The shape that the keys ``tensor_size`` or ``tensor_size_list``, ``shard_size`` and
        ``block_size`` name. Raises :class:`~ucm.errors.InvalidInputError` when they are missing, or
        do not divide each other."""
        layer = tuple(config.get("tensor_size_list") or ())
        if not layer and config.get("tensor_size"):
            layer = (config["tensor_size"],)
        shard, block = config.get("shard_size"), config.get("block_size")
        sizes = (*layer, shard, block)
        whole = [isinstance(size, int) and not isinstance(size, bool) for size in sizes]
        if not layer or not all(whole) or min(sizes) < 1:
            raise InvalidInputError(
                "a store needs its sizes in bytes: tensor_size or tensor_size_list, shard_size,"
                " block_size",
                context={"tensors": layer, "shard_size": shard, "block_size": block},
            )
        assert isinstance(shard, int)
        assert isinstance(block, int)
        if shard % sum(layer) or block % shard:
            raise InvalidInputError(
                "sizes divide each other: a shard is a whole number of layers, a block a whole"
                " number of shards",
                context={"layer": sum(layer), "shard_size": shard, "block_size": block},
            )
        return cls(layer * (shard // sum(layer)), shard, block)


@dataclass(slots=True, frozen=True)
class TensorView:
    """One tensor of a layer: the address of block 0, the bytes from block to block, and the runs
    inside a block."""

    base: int
    stride: int
    offsets: tuple[int, ...]
    run: int  # bytes of each run

    @classmethod
    def of(cls, name: str, tensor: Any, num_blocks: int | None = None) -> TensorView:
        """Read from a registered tensor whose first dimension counts blocks; or, with
        ``num_blocks``, equal parts of blocks."""
        if isinstance(tensor, np.ndarray):
            base, size = tensor.ctypes.data, tensor.itemsize
            strides = tuple(stride // size for stride in tensor.strides)
        elif hasattr(tensor, "data_ptr"):
            base, size, strides = tensor.data_ptr(), tensor.element_size(), tuple(tensor.stride())
        else:
            base, size, strides = 0, 0, ()
        if len(strides) < 2:
            raise InvalidInputError(
                f"layer {name}: expected a tensor [block, ...], got {type(tensor).__name__}"
            )
        if strides[0] <= 0 and tensor.shape[0] > 1:
            raise InvalidInputError(f"layer {name}: the blocks do not lie one after the other")
        first = int(tensor.shape[0])
        parts, rest = (1, 0) if num_blocks is None else divmod(first, max(num_blocks, 1))
        if rest or not parts:
            raise InvalidInputError(f"layer {name}: {first} is no multiple of {num_blocks} blocks")
        offsets, run = _runs((parts, *tensor.shape[1:]), strides)
        return cls(
            base=base,
            stride=parts * strides[0] * size,
            offsets=tuple(offset * size for offset in offsets),
            run=run * size,
        )


def _runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Offsets and common length, in elements, of the contiguous runs of a strided box, sorted."""
    run = 1
    outer: list[list[int]] = []
    for extent, stride in sorted(zip(shape, strides, strict=True), key=lambda dim: dim[1]):
        if extent == 1:
            continue
        if stride == run and not outer:
            run *= extent
        elif stride < run:
            raise InvalidInputError(
                f"overlapping elements: shape {tuple(shape)}, strides {tuple(strides)}"
            )
        else:
            outer.append([index * stride for index in range(extent)])
    return tuple(sorted(sum(offsets) for offsets in itertools.product(*outer))), run


class KVLayout:
    """All layers of one worker, in model order; gives sizes for the store and addresses of blocks.
    Piece *j* of block *n* begins at ``first[j] + n * stride[j]``. The tensors must outlive whatever
    uses the addresses."""

    def __init__(
        self, caches: Mapping[str, Any], layers: Sequence[str] = (), num_blocks: int | None = None
    ) -> None:
        """``caches``: a tensor ``[block, ...]`` for each layer, by name, as vLLM registers them, or
        several; ``layers``: names of the layers that count, all if empty; ``num_blocks``: vLLM's
        own number of blocks. Where a kernel takes smaller blocks than vLLM manages, the first
        dimension counts kernel blocks, several in a row for each block. Raises
        :class:`~ucm.errors.InvalidInputError` for a form that has no such addresses."""
        names = [name for name in model_order(caches) if not layers or name in set(layers)]
        seen: set[tuple[tuple[int, int], ...]] = set()
        self.names: list[str] = []
        self.layers: list[list[TensorView]] = []
        self.tensors: list[Sequence[Any]] = []  # of each layer
        blocks: set[int] = set()
        devices: set[str] = set()
        for name in names:
            tensors = caches[name] if isinstance(caches[name], tuple | list) else (caches[name],)
            layer = [TensorView.of(name, tensor, num_blocks) for tensor in tensors]
            place = tuple((view.base, view.stride) for view in layer)
            if not layer or place in seen:
                continue  # a layer without KV, or one that shares the KV of another one
            seen.add(place)
            self.names.append(name)
            self.layers.append(layer)
            self.tensors.append(tensors)
            for tensor in tensors:
                blocks.add(int(tensor.shape[0]) if num_blocks is None else num_blocks)
                self.dtype: Any = tensor.dtype
                self.device: Any = getattr(tensor, "device", None)  # of torch's tensors
                devices.add(str(self.device))
        if not self.layers:
            raise InvalidInputError("there is no KV cache")
        if len(blocks) != 1:
            raise InvalidInputError(f"layers with different numbers of blocks: {sorted(blocks)}")
        if len(devices) != 1:
            raise InvalidInputError(f"layers on different devices: {sorted(devices)}")
        self.num_blocks = blocks.pop()
        views = [view for layer in self.layers for view in layer]
        offsets = [view.base + offset for view in views for offset in view.offsets]
        self.first = np.array(offsets, dtype=np.uint64)
        self.stride = np.array([v.stride for v in views for _ in v.offsets], dtype=np.uint64)

    @property
    def device_type(self) -> str:
        """torch's name of the kind of device that the tensors lie on."""
        return str(getattr(self.device, "type", "cpu"))

    @property
    def pieces(self) -> int:
        """Device pieces of one block."""
        return len(self.first)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this worker, without padding."""
        return sum(view.run * len(view.offsets) for layer in self.layers for view in layer)

    def sizes(self) -> dict[str, Any]:
        """The store's size keys; where layers differ, the block counts as one layer."""
        per_layer = [[view.run for view in layer for _ in view.offsets] for layer in self.layers]
        uniform = all(sizes == per_layer[0] for sizes in per_layer)
        every = [size for sizes in per_layer for size in sizes]
        return {
            "tensor_size_list": per_layer[0] if uniform else every,
            "shard_size": self.block_bytes,
            "block_size": self.block_bytes,
        }

    def addresses(self, blocks: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Addresses, shape (blocks, pieces), of the given device blocks."""
        numbers = block_numbers(blocks)
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.num_blocks:
            raise InvalidInputError(f"device block outside 0..{self.num_blocks - 1}")
        return self.first[None, :] + numbers.astype(np.uint64)[:, None] * self.stride[None, :]


def block_numbers(blocks: Any) -> npt.NDArray[np.int64]:
    """Numbers of device blocks as one row of integers."""
    numbers = np.asarray(blocks)
    if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        found = {"shape": numbers.shape, "dtype": str(numbers.dtype)}
        raise InvalidInputError("device block numbers are integers in one row", context=found)
    return numbers.astype(np.int64, copy=False)


def model_order(caches: Mapping[str, Any]) -> list[str]:
    """Layer names sorted by the numbers in them: the same in every process and version."""

    def numbers(name: str) -> tuple[list[int], str]:
        return [int(text) for text in re.findall(r"\d+", name)], name

    return sorted(caches, key=numbers)
