"""Block ids as objects, for programs written against the original; every store takes plain
``bytes``."""

from __future__ import annotations

from typing import Self

from ucm.errors import InvalidInputError


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
        from ucm.store.ucmstore import block_id

        return cls(block_id(hex_str))
