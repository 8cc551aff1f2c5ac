"""Entry points of vLLM. ``vllm.general_plugins``, called in every process of an engine: registers
our connectors and the models of ReRoPE with vLLM by name, and overrides vLLM's attention backends
by name, for sparse attention and ReRoPE. ``vllm.endpoint_plugins``, only where ``VLLM_PLUGINS``
names ``ucm_mode``: ``ucm mode`` by the server's address.

It runs in engines that do not use ucm too. Neither this module nor :mod:`..attention.registering`
imports the compiled core or the configuration there, so a core that cannot be imported does no
harm. Where the command line of a server names our connector, its configuration is checked at once:
see :mod:`..early`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ucm.integration.vllm.early import CONNECTORS, UNROTATED, refuse_wrong_arguments

_MODULE = "ucm.integration.vllm.connector"
_MODELS = "ucm.integration.vllm.attention.rerope_models"
#: Below ``/v1``, where vLLM requires the key of a server that has one.
MODE_PATH = "/v1/ucm/mode"


def register() -> None:
    """Register what is not registered yet; vLLM calls this in every process, sometimes twice. It
    raises only :class:`SystemExit`, for a server whose arguments or environment configure our
    connector wrongly."""
    refuse_wrong_arguments(sys.argv)
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name in CONNECTORS:
            if name not in KVConnectorFactory._registry:
                KVConnectorFactory.register_connector(name, _MODULE, name)
    except Exception as error:
        logging.getLogger("ucm.vllm").warning(
            "the connectors are not registered with vLLM: %r", error
        )
    try:
        from vllm.model_executor.models.registry import ModelRegistry

        for name in UNROTATED.values():
            if name not in ModelRegistry.models:  # imported when an engine names it
                ModelRegistry.register_model(name, f"{_MODELS}:{name}")
    except Exception as error:
        logging.getLogger("ucm.vllm").warning(
            "the models of ReRoPE are not registered with vLLM: %r", error
        )
    try:
        from ucm.integration.vllm.attention.registering import register as register_backends

        register_backends()
    except Exception as error:
        logging.getLogger("ucm.vllm").warning(
            "sparse attention is not registered with vLLM: %r", error
        )


class ModeEndpoint:
    """The mode in the state directory of an API server (:mod:`ucm.mode`): ``GET`` reads it, and
    ``PUT`` with ``?mode=off`` writes it. Its engines have the same directory and follow it."""

    name = "ucm_mode"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """As vLLM defines it; the calls run on threads, since a directory may hang."""
        app.add_api_route(MODE_PATH, lambda: _switched(""), methods=["GET"])
        app.add_api_route(MODE_PATH, _switched, methods=["PUT"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """As vLLM defines it: nothing of the engine is needed."""


def _switched(mode: str) -> dict[str, str]:
    from fastapi import HTTPException

    from ucm.errors import ConfigError
    from ucm.mode import Mode, state_directory, switched

    try:
        if (directory := state_directory()) is None:
            raise ConfigError("the server's user has no home: set UCM_STATE_DIR")
        return switched(directory, Mode(mode) if mode else None)
    except (OSError, ValueError, ConfigError) as error:
        raise HTTPException(400, str(error)) from None
