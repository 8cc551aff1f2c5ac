"""The terminal: what the commands share of their options, and output for people and for programs.

Sizes and shares are read as the configuration reads them; what is wrong is a
:class:`click.BadParameter`, to which click adds the option. Output is tables, sizes, times in
words, and one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ucm.logger import in_units

if TYPE_CHECKING:
    from ucm.config.fields import Capacity


_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*")


def _options(
    _ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str]:
    if unclear := next((pair for pair in pairs if "=" not in pair), None):
        raise click.BadParameter(f"{unclear!r} is no KEY=VALUE")
    return dict(pair.partition("=")[::2] for pair in pairs)


def scheme_of(path: str) -> str:
    """The scheme of an address; empty for a path."""
    scheme, found, _ = path.partition("://")
    return scheme.lower() if found else ""


#: How a server or a bucket is reached.
of_store = click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    callback=_options,
    metavar="KEY=VALUE",
    help=(
        "A key of the store, where ROOT is an address: object_endpoint=http://host:port;"
        " repeatable."
    ),
)


def _split(_ctx: click.Context, _param: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    """The directories of ``a:b:c``, as ``storage_backends`` names several; a path that is there and
    an address of a server or a bucket stay as they are."""
    whole = [bool(scheme_of(text)) or os.path.exists(text) for text in given]
    paths = [
        piece
        for text, one in zip(given, whole, strict=True)
        for piece in ([text] if one else filter(None, text.split(":")))
    ]
    if missing := [path for path in paths if not scheme_of(path) and not os.path.exists(path)]:
        raise click.BadParameter(f"{missing[0]!r} does not exist")
    return tuple(paths)


#: The roots a command works on.
roots = click.argument("paths", metavar="ROOT...", nargs=-1, required=True, callback=_split)
#: The namespaces it works on.
namespaces = click.option(
    "--namespace",
    "wanted",
    multiple=True,
    help="Only this namespace (how its name begins); repeatable.",
)
#: For programs.
json_output = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def rate(text: str) -> int | None:
    """A size per second, with or without ``/s``; or ``unlimited``, which is None."""
    if text == "unlimited":
        return None
    if found := size(text.removesuffix("/s"), ", or unlimited"):
        return found
    raise click.BadParameter("a rate of 0 would never end; write a size, or unlimited")


def target(text: str) -> Capacity:
    """A size, or a percentage of the root's limit."""
    from ucm.config.fields import Capacity  # with pydantic: not before it is needed

    if text.rstrip().endswith("%"):
        return Capacity(percent=percent(text))
    return Capacity(bytes=size(text, ", or a share of the root's limit like 50%"))


def size(text: str, otherwise: str = "") -> int:
    """A number of bytes, ``64MiB``; ``otherwise``: the end of the error."""
    from ucm.config.fields import parse_size  # with pydantic: not before it is needed

    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}{otherwise}") from None


def url(text: str) -> str:
    """The address of a server; ``http://`` may be left out."""
    whole = (text if "://" in text else f"http://{text}").rstrip("/")
    parts = urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise click.BadParameter(f"{text!r} is no address of a server; write http://host:port")
    if parts.path.endswith("/v1"):
        raise click.BadParameter(f"{text!r}: write it without /v1; paths are passed on whole")
    return whole


class MissingExtra(click.ClickException):
    """A package of the extra is not installed."""

    exit_code = 2

    def __init__(self, name: str | None, command: str, extra: str) -> None:
        super().__init__(f"{command} needs {name}: pip install 'ucm-kv[{extra}]'")


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
    from ucm.config.fields import seconds_of  # with pydantic: not before it is needed

    found = seconds_of(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no age; write 90s, 30m, 12h, 7d or 2w")
    return found


def without(words: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Arguments without this one, and its value; None where it is not given."""
    others: list[str] = []
    value: str | None = None
    left = iter(words)
    for word in left:
        key, equals, inline = word.partition("=")
        if key.replace("_", "-") == name:
            value = inline if equals else next(left, "")
        else:
            others.append(word)
    return others, value


_SPANS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
#: A number or a size, which stand on the right of their column.
_NUMBER = re.compile(r"-|[0-9][0-9.]*(?: [KMGTPE]?i?B)?")


def wall_ns() -> int:
    """Nanoseconds since 1970; the one clock of the command line."""
    return time.time_ns()


def span(seconds: float) -> str:
    """A length of time in its largest unit: ``3 hours``."""
    for name, length in _SPANS:
        if seconds >= length:
            return many(int(seconds // length), name)
    return "less than a second"


def ago(then: int | None) -> str:
    """How long ago a time (s since 1970) was, in words; ``-`` for never."""
    if then is None:
        return "-"
    seconds = wall_ns() / 1e9 - then
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def many(count: int, what: str) -> str:
    """``1 record``, ``2 records``."""
    if count == 1:
        return f"1 {what}"
    return f"{count} {what[:-1] + 'ies' if what.endswith('ry') else what + 's'}"


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


def listed(header: Sequence[str], documents: Iterable[Mapping[str, Any]]) -> None:
    """Prints documents as a table, a column for each of these keys: bytes in units, uses in
    words."""

    def cell(name: str, value: Any) -> object:
        if name == "bytes":
            return in_units(value)
        return ago(value) if name.endswith(" use") else value

    rows = [[cell(name, one[name.replace(" ", "_")]) for name in header] for one in documents]
    table(header, rows)


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


def _plain(value: object) -> str:
    """A text without control characters, which names of files may hold."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)
    )


def short(value: object, most: int = 40) -> str:
    """A text of at most ``most`` characters."""
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
