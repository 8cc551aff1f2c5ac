"""GSA, by the names of the original, of the book and of document 002."""

from ucm.sparse.names import *  # noqa: F403
