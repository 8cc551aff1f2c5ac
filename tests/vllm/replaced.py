"""Snapshots of vLLM's code in this process, and the changed objects in a later snapshot.

A snapshot holds, by place, the functions, classes, descriptors and other callables of every loaded
module of vLLM, of its classes and of the instances that its modules keep. Entries of their
dictionaries, vLLM's registries among them, belong to it. Snapshots are compared by identity,
independent of the way of assignment.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from functools import cached_property
from types import MappingProxyType, ModuleType
from typing import Any

#: Objects that vLLM itself fills at run time.
_NOT_CODE = frozenset(
    {
        "__annotations__",
        "__builtins__",
        "__dict__",
        "__weakref__",
        "__warningregistry__",
        "_abc_impl",
    }
)
_MISSING = "nothing"


def snapshot() -> dict[str, Any]:
    """The objects of every loaded module of vLLM, by place."""
    found: dict[str, Any] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if isinstance(module, ModuleType) and name.partition(".")[0] == "vllm":
            found[name] = module
            for place, value in _members(name, vars(module)):
                found[place] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update(_members(place, vars(value)))
                elif _is_theirs(value):
                    found.update(_members(place, getattr(value, "__dict__", {})))
    return found


def _members(
    place: str, names: dict[str, Any] | MappingProxyType[str, Any]
) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if name in _NOT_CODE or isinstance(value, ModuleType):
            continue
        if _is_code(value) or _is_theirs(value):
            yield f"{place}.{name}", value
        elif isinstance(value, dict):
            for key, entry in list(value.items()):
                if _is_code(entry) or isinstance(entry, str) or _is_theirs(entry):
                    yield (
                        f"{place}.{name}[{getattr(key, 'name', getattr(key, '__name__', key))}]",
                        entry,
                    )


def _is_code(value: Any) -> bool:
    if isinstance(value, weakref.ref):
        return False
    return callable(value) or isinstance(
        value, property | cached_property | staticmethod | classmethod
    )


def _is_theirs(value: Any) -> bool:
    """True for an instance of a class of vLLM."""
    return not isinstance(value, type) and type(value).__module__.partition(".")[0] == "vllm"


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Places with a changed object, in modules of both snapshots, and a short text of both
    objects."""
    modules = {place for place, value in before.items() if isinstance(value, ModuleType)}

    def module_of(place: str) -> str:
        parts = place.partition("[")[0].split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next(
            (name for name in names if name in modules or isinstance(after.get(name), ModuleType)),
            "",
        )

    return {
        place: f"{before.get(place, _MISSING)!r:.80} -> {after.get(place, _MISSING)!r:.80}"
        for place in sorted(before.keys() | after.keys())
        if before.get(place, _MISSING) is not after.get(place, _MISSING)
        and module_of(place) in modules
    }
