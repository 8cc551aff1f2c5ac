"""The prefetch engine, by the names of the book and of document 002."""

from ucm.sparse.names import *  # noqa: F403
