"""KVStar MultiStep, by the names of the original and of the book."""

from typing import Any

from ucm.refused import refuse
from ucm.sparse.names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    raise refuse(__name__, name)
