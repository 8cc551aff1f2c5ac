"""The store that keeps nothing."""

from ucm.store.empty.connector import UcmEmptyStore

__all__ = ["UcmEmptyStore"]
