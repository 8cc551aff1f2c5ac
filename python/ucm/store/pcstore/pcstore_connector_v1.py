"""The name users of the original import."""

from ucm.store.pc.connector import UcmPcStore

__all__ = ["UcmPcStore"]
