"""GSA On-Device, by the names of the original and of the book."""

from ucm.sparse.names import *  # noqa: F403
