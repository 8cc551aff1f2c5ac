"""Output for people and for programs: tables, sizes, times in words, one JSON document."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SPANS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
#: A number or a size, which stand on the right of their column.
_NUMBER = re.compile(r"-|[0-9][0-9.]*(?: [KMGTPE]?i?B)?")


def wall_ns() -> int:
    """Nanoseconds since 1970; the one clock of the command line."""
    return time.time_ns()


def size(count: float) -> str:
    """Bytes in the largest binary unit: ``1.5 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return (
        f"{count:.0f} {_UNITS[unit]}"
        if unit == 0 or count >= 100
        else f"{count:.1f} {_UNITS[unit]}"
    )


def span(seconds: float) -> str:
    """A length of time in its largest unit: ``3 hours``."""
    for name, length in _SPANS:
        if seconds >= length:
            return many(int(seconds // length), name)
    return "less than a second"


def ago(then_ns: int | None, now_ns: int) -> str:
    """How long ago, in words; ``-`` for never."""
    if then_ns is None:
        return "-"
    seconds = (now_ns - then_ns) / 1e9
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def many(count: int, what: str) -> str:
    """``1 record``, ``2 records``."""
    return (
        f"{count} {what}"
        if count == 1
        else f"{count} {what[:-1] + 'ies' if what.endswith('ry') else what + 's'}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> None:
    """Prints columns: numbers and sizes to the right, texts to the left."""
    if not rows:
        return
    texts = [[_plain(value) for value in row] for row in rows]
    widths = [max(len(line[at]) for line in [list(header), *texts]) for at in range(len(header))]
    right = [all(_NUMBER.fullmatch(text) for text in column) for column in zip(*texts, strict=True)]
    for line in [list(header), *texts]:
        cells = [
            text.rjust(w) if r else text.ljust(w)
            for text, w, r in zip(line, widths, right, strict=True)
        ]
        click.echo((indent + "  ".join(cells)).rstrip())


def pairs(rows: Sequence[tuple[str, object]], indent: str = "  ") -> None:
    """Prints names and values, one pair a line."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"{indent}{_plain(name).ljust(width)}  {_plain(value)}".rstrip())


def each(show: Callable[[dict[str, Any]], None], documents: Sequence[dict[str, Any]]) -> None:
    """Several results for people, with an empty line between."""
    for at, document in enumerate(documents):
        if at:
            click.echo()
        show(document)


def document(value: Any) -> None:
    """Prints one JSON document."""
    click.echo(json.dumps(value, indent=2))


def seconds(then_ns: int | None) -> int | None:
    """Nanoseconds as the whole seconds of a JSON document."""
    return None if then_ns is None else then_ns // 10**9


def _plain(value: object) -> str:
    """A text without what a terminal would obey, or could not print: names of files may hold
    anything."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)
    )


def short(value: object, most: int = 40) -> str:
    """A text of at most so many characters."""
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
