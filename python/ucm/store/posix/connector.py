"""The store on a directory; see :mod:`ucm.store.engine`."""

from ucm.refused import of_posix as __getattr__  # noqa: F401
from ucm.store.engine import PosixTask as PosixTask
from ucm.store.engine import UcmPosixStore as UcmPosixStore
