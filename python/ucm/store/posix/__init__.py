"""The store on any file system that mounts."""

from ucm.store.posix.connector import UcmPosixStore

__all__ = ["UcmPosixStore"]
