"""A profile of ucm by Chrome's trace event format, as far as ucm writes it: what Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

NUMBER = {"type": "integer", "minimum": 0}
ALL = {"name": {"type": "string"}, "pid": NUMBER, "tid": NUMBER}
#: The "JSON array" form, and the event types of ucm.
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "ph", "pid", "tid"],
        "oneOf": [
            {
                "properties": ALL | {"ph": {"const": "M"}, "args": {"required": ["name"]}},
                "additionalProperties": False,
            },
            {
                "properties": ALL
                | {"ph": {"const": "X"}, "cat": {"type": "string"}, "ts": NUMBER, "dur": NUMBER}
                | {"args": {"type": "object"}},
                "required": ["ts", "dur", "cat"],
                "additionalProperties": False,
            },
            {
                "properties": ALL
                | {"ph": {"enum": ["b", "e"]}, "cat": {"type": "string"}, "ts": NUMBER}
                | {"id": NUMBER, "args": {"type": "object"}},
                "required": ["ts", "id", "cat"],
                "additionalProperties": False,
            },
        ],
    },
}


def events_of(path: Path) -> list[dict[str, Any]]:
    """All events, which follow the schema, with every span closed; the array of the file is not."""
    text = path.read_text()
    assert text.startswith("[\n") and text.endswith(",\n")
    found: list[dict[str, Any]] = json.loads(f"{text[:-2]}]")
    Draft202012Validator(SCHEMA).validate(found)
    opened = [(one["pid"], one["id"]) for one in found if one["ph"] == "b"]
    closed = [(one["pid"], one["id"]) for one in found if one["ph"] == "e"]
    assert sorted(opened) == sorted(closed)
    assert len(set(opened)) == len(opened)
    return found
