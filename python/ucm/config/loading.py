"""From what a user wrote to one checked configuration.

:func:`load` is for a caller that wants to run, :func:`parse` for one that wants to see. Sources are
a YAML file, vLLM's ``kv_connector_extra_config`` and the environment; the later one wins, key by
key. Each source becomes a :class:`Layer`, which checks only the names of keys and contradictions
within its source. :func:`assemble` lays the layers over each other and makes the model, which
checks the values.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ucm.config.fields import Capacity, check_local, no_flag, parse_flag, scheme_of
from ucm.config.model import STORE_SECTIONS, StoreSettings, UcmConfig, show
from ucm.config.rules import problems_of, word_of
from ucm.config.sparse import BUILT_IN, UncheckedConfig, algorithm_of, algorithms, folded, keys_of
from ucm.config.words import (
    ALIASES,
    BACKEND_WORDS,
    CONFIG_FILE_VARIABLE,
    DEFAULT_STORE,
    DISABLE_VARIABLE,
    ELSEWHERE,
    ENVIRONMENT,
    FOREIGN_STAGES,
    GIBIBYTES,
    INSTEAD,
    KNOWN_STORES,
    MEANINGLESS,
    MEANINGLESS_ENVIRONMENT,
    OPTION_OWNER,
    PIPELINE,
    PLATFORMS,
    SPARSE_ALIASES,
    SPARSE_MEANINGLESS,
    SPARSE_NEEDS,
    SPARSE_WHY,
    STORE_OF_SCHEME,
    STORES,
    UNUSED,
    hint,
    key_hint,
    option_keys,
    options_of,
    store_hint,
    without_effect,
)
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

    def ignore(self, instead: str, *written: str) -> None:
        """Note keys that mean nothing here."""
        keys = self.meaningless.setdefault(instead, [])
        keys += [key for key in written if key not in keys]

    def ignore_as(self, other: Layer) -> None:
        """Note the keys that mean nothing in another layer."""
        for instead, keys in other.meaningless.items():
            self.ignore(instead, *keys)

    def section(
        self, value: Any, written: str, what: str = "is a section with keys below it"
    ) -> Any:
        """``value`` if it is a mapping; else the error that says ``what`` it should be."""
        if not isinstance(value, Mapping):
            raise ConfigError(f'"{written}" in {self.source} {what}, got {type(value).__name__}')
        return value


def store_of_word(word: Any, written: str) -> str:
    """Class name of the store that a backend word, a stage word or a class name means."""
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
        return int(float(no_flag(value)) * (1 << 30))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f'"{written}" in {source} counts GiB: write a number, got {value!r}'
        ) from None


def algorithm_name(value: Any, written: str) -> str:
    """:func:`~ucm.config.sparse.algorithm_of`, but an unknown name is an error with a hint."""
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


def _sections() -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(info.annotation.model_fields)
        for name, info in UcmConfig.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


#: Most entries of `ucm_connectors`.
MAX_CONNECTORS = 8
#: Section of the model -> its keys.
SECTIONS: dict[str, tuple[str, ...]] = _sections()
#: Words of the stage that keeps nothing.
_NOTHING = frozenset({"empty", "ucmemptystore"})
#: Keys that choose a store.
_CHOICE = (
    "ucm_connector_name",
    "ucm_connector_module_path",
    "ucm_connector_config",
    "store_pipeline",
)
#: Keys of the model that are plain values.
PLAIN_KEYS = frozenset(UcmConfig.model_fields) - {*SECTIONS, *_CHOICE[2:], "options"}


def normalise(mapping: Mapping[str, Any], source: str, choice: int = 0) -> Layer:
    """One mapping of any accepted shape; of several ``ucm_connectors`` the one at ``choice``."""
    layer = Layer(source, choice)
    _read(layer, mapping, "")
    _attach_sections(layer)
    _collapse(layer)
    return layer


@functools.cache
def known_keys() -> frozenset[str]:
    """Every key that is accepted at the top of a file."""
    dotted = {f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys}
    known = (
        PLAIN_KEYS | set(SECTIONS) | dotted | set(ALIASES) | set(MEANINGLESS) | set(OPTION_OWNER)
    )
    return known | set(_HANDLERS) | {"ucm_config_path", "UCM_CONFIG_FILE"}


def _read(layer: Layer, mapping: Mapping[str, Any], above: str) -> None:
    for key, value in mapping.items():
        written = f"{above}{key}"
        if not isinstance(key, str):
            raise ConfigError(f'the key "{written}" in {layer.source} is not a text')
        if value is None and (
            key in known_keys() or key.lower() in BACKEND_WORDS or folded(key) in BUILT_IN
        ):
            continue  # `key:` with nothing behind it says nothing
        _read_key(layer, key, value, written)


def _read_key(layer: Layer, key: str, value: Any, written: str) -> None:
    head, _, rest = key.partition(".")
    if key in _HANDLERS:
        _HANDLERS[key](layer, value, written)
    elif key in ALIASES or key in PLAIN_KEYS:
        _put_plain(layer, key, value, written)
    elif key in OPTION_OWNER:
        layer.put(f"options.{key}", value, written)
    elif key in MEANINGLESS:
        layer.ignore(MEANINGLESS[key], written)
    elif key in SECTIONS:
        _read_section(layer, key, value, written)
    elif rest and head in SECTIONS:
        _read_section(layer, head, {rest: value}, head)
    elif key.lower() in BACKEND_WORDS and isinstance(value, Mapping):
        layer.sections[key.lower()] = {"written": written, "keys": value}
    elif folded(key) in BUILT_IN and isinstance(value, Mapping):
        _choose(layer, str(algorithm_of(key)), value, written, layer.source)
    else:
        instead = f"; {INSTEAD[key]}" if key in INSTEAD else key_hint(key, known_keys())
        raise ConfigError(
            f'unknown key "{written}" in {layer.source}{instead}', context={"key": written}
        )


def _put_plain(layer: Layer, key: str, value: Any, written: str) -> None:
    target = ALIASES.get(key, key)
    if target == "storage_capacity" and is_zero(value) and (key == target or key in GIBIBYTES):
        layer.warnings.append(
            f'"{written}: 0" in {layer.source} meant no limit; here space is always bounded and the'
            " default limit holds; write `storage_capacity` as a size or a percentage"
        )
        return
    if key in GIBIBYTES:
        value = gibibytes(value, written, layer.source)
    elif key == "codec" and str(value).strip().lower() == "lz4":
        layer.warnings.append(
            f'"{written}: lz4" in {layer.source} means zstd here; write `codec: zstd`'
        )
        value = "zstd"
    layer.put(target, value, written)


def _read_section(layer: Layer, section: str, value: Any, written: str) -> None:
    if section == "rerope" and isinstance(value, bool):
        value = {"enabled": value}
    if section == "profile" and not isinstance(value, Mapping):
        value = {"enabled": value}
    for key, item in layer.section(value, written).items():
        inner = f"{written}.{key}"
        if key not in SECTIONS[section]:
            raise ConfigError(
                f'unknown key "{inner}" in {layer.source}{hint(str(key), SECTIONS[section])}',
                context={"key": inner},
            )
        if item is None:
            continue
        if section == "sparse" and key == "config":
            # the keys of the one algorithm that `sparse.type` names
            keys = layer.section(item, inner, "holds the keys of the algorithm")
            layer.put("sparse.keys", dict(keys), inner)
            continue
        layer.put(f"{section}.{key}", item, inner)
    if section == "rerope" and "enabled" not in value:
        layer.put("rerope.enabled", True, written)


def read_algorithm(layer: Layer, algorithm: str, keys: Mapping[Any, Any], written: str) -> None:
    """Put the keys of an algorithm's section, which stands at ``written``, into a layer.

    Raises :class:`~ucm.errors.ConfigError` for an unknown key, with the nearest known one.
    """
    section = keys_of(algorithm)
    known, unchecked = section.model_fields, issubclass(section, UncheckedConfig)
    if unchecked and keys:
        layer.warnings.append(
            f'the keys of "{written}" in {layer.source} are not checked: PyTorch is not installed'
        )
    for key, value in keys.items():
        inner = f"{written}.{key}"
        name = SPARSE_ALIASES.get(str(key), str(key))
        if name in known or unchecked:
            if value is not None:  # `key:` with nothing behind it says nothing
                layer.put(f"sparse.config.{algorithm}.{name}", value, inner)
        elif key in SPARSE_MEANINGLESS:
            layer.ignore(SPARSE_MEANINGLESS[key], inner)
        else:
            spellings = [*known, *(other for other, key in SPARSE_ALIASES.items() if key in known)]
            raise ConfigError(
                f'unknown key "{inner}" in {layer.source}{hint(str(key), spellings)} (sparse'
                f" algorithm {algorithm})",
                context={"key": inner},
            )
    # A section without keys is written all the same.
    layer.put(f"sparse.config.{algorithm}", {}, written)


# Shapes
# --------------------------------------------------------------------------------------------------


def _read_connectors(layer: Layer, value: Any, written: str) -> None:
    if isinstance(value, Mapping):
        value = [value]
    if (
        not isinstance(value, list | tuple)
        or not 1 <= len(value) <= MAX_CONNECTORS
        or not all(isinstance(entry, Mapping) for entry in value)
    ):
        raise ConfigError(
            f'"{written}" in {layer.source} is a list of one to {MAX_CONNECTORS}'
            " {ucm_connector_name, ucm_connector_config}, of which the first that is available"
            " is used; stages of one store go into `store_pipeline`"
        )
    layer.entries = len(value)
    place = layer.choice if layer.choice < len(value) else 0
    entry, above = value[place], f"{written}[{place}]"
    allowed = ("ucm_connector_name", "ucm_connector_module_path", "ucm_connector_config")
    for key in entry:
        if key not in allowed:
            raise ConfigError(
                f'unknown key "{above}.{key}" in {layer.source}{hint(str(key), allowed)}'
            )
    if not entry.get("ucm_connector_name"):
        raise ConfigError(f'"{above}" in {layer.source} has no `ucm_connector_name`')
    _read_connector(layer, entry, f"{above}.")


def _read_connector(layer: Layer, entry: Mapping[str, Any], above: str) -> None:
    name = entry.get("ucm_connector_name")
    module = entry.get("ucm_connector_module_path")
    config = entry.get("ucm_connector_config")
    if name is not None:
        if not isinstance(name, str):
            raise ConfigError(
                f'"{above}ucm_connector_name" in {layer.source} is the name of a store, got'
                f" {name!r}"
            )
        layer.put("ucm_connector_name", name, f"{above}ucm_connector_name")
    if module is not None:
        layer.put("ucm_connector_module_path", module, f"{above}ucm_connector_module_path")
    if config is None:
        return
    written = f"{above}ucm_connector_config"
    layer.section(config, written, "holds the keys of the store")
    if module is not None or (name is not None and name not in KNOWN_STORES):
        # A user's own store: its keys are its own business.
        layer.put("ucm_connector_config", dict(config), written)
        return
    _read(layer, config, f"{written}.")


def _read_flat_connector(key: str, layer: Layer, value: Any, written: str) -> None:
    # These three keys belong together wherever they stand; they are read when all are known.
    layer.sections.setdefault("", {})[key] = value
    layer.sections[""]["written"] = written.removesuffix(key)


def _read_backend(layer: Layer, value: Any, written: str) -> None:
    if isinstance(value, Mapping):
        _read_lower_store(layer, value, written)
        return
    layer.put("ucm_connector_name", store_of_word(value, written), written)


def _read_lower_store(layer: Layer, value: Mapping[str, Any], written: str) -> None:
    """``UcmCacheStore {backend: {name, config}}``: a pipeline of the cache and that store."""
    for key in value:
        if key not in ("name", "config"):
            raise ConfigError(
                f'unknown key "{written}.{key}" in'
                f" {layer.source}{hint(str(key), ('name', 'config'))}"
            )
    lower = {"type": value.get("name", DEFAULT_STORE), **(value.get("config") or {})}
    layer.sections["<below>"] = {"written": written, "keys": lower}


def _read_pipeline(layer: Layer, value: Any, written: str) -> None:
    if isinstance(value, str):
        items: list[Any] = [{"type": word.strip()} for word in value.split("|")]
    elif isinstance(value, list | tuple):
        items = [{"type": item} if isinstance(item, str) else item for item in value]
    else:
        items = []
    if not items or not all(isinstance(item, Mapping) and item.get("type") for item in items):
        raise ConfigError(
            f'"{written}" in {layer.source} names stages from top to bottom: write "Cache|Posix",'
            " or a list of {type: ..., path: ...}"
        )
    words = [str(item["type"]).strip().lower() for item in items]
    if words == ["cache"]:
        raise ConfigError(
            f'"{written}" in {layer.source} is Cache alone, which forgets everything with its'
            ' processes; write "Cache|Posix" with a directory, or "Cache|Empty" if that is meant'
        )
    if len(words) > 1 and words[-1] in _NOTHING:
        items = items[:-1]  # nothing lies below the stage above it
    if any(word in _NOTHING for word in words[:-1]):
        raise ConfigError(
            f'"{written}" in {layer.source} has a stage below Empty, which keeps nothing and passes'
            " nothing on; write Empty last or leave it out"
        )
    layer.put(
        "store_pipeline",
        [_stage(layer, item, f"{written}[{i}]") for i, item in enumerate(items)],
        written,
    )


def _stage(layer: Layer, item: Mapping[str, Any], written: str) -> dict[str, Any]:
    """Keys of one stage as the model wants them."""
    inner = Layer(layer.source)
    own = ("type", "write_policy")
    _read(inner, {key: value for key, value in item.items() if key not in own}, f"{written}.")
    _attach_sections(inner)
    stage: dict[str, Any] = {"store": store_of_word(item["type"], f"{written}.type"), "options": {}}
    if item.get("write_policy") is not None:
        stage["write_policy"] = item["write_policy"]
    for key, entry in inner.values.items():
        if key.startswith("options."):
            stage["options"][key.partition(".")[2]] = entry.value
        elif key in StoreSettings.model_fields:
            stage[key] = entry.value
        elif ".quarantine." in entry.written:  # of older versions, where each tier had one
            layer.ignore(f"`{key}` at the top level", entry.written)
        else:
            raise ConfigError(
                f'"{entry.written}" in {layer.source} is no key of a stage; write it at the top'
                " level"
            )
    layer.ignore_as(inner)
    layer.warnings.extend(inner.warnings)
    return stage


def _read_mapping(layer: Layer, value: Any, written: str) -> None:
    _read(layer, layer.section(value, written), f"{written}.")


def _read_quarantine(layer: Layer, value: Any, written: str) -> None:
    """A section of older versions: one key moved to `breaker`, the others mean nothing."""
    for key, item in layer.section(value, written).items():
        _read_key(layer, f"quarantine.{key}", item, f"{written}.{key}")


def _read_nfs_path(layer: Layer, value: Any, written: str) -> None:
    try:
        check_local(str(value))
    except ValueError as error:
        raise ConfigError(f'"{written}" in {layer.source}: {error}') from None
    layer.put("storage_backends", value, written)


def _read_sparse_config(layer: Layer, value: Any, written: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'"{written}" in {layer.source} names algorithms and their keys, e.g. {{GSA: {{...}}}}'
        )
    for key, item in value.items():
        inner = f"{written}.{key}"
        algorithm = algorithm_of(str(key))
        if key in ("sparse_type", "type"):
            layer.put("sparse.type", item, inner)
        elif algorithm is not None and (item is None or isinstance(item, Mapping)):
            _choose(layer, algorithm, item or {}, inner, written)
        elif item is None or isinstance(item, Mapping):
            # A selector of the user's own, which the module that the configuration names registers.
            layer.put(f"sparse.own.{key}", dict(item or {}), inner)
            _first(layer, written).append(str(key))
        else:
            raise unknown_section(str(key), inner, layer.source)


def _read_blending(layer: Layer, value: Any, written: str) -> None:
    if str(value).lower() in ("true", "1"):
        _choose(layer, "Blend", {}, written, written)


def _choose(
    layer: Layer, algorithm: str, keys: Mapping[str, Any], written: str, where: str
) -> None:
    """Keys of an algorithm select it, unless another is named; of several the first is taken."""
    read_algorithm(layer, algorithm, keys, written)
    chosen = _first(layer, where)
    if algorithm not in chosen:
        chosen.append(algorithm)


def _first(layer: Layer, where: str) -> list[str]:
    """The algorithms that have keys, in the order in which they stand in the section ``where``."""
    found: list[str] = layer.values.setdefault("sparse.first", Entry([], layer.source, where)).value
    return found


def _attach_sections(layer: Layer) -> None:
    """Give the sections of stages to their stages, once the whole source has been read."""
    flat = layer.sections.pop("", None)
    if flat is not None:
        _read_connector(layer, flat, flat["written"])
    below = layer.sections.pop("<below>", None)
    if below is not None:
        top = layer.values.get("ucm_connector_name")
        stage = _stage(layer, below["keys"], below["written"])
        store = top.value if top is not None else "UcmCacheStore"
        options = [key for key in layer.values if key.startswith("options.")]
        upper = {
            "store": store,
            "options": {key.partition(".")[2]: layer.values.pop(key).value for key in options},
        }
        layer.values.pop("ucm_connector_name", None)
        layer.put("store_pipeline", [upper, stage], below["written"])
    if not layer.sections:
        return
    pipeline = layer.values.get("store_pipeline")
    stages: list[dict[str, Any]] = pipeline.value if pipeline is not None else []
    for word, section in list(layer.sections.items()):
        store = BACKEND_WORDS[word]
        matching = [stage for stage in stages if stage["store"] == store]
        if not stages:
            # A section alone names the store and holds its keys.
            layer.put("ucm_connector_name", store, section["written"])
            _read(layer, section["keys"], f"{section['written']}.")
        elif not matching:
            names = "|".join(stage["store"] for stage in stages)
            raise ConfigError(
                f'section "{section["written"]}" in {layer.source} has no stage in the pipeline'
                f" {names}"
            )
        else:
            stage = _stage(layer, {"type": word, **section["keys"]}, section["written"])
            matching[0].update({**stage, "options": {**matching[0]["options"], **stage["options"]}})
    layer.sections.clear()


def _collapse(layer: Layer) -> None:
    """A pipeline of one stage is that store."""
    pipeline = layer.values.get("store_pipeline")
    if pipeline is None or len(pipeline.value) != 1:
        return
    del layer.values["store_pipeline"]
    stage = pipeline.value[0]
    name = layer.values.get("ucm_connector_name")
    if name is not None and name.value == PIPELINE:
        del layer.values["ucm_connector_name"]
    layer.put("ucm_connector_name", stage["store"], pipeline.written)
    for key, value in stage.items():
        if key not in ("store", "options"):
            layer.put(key, value, f"{pipeline.written}[0].{key}")
    for key, value in stage["options"].items():
        layer.put(f"options.{key}", value, f"{pipeline.written}[0].{key}")


_HANDLERS: dict[str, Callable[[Layer, Any, str], None]] = {
    "ucm_connectors": _read_connectors,
    **{key: functools.partial(_read_flat_connector, key) for key in _CHOICE[:3]},
    "storage_backend": _read_backend,
    "backend": _read_backend,
    "store_pipeline": _read_pipeline,
    "pipeline": _read_pipeline,
    "storage": _read_mapping,
    "vllm": _read_mapping,
    "nfs_path": _read_nfs_path,
    "quarantine": _read_quarantine,
    "ucm_sparse_config": _read_sparse_config,
    "enable_blending": _read_blending,
}


# Sources
# --------------------------------------------------------------------------------------------------

#: The inline dictionary's name in messages, and its keys that name a file.
INLINE = "kv_connector_extra_config"
FILE_KEYS = ("ucm_config_path", CONFIG_FILE_VARIABLE)
#: Largest file that is read, in bytes.
MAX_FILE_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """SafeLoader that refuses a key written twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key}" is written twice', key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def disabled(environ: Mapping[str, str]) -> bool:
    """Whether ``UCM_DISABLE`` switches everything off."""
    text = environ.get(DISABLE_VARIABLE, "").strip()
    try:
        return parse_flag(text) if text else False
    except ValueError as error:
        raise ConfigError(f"environment {DISABLE_VARIABLE}: {error}") from None


def file_named(inline: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Path of the configuration file, and its source: environment, else inline dictionary."""
    from_environment = environ.get(CONFIG_FILE_VARIABLE, "").strip()
    if from_environment:
        return from_environment, f"environment {CONFIG_FILE_VARIABLE}"
    named = {key: inline[key] for key in FILE_KEYS if inline.get(key) not in (None, "")}
    if len({os.path.abspath(str(path)) for path in named.values()}) > 1:
        raise ConfigError(
            f"{' and '.join(named)} in {INLINE} name different files; keep one of them"
        )
    for key, path in named.items():
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"{key} in {INLINE} is the path of a YAML file, got {path!r}")
        return os.fspath(path), f"{INLINE}.{key}"
    return None


def read_file(path: str, named_by: str, choice: int = 0) -> Layer:
    """The layer of one YAML file, with one of its ``ucm_connectors``."""
    full = os.path.abspath(os.path.expanduser(path))
    try:
        with open(full, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {full} cannot be read: {error.strerror}; it is named by"
            f" {named_by}"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the configuration file {full} is larger than {MAX_FILE_BYTES} bytes; is it the right"
            " one?"
        )
    try:
        content = yaml.load(data.decode("utf-8"), Loader=_Loader)  # noqa: S506 - derives from SafeLoader
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {full} is not UTF-8: {error.reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file {full} is not YAML: {_place(error)}") from None
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"the configuration file {full} holds keys at its top, got {type(content).__name__}"
        )
    for key in FILE_KEYS:
        if key in content:
            raise ConfigError(
                f'"{key}" in file {full} names another file; put the keys into this one'
            )
    return normalise(content, f"file {full}", choice)


def _place(error: yaml.YAMLError) -> str:
    # Only the problem and its place: the text around it may hold a secret.
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it cannot be parsed"
    return (
        str(problem)
        if mark is None
        else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
    )


def read_inline(inline: Mapping[str, Any], choice: int = 0) -> Layer:
    """The layer of the inline dictionary, with one of its ``ucm_connectors``."""
    return normalise(
        {key: value for key, value in inline.items() if key not in FILE_KEYS}, INLINE, choice
    )


def read_environment(environ: Mapping[str, str]) -> Layer:
    """The layer of the environment. Empty variables count as unset."""
    layer = Layer("the environment")
    for name, text in sorted(environ.items()):
        if not (value := text.strip()):
            continue
        if name in ENVIRONMENT:
            _read_variable(layer, name, value)
        elif name in MEANINGLESS_ENVIRONMENT:
            layer.ignore(MEANINGLESS_ENVIRONMENT[name], name)
        elif name.startswith("UCM_") and name not in ELSEWHERE:
            known = [*(n for n in ENVIRONMENT if n.startswith("UCM_")), *ELSEWHERE]
            layer.warnings.append(f"environment {name} is unknown and ignored{hint(name, known)}")
    return layer


def _read_variable(layer: Layer, name: str, value: str) -> None:
    key, origin = ENVIRONMENT[name], f"environment {name}"
    if key == "storage_backend":
        layer.put("ucm_connector_name", store_of_word(value, name), name, origin)
    elif key == "platform":
        platform = PLATFORMS.get(value.lower())
        if platform is None:
            # PLATFORM is a common name: what we do not know was most likely not meant for us.
            layer.warnings.append(
                f'{origin} is "{value}" and ignored; known are {", ".join(PLATFORMS)}'
            )
        else:
            layer.put(key, platform, name, origin)
    elif key.endswith(".enabled") or key == "debug":
        try:
            layer.put(key, parse_flag(value), name, origin)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}") from None
    else:
        layer.put(key, value, name, origin)


# One configuration of all layers
# --------------------------------------------------------------------------------------------------

Values = dict[str, Entry]

#: A build flag in the original, and likely to be set where that was built: alone it names no
#: algorithm.
BUILD_FLAG = "ENABLE_SPARSE"


def assemble(layers: list[Layer]) -> UcmConfig:
    """One configuration of all layers, earliest first."""
    values: Values = {}
    ignored = Layer("all sources")
    warnings: list[str] = []
    for layer in layers:
        _overlay(values, layer)
        warnings += layer.warnings
        ignored.ignore_as(layer)
    _resolve_sparse(values, warnings, ignored)
    if (
        (debug := values.get("debug")) is not None
        and debug.value in (True, 1, "true")
        and "log.level" not in values
    ):
        values["log.level"] = Entry("DEBUG", debug.origin, debug.written)
    _choose_by_address(values)
    options = _options(values, ignored)
    _ignore_unused(values, ignored)
    warnings += [without_effect(keys, instead) for instead, keys in ignored.meaningless.items()]
    config = _build(values, options)
    return config.with_findings(
        origins={key: entry.origin for key, entry in values.items()},
        warnings=tuple(warnings),
        problems=tuple(problems_of(config)),
    )


def _overlay(values: Values, layer: Layer) -> None:
    """Lay a layer over what is there. A later choice of a store replaces an earlier one whole."""
    name, before = layer.values.get("ucm_connector_name"), values.get("ucm_connector_name")
    renamed = name is not None and (before is None or before.value != name.value)
    if renamed or "store_pipeline" in layer.values:
        for key in [key for key in values if key in _CHOICE or key.startswith("options.")]:
            del values[key]
    values.update(layer.values)


def _resolve_sparse(values: Values, warnings: list[str], ignored: Layer) -> None:
    """Which algorithm is meant: the one named, else the first that has keys."""
    first = values.pop("sparse.first", None)
    keys = values.pop("sparse.keys", None)
    path = values.get("sparse.module_path")
    own = [key for key in values if key.startswith("sparse.own.")]
    if path is not None and (own or keys is not None):
        _import_selectors(str(path.value), path.written)
    for key in own:  # selectors that were registered after the configuration was read
        name, section = key.removeprefix("sparse.own."), values.pop(key)
        if (own_one := algorithm_of(name)) is None:
            raise unknown_section(name, section.written, section.origin)
        _read_section_of(values, own_one, section, ignored)
    if first is not None and "sparse.type" not in values:
        chosen = algorithm_of(first.value[0])
        values["sparse.type"] = Entry(chosen, first.origin, first.written)
        if len(first.value) > 1:
            warnings.append(
                f'"{first.written}" holds {", ".join(map(json.dumps, first.value))};'
                f" {first.value[0]} is taken because it stands first; write `sparse_type` to choose"
            )
    kind = values.get("sparse.type")
    # else it is the class of a user's method
    if kind is not None and path is None:
        kind = values["sparse.type"] = replace(kind, value=algorithm_name(kind.value, kind.written))
    if kind is not None and "sparse.enabled" not in values:
        values["sparse.enabled"] = Entry(True, kind.origin, kind.written)
    if keys is not None and kind is not None:
        _read_section_of(values, algorithm_name(kind.value, kind.written), keys, ignored)
    elif keys is not None:
        ignored.ignore("`sparse.type` beside it, which names the algorithm", keys.written)
    if kind is not None:
        _ignore_useless(values, f"sparse.config.{kind.value}", ignored)
    switch = values.get("sparse.enabled")
    if kind is None and switch is not None and switch.written == BUILD_FLAG:
        del values["sparse.enabled"]
        ignored.ignore(
            "UCM_SPARSE_TYPE or `ucm_sparse_config`, which name an algorithm", BUILD_FLAG
        )


def _read_section_of(values: Values, algorithm: str, keys: Entry, ignored: Layer) -> None:
    """The keys of an algorithm, as far as they are not written elsewhere."""
    section = Layer(keys.origin)
    read_algorithm(section, algorithm, keys.value, keys.written)
    for key, entry in section.values.items():
        values.setdefault(key, entry)
    ignored.ignore_as(section)


def _import_selectors(path: str, written: str) -> None:
    """Import a user's module, which may register selectors."""
    try:
        importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(f"{written}: {path} cannot be imported: {error}") from error


def _choose_by_address(values: Values) -> None:
    """An address says which store it is of, where none is named."""
    place = values.get("storage_backends")
    named = {"ucm_connector_name", "ucm_connector_module_path", "store_pipeline"} & values.keys()
    if place is None or named:
        return
    first = place.value[0] if isinstance(place.value, list | tuple) and place.value else place.value
    store = STORE_OF_SCHEME.get(scheme_of(first)) if isinstance(first, str) else None
    if store is not None:
        values["ucm_connector_name"] = Entry(store, place.origin, place.written)


def _ignore_useless(values: Values, section: str, ignored: Layer) -> None:
    """Keys of the chosen algorithm that do nothing without another one, which is not written."""
    for key, needed in SPARSE_NEEDS.items():
        entry = values.get(f"{section}.{key}")
        others = [
            values[name] for name in (f"{section}.{other}" for other in needed) if name in values
        ]
        if entry is not None and all(one.value in (False, 0, "false", "0") for one in others):
            ignored.ignore(SPARSE_WHY[needed[0]], entry.written)


def _ignore_unused(values: Values, ignored: Layer) -> None:
    """Keys that are read and checked, but have no effect yet."""
    name = values.get("ucm_connector_name")
    own = "ucm_connector_module_path" in values or (
        name is not None and name.value not in KNOWN_STORES
    )
    for key, instead in UNUSED.items():
        if key not in values or values[key].value is False:
            continue  # not wanted
        if not (own and key in StoreSettings.model_fields):  # a user's own store gets it
            ignored.ignore(instead, values[key].written)
    pipeline = values.get("store_pipeline")
    for i, stage in enumerate(pipeline.value if pipeline is not None else []):
        for key in UNUSED.keys() & stage.keys():
            ignored.ignore(UNUSED[key], f"store_pipeline[{i}].{key}")
    if "rerope.enabled" not in values:
        for key in [key for key in values if key.startswith("rerope.")]:
            ignored.ignore(
                "`VLLM_USE_REROPE=true` beside it: without it ReRoPE is off", values[key].written
            )


def _options(values: Values, ignored: Layer) -> dict[str, Any]:
    """The keys that only some store has, checked; those of another store have no meaning here."""
    name = (
        str(values["ucm_connector_name"].value) if "ucm_connector_name" in values else DEFAULT_STORE
    )
    pipeline = values.get("store_pipeline")
    stages: list[dict[str, Any]] = pipeline.value if pipeline is not None else []
    allowed = option_keys(name, tuple(stage["store"] for stage in stages))
    used = "|".join(word_of(stage["store"]) for stage in stages) or name
    given: dict[str, Any] = {}
    for key in [key for key in values if key.startswith("options.")]:
        option = key.partition(".")[2]
        if option not in allowed:
            _ignore_option(ignored, option, values.pop(key).written, used)
        elif stages:
            # Written beside the pipeline: it belongs to the stage that has it.
            for stage in stages:
                if option in option_keys(stage["store"]):
                    stage["options"].setdefault(option, values[key].value)
            del values[key]
        else:
            given[option] = values[key].value
    for i, stage in enumerate(stages):
        where = f"store_pipeline[{i}]"
        mine = option_keys(stage["store"])
        for option in [option for option in stage["options"] if option not in mine]:
            del stage["options"][option]
            _ignore_option(ignored, option, f"{where}.{option}", stage["store"])
        origin = pipeline.origin if pipeline is not None else where
        written = {
            option: Entry(value, origin, f"{where}.{option}")
            for option, value in stage["options"].items()
        }
        stage["options"] = _checked_options(stage["store"], stage["options"], written)
    return _checked_options(name, given, {option: values[f"options.{option}"] for option in given})


def _ignore_option(ignored: Layer, option: str, written: str, used: str) -> None:
    """``used``: the store or the stages that are configured, none of which has the key."""
    instead = MEANINGLESS.get(option)
    if instead is None:
        owner = OPTION_OWNER[option]
        below = STORES[used].word.capitalize() if used in STORES else used
        above = f'`store_pipeline: "{word_of(owner)}|{below}"` to keep blocks in memory above it'
        with_it = above if STORES[owner].kind.memory else f"{owner}, whose key it is"
        instead = f"{with_it}, or leave it out: {used} has no such key"
    ignored.ignore(instead, written)


def _checked_options(store: str, given: dict[str, Any], written: Values) -> dict[str, Any]:
    """All keys that this store alone has, checked; ``written``: the places of ``given`` ones."""
    if store not in STORES:
        return {}
    model = options_of(store)
    try:
        made = model(**given)
    except ValidationError as error:
        raise _config_error(error, written) from None
    # of an amount that is no share, the bytes
    values = {key: getattr(made, key) for key in model.model_fields}
    return {
        key: value.bytes if isinstance(value, Capacity) and value.bytes is not None else value
        for key, value in values.items()
    }


def _build(values: Values, options: dict[str, Any]) -> UcmConfig:
    _name_pipeline(values)
    nested: dict[str, Any] = {"options": options} if options else {}
    for key, entry in values.items():
        if key.startswith("options."):
            continue
        head, _, rest = key.partition(".")
        if head == "sparse" and rest.startswith("config."):
            _, algorithm, *keys = rest.split(".")
            section = nested.setdefault("sparse", {}).setdefault("config", {})
            section.setdefault(algorithm, {}).update(dict.fromkeys(keys, entry.value))
        elif rest:
            nested.setdefault(head, {})[rest] = entry.value
        else:
            nested[key] = entry.value
    try:
        return UcmConfig(**nested)
    except ValidationError as error:
        raise _config_error(error, values) from None


def _name_pipeline(values: Values) -> None:
    name, pipeline = values.get("ucm_connector_name"), values.get("store_pipeline")
    if pipeline is None:
        if name is not None and name.value == PIPELINE:
            raise ConfigError(
                f'"{name.written}" ({name.origin}) is UcmPipelineStore, but `store_pipeline` is'
                ' missing: write its stages from top to bottom, e.g. "Cache|Posix"'
            )
        return
    if name is None:
        values["ucm_connector_name"] = Entry(PIPELINE, pipeline.origin, pipeline.written)
    elif name.value != PIPELINE:
        raise ConfigError(
            f'"{name.written}" ({name.origin}) names {name.value}, but "{pipeline.written}" '
            f"({pipeline.origin}) names a pipeline; keep one of them"
        )


def _config_error(error: ValidationError, values: Values) -> ConfigError:
    """The errors of pydantic under the keys that the user wrote."""
    sentences: list[str] = []
    keys: list[str] = []
    for found in error.errors(include_url=False, include_input=False):
        location = [str(part) for part in found["loc"]]
        keys.append(".".join(location))
        message = str(found["msg"]).removeprefix("Value error, ")
        ours = found["type"] == "value_error"
        entry = _written_entry(location, values)
        if entry is None:
            sentences.append(f"{'.'.join(location) or 'the configuration'}: {message}")
            continue
        place = f'"{entry.written}" in {entry.origin}'
        if entry.origin.endswith(f" {entry.written}"):
            place = entry.origin
        if not ours:
            got = show(location[-1], entry.value)
            message = f"{message[:1].lower()}{message[1:]}, got {got}"
        sentences.append(f"{place}: {message}")
    return ConfigError(
        "; ".join(dict.fromkeys(sentences)), context={"keys": ", ".join(dict.fromkeys(keys))}
    )


def _written_entry(location: list[str], values: Values) -> Entry | None:
    for length in range(len(location), 0, -1):
        key = ".".join(location[:length])
        if key in values:
            return values[key]
    below = f"{location[0]}." if location else "."
    return next((entry for key, entry in values.items() if key.startswith(below)), None)


# Several entries of `ucm_connectors`: one configuration with alternatives for its store
# --------------------------------------------------------------------------------------------------

#: Keys that an alternative may set; all others are the engine's and hold whichever store is used.
_OF_STORE = {*StoreSettings.model_fields, *STORE_SECTIONS, *_CHOICE, "options"}


def with_alternatives(first: UcmConfig, others: Sequence[UcmConfig]) -> UcmConfig:
    """``first`` with those of ``others`` that name another store.

    Their warnings and problems become those of the whole: an entry that cannot run in this version
    is an error even if another could, because it would never be tried.
    """
    different: list[UcmConfig] = []
    for other in others:
        if all(_store(other) != _store(known) for known in (first, *different)):
            different.append(other)
    warnings, problems = list(first.warnings), list(first.problems)
    for number, other in enumerate(different, 2):
        warnings += [warning for warning in other.warnings if warning not in warnings]
        problems += [
            f"store {number} of `ucm_connectors`: {text}"
            for text in other.problems
            if text not in problems
        ]
        if engine_keys := _differing(first, other):
            warnings.append(
                f"store {number} of `ucm_connectors` sets {', '.join(engine_keys)}: keys of the"
                " engine are taken from the first entry; write them at the top level"
            )
    return first.with_findings(
        origins=first.origins,
        warnings=tuple(warnings),
        problems=tuple(problems),
        alternatives=tuple(different),
    )


def _store(config: UcmConfig) -> tuple[Any, ...]:
    pipeline = [stage.model_dump() for stage in config.store_pipeline]
    names = config.ucm_connector_name, config.ucm_connector_module_path
    return (*names, config.store_config(), pipeline)


def _differing(first: UcmConfig, other: UcmConfig) -> list[str]:
    """Keys of the engine that an alternative sets to another value."""
    keys = [key for key in UcmConfig.model_fields if key not in _OF_STORE]
    given = {key.partition(".")[0] for key in other.origins}
    return [key for key in keys if key in given and getattr(first, key) != getattr(other, key)]


# The ways in
# --------------------------------------------------------------------------------------------------

_log = logging.getLogger("ucm.config")
_said: set[str] = set()


def load(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> UcmConfig:
    """The effective configuration, ready to run.

    ``extra_config`` is vLLM's ``kv_connector_extra_config``: keys of ucm themselves, or
    ``ucm_config_path`` (also ``UCM_CONFIG_FILE``) naming a YAML file, or both. ``environ`` is the
    environment (None: this process's). Logs every warning once per process. With ``UCM_DISABLE=1``
    nothing is read and ``enabled`` is false. Raises :class:`~ucm.errors.ConfigError` for whatever
    is wrong, unknown, contradictory, missing, or not built yet.
    """
    config = parse(extra_config, environ)
    for warning in config.warnings:
        warn_once(warning)
    config.require_built()
    return config


def config_of(vllm_config: Any) -> UcmConfig:
    """:func:`load` for the configuration inside vLLM's."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return load(getattr(transfer, "kv_connector_extra_config", None) or {})


def parse(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> UcmConfig:
    """As :func:`load`, but without logging; what is not built yet is in ``problems``, no error."""
    env = os.environ if environ is None else environ
    inline = {} if extra_config is None else extra_config
    if not isinstance(inline, Mapping):
        raise ConfigError(f"{INLINE} is a dictionary, got {type(inline).__name__}")
    if disabled(env):
        return UcmConfig(enabled=False).with_findings(
            origins={"enabled": "environment UCM_DISABLE"}
        )
    first, entries = _one(inline, env, 0)
    others = [_one(inline, env, choice)[0] for choice in range(1, entries)]
    return with_alternatives(first, others) if others else first


def _one(inline: Mapping[str, Any], env: Mapping[str, str], choice: int) -> tuple[UcmConfig, int]:
    """The configuration with this entry of ``ucm_connectors``, and how many entries there are."""
    named = file_named(inline, env)
    layers = [read_file(*named, choice)] if named is not None else []
    layers += [read_inline(inline, choice), read_environment(env)]
    return assemble(layers), max(layer.entries for layer in layers)


class UCMConfig:
    """The configuration by the book's name: its two ways in."""

    @staticmethod
    def from_yaml(path: str | os.PathLike[str]) -> UcmConfig:
        """:func:`load` of a file; the environment is later, and wins."""
        return load({"ucm_config_path": os.fspath(path)})

    @staticmethod
    def from_vllm_config(vllm_config: Any) -> UcmConfig:
        """:func:`load` of the extra configuration of vLLM's connector."""
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        if transfer is None:
            raise ConfigError("this engine has no kv_transfer_config")
        return load(transfer.kv_connector_extra_config)


def warn_once(message: str) -> None:
    """Log a warning once per process: both sides of a connector read the configuration."""
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
