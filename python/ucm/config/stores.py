"""The stores and tiers ucm knows by name, with the keys of each: all of it from the registry of the
core.

A new kind of tier is a file and a line there (``crates/ucm-tier/src/builtin/``); nothing here knows
of it by name. What is no kind of tier, a pipeline of several, stands here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ucm._core import tier_kinds
from ucm.config.fields import Schema, Section, json_type, plain, section_of


@dataclass(frozen=True)
class Kind:
    """A kind of tier."""

    #: What the core calls it.
    word: str
    #: ``medium`` keeps blocks, ``layer`` is a word before one that does and sets keys of it,
    #: ``python`` is a store class without the core, ``declared`` is not built yet.
    role: Literal["medium", "layer", "python", "declared"]
    #: Whether it is memory that the processes of a host share.
    memory: bool
    #: What to use instead, of a kind that is not built yet.
    instead: str
    #: Key -> what may be written for it.
    options: Mapping[str, Schema]
    #: Key -> what holds where nothing is written; in the order in which they are shown.
    defaults: Mapping[str, Any]
    #: Keys that must be given.
    required: frozenset[str]

    @property
    def needs_directory(self) -> bool:
        """Whether it keeps blocks in a directory that has to be named."""
        return any(self.options[key].get("format") == "directories" for key in self.required)

    @property
    def schemes(self) -> tuple[str, ...]:
        """What the addresses begin with at which it keeps blocks; empty where it has none."""
        return tuple(
            scheme for schema in self.options.values() for scheme in schema.get("schemes", ())
        )

    @property
    def needs_address(self) -> bool:
        """Whether it keeps blocks at an address that has to be named."""
        return any("schemes" in self.options[key] for key in self.required)


@dataclass(frozen=True)
class StoreName:
    """A store as it is configured: a kind of tier by one of its names."""

    #: The word of a backend and of a pipeline's stage.
    word: str
    #: Name of the class.
    store: str
    #: One line about it, and whether it is built.
    summary: str
    #: Keys that always have these values under this name; of a layer those of the stage below that
    #: says nothing else.
    fixed: Mapping[str, Any]
    kind: Kind

    def told(self, value: Callable[[str], Any]) -> dict[str, Any]:
        """What the core is told of such a tier; ``value`` answers what each key is set to."""
        return {
            "kind": self.kind.word,
            **{key: plain(value(key)) for key in self.kind.defaults},
            **self.fixed,
        }


def _read() -> Iterator[StoreName]:
    for found in json.loads(tier_kinds()):
        options = found["options"]
        kind = Kind(
            found["names"][0]["word"],
            found["role"],
            found["memory"],
            found["instead"] or "",
            options.get("properties", {}),
            found["defaults"],
            frozenset(options.get("required", ())),
        )
        for name in found["names"]:
            yield StoreName(name["word"], name["class"], name["summary"], name["fixed"], kind)


#: Class name -> the store.
STORES: dict[str, StoreName] = {found.store: found for found in _read()}

#: Every kind, in order.
KINDS: tuple[Kind, ...] = tuple({found.kind.word: found.kind for found in STORES.values()}.values())

#: What an address begins with -> the store that keeps blocks there.
STORE_OF_SCHEME: dict[str, str] = {
    scheme: store for store, found in reversed(STORES.items()) for scheme in found.kind.schemes
}

#: The store that is used where none is named. Its keys stand at the top of a configuration and hold
#: for every stage of a pipeline that has them; those of other kinds are options of their store
#: alone.
DEFAULT_STORE: str = next(iter(STORES))
COMMON: Kind = STORES[DEFAULT_STORE].kind

#: The store that puts several tiers together.
PIPELINE = "UcmPipelineStore"

#: Word of a backend or of a pipeline stage, in lower case -> class name of the store.
BACKEND_WORDS: dict[str, str] = {
    **{found.word: found.store for found in STORES.values()},
    "pipeline": PIPELINE,
}

#: Stages of the original that ucm has no store for; they parse so that the answer names them.
FOREIGN_STAGES: tuple[str, ...] = ("delegator", "dram", "yuanrong", "asu")

KNOWN_STORES: frozenset[str] = frozenset(BACKEND_WORDS.values())

BUILT_STORES: frozenset[str] = frozenset(
    {PIPELINE, *(name for name, found in STORES.items() if found.kind.role in ("medium", "python"))}
)

#: Stores that keep their blocks in segments, whatever ``layout`` says.
IN_SEGMENTS: frozenset[str] = frozenset(
    name for name, found in STORES.items() if found.fixed.get("layout") == "segment"
)


def why_not_alone(store: str) -> str:
    """Why this is no store by itself and what to write instead; empty where it is one."""
    found = STORES.get(store)
    if found is None or found.kind.role != "layer":
        return ""
    word = found.word.capitalize()
    return (
        f'{word} keeps nothing itself; write it before the stage it is for: "{word}|Pc", or'
        f' "Cache|{word}|Pc"'
    )


def instead_of(store: str) -> str:
    """What to write today instead of a store that is not built yet; empty where nothing is
    known."""
    return STORES[store].kind.instead if store in STORES else ""


def needs_directory(store: str) -> bool:
    """Whether this store keeps its blocks in a directory that has to be named."""
    return store in STORES and STORES[store].kind.needs_directory


def schemes_of(store: str) -> tuple[str, ...]:
    """What the addresses of this store begin with; empty where it has none."""
    return STORES[store].kind.schemes if store in STORES else ()


def needs_address(store: str) -> bool:
    """Whether this store keeps its blocks at an address that has to be named."""
    return store in STORES and STORES[store].kind.needs_address


def own_keys(kind: Kind) -> dict[str, Any]:
    """The keys of a kind that do not stand at the top of a configuration, with their defaults."""
    return {key: default for key, default in kind.defaults.items() if key not in COMMON.defaults}


@functools.cache
def options_of(store: str) -> type[Section]:
    """The keys that this store has beside the common ones, as a section that reads and checks
    them."""
    kind = STORES[store].kind
    return section_of(f"{store}Options", kind.options, own_keys(kind))


#: Key that only some stores have -> the first of them.
OPTION_OWNER: dict[str, str] = {
    key: name for name, found in reversed(STORES.items()) for key in own_keys(found.kind)
}


def option_keys(store: str, stages: tuple[str, ...] = ()) -> frozenset[str]:
    """Keys beside the common ones that ``store``, or one of its pipeline's ``stages``, takes."""
    return frozenset(
        key for name in (store, *stages) if name in STORES for key in own_keys(STORES[name].kind)
    )


def _leaves(schemas: Mapping[str, Schema], above: str = "") -> Iterator[tuple[str, Schema]]:
    for key, schema in schemas.items():
        if json_type(schema) == "object":
            yield from _leaves(schema["properties"], f"{above}{key}.")
        else:
            yield f"{above}{key}", schema


def _all_leaves() -> Iterator[tuple[str, str, Schema]]:
    """Every key of every kind: as it is written, as the model has it, and its schema."""
    for kind in KINDS:
        for key, schema in _leaves(kind.options):
            yield key, key if key.partition(".")[0] in COMMON.defaults else f"options.{key}", schema


#: Other spelling -> key of the model; of those in :data:`TIER_GIBIBYTES` the number counts GiB.
TIER_ALIASES: dict[str, str] = {
    other: target
    for _, target, schema in _all_leaves()
    for spellings in ("aliases", "aliases_gib")
    for other in schema.get(spellings, ())
}
TIER_GIBIBYTES: frozenset[str] = frozenset(
    other for _, _, schema in _all_leaves() for other in schema.get("aliases_gib", ())
)

#: Environment name -> key of the model.
TIER_ENVIRONMENT: dict[str, str] = {
    name: target for _, target, schema in _all_leaves() for name in schema.get("env", ())
}

#: Keys whose values are flags, sizes or permission bits, and what is said of those for which
#: nothing is given.
TIER_FLAGS: frozenset[str] = frozenset(
    key for key, _, schema in _all_leaves() if json_type(schema) == "boolean"
)
TIER_SIZES: frozenset[str] = frozenset(
    key for key, _, schema in _all_leaves() if schema.get("format") in ("size", "amount")
)
TIER_MODES: frozenset[str] = frozenset(
    key for key, _, schema in _all_leaves() if schema.get("format") == "mode"
)
TIER_UNSET: dict[str, str] = {
    key: schema["unset"] for key, _, schema in _all_leaves() if "unset" in schema
}
