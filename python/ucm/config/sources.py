"""Where configuration is read from: a YAML file, vLLM's ``kv_connector_extra_config``, the
environment."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from ucm.config.layer import Layer, store_of_word
from ucm.config.normalise import normalise
from ucm.config.sizes import parse_flag
from ucm.config.stores import TIER_FLAGS
from ucm.config.words import (
    CONFIG_FILE_VARIABLE,
    DISABLE_VARIABLE,
    ELSEWHERE,
    ENVIRONMENT,
    MEANINGLESS_ENVIRONMENT,
    PLATFORMS,
    hint,
)
from ucm.errors import ConfigError

#: How the inline dictionary is called in messages.
INLINE = "kv_connector_extra_config"
#: Keys of the inline dictionary that name a file.
FILE_KEYS = ("ucm_config_path", CONFIG_FILE_VARIABLE)
#: Largest file that is read, in bytes.
MAX_FILE_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """SafeLoader that refuses a key written twice, of which YAML would silently keep the last."""

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
    return _flag(environ, DISABLE_VARIABLE)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip()
    try:
        return parse_flag(text) if text else False
    except ValueError as error:
        raise ConfigError(f"environment {name}: {error}") from None


def file_named(inline: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Path of the configuration file and who named it; the environment wins over the inline
    dictionary."""
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
    if content is None:
        content = {}
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
        f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
        if mark is not None
        else str(problem)
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
        value = text.strip()
        if not value:
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
    elif key.endswith(".enabled") or key == "debug" or key.removeprefix("options.") in TIER_FLAGS:
        try:
            layer.put(key, parse_flag(value), name, origin)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}") from None
    else:
        layer.put(key, value, name, origin)
