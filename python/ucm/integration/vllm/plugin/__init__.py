"""Entry point ``vllm.general_plugins``, called in every process of an engine: registers our
connectors with vLLM by name, and overrides vLLM's attention backends by name, for sparse attention.

It runs in engines that do not use ucm too. Neither this module nor :mod:`..attention.registering`
imports the compiled core or the configuration there, so a core that cannot be imported does no
harm. Where the command line of a server names our connector, its configuration is checked at once:
see :mod:`..early`.
"""

from __future__ import annotations

import logging
import sys

from ucm.integration.vllm.early import CONNECTORS, refuse_wrong_arguments

_MODULE = "ucm.integration.vllm.connector"


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
        from ucm.integration.vllm.attention.registering import register as register_backends

        register_backends()
    except Exception as error:
        logging.getLogger("ucm.vllm").warning(
            "sparse attention is not registered with vLLM: %r", error
        )
