"""The store in a pool of Mooncake."""

from ucm.store.mooncake.connector import UcmMooncakeStore

__all__ = ["UcmMooncakeStore"]
