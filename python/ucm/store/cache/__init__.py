"""The store in host memory alone."""

from ucm.store.cache.connector import UcmCacheStore

__all__ = ["UcmCacheStore"]
