"""Types of the configuration's values: what may be written for them, and their bounds.

Those of tiers are made from the schema that the core gives of each option
(``crates/ucm-tier/src/kind/options.rs``): its JSON type, its ``format`` and its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SkipValidation,
    create_model,
)

from ucm.config.secret import parse_secret
from ucm.config.sizes import (
    Capacity,
    parse_age,
    parse_capacity,
    parse_flag,
    parse_floor,
    parse_heats,
    parse_mode,
    parse_paths,
    parse_size,
)

Schema = Mapping[str, Any]
Reader = Callable[[Any], Any]


S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of all parts of the configuration: no unknown keys, no changes, no values in error
    texts."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, arbitrary_types_allowed=True
    )


def no_flag(value: Any) -> Any:
    """A value that is no flag, which Python would take for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


def word(value: Any) -> Any:
    """A text as words are compared."""
    return value.strip().lower() if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(parse_flag)]
Size = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, BeforeValidator(no_flag), Field(ge=1)]
Number = Annotated[int, BeforeValidator(no_flag), Field(ge=0)]
Milliseconds = Annotated[int, BeforeValidator(no_flag), Field(ge=1, le=3_600_000)]
Seconds = Annotated[float, BeforeValidator(no_flag), Field(gt=0, le=3600, allow_inf_nan=False)]
Port = Annotated[int, BeforeValidator(no_flag), Field(ge=1, le=65535)]


def plain(value: Any) -> Any:
    """A value as it can be written, and as the core reads it, its secrets still hidden
    (:func:`ucm.config.secret.revealed`)."""
    if isinstance(value, Capacity):
        return value.bytes if value.bytes is not None else str(value)
    if isinstance(value, Section):
        return {key: plain(item) for key, item in value}
    return list(value) if isinstance(value, tuple) else value


def choices(schema: Schema) -> tuple[str, ...]:
    """What may be chosen for an option, without the null of one that may be left out; empty for
    others."""
    return tuple(choice for choice in schema.get("enum", ()) if choice is not None)


def json_type(schema: Schema) -> str:
    """The JSON type of an option, without the null of one that may be left out."""
    types = schema["type"]
    return types if isinstance(types, str) else next(name for name in types if name != "null")


def field_of(schema: Schema, default: Any) -> tuple[Any, Any]:
    """Annotation and default of the field that reads an option."""
    if json_type(schema) == "object":
        section: type[Section] = section_of(
            schema.get("title", "Section"), schema["properties"], default
        )
        return section, section()
    kind, read = _reading(schema)
    value = default if default is None else () if default == [] else read(default)
    if "null" in schema["type"]:
        return Annotated[
            Union[kind, None],  # noqa: UP007
            BeforeValidator(partial(unless_none, read)),
            _bounds(schema),
        ], value
    return Annotated[kind, BeforeValidator(read), _bounds(schema)], value


def section_of(
    name: str,
    schemas: Mapping[str, Schema],
    defaults: Mapping[str, Any],
    base: type[S] = Section,  # type: ignore[assignment]
) -> type[S]:
    """A section with a field for each of these options, in the order of their defaults."""
    fields: dict[str, Any] = {key: field_of(schemas[key], value) for key, value in defaults.items()}
    return create_model(name, __base__=base, **fields)


def _reading(schema: Schema) -> tuple[Any, Reader]:
    """Type of an option's value, and what reads it."""
    if several := choices(schema):
        return Literal[several], partial(_choice, several)
    match schema.get("format"):
        case "directories" | "addresses":
            return tuple[SkipValidation[str], ...], parse_paths  # an Address among them stays one
        case "heats":
            return tuple[tuple[str, str], ...], parse_heats
        case "secret":
            return SecretStr, parse_secret
        case "size":
            return int, parse_size
        case "age":
            return int, parse_age
        case "mode":
            return int, partial(parse_mode, needs=schema.get("needs", 0))
        case "amount":
            return Capacity, parse_floor if schema.get("minimum") == 0 else parse_capacity
    match json_type(schema):
        case "boolean":
            return bool, parse_flag
        case "integer":
            return int, no_flag
        case "number":
            return float, no_flag
        case "string":
            return str, _as_written
    raise TypeError(f"no configuration can hold an option like {schema}")


def _bounds(schema: Schema) -> Any:
    if json_type(schema) not in ("integer", "number") or schema.get("format") in (
        "amount",
        "age",
        "mode",
    ):
        return Field()  # whatever reads it has bounds of its own
    names = {"minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt"}
    bounds: dict[str, Any] = {
        short: schema[name] for name, short in names.items() if name in schema
    }
    if json_type(schema) == "number":
        bounds["allow_inf_nan"] = False
    return Field(**bounds)


def _as_written(value: Any) -> Any:
    return value


def unless_none(read: Reader, value: Any) -> Any:
    """What is read, or nothing where nothing is written."""
    return None if value is None else read(value)


def _choice(several: tuple[str, ...], value: Any) -> Any:
    """The choice that is meant, however it is spelled; what is none is refused by its type."""
    # YAML 1.1 reads a bare `off` as false.
    folded = "off" if value is False and "off" in several else word(value)
    return (
        folded
        if folded in several or not isinstance(folded, str)
        else folded.replace("-", "").replace("_", "")
    )
