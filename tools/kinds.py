"""Writes the tables of docs/configuration*.md that come from the registry of kinds of tiers: the
stores, and the keys of each kind.

Run it after a change of a kind or one of its options, with the core built; with ``--check`` it only
checks that the pages are up to date (a test does that). A table stands between ``<!-- <name>: made
by tools/kinds.py -->`` and ``<!-- end -->``; every kind that has keys needs one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page

from ucm.config.fields import Schema, choices, json_type, show_size
from ucm.config.words import COMMON, KINDS, PIPELINE, STORES, Kind, own_keys

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.glob("configuration*.md"))
TABLE = page.tables_of("kinds.py")
#: The unit of a value of each format, if the option has none itself.
UNITS = {
    "directories": "path",
    "size": "size",
    "amount": "size or percent",
    "age": "at least 60 s, or `12h`, `30d`, `2w`",
    "mode": "octal, in quotes",
}
UNITS_OF_TYPES = {"boolean": "flag", "string": "text", "integer": "number", "number": "number"}


def stores() -> Iterator[str]:
    """The table of all stores."""
    yield "| word | store | state |"
    yield "|---|---|---|"
    for found in STORES.values():
        yield f"| {found.word} | `{found.store}` | {found.summary} |"
    yield f"| pipeline | `{PIPELINE}` | built: several stages as one, with `store_pipeline` |"


def keys(kind: Kind, section: str = "") -> Iterator[str]:
    """The table of a kind's keys, or of one section of them."""
    yield "| key | default | unit | meaning |"
    yield "|---|---|---|---|"
    schemas, defaults = kind.options, keys_of(kind)
    if section:
        schemas, defaults = schemas[section]["properties"], defaults[section]
    for key, default in defaults.items():
        schema = schemas[key]
        if json_type(schema) == "object":
            continue  # a table of its own
        shown = "none, required" if key in kind.required else default_of(schema, default)
        name = f"{section}.{key}" if section else key
        yield f"| `{name}` | {shown} | {unit_of(schema)} | {meaning_of(schema)} |"


def keys_of(kind: Kind) -> dict[str, Any]:
    """The keys of a kind with their defaults, except those of every store."""
    return dict(kind.defaults) if kind is COMMON else own_keys(kind)


def default_of(schema: Schema, default: Any) -> str:
    """A default in its written form."""
    if default is None or default == []:
        return str(schema.get("unset", "none"))
    if isinstance(default, bool):
        return str(default).lower()
    if schema.get("format") == "mode":
        return f"{default:04o}"
    if schema.get("format") in ("size", "amount") and isinstance(default, int):
        return show_size(default)
    return f"{default:.15g}" if isinstance(default, int | float) else default or "empty"


def unit_of(schema: Schema) -> str:
    """The unit of an option, with its bounds."""
    if several := choices(schema):
        return ", ".join(several)
    unit = (
        schema.get("unit")
        or UNITS.get(schema.get("format", ""))
        or UNITS_OF_TYPES[json_type(schema)]
    )
    least, most = schema.get("minimum", 0), schema.get("maximum")
    if json_type(schema) not in ("integer", "number") or schema.get("format") in (
        "mode",
        "age",
        "amount",
    ):
        return str(unit)
    show = show_size if schema.get("format") == "size" else str
    if least > 1 and most is not None:
        return f"{unit}, {show(least)} to {show(most)}"
    if least > 1 or least < 0:
        return f"{unit}, at least {show(least)}"
    return f"{unit}, at most {show(most)}" if most is not None else str(unit)


def meaning_of(schema: Schema) -> str:
    """The meaning of an option, and its other spellings."""
    others = [f"`{name}`" for name in (*schema.get("aliases", ()), *schema.get("env", ()))]
    others += [f"`{name}` (a number of GiB)" for name in schema.get("aliases_gib", ())]
    meaning = " ".join(schema["description"].split()).replace("|", "\\|")
    return f"{meaning}. Also {', '.join(others)}" if others else meaning


def tables() -> dict[str, str]:
    """Every table by its name."""
    made = {"stores": stores()}
    for kind in KINDS:
        types = {key: json_type(kind.options[key]) for key in keys_of(kind)}
        if any(found != "object" for found in types.values()):
            made[f"keys of {kind.word}"] = keys(kind)
        for key, found in types.items():
            if found == "object":
                made[f"keys of {kind.word}.{key}"] = keys(kind, key)
    return {name: "\n".join(lines) + "\n" for name, lines in made.items()}


def written(text: str) -> str:
    """A page with new tables. Raises LookupError if the pages together lack one, or have an unknown
    one or one twice."""
    made = tables()
    standing = [found["name"] for path in PAGES for found in TABLE.finditer(path.read_text())]
    if sorted(standing) != sorted(made):
        missing, unknown = sorted(set(made) - set(standing)), sorted(set(standing) - set(made))
        raise LookupError(
            f"tables missing: {missing}, unknown: {unknown}, twice:"
            f" {len(standing) - len(set(standing))}"
        )
    return TABLE.sub(lambda found: f"{found[1]}{made[found['name']]}{found[4]}", text)


if __name__ == "__main__":
    sys.exit(page.run(__doc__, PAGES, "kinds.py", written))
