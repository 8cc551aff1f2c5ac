"""From layers to one checked configuration: the later layer wins, then the model is made and
judged."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ucm.config.built import problems_of
from ucm.config.effective import show
from ucm.config.layer import Entry, Layer, algorithm_name, unknown_section
from ucm.config.model import StoreSettings, UcmConfig
from ucm.config.pipelines import word_of
from ucm.config.sizes import Capacity, scheme_of
from ucm.config.sparse import algorithm_of
from ucm.config.sparse_keys import NEEDS, WHY, read_algorithm
from ucm.config.stores import (
    DEFAULT_STORE,
    KNOWN_STORES,
    OPTION_OWNER,
    PIPELINE,
    STORE_OF_SCHEME,
    STORES,
    option_keys,
    options_of,
)
from ucm.config.words import MEANINGLESS, UNUSED, without_effect
from ucm.errors import ConfigError

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
        for instead, keys in layer.meaningless.items():
            for key in keys:
                ignored.ignore(instead, key)
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
    name, pipeline = layer.values.get("ucm_connector_name"), layer.values.get("store_pipeline")
    before = values.get("ucm_connector_name")
    if pipeline is not None or (
        name is not None and (before is None or before.value != name.value)
    ):
        chosen = {
            "ucm_connector_name",
            "ucm_connector_module_path",
            "ucm_connector_config",
            "store_pipeline",
        }
        for key in [key for key in values if key in chosen or key.startswith("options.")]:
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
    for key in own:
        _read_own(values, key.removeprefix("sparse.own."), values.pop(key), ignored)
    if first is not None and "sparse.type" not in values:
        name = algorithm_of(first.value[0])
        values["sparse.type"] = Entry(name, first.origin, first.written)
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
        _read_section(values, algorithm_name(kind.value, kind.written), keys, ignored)
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


def _read_section(values: Values, algorithm: str, keys: Entry, ignored: Layer) -> None:
    """The keys of an algorithm, as far as they are not written elsewhere."""
    section = Layer(keys.origin)
    read_algorithm(section, algorithm, keys.value, keys.written)
    for key, entry in section.values.items():
        values.setdefault(key, entry)
    for instead, written in section.meaningless.items():
        for key in written:
            ignored.ignore(instead, key)


def _read_own(values: Values, name: str, keys: Entry, ignored: Layer) -> None:
    """The keys of a selector that was registered after the configuration was read."""
    algorithm = algorithm_of(name)
    if algorithm is None:
        raise unknown_section(name, keys.written, keys.origin)
    _read_section(values, algorithm, keys, ignored)


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
    for key, needed in NEEDS.items():
        entry, others = (
            values.get(f"{section}.{key}"),
            [values.get(f"{section}.{other}") for other in needed],
        )
        if entry is not None and all(
            other is None or other.value in (False, 0, "false", "0") for other in others
        ):
            ignored.ignore(WHY[needed[0]], entry.written)


def _ignore_unused(values: Values, ignored: Layer) -> None:
    """Keys that are understood and harmless, but have no effect before that part is built."""
    name = values.get("ucm_connector_name")
    own = "ucm_connector_module_path" in values or (
        name is not None and name.value not in KNOWN_STORES
    )
    for key, instead in UNUSED.items():
        if key not in values or values[key].value in (False, "UCMBlendConnector"):
            continue  # not wanted, or refused as a whole
        if not (own and key in StoreSettings.model_fields):  # a user's own store gets it
            ignored.ignore(instead, values[key].written)
    pipeline = values.get("store_pipeline")
    for i, stage in enumerate(pipeline.value if pipeline is not None else []):
        for key in UNUSED.keys() & stage.keys():
            ignored.ignore(UNUSED[key], f"store_pipeline[{i}].{key}")
    if "rerope.enabled" not in values:
        for key in [key for key in values if key.startswith("rerope.")]:
            ignored.ignore(
                "nothing: ReRoPE is not built yet, and not switched on", values[key].written
            )


def _options(values: Values, ignored: Layer) -> dict[str, Any]:
    """Check the keys that only some store has; those of another store have no meaning here."""
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
        written = {
            option: Entry(
                value, pipeline.origin if pipeline is not None else where, f"{where}.{option}"
            )
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
    """The keys that this store alone has, all of them, checked; ``written`` says where those that
    are given stand."""
    if store not in STORES:
        return {}
    model = options_of(store)
    try:
        made = model(**given)
    except ValidationError as error:
        raise _config_error(error, written) from None
    return {key: _number(getattr(made, key)) for key in model.model_fields}


def _number(value: Any) -> Any:
    """A value as options hold it: of an amount that is no share, the bytes."""
    return value if not isinstance(value, Capacity) or value.bytes is None else value.bytes


def _build(values: Values, options: dict[str, Any]) -> UcmConfig:
    _name_pipeline(values)
    nested: dict[str, Any] = {"options": options} if options else {}
    for key, entry in values.items():
        if key.startswith("options."):
            continue
        head, _, rest = key.partition(".")
        if head == "sparse" and rest.startswith("config."):
            _, algorithm, *keys = rest.split(".")
            section = (
                nested.setdefault("sparse", {}).setdefault("config", {}).setdefault(algorithm, {})
            )
            section.update(dict.fromkeys(keys, entry.value))
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
    """What pydantic found, in the words of the user who wrote it."""
    sentences: list[str] = []
    keys: list[str] = []
    for found in error.errors(include_url=False, include_input=False):
        location = [str(part) for part in found["loc"]]
        entry = _written_entry(location, values)
        message = str(found["msg"])
        ours = found["type"] == "value_error"
        if ours:
            message = message.removeprefix("Value error, ")
        keys.append(".".join(location))
        if entry is None:
            sentences.append(f"{'.'.join(location) or 'the configuration'}: {message}")
            continue
        place = (
            entry.origin
            if entry.origin.endswith(f" {entry.written}")
            else f'"{entry.written}" in {entry.origin}'
        )
        got = "" if ours else f", got {show(location[-1], entry.value)}"
        sentences.append(
            f"{place}: {message[:1].lower() + message[1:] if not ours else message}{got}"
        )
    return ConfigError(
        "; ".join(dict.fromkeys(sentences)), context={"keys": ", ".join(dict.fromkeys(keys))}
    )


def _written_entry(location: list[str], values: Values) -> Entry | None:
    for length in range(len(location), 0, -1):
        key = ".".join(location[:length])
        if key in values:
            return values[key]
    below = [
        entry for key, entry in values.items() if location and key.startswith(f"{location[0]}.")
    ]
    return below[0] if below else None
