"""From any shape a user may write to one flat layer of keys of the model.

A :class:`Layer` is what one source (a file, the inline dictionary, the environment) says: key of
the model -> the value as written, and where it stands. Nothing is checked here but the names of
keys and contradictions within one source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from ucm.config.layer import (
    Entry,
    Layer,
    gibibytes,
    is_zero,
    store_of_word,
    unknown_section,
)
from ucm.config.model import StoreSettings, UcmConfig
from ucm.config.sizes import check_local
from ucm.config.sparse import BUILT_IN, algorithm_of, folded
from ucm.config.sparse_keys import read_algorithm
from ucm.config.stores import BACKEND_WORDS, DEFAULT_STORE, KNOWN_STORES, OPTION_OWNER, PIPELINE
from ucm.config.words import (
    ALIASES,
    GIBIBYTES,
    MEANINGLESS,
    PLATFORMS,
    hint,
    key_hint,
)
from ucm.errors import ConfigError


def _sections() -> dict[str, tuple[str, ...]]:
    found = {}
    for name, info in UcmConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found[name] = tuple(info.annotation.model_fields)
    return found


#: Most entries of `ucm_connectors`.
MAX_CONNECTORS = 8
#: Section of the model -> its keys.
SECTIONS: dict[str, tuple[str, ...]] = _sections()
#: Words of the stage that keeps nothing.
_NOTHING = frozenset({"empty", "ucmemptystore"})
#: Keys of the model that are plain values.
PLAIN_KEYS: frozenset[str] = frozenset(
    set(UcmConfig.model_fields)
    - set(SECTIONS)
    - {"ucm_connector_config", "options", "store_pipeline"}
)


def normalise(mapping: Mapping[str, Any], source: str, choice: int = 0) -> Layer:
    """Read one mapping of any of the accepted shapes; of several ``ucm_connectors`` the one at
    ``choice``."""
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
    elif key in ALIASES:
        _read_alias(layer, key, value, written)
    elif key in PLAIN_KEYS:
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
        raise ConfigError(
            f'unknown key "{written}" in {layer.source}{key_hint(key, known_keys())}',
            context={"key": written},
        )


def _put_plain(layer: Layer, key: str, value: Any, written: str) -> None:
    if key == "platform":
        word = str(value).strip().lower()
        if word not in PLATFORMS:
            raise ConfigError(
                f'"{written}" names the platform "{value}"; known are {", ".join(PLATFORMS)}'
            )
        value = PLATFORMS[word]
    if key == "storage_capacity" and is_zero(value):
        _unbounded(layer, written)
        return
    layer.put(key, value, written)


def _read_alias(layer: Layer, key: str, value: Any, written: str) -> None:
    target = ALIASES[key]
    if key in GIBIBYTES:
        if target == "storage_capacity" and is_zero(value):
            _unbounded(layer, written)
            return
        value = gibibytes(value, written, layer.source)
    layer.put(target, value, written)


def _unbounded(layer: Layer, written: str) -> None:
    layer.warnings.append(
        f'"{written}: 0" in {layer.source} meant no limit; here space is always bounded and the'
        " default limit holds; write `storage_capacity` as a size or a percentage"
    )


def _read_section(layer: Layer, section: str, value: Any, written: str) -> None:
    if section == "rerope" and isinstance(value, bool):
        value = {"enabled": value}
    if section == "profile" and not isinstance(value, Mapping):
        value = {"enabled": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'"{written}" in {layer.source} is a section with keys below it, got'
            f" {type(value).__name__}"
        )
    for key, item in value.items():
        inner = f"{written}.{key}"
        if key not in SECTIONS[section]:
            raise ConfigError(
                f'unknown key "{inner}" in {layer.source}{hint(str(key), SECTIONS[section])}',
                context={"key": inner},
            )
        if item is None:
            continue
        if section == "sparse" and key == "config":
            _read_sparse_keys(layer, item, inner)
            continue
        layer.put(f"{section}.{key}", item, inner)
    if section == "rerope" and "enabled" not in value:
        layer.put("rerope.enabled", True, written)


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
    if not isinstance(config, Mapping):
        raise ConfigError(
            f'"{written}" in {layer.source} holds the keys of the store, got'
            f" {type(config).__name__}"
        )
    if module is not None or (name is not None and name not in KNOWN_STORES):
        # A user's own store: its keys are its own business.
        layer.put("ucm_connector_config", dict(config), written)
        return
    _read(layer, config, f"{written}.")


def _read_flat_connector(key: str) -> Callable[[Layer, Any, str], None]:
    def read(layer: Layer, value: Any, written: str) -> None:
        # These three keys belong together wherever they stand; they are read when all are known.
        layer.sections.setdefault("", {})[key] = value
        layer.sections[""]["written"] = written.removesuffix(key)

    return read


def _read_backend(layer: Layer, value: Any, written: str) -> None:
    if isinstance(value, Mapping):
        _read_lower_store(layer, value, written)
        return
    layer.put("ucm_connector_name", store_of_word(value, written), written)


def _read_lower_store(layer: Layer, value: Mapping[str, Any], written: str) -> None:
    """``UcmCacheStore {backend: {name, config}}``: the cache above another store, which is a
    pipeline of two."""
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
        else:
            raise ConfigError(
                f'"{entry.written}" in {layer.source} is no key of a stage; write it at the top'
                " level"
            )
    for instead, keys in inner.meaningless.items():
        for ignored in keys:
            layer.ignore(instead, ignored)
    layer.warnings.extend(inner.warnings)
    return stage


def _read_mapping(layer: Layer, value: Any, written: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'"{written}" in {layer.source} is a section with keys below it, got'
            f" {type(value).__name__}"
        )
    _read(layer, value, f"{written}.")


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


def _choose(
    layer: Layer, algorithm: str, keys: Mapping[str, Any], written: str, where: str
) -> None:
    """Keys of an algorithm say that it is wanted, unless another is named; of several the first
    that stands there."""
    read_algorithm(layer, algorithm, keys, written)
    chosen = _first(layer, where)
    if algorithm not in chosen:
        chosen.append(algorithm)


def _first(layer: Layer, where: str) -> list[str]:
    """The algorithms that have keys, in the order in which they stand in the section ``where``."""
    found: list[str] = layer.values.setdefault("sparse.first", Entry([], layer.source, where)).value
    return found


def _read_sparse_keys(layer: Layer, value: Any, written: str) -> None:
    """``sparse: {type, config: {...}}``: keys of the one algorithm that ``type`` names."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'"{written}" in {layer.source} holds the keys of the algorithm, got'
            f" {type(value).__name__}"
        )
    layer.put("sparse.keys", dict(value), written)


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
    "ucm_connector_name": _read_flat_connector("ucm_connector_name"),
    "ucm_connector_module_path": _read_flat_connector("ucm_connector_module_path"),
    "ucm_connector_config": _read_flat_connector("ucm_connector_config"),
    "storage_backend": _read_backend,
    "backend": _read_backend,
    "store_pipeline": _read_pipeline,
    "pipeline": _read_pipeline,
    "storage": _read_mapping,
    "vllm": _read_mapping,
    "nfs_path": _read_nfs_path,
    "ucm_sparse_config": _read_sparse_config,
}
