"""``UcmNfsStore``: what the original calls a store on a network share, here the POSIX store on its
mount point."""

from __future__ import annotations

from typing import ClassVar

from ucm.store.posix.connector import UcmPosixStore


class UcmNfsStore(UcmPosixStore):
    """:class:`~ucm.store.posix.connector.UcmPosixStore` under another name, with the same keys."""

    store_name: ClassVar[str] = "UcmNfsStore"
