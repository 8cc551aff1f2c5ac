"""One layer of configuration: what one source says, and the small readings of single words in
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ucm.config.sparse import algorithm_of, algorithms
from ucm.config.stores import BACKEND_WORDS, FOREIGN_STAGES, KNOWN_STORES
from ucm.config.words import hint, store_hint
from ucm.errors import ConfigError


@dataclass(slots=True)
class Entry:
    """One value as written."""

    value: Any
    origin: str  # "file /etc/ucm.yaml", "kv_connector_extra_config", "environment UCM_IO_DIRECT"
    written: str  # the key as the user spelled it, with the keys above it


@dataclass(slots=True)
class Layer:
    """What one source says."""

    source: str
    choice: int = 0  # which entry of `ucm_connectors` is read
    entries: int = 0  # how many there are
    values: dict[str, Entry] = field(default_factory=dict)
    # what to write instead -> keys as written
    meaningless: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    # stage word -> keys of its section
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, key: str, value: Any, written: str, origin: str | None = None) -> None:
        """Take a value; two spellings of one key must agree."""
        before = self.values.get(key)
        if before is not None and before.value != value:
            raise ConfigError(
                f'"{before.written}" and "{written}" in {self.source} mean the same and differ;'
                " keep one of them"
            )
        if before is None:
            self.values[key] = Entry(value, origin or self.source, written)

    def ignore(self, instead: str, written: str) -> None:
        """Note a key that means nothing here."""
        keys = self.meaningless.setdefault(instead, [])
        if written not in keys:
            keys.append(written)


def store_of_word(word: Any, written: str) -> str:
    """Class name of the store that a backend word, a stage word or a class name names."""
    text = str(word).strip()
    if text in KNOWN_STORES:
        return text
    lowered = text.lower()
    if lowered in BACKEND_WORDS:
        return BACKEND_WORDS[lowered]
    if lowered in FOREIGN_STAGES:
        return text
    raise ConfigError(
        f'"{written}" names the backend "{text}", which ucm does not know'
        f"{store_hint(text, (*BACKEND_WORDS, *KNOWN_STORES))} (known: {', '.join(BACKEND_WORDS)})"
    )


def is_zero(value: Any) -> bool:
    """Whether a number, perhaps as text, is zero."""
    return not isinstance(value, bool) and str(value).strip() in {"0", "0.0"}


def gibibytes(value: Any, written: str, source: str) -> int:
    """Bytes of a number that counts GiB."""
    try:
        if isinstance(value, bool):
            raise ValueError
        size = int(float(value) * (1 << 30))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f'"{written}" in {source} counts GiB: write a number, got {value!r}'
        ) from None
    return size


def algorithm_name(value: Any, written: str) -> str:
    """As :func:`~ucm.config.sparse.algorithm_of`, but an unknown name is an error that shows the
    nearest."""
    algorithm = algorithm_of(str(value))
    if algorithm is None:
        raise ConfigError(
            f'"{written}" names the sparse algorithm "{value}", which ucm does not know'
            f"{hint(str(value), algorithms())}"
        )
    return algorithm


def unknown_section(name: str, written: str, source: str) -> ConfigError:
    """The error for keys of an algorithm that is not registered."""
    return ConfigError(
        f'unknown key "{written}" in {source}{hint(name, ("sparse_type", *algorithms()))}'
    )
