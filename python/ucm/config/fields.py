"""Values of the configuration: how each is read, its type and its bounds, and which are secrets.

A reader raises :class:`ValueError` with a sentence that says what was read and what is accepted;
the loader adds the key and where it stands. The fields of tiers are made from the schema that the
core gives of each option: its JSON type, its ``format`` and its bounds.

A password is a :class:`pydantic.SecretStr`, an address with a login an :class:`Address`. Both show
asterisks in ``str``, ``repr``, logs and dumps, and keep their value until :func:`revealed`, which
is called where a configuration leaves ucm's Python: for the core, and for a user's own store.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SkipValidation,
    ValidationError,
    create_model,
)

from ucm.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{letter: 1024**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:%|percent)\s*")
_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d|w)\s*")
_AGES = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NFS_ADDRESS = re.compile(
    r"(?P<server>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:]+\]):(?P<directory>/[^:]*)"
)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
#: User and password of an address, up to the last ``@``; the password follows the first colon.
_LOGIN = re.compile(r"(?<=://)(?P<user>[^\s:@/]*:)?.*(?=@)", re.DOTALL)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

#: What stands in the place of a secret, and of a password in an address.
HIDDEN = "<hidden>"
_ASTERISKS = "***"

#: The largest size that is accepted, in bytes: what a signed 64-bit offset can name.
MAX_SIZE = 2**63 - 1


def parse_size(value: Any) -> int:
    """Bytes of ``123``, ``"40GiB"``, ``"40 GB"`` (powers of 1000) or ``"40G"`` (powers of 1024)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size; write bytes as a number, or a text like 40GiB")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        factor = _UNITS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError(
                f"{value!r} is not a size; write bytes as a number, or a text like 40GiB, 512MiB,"
                " 1.5TB"
            )
        # Whole numbers stay exact; a fraction is rounded down to whole bytes.
        size: int | float = (
            int(match[1]) * factor if match[1].isdigit() else float(match[1]) * factor
        )
    else:
        size = value
    if isinstance(size, float):
        if not math.isfinite(size):
            raise ValueError(f"{value!r} is not a size; it must be finite")
        size = int(size)
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"{value!r} is not a size; it must be at least 0 and below 8EiB")
    return size


@dataclass(frozen=True, slots=True)
class Capacity:
    """A limit of stored bytes: a number of bytes, or a share of the file system in percent."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, total: int) -> int:
        """The limit in bytes, on a file system of ``total`` bytes."""
        return self.bytes if self.bytes is not None else int(total * (self.percent or 0.0) / 100)

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent is not None else show_size(self.bytes or 0)


def parse_capacity(value: Any) -> Capacity:
    """A size as of :func:`parse_size`, or ``"20%"`` of the file system (above 0, at most 100)."""
    if isinstance(value, Capacity):
        return value
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise ValueError(
                f"{value!r} is not a share of a file system; write more than 0% and at most 100%"
            )
        return Capacity(percent=percent)
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or a share of the file system like 20%") from None
    if size == 0:
        raise ValueError(
            "a capacity of 0 would keep nothing; write a size or a percentage, or leave it out"
        )
    return Capacity(bytes=size)


def parse_floor(value: Any) -> Capacity:
    """What :func:`parse_capacity` reads, or 0: no floor."""
    if not isinstance(value, bool) and str(value).strip().rstrip("%").strip() in {"0", "0.0"}:
        return Capacity(bytes=0)
    return parse_capacity(value)


def seconds_of(value: Any) -> float | None:
    """Seconds of a text like ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``; None for another."""
    match = _AGE.fullmatch(value.lower()) if isinstance(value, str) else None
    return None if match is None else float(match[1]) * _AGES[match[2]]


def parse_age(value: Any) -> int:
    """Whole seconds, at least 60, of a number or a text: ``90min``, ``12h``, ``30d``, ``2w``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    seconds = float(value) if number else seconds_of(value)
    if seconds is None or not 60 <= seconds <= 100 * 365 * 86400:
        raise ValueError(
            f"{value!r} is not an age; write seconds (at least 60), or a text like 12h, 30d, 2w"
        )
    return int(seconds)


def parse_flag(value: Any) -> bool:
    """``True`` of true, 1, yes, on (in any case); ``False`` of false, 0, no, off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, int | str) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither true (true, 1, yes, on) nor false (false, 0, no, off)")


def parse_paths(value: Any) -> tuple[str, ...]:
    """Directories of one path, of ``"a:b:c"``, or of a list; made absolute, ``~`` expanded, order
    kept. An address (``scheme://...``) stays as it is."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        check_local(text)
        pieces: Sequence[Any] = (
            [text] if scheme_of(text) else [part for part in text.split(":") if part]
        )
        for piece, following in itertools.pairwise(pieces):
            check_local(f"{piece}:{following}")
            if scheme_of(f"{piece}:{following}"):
                raise ValueError(
                    f"{without_login(text)!r} has an address among directories; write a list,"
                    " [/some/directory, s3://...]"
                )
    elif isinstance(value, list | tuple):
        pieces = value
    else:
        kind = type(value).__name__
        raise ValueError(f"this {kind} is not a directory; write a path, a:b:c, or a list of paths")
    paths: list[str] = []
    for piece in pieces:
        if not isinstance(piece, str | os.PathLike) or not os.fspath(piece):
            kind = "empty text" if piece == "" else type(piece).__name__
            raise ValueError(
                f"this {kind} is not a directory; write a path, a:b:c, or a list of paths"
            )
        check_local(os.fspath(piece))
        text = os.fspath(piece)
        if not scheme_of(text):
            path = os.path.abspath(os.path.expanduser(text))
        elif has_login(text) and not isinstance(text, Address):
            path = Address(text)
        else:
            path = text
        if path not in paths:
            paths.append(path)
    if not paths:
        raise ValueError("it names no directory; write a path, a:b:c, or a list of paths")
    return tuple(paths)


def scheme_of(place: str) -> str:
    """The scheme of an address, in lower case; empty for a path."""
    match = _URL.match(place)
    return match["scheme"].lower() if match else ""


def without_login(text: str) -> str:
    """A text of one address with its password replaced: ``redis://user:***@host``. A login without
    a colon may be one secret and is replaced whole."""
    return _LOGIN.sub(lambda login: (login["user"] or "") + _ASTERISKS, text)


def has_login(text: str) -> bool:
    """Whether a text has an address with a login in it."""
    return _LOGIN.search(text) is not None


class Address(str):
    """An address with a login. Its text shows no password; :attr:`written` is for
    :func:`revealed`."""

    __slots__ = ("written",)

    written: str

    def __new__(cls, written: str) -> Address:
        """The address that was ``written``, with its login."""
        address = super().__new__(cls, without_login(written))
        address.written = written
        return address

    def __eq__(self, other: object) -> bool:
        return self.written == (other.written if isinstance(other, Address) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.written)

    def __reduce__(self) -> tuple[type[Address], tuple[str]]:
        return Address, (self.written,)


#: The speeds that a directory can have.
HEATS: tuple[str, ...] = ("hot", "warm", "cold")


def parse_heats(value: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of absolute path and speed, of ``{/mnt/ssd: hot, /mnt/nfs: cold}`` or of pairs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise ValueError(
            f"{value!r} says of no directory how fast it is; write {{/mnt/ssd: hot, /mnt/nfs:"
            " cold}"
        )
    heats: dict[str, str] = {}
    for directory, heat in pairs:
        (path,) = parse_paths([directory])
        said = heat.strip().lower() if isinstance(heat, str) else heat
        if said not in HEATS:
            raise ValueError(
                f"{heat!r} of {path} is no word for how fast it is; write {', '.join(HEATS)}"
            )
        if heats.setdefault(path, said) != said:
            raise ValueError(f"{path} is both {heats[path]} and {said}; keep one of them")
    return tuple(heats.items())


def check_local(path: str) -> None:
    """Refuse what looks like a directory and is none of this machine: ``server:/dir``."""
    if not scheme_of(path) and _NFS_ADDRESS.match(path):
        raise ValueError(
            f"{path!r} is an NFS address, not a directory; mount it (mount -t nfs {path} /mnt/kv)"
            " and give the mount point (storage_backends: /mnt/kv)"
        )


def show_size(size: int) -> str:
    """The shortest exact text of a size: ``256MiB``, else the bytes."""
    for power, letter in reversed(tuple(enumerate("KMGTP", start=1))):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{letter}iB"
    return str(size)


def parse_mode(value: Any, needs: int) -> int:
    """Permission bits of ``"0660"`` (octal, as for chmod), or of a number below 0o1000, which YAML
    makes of ``0660``. The bits in ``needs`` must be among them."""
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{3,4}", value.strip()):
        mode = int(value.strip().removeprefix("0o"), 8)
    elif isinstance(value, int) and not isinstance(value, bool):
        mode = value
    else:
        raise ValueError(f'{value!r} is not a mode; write it in octal and in quotes, like "0660"')
    if not 0 <= mode <= 0o777:
        raise ValueError(
            f"{value!r} is not a mode between 0 and 0777; write it in octal and in quotes, like"
            ' "0660"'
        )
    if mode & needs != needs:
        raise ValueError(
            f"mode {mode:04o} locks its owner out; it must have at least the bits of {needs:04o}"
        )
    return mode


#: Names of keys whose values are never shown.
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|private_?key|access_?key|api_?key|(^|[_.-])(auth|token|key)$|auth_?token",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a key of this name holds something that must not be printed."""
    return _SECRET_NAME.search(name) is not None


def parse_secret(value: Any) -> SecretStr:
    """A text that is never shown."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise ValueError("a text is expected; put a number in quotes")
    return SecretStr(value)


def concealed(value: Any, secret: bool = False) -> Any:
    """A value as written, with every secret text in it, by its key's name or as a login in an
    address, in a form that shows none."""
    if isinstance(value, Mapping):
        return {key: concealed(item, secret or is_secret(str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(concealed(item, secret) for item in value)
    if isinstance(value, Address) or not isinstance(value, str):
        return value
    if secret:
        return SecretStr(value)
    return Address(value) if has_login(value) else value


def revealed(value: Any) -> Any:
    """The same value with its secrets as they were written; it must not be kept or shown."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Address):
        return value.written
    if isinstance(value, Mapping):
        return {key: revealed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(revealed(item) for item in value)
    return value


def for_core(description: Mapping[str, Any]) -> str:
    """A description of a store or of a place as JSON for the core."""
    return json.dumps(revealed(description), ensure_ascii=False)


#: Mode bits of all users but the owner.
_OTHERS = 0o077


def read_secret(path: str, what: str, most: int) -> bytes:
    """At most ``most`` bytes of a file that holds a secret; ``what`` is its name in the
    configuration. Raises :class:`OSError`, and :class:`~ucm.errors.ConfigError` for a file of our
    own that other users may read; the core checks the same. A file of another owner, whose mode may
    be out of our control, is read with a warning."""
    full = os.path.expanduser(path)
    with open(full, "rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if mode & _OTHERS:
            wrong = (
                f"{what} is a secret, and its file {full} is open to other users (mode {mode:04o})"
            )
            if found.st_uid == os.geteuid():
                raise ConfigError(
                    f"{wrong}: run chmod 600 {full} (where Kubernetes mounts it: defaultMode: 0400)"
                )
            logging.getLogger("ucm.store").warning(
                "%s; it belongs to another user and is used all the same: let its owner run chmod"
                " 600 %s",
                wrong,
                full,
            )
        return file.read(most)


Schema = Mapping[str, Any]
Reader = Callable[[Any], Any]


S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of all sections: no unknown keys, no changes, no values in error texts."""

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
    """A value as it can be written and as the core reads it; its secrets are still hidden."""
    if isinstance(value, Capacity):
        return value.bytes if value.bytes is not None else str(value)
    if isinstance(value, Section):
        return {key: plain(item) for key, item in value}
    return list(value) if isinstance(value, tuple) else value


def choices(schema: Schema) -> tuple[str, ...]:
    """What may be chosen for an option, without null; empty for others."""
    return tuple(choice for choice in schema.get("enum", ()) if choice is not None)


def json_type(schema: Schema) -> str:
    """The JSON type of an option, without null."""
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
    field: Any = Annotated[kind, BeforeValidator(read), _bounds(schema)]
    return (field | None if "null" in schema["type"] else field), value


def section_of(
    name: str,
    schemas: Mapping[str, Schema],
    defaults: Mapping[str, Any],
    base: type[S] = Section,  # type: ignore[assignment]
) -> type[S]:
    """A section with a field for each of these options, in the order of their defaults."""
    fields: dict[str, Any] = {key: field_of(schemas[key], value) for key, value in defaults.items()}
    return create_model(name, __base__=base, **fields)


def config_error(error: ValidationError, **context: Any) -> ConfigError:
    """The first thing that is wrong: the key, and what pydantic says."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", context=context)


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
            return str, lambda value: value
    raise TypeError(f"no configuration can hold an option like {schema}")


def _bounds(schema: Schema) -> Any:
    if json_type(schema) not in ("integer", "number") or schema.get("format") in (
        "amount",
        "age",
        "mode",
    ):
        return Field()  # its reader has bounds of its own
    names = {"minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt"}
    bounds: dict[str, Any] = {
        short: schema[name] for name, short in names.items() if name in schema
    }
    if json_type(schema) == "number":
        bounds["allow_inf_nan"] = False
    return Field(**bounds)


def _choice(several: tuple[str, ...], value: Any) -> Any:
    """The choice that is meant, however it is spelled; any other value is refused by its type."""
    # YAML 1.1 reads a bare `off` as false.
    folded = "off" if value is False and "off" in several else word(value)
    if folded in several or not isinstance(folded, str):
        return folded
    return folded.replace("-", "").replace("_", "")
