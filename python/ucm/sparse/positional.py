"""The calls of document 002, which knows no layer names and no engine: ``attention_begin(layer_idx,
q, k, v, metadata)``.

A caller of this form registers the KV cache once and passes, for each layer, metadata with the
block table and the lengths; what else an engine would say is found here: the shape of the keys from
the cache, the representations from its blocks. A row is a request; ``metadata.request_ids`` names
it, else its place in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ucm.errors import InvalidInputError
from ucm.sparse.batch import SparseBatch, SparseRow
from ucm.sparse.method import BlockSparse
from ucm.sparse.selector import Geometry


class PositionalMethod(BlockSparse):
    """A host that takes both forms: with a layer's name (an engine's), and with its number."""

    _caches: tuple[Tensor, ...] = ()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Where the KV lies, by layer name in the order of the model: ``[2, blocks, b, h, d]``, or
        keys alone in ``[blocks, b, h, d]``. Nothing is learned from it once :meth:`setup` was
        called."""
        super().register_kv_caches(kv_caches)
        if self._method is not None or not kv_caches:
            return
        keys = [cache[0] if cache.dim() == 5 else cache for cache in kv_caches.values()]
        if any(cache.dim() != 4 or cache.shape != keys[0].shape for cache in keys):
            shapes = sorted({tuple(cache.shape) for cache in kv_caches.values()})
            raise InvalidInputError(
                "the KV of each layer is [2, blocks, tokens, heads, size] or [blocks, tokens,"
                " heads, size], the same for all",
                context={"shapes": shapes},
            )
        blocks, size, heads, dim = keys[0].shape
        self._caches = tuple(keys)
        self._names = list(kv_caches)
        self._encoded: list[set[int]] = [set() for _ in keys]
        geometry = Geometry(block_size=size, kv_heads=heads, head_dim=dim)
        self.setup(
            geometry,
            [f"layers.{place}" for place in range(len(keys))],
            blocks,
            device=keys[0].device,
        )

    def attention_begin(
        self,
        query: Any,
        key: Any,
        value: Any,
        layer_name: Any,
        forward_context: Any,
        output: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """With a layer's number in the first place: ``(layer_idx, query, key, value, metadata)``.
        The metadata's block table and lengths are replaced (it is the caller's own copy); returns
        query, key, value and None."""
        if not isinstance(query, int):
            return super().attention_begin(
                query, key, value, layer_name, forward_context, output, *args, **kwargs
            )
        layer, query, key, value, metadata = query, key, value, layer_name, forward_context
        self._check(layer)
        lens = [int(length) for length in metadata.seq_lens]
        names = getattr(metadata, "request_ids", None) or [
            f"row {place}" for place in range(len(lens))
        ]
        if self._sparse_metadata is None or layer == 0:
            self._begin(names, lens, query)
        self._encode(layer, metadata.block_table, lens)
        context = SimpleNamespace(attn_metadata=metadata)
        return super().attention_begin(query, key, value, f"layers.{layer}", context)

    def attention_finished(self, *args: Any, **kwargs: Any) -> Any:
        """``attention_finished(layer_idx, output)`` returns the output; the engine's form as in the
        base class."""
        if len(args) == 2 and isinstance(args[0], int):
            return args[1]
        return super().attention_finished(*args, **kwargs)

    def _check(self, layer: int) -> None:
        if not self._caches:
            raise InvalidInputError("call register_kv_caches before attention_begin")
        if not 0 <= layer < len(self._caches):
            raise InvalidInputError(f"there are layers 0 to {len(self._caches) - 1}, got {layer}")

    def _begin(self, names: list[str], lens: list[int], query: Tensor) -> None:
        """A step begins: every row decodes one token, whatever was computed before it."""
        if query.shape[0] != len(lens):
            raise InvalidInputError(
                "this form is for decoding: one query for each row",
                context={"queries": query.shape[0], "rows": len(lens)},
            )
        self._first = getattr(self, "_first", {})
        for name, length in zip(names, lens, strict=True):
            # shorter than it was: another request of that name
            if length <= self._first.get(name, length + 1):
                self.request_finished_in_worker(name)
                self._first[name] = length - 1
        rows = [
            SparseRow(n, length, self._first[n], self._first[n])
            for n, length in zip(names, lens, strict=True)
        ]
        self.bind_sparse_metadata(SparseBatch(rows))

    def _encode(self, layer: int, block_table: Tensor, lens: list[int]) -> None:
        """Representations of the full blocks that have none yet. Blocks are taken for unchanged
        while they are in use."""
        size, known = self.selector.geometry.block_size, self._encoded[layer]
        used = {
            int(block)
            for row, length in zip(block_table, lens, strict=True)
            for block in row[: length // size]
        }
        known &= used
        new = sorted(used - known)
        if new and layer in self.store.layers:
            self.store.update(layer, self._caches[layer][torch.tensor(new)], new)
        if new:
            self.store.mark_ready(new)
        known.update(new)


@cache
def method_for(algorithm: str) -> type[PositionalMethod]:
    """The method that is an algorithm and nothing else: the host, under its name."""
    given = {
        "algorithm": algorithm,
        "__module__": __name__,
        "__doc__": f"Blocks chosen by {algorithm}.",
    }
    return type(algorithm, (PositionalMethod,), given)
