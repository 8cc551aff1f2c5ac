"""The name users of the original import."""

from ucm.store.nfs.connector import UcmNfsStore

__all__ = ["UcmNfsStore"]
