"""What the commands share on the command line: the root, the form of the output, and how values are
read.

Sizes and shares are read as the configuration reads them, ages and beginnings of names here, by
plain functions that click calls; what is wrong is a :class:`click.BadParameter`, to which click
adds the option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ucm.cli.remote import AnyRoot, scheme_of
from ucm.errors import ConfigError

_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d|w)\s*")
_AGES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*")


def _told(
    _context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str]:
    told = dict(pair.partition("=")[::2] for pair in pairs)
    if unclear := next((pair for pair in pairs if "=" not in pair), None):
        raise click.BadParameter(f"{unclear!r} is no KEY=VALUE")
    return told


#: How a server or a bucket is reached.
of_store = click.option(
    "-o",
    "--option",
    "told",
    multiple=True,
    callback=_told,
    metavar="KEY=VALUE",
    help=(
        "A key of the store, where ROOT is an address: object_endpoint=http://host:port;"
        " repeatable."
    ),
)


def _split(_ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The directories of ``a:b:c``, as ``storage_backends`` names several; a path that is there and
    an address of a server or a bucket stay as they are."""
    whole = [bool(scheme_of(text)) or os.path.exists(text) for text in given]
    paths = [
        piece
        for text, one in zip(given, whole, strict=True)
        for piece in ([text] if one else _pieces(text))
    ]
    if missing := [path for path in paths if not scheme_of(path) and not os.path.exists(path)]:
        raise click.BadParameter(f"{missing[0]!r} does not exist")
    return tuple(paths)


def _pieces(text: str) -> list[str]:
    return [piece for piece in text.split(":") if piece]


#: The roots a command works on.
roots = click.argument("paths", metavar="ROOT...", nargs=-1, required=True, callback=_split)
#: For programs.
json_output = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@dataclass(frozen=True)
class Rate:
    """Bytes per second; ``None`` is no bound."""

    bytes: int | None


@dataclass(frozen=True)
class Target:
    """Bytes to come down to: a number, or a share of the root's limit in percent."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, limit: int) -> int:
        """In bytes, for a root of this limit."""
        return self.bytes if self.bytes is not None else int(limit * (self.percent or 0.0) / 100)


def rate(text: str) -> Rate:
    """A size per second, with or without ``/s``; or ``unlimited``."""
    if text == "unlimited":
        return Rate(None)
    size = _size(text.removesuffix("/s"), "or unlimited")
    if size == 0:
        raise click.BadParameter("a rate of 0 would never end; write a size, or unlimited")
    return Rate(size)


def target(text: str) -> Target:
    """A size, or a percentage of the root's limit."""
    if text.rstrip().endswith("%"):
        return Target(percent=percent(text))
    return Target(bytes=_size(text, "or a share of the root's limit like 50%"))


def percent(text: str) -> float:
    """``5%`` or ``5``: a number from 0 to 100."""
    match = _PERCENT.fullmatch(text)
    if match is None or float(match[1]) > 100:
        raise click.BadParameter(
            f"{text!r} is no percentage; write a number from 0 to 100, like 5%"
        )
    return float(match[1])


def age(text: str) -> float:
    """A length of time, ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``, in seconds."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no age; write 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _AGES[match[2]]


def pick(names: list[str], wanted: tuple[str, ...], where: str) -> list[str]:
    """The namespaces that the given beginnings of names stand for, all if none is given.

    Raises :class:`~ucm.errors.ConfigError` for one that fits none or several.
    """
    picked = set()
    for start in wanted:
        fits = [name for name in names if name.startswith(start)] if start else []
        if len(fits) != 1:
            problem = (
                f"{len(fits)} namespaces of {where} begin"
                if fits
                else f"no namespace of {where} begins"
            )
            known = ", ".join(name[:12] for name in names) or "none"
            raise ConfigError(f"{problem} with {start!r}; there are: {known}")
        picked.add(fits[0])
    return sorted(picked) if wanted else names


def pick_each(
    roots: Sequence[AnyRoot], wanted: tuple[str, ...]
) -> Iterable[tuple[AnyRoot, list[str]]]:
    """The same of each of several roots: a beginning has to fit one namespace of all of them
    together."""
    names = {root: root.namespaces() for root in roots}
    every = sorted({name for some in names.values() for name in some})
    picked = set(pick(every, wanted, ", ".join(root.shown for root in roots)))
    return [(root, [name for name in some if name in picked]) for root, some in names.items()]


def together(command: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON document of a command: that of its one root, or those of several."""
    return documents[0] if len(documents) == 1 else {"command": command, "roots": documents}


def _size(text: str, otherwise: str) -> int:
    # with all of the configuration, which other commands do not need
    from ucm.config.fields import (
        parse_size,
    )

    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}, {otherwise}") from None
