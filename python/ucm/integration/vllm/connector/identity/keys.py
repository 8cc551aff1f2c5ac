"""Computes the block keys of a request: the prompt is hashed once, output blocks as they fill
up."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.identity.extra_keys import ExtraKeys
from ucm.store import BlockHasher

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KeyMaker:
    """Hashes token blocks under one identity."""

    def __init__(
        self, identity: str, block_tokens: int, hash_method: str, extra: ExtraKeys
    ) -> None:
        self._hasher = BlockHasher(
            hashlib.sha256(identity.encode()).digest(), block_tokens, hash_method
        )
        self._extra = extra
        self.block_tokens = block_tokens

    def first(self, request: Request) -> list[bytes]:
        """Keys of all full blocks of the tokens known now. May read an adapter's files: for
        background threads."""
        return self.more(request, [])

    def at_once(self, request: Request, tokens: int) -> bool:
        """Whether :meth:`first` needs no file, and takes little: nothing but tokens, and not more
        than so many."""
        return request.num_tokens <= tokens and self._extra.only_tokens(request)

    def current(self, request: Request, since: float) -> bool | None:
        """Whether the keys say what the request computed before ``since`` (monotonic, in seconds).

        Asked before its blocks are stored; never waits. None when that is not known yet; False is
        final.
        """
        return self._extra.current(request, since)

    def more(self, request: Request, keys: list[bytes]) -> list[bytes]:
        """Keys of the full blocks after those of ``keys``.

        Raises :class:`~.unkeyable.UnkeyableError` for a request that has no keys.
        """
        tokens = request._all_token_ids
        start, end = len(keys), len(tokens) // self.block_tokens
        if end <= start:
            return []
        extra = self._extra.of(request, start, end)
        return self._hasher.hash_blocks(
            tokens, parent=keys[-1] if keys else None, start=start, extra=extra
        )
