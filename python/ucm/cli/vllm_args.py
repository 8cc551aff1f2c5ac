"""``ucm vllm-args``: the arguments of ``vllm serve`` for a configuration, which is checked first.

The original's arguments, ``--kv-connector`` and ``--kv-connector-config``, become the one that vLLM
has; all others are passed on as they are. ReRoPE needs a model class of ucm, and the wanted length
of a context, which ``--hf-overrides`` gives to vLLM.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ucm.cli import terminal
from ucm.errors import ConfigError
from ucm.integration.vllm.early import UNROTATED

_ROLES = ("kv_both", "kv_producer", "kv_consumer")


@click.command(
    "vllm-args", context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option("--config", "file", metavar="FILE", help="The configuration file of ucm.")
@click.option("--kv-connector", "name", default="UCMConnector", show_default=True)
@click.option("--kv-connector-config", "inline", metavar="FILE|JSON", help="As in the original.")
@click.option("--role", type=click.Choice(_ROLES), default=_ROLES[0], show_default=True)
@click.option("--architecture", metavar="NAME", help="With rerope, where --model is no directory.")
@terminal.json_output
@click.argument("rest", metavar="[ARGUMENT OF VLLM]...", nargs=-1, type=click.UNPROCESSED)
def vllm_args(
    file: str | None,
    name: str,
    inline: str | None,
    role: str,
    architecture: str | None,
    as_json: bool,
    rest: tuple[str, ...],
) -> None:
    """Print the arguments of vllm serve for a configuration, after checking it.

    vllm serve MODEL $(...) loses the quotes: use eval "vllm serve MODEL $(ucm vllm-args ...)".
    """
    from ucm.config import parse

    if file and inline:
        raise click.UsageError("--config and --kv-connector-config exclude each other")
    extra: dict[str, Any] = _file(file) if file else _inline(inline) if inline else {}
    config = parse(extra if name == "UCMConnector" else {**extra, "kv_connector": name})
    config.require_built()
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    transfer = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    given = _with_overrides(rest, architecture) if config.rerope.enabled else [*rest]
    arguments = [*given, "--kv-transfer-config", json.dumps(transfer)]
    if as_json:
        terminal.document({"command": "vllm-args", "arguments": arguments})
    else:
        click.echo(shlex.join(arguments))


def _file(path: str) -> dict[str, Any]:
    return {"ucm_config_path": os.path.abspath(path)}


def _inline(given: str) -> dict[str, Any]:
    """The configuration that the original's argument holds, or the file that it names."""
    if not given.lstrip().startswith("{"):
        if not Path(given).exists():
            raise click.BadParameter(f"{given!r} is neither a file nor a JSON object")
        return _file(given)
    try:
        found = json.loads(given)
    except ValueError as error:
        raise click.BadParameter(f"--kv-connector-config is no JSON: {error}") from None
    assert isinstance(found, Mapping)  # it begins with a brace
    return dict(found)


def _with_overrides(rest: tuple[str, ...], architecture: str | None) -> list[str]:
    """vLLM's arguments with the overrides of the model's configuration that ReRoPE needs."""
    others, overrides = _without(rest, "--hf-overrides")
    _, model = _without(rest, "--model")
    _, length = _without(rest, "--max-model-len")
    if architecture is None and model and (Path(model) / "config.json").is_file():
        read = json.loads((Path(model) / "config.json").read_text())
        architecture = str((read.get("architectures") or ["none"])[0])
    if architecture is None:
        raise ConfigError("rerope: give --architecture NAME, one of " + ", ".join(UNROTATED))
    if architecture not in UNROTATED:
        raise ConfigError(f"rerope: {architecture} is not served, only {', '.join(UNROTATED)}")
    if not (length or "").isdecimal():
        raise ConfigError(
            "rerope: give --max-model-len as a number of tokens, like 131072: the longest prompt"
            " with its answer"
        )
    found = json.loads(overrides or "{}") | {
        "architectures": [UNROTATED[architecture]],
        "max_position_embeddings": int(length or 0),
    }
    return [*others, "--hf-overrides", json.dumps(found)]


def _without(words: tuple[str, ...], name: str) -> tuple[list[str], str | None]:
    """Arguments without this one, and its value; None where it is not given."""
    others: list[str] = []
    value: str | None = None
    left = iter(words)
    for word in left:
        key, equals, inline = word.partition("=")
        if key.replace("_", "-") == name:
            value = inline if equals else next(left, "")
        else:
            others.append(word)
    return others, value
