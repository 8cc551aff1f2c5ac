"""The store on a directory; see :mod:`ucm.store.engine`."""

from ucm.store.engine import PosixTask, UcmPosixStore

__all__ = ["PosixTask", "UcmPosixStore"]
