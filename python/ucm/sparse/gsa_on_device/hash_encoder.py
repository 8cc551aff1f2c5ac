"""Hash codes, by the names of the book."""

from ucm.sparse.names import *  # noqa: F403
