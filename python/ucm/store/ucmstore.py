"""The store interface of the original UCM, V0: text ids, byte offsets, ``create`` before and
``commit`` after a dump.

For stores and programs that were written against it; new ones use :mod:`ucm.store.ucmstore_v1`.
Adapters lead both ways: :class:`ucm.store.v0_over_v1.V0OverV1` puts this face on any V1 store, and
:class:`ucm.store.v1_over_v0.V1OverV0` makes a V0 store usable wherever a V1 store is, the vLLM
connector included.

A block is written in this order: ``create`` reserves it, ``dump`` or ``dump_data`` writes its
parts, ``wait`` says that they arrived, ``commit(True)`` makes it visible as a whole or
``commit(False)`` drops it. A block that was not committed is never found by ``lookup``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ucm.errors import InvalidInputError
from ucm.store.tensors import address_of, bytes_of
from ucm.store.ucmstore_v1 import Task

#: What ``create``, ``wait`` and ``check`` answer when all is well; any other number is an error
#: (``UcmError.code``).
OK = 0
#: ``create``: the block is stored already, or somebody is writing it. There is nothing to do for
#: this block.
DUPLICATE_KEY = -50003

_HEX_ID = re.compile(r"[0-9a-fA-F]{32}")


def block_id(name: str | bytes) -> bytes:
    """The 16 bytes that a V0 block id names: 32 hexadecimal digits, or the 16 bytes themselves.

    Any other text is an :class:`~ucm.errors.InvalidInputError`: it would have to be hashed, and
    only the caller knows what else its ids must be told apart from.
    """
    if isinstance(name, bytes) and len(name) == 16:
        return name
    if isinstance(name, str) and _HEX_ID.fullmatch(name):
        return bytes.fromhex(name)
    raise InvalidInputError(
        "a block id is 32 hexadecimal digits or 16 bytes; from another text make one with "
        "hashlib.sha256(text.encode()).hexdigest()[:32]",
        context={"block_id": repr(name)[:80]},
    )


class UcmKVStoreBase(ABC):
    """Base of V0 stores. ``config`` is a plain dictionary.

    A store defines ``create``, ``lookup``, ``wait``, ``commit`` and either ``fetch_data`` and
    ``dump_data`` (raw addresses) or ``load`` and ``dump`` (tensors).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    def cc_store(self) -> int:
        """Address of the C table of this store (``ucm_store.h``), 0 where there is none."""
        return 0

    @abstractmethod
    def create(self, block_ids: Sequence[str]) -> Sequence[int]:
        """Reserve blocks: 0 for each that may be dumped now, else why not (:data:`DUPLICATE_KEY`,
        or an error's code, -50004 when there is no room at the moment)."""

    @abstractmethod
    def lookup(self, block_ids: Sequence[str]) -> Sequence[bool]:
        """Whether each block is stored and committed."""

    def prefetch(self, block_ids: Sequence[str]) -> None:
        """A hint that these blocks will be asked for; may be ignored."""

    def load(self, block_ids: Sequence[str], offset: Sequence[int], tensors: Sequence[Any]) -> Any:
        """Start reading: row *i* fills ``tensors[i]`` from byte ``offset[i]`` of block
        ``block_ids[i]`` on."""
        return self.fetch_data(block_ids, offset, *_spans(tensors))

    def dump(self, block_ids: Sequence[str], offset: Sequence[int], tensors: Sequence[Any]) -> Any:
        """Start writing: row *i* puts ``tensors[i]`` at byte ``offset[i]`` of block
        ``block_ids[i]``, which was created. The tensors must stay as they are until the task was
        waited for."""
        return self.dump_data(block_ids, offset, *_spans(tensors))

    def fetch_data(
        self,
        block_ids: Sequence[str],
        offset: Sequence[int],
        addr: Sequence[int],
        size: Sequence[int],
    ) -> Any:
        """:meth:`load` into raw memory: ``size[i]`` bytes to address ``addr[i]``."""
        raise NotImplementedError("this store takes tensors, not addresses")

    def dump_data(
        self,
        block_ids: Sequence[str],
        offset: Sequence[int],
        addr: Sequence[int],
        size: Sequence[int],
    ) -> Any:
        """:meth:`dump` from raw memory: ``size[i]`` bytes from address ``addr[i]``."""
        raise NotImplementedError("this store takes tensors, not addresses")

    @abstractmethod
    def wait(self, task: Any) -> int:
        """Wait for a task: 0, or the code of what went wrong."""

    @abstractmethod
    def commit(self, block_ids: Sequence[str], is_success: bool | Sequence[bool] = True) -> None:
        """Publish created blocks, or drop them; one answer for all or one for each."""

    def check(self, task: Any) -> tuple[int, bool]:
        """(0 or an error's code, whether the task is finished). Here: by waiting; a store that
        knows overrides it."""
        return self.wait(task), True


def _spans(tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    return [address_of(tensor, row=row) for row, tensor in enumerate(tensors)], [
        bytes_of(t) for t in tensors
    ]


__all__ = ["DUPLICATE_KEY", "OK", "Task", "UcmKVStoreBase", "block_id"]
