"""The store on a network share, by its own name."""

from ucm.store.nfs.connector import UcmNfsStore

__all__ = ["UcmNfsStore"]
