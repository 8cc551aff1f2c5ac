"""Block keys of a token list under the names of the original, computed by
:class:`ucm.store.BlockHasher`.

For programs that keep blocks of their own in a store. The vLLM connector does not use it: its keys
stand for a whole identity (weights, layout, adapters), so they are other ones than these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucm._core import BlockHasher

#: Tokens of a block where nothing else is said.
DEFAULT_BLOCK_SIZE = 16


class RequestHasher:
    """Chained keys of the full blocks of a request; what is left over at its end has none."""

    def __init__(self, config: Any, rank_id: int = 0) -> None:
        """``config`` is vLLM's configuration, of which model, ranks and dtype are told apart, and
        so is ``rank_id``; or a dictionary with ``block_size`` (tokens), ``hash_method`` and perhaps
        ``identity``."""
        if isinstance(config, Mapping):
            self.block_size = int(config.get("block_size", DEFAULT_BLOCK_SIZE))
            self.hash_method = str(config.get("hash_method", "sha256"))
            self.meta_bytes = str(config.get("identity", "")).encode()
            return
        model = getattr(config, "model_config", config)
        parallel = getattr(config, "parallel_config", config)
        meta = f"{model.model}:{parallel.tensor_parallel_size}:{model.dtype}:{rank_id}"
        self.block_size = int(
            getattr(getattr(config, "cache_config", None), "block_size", 0) or DEFAULT_BLOCK_SIZE
        )
        self.hash_method = "sha256"
        self.meta_bytes = meta.encode()

    def compute_block_hashes(self, token_ids: Any, block_size: int | None = None) -> list[bytes]:
        """The keys of all full blocks, in order; ``block_size`` in tokens, by default the
        configured one."""
        hasher = BlockHasher(
            self.meta_bytes, self.block_size if block_size is None else block_size, self.hash_method
        )
        return hasher.hash_blocks(token_ids)

    #: The same by its other name.
    generate_block_hashes = compute_block_hashes
