"""``UcmDs3fsStore``: the POSIX store on a mount of 3FS, with blocks past FUSE through its rings."""

from __future__ import annotations

from typing import ClassVar

from ucm.store.posix.connector import UcmPosixStore


class UcmDs3fsStore(UcmPosixStore):
    """:class:`~ucm.store.posix.connector.UcmPosixStore` over USRBIO; beside its keys those of the
    rings."""

    store_name: ClassVar[str] = "UcmDs3fsStore"
