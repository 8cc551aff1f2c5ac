"""``UcmFakeStore``: remembers ids and no bytes. FOR TESTS ONLY: what it "loads" is whatever lay in
memory before.

It answers lookups as a store would and ends every transfer at once and well, so that a connector
can be measured or tested without any I/O. An engine that uses it produces wrong tokens, so it is
made only where ``allow_wrong_tokens: true`` was written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ucm.config.stores import option_keys, options_of
from ucm.errors import ConfigError, NotFoundError
from ucm.store.fake.ring import IdRing
from ucm.store.instant import InstantStore, InstantTask


class UcmFakeStore(InstantStore):
    """Ids alone, first in, first out. Keys: ``buffer_number`` (ids kept), ``allow_wrong_tokens``
    (must be true), ``storage_backends`` (a directory through which several processes share the ids;
    none: this process alone)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        given = {key: config[key] for key in option_keys("UcmFakeStore") if key in config}
        try:
            options = options_of("UcmFakeStore")(**given).model_dump()
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ConfigError(
                f"{first['loc'][0]}: {first['msg']}", context={"store": "UcmFakeStore"}
            ) from None
        if not options["allow_wrong_tokens"]:
            raise ConfigError(
                "UcmFakeStore loads nothing, so an engine that uses it answers with wrong tokens;"
                " it is for tests: write allow_wrong_tokens: true there, and use UcmPosixStore"
                " everywhere else"
            )
        where = config.get("storage_backends") or ()
        root = where if isinstance(where, str | os.PathLike) else next(iter(where), None)
        self._ids = IdRing(
            options["buffer_number"], None if root is None else Path(root) / "ucm-fake-ids"
        )
        self._shards = max(
            1, int(config.get("block_size", 1)) // int(config.get("shard_size") or 1)
        )
        self._incomplete: dict[bytes, set[int]] = {}
        self._limit = options["buffer_number"]

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return self._ids.has(self.checked(block_ids))

    def load_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: npt.NDArray[np.uint64]
    ) -> InstantTask:
        self.rows(block_ids, shard_index, addrs)
        there = self._ids.has(block_ids)
        missing = NotFoundError("this block was never dumped, or was pushed out by later ones")
        return InstantTask("load", {row: missing for row, known in enumerate(there) if not known})

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        prerequisite_handle: int = 0,
    ) -> InstantTask:
        self.rows(block_ids, shard_index, addrs)
        whole = []
        for block, shard in zip(block_ids, shard_index, strict=True):
            left = self._incomplete.setdefault(block, set(range(self._shards)))
            left.discard(int(shard))
            if not left:
                del self._incomplete[block]
                whole.append(block)
        while len(self._incomplete) > self._limit:
            del self._incomplete[next(iter(self._incomplete))]
        self._ids.add(whole)
        return InstantTask("dump", {})

    def stats(self) -> dict[str, Any]:
        return {"healthy": True, "wrong_tokens": True}

    def close(self) -> None:
        super().close()
        self._ids.close()
