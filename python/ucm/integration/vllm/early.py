"""A wrong configuration of ours fails early, where its user sees it, in one sentence.

vLLM passes a connector its configuration when the model is loaded, which takes minutes. Before that
it calls, with a configuration or without one: the entry point of the plug-in, first of all, where
the command line is known; two class methods of the connector, in its first process; and the names
of attention backends, in a worker that begins to build the model. Each of them calls in here.
Whatever is not a wrong configuration of ours is left to the connector's constructor.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ucm.errors import ConfigError

#: Our connectors, as vLLM's configuration names them.
CONNECTORS = ("UCMConnector", "UCMDirectConnector", "UCMBlendConnector")
#: Architecture of vLLM -> the model class of ucm that leaves keys unrotated, for ReRoPE.
UNROTATED = {
    "LlamaForCausalLM": "UcmReRopeLlamaForCausalLM",
    "Qwen2ForCausalLM": "UcmReRopeQwen2ForCausalLM",
    "Qwen3ForCausalLM": "UcmReRopeQwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "UcmReRopeQwen3MoeForCausalLM",
}
#: vLLM's argument with the configuration of connectors.
ARGUMENT = "--kv-transfer-config"


def refuse_wrong(extra: Any) -> None:
    """Stop this process if our section of vLLM's configuration, a file that it names or the
    environment is wrong."""
    if sentence := why_wrong(extra):
        refuse(sentence)


def refuse(sentence: str) -> NoReturn:
    """Stop this process for a wrong configuration. A program that calls vLLM gets a
    :class:`~ucm.errors.ConfigError`; a server and a process of an engine exit with the sentence."""
    import multiprocessing  # not at the top, where every engine imports it

    if multiprocessing.parent_process() is not None or written_on(sys.argv):
        raise SystemExit(f"ucm: {sentence}")
    raise ConfigError(sentence)


def section_of(connector: Any, extra: Any) -> Any:
    """Our section in the configuration of a connector, also inside a MultiConnector; None without
    one."""
    if connector in CONNECTORS:
        return extra
    children = extra.get("connectors", ()) if isinstance(extra, Mapping) else ()
    for child in children if isinstance(children, list | tuple) else ():
        if not isinstance(child, Mapping):
            continue
        found = section_of(child.get("kv_connector"), child.get("kv_connector_extra_config") or {})
        if found is not None:
            return found
    return None


def extra_config(vllm_config: Any) -> Any:
    """Our section of vLLM's configuration, also inside a MultiConnector; None without one."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return None
    return section_of(transfer.kv_connector, transfer.kv_connector_extra_config or {})


def why_wrong(extra: Any) -> str:
    """What is wrong in a configuration, with what to write instead; empty if nothing is."""
    try:
        from ucm.config import parse

        parse(extra).require_built()
    except ConfigError as error:
        return error.message
    except Exception as error:  # the core cannot be imported: the constructor reports it
        logging.getLogger("ucm.vllm").debug("the configuration is checked later: %r", error)
    return ""


def refuse_wrong_arguments(argv: Sequence[str]) -> None:
    """:func:`refuse_wrong` for the arguments of a server with our connector."""
    ours = section_on(argv) if written_on(argv) else None
    if ours is not None:
        refuse_wrong(ours)


def written_on(argv: Sequence[str]) -> bool:
    """Whether a command line configures a connector."""
    return any(_keys_of(word) is not None for word in argv)


def section_on(argv: Sequence[str]) -> Any:
    """Our section in the arguments of a server: one document, or one argument for each key. None
    without our connector, and where vLLM itself will refuse the arguments."""
    found: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        keys = _keys_of(word)
        if keys is None:
            continue
        _, equals, value = word.partition("=")
        value = value if equals else next(words, "")
        try:
            _put(found, keys, value)
        except (ValueError, AttributeError, TypeError):
            return None
    return section_of(found.get("kv_connector"), found.get("kv_connector_extra_config") or {})


def _keys_of(word: str) -> list[str] | None:
    """The keys behind the argument's name, ``[]`` for the whole document; None for another
    argument."""
    head, *keys = word.partition("=")[0].split(".")
    return keys if head.replace("_", "-") == ARGUMENT else None


def _put(found: dict[str, Any], keys: list[str], value: str) -> None:
    """As vLLM reads it: the value of a key is JSON, or else a text."""
    if not keys:
        return found.update(json.loads(value))
    for key in keys[:-1]:
        found = found.setdefault(key, {})
    try:
        found[keys[-1]] = json.loads(value)
    except ValueError:
        found[keys[-1]] = value
    return None
