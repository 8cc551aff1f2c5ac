"""The store of tests that knows ids and has no bytes."""

from ucm.store.fake.connector import UcmFakeStore

__all__ = ["UcmFakeStore"]
