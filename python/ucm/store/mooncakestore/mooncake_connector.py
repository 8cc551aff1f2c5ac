"""The name users of the original import."""

from ucm.store.mooncake.connector import UcmMooncakeStore

__all__ = ["UcmMooncakeStore"]
