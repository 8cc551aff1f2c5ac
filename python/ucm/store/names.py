"""Names of the original for programs that were written against it: block ids as objects, and the
block keys of a token list.

Every store takes plain ``bytes``, and the vLLM connector computes keys for a whole identity
(weights, layout, adapters), which are other ones than these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ucm._core import BlockHasher
from ucm.errors import InvalidInputError
from ucm.store.v0 import block_id


class BlockId(bytes):
    """The 16 bytes that name a block. It is bytes, so it goes wherever an id goes."""

    #: Bytes of an id.
    SIZE = 16

    def __new__(cls, hash_bytes: bytes) -> Self:
        """Raises :class:`~ucm.errors.InvalidInputError` for anything but 16 bytes."""
        given: object = hash_bytes
        if not isinstance(given, bytes) or len(given) != cls.SIZE:
            raise InvalidInputError(
                "a block id is 16 raw bytes (type bytes)", context={"got": repr(given)[:80]}
            )
        return super().__new__(cls, hash_bytes)

    @property
    def bytes(self) -> bytes:
        """The id without its class."""
        return self[:]

    def to_hex(self) -> str:
        """32 hexadecimal digits."""
        return self.hex()

    @classmethod
    def from_hex(cls, hex_str: str) -> Self:
        """The id of 32 hexadecimal digits, in either case; another text is an error."""
        return cls(block_id(hex_str))


#: Tokens of a block by default.
DEFAULT_BLOCK_SIZE = 16


class RequestHasher:
    """Chained keys of the full blocks of a request; what is left over at its end has none."""

    def __init__(self, config: Any, rank_id: int = 0) -> None:
        """``config`` is vLLM's configuration, whose model, ranks and dtype, with ``rank_id``, make
        keys differ; or a dictionary with ``block_size`` (tokens), ``hash_method`` and perhaps
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
