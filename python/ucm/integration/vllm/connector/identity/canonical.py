"""Turns configuration objects into plain JSON values whose text is the same in every process.

Dictionaries are sorted by key, sets by their text, types that JSON lacks become words. Nothing here
depends on the environment, on object addresses, on Python's hash seed or on the order in which a
dictionary was filled.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ucm.errors import InvalidInputError

#: Objects nested deeper than this are taken for a cycle.
MAX_DEPTH = 32

#: Characters of a value shown in a difference.
_SHOWN = 120


def text_of(value: Any) -> str:
    """The one JSON text of a plain value: no spaces, ASCII only. Keys stay in the order they
    have."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON values, nested dictionaries sorted by key.

    Raises :class:`~ucm.errors.InvalidInputError` for an object that has no stable description.
    """
    if depth > MAX_DEPTH:
        raise InvalidInputError(
            "a configuration value is nested too deeply to describe", context={"limit": MAX_DEPTH}
        )
    if isinstance(value, enum.Enum):  # before int and str: many enums are both
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return _sorted({_key(key): plain(item, depth + 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth + 1) for item in value), key=text_of)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _described(value, depth)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two plain values differ: one sentence each, with the dotted path and both values."""
    where = path or "the value"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: list[str] = []
        for key in list(a) + [key for key in b if key not in a]:
            step = f"{path}.{key}" if path else key
            if key not in a or key not in b:
                found.append(f"{step} is {_shown(a, key)} here and {_shown(b, key)} there")
            else:
                found += differences(a[key], b[key], step)
        return found
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return [f"{where} has {len(a)} items here and {len(b)} there"]
        return [
            line
            for i, pair in enumerate(zip(a, b, strict=True))
            for line in differences(*pair, f"{where}[{i}]")
        ]
    # 1 and 1.0 and true are equal in Python, but their JSON texts, and with them the digests, are
    # not.
    if text_of(a) == text_of(b):
        return []
    return [f"{where} is {_short(a)} here and {_short(b)} there"]


def _sorted(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: mapping[key] for key in sorted(mapping)}


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(plain(key))


def _described(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    for method in ("to_dict", "model_dump"):
        describe: Callable[[], Any] | None = getattr(value, method, None)
        if callable(describe):
            return plain(describe(), depth + 1)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields, depth + 1)
    # what a callable object does is not in its attributes
    if hasattr(value, "__dict__") and not callable(value):
        return plain({"": kind.__qualname__, **vars(value)}, depth + 1)
    raise InvalidInputError(
        "a configuration value has no stable description, so no identity can be made from it",
        context={"type": f"{kind.__module__}.{kind.__qualname__}"},
    )


def _name(value: Any) -> str:
    name = f"{value.__module__}.{value.__qualname__}"
    if "<" in name:  # a lambda or a local function: its name does not say what it does
        raise InvalidInputError(
            "a nameless function stands in the configuration, so no identity can be made from it",
            context={"function": name},
        )
    return name


def _shown(mapping: Mapping[str, Any], key: str) -> str:
    return _short(mapping[key]) if key in mapping else "absent"


def _short(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
