"""The sizes of a block as a store's configuration names them: pieces, shards, block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ucm.errors import InvalidInputError


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
        ``block_size`` name.

        Raises :class:`~ucm.errors.InvalidInputError` when they are missing, or do not divide each
        other.
        """
        layer = tuple(config.get("tensor_size_list") or ())
        if not layer and config.get("tensor_size"):
            layer = (config["tensor_size"],)
        shard, block = config.get("shard_size"), config.get("block_size")
        sizes = (*layer, shard, block)
        if not layer or any(
            not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes
        ):
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
