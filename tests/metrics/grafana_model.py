"""Checks a dashboard against Grafana's own model: the classes of ``grafana-foundation-sdk``, which
Grafana makes from its schemas, one release for each of its versions.

Their ``from_json`` neither checks types nor reports keys that it does not know, so this module does
both, from the annotations of the classes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()


def mistakes(board: dict[str, Any]) -> list[str]:
    """What Grafana's model does not know of a dashboard, and values of another type."""
    made = Dashboard.from_json(board)
    written = json.loads(json.dumps(made, cls=JSONEncoder))
    return [*_lost(board, written, "dashboard"), *_wrong(made, Dashboard, "dashboard")]


def _lost(given: Any, written: Any, at: str) -> Iterator[str]:
    """Keys that are not written again."""
    if isinstance(given, dict) and isinstance(written, dict):
        for key, value in given.items():
            if key not in written:
                yield f"{at}.{key}: not a key of Grafana's"
            else:
                yield from _lost(value, written[key], f"{at}.{key}")
    elif isinstance(given, list) and isinstance(written, list):
        for number, (one, other) in enumerate(zip(given, written, strict=True)):
            yield from _lost(one, other, f"{at}.{number}")


def _wrong(value: Any, kind: Any, at: str) -> Iterator[str]:
    """Values of another type than the annotations say."""
    outer, inner = get_origin(kind), get_args(kind)
    if isinstance(value, UnknownDataquery):
        yield f"{at}: an unknown source of data"
    elif hasattr(value, "to_json"):  # its own class says more than the annotation
        for name, hint in _hints(type(value)).items():
            yield from _wrong(getattr(value, name), hint, f"{at}.{name}")
    elif outer in (Union, UnionType):
        yield from min((list(_wrong(value, one, at)) for one in inner), key=len)
    elif outer is list and isinstance(value, list):
        for number, one in enumerate(value):
            yield from _wrong(one, inner[0], f"{at}.{number}")
    elif outer is dict and isinstance(value, dict):
        for key, one in value.items():
            yield from _wrong(one, inner[1], f"{at}.{key}")
    elif outer is Literal:
        if value not in inner:
            yield f"{at}: {value!r} is none of {inner}"
    elif isinstance(kind, type) and issubclass(kind, Enum):
        if value not in [one.value for one in kind] and value not in list(kind):
            yield f"{at}: {value!r} is none of {[one.value for one in kind]}"
    elif kind not in (Any, object) and not _is(value, outer or kind):
        yield f"{at}: {value!r} is no {kind}"


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, vars(sys.modules[kind.__module__]))
