"""The methods that are an algorithm and nothing else: the host, under a name."""

from __future__ import annotations

from typing import ClassVar

from ucm.sparse.positional import PositionalMethod


class Auto(PositionalMethod):
    """The algorithm that is known to be best: see :func:`ucm.sparse.config.resolve_auto`."""

    algorithm: ClassVar[str] = "Auto"


class Quest(PositionalMethod):
    """Bounds of keys, by channel."""

    algorithm: ClassVar[str] = "Quest"


class InfLLM(PositionalMethod):
    """A few representative keys of each block."""

    algorithm: ClassVar[str] = "InfLLM"


class Periodic(PositionalMethod):
    """Blocks at equal distances."""

    algorithm: ClassVar[str] = "Periodic"


class Random(PositionalMethod):
    """Control: blocks by lot."""

    algorithm: ClassVar[str] = "Random"


class Windows(PositionalMethod):
    """Control: the windows alone."""

    algorithm: ClassVar[str] = "Windows"


class Oracle(PositionalMethod):
    """Control: the true attention mass of each block."""

    algorithm: ClassVar[str] = "Oracle"
