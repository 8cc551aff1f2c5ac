"""Names of the original for programs that were written against it: block ids as objects, and the
block keys of a token list.

Every store takes plain ``bytes``, and the vLLM connector computes keys for a whole identity
(weights, layout, adapters), which are other ones than these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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


def compute_block_hash(
    parent: bytes | Sequence[int],
    tokens: Sequence[int] | int,
    prefix_hash: str | None = None,
    *,
    hash_method: str = "sha256",
) -> bytes | str:
    """The key of one block in the chain of :class:`RequestHasher`, in the two forms of the book:
    ``(parent_hash, token_ids)`` gives bytes; ``(token_ids, block_size, prefix_hash)`` gives 32 hex
    digits, and without a prefix hash begins a chain without identity. Raises
    :class:`~ucm.errors.InvalidInputError`."""
    if isinstance(parent, bytes) and not isinstance(tokens, int):
        return _next_key(block_id(parent), tokens, hash_method)
    if isinstance(parent, bytes) or not isinstance(tokens, int) or len(parent) != tokens:
        raise InvalidInputError(
            "a block's key is made from (parent_hash, token_ids), or from (token_ids, block_size,"
            " prefix_hash) with as many tokens as the block has"
        )
    if prefix_hash is None:
        return BlockHasher(b"", tokens, hash_method).hash_blocks(parent)[0].hex()
    return _next_key(block_id(prefix_hash), parent, hash_method).hex()


def _next_key(parent: bytes, tokens: Sequence[int], hash_method: str) -> bytes:
    if hash_method not in ("sha256", "md5"):
        raise InvalidInputError(f"one block is hashed by sha256 or md5, not {hash_method}")
    try:
        content = parent + b"".join(token.to_bytes(4, "little") for token in tokens)
    except (AttributeError, OverflowError) as error:
        raise InvalidInputError(f"a token is a number of 32 bits: {error}") from error
    return hashlib.new(hash_method, content, usedforsecurity=False).digest()[:16]


#: Tokens of a block by default.
DEFAULT_BLOCK_SIZE = 16


class RequestHasher:
    """Chained keys of the full blocks of a request; what is left over at its end has none."""

    def __init__(self, config: Any = None, rank_id: int = 0) -> None:
        """``config`` is vLLM's configuration, whose model, ranks and dtype, with ``rank_id``, make
        keys differ; or a dictionary with ``block_size`` (tokens), ``hash_method`` and perhaps
        ``identity``; or None for the defaults of these."""
        if config is None or isinstance(config, Mapping):
            config = config or {}
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
