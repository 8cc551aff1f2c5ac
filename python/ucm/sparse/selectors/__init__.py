"""The algorithms of block selection, one file each: the class, its keys and its registration."""

from ucm.sparse.selector import make_selector, register_selector

__all__ = ["make_selector", "register_selector"]
