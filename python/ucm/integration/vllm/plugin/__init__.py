"""Entry point ``vllm.general_plugins``: makes our connectors known to vLLM by name, in every process of an engine, and
stands behind the names of vLLM's attention backends, for engines with sparse attention."""

from __future__ import annotations

import logging

#: Connectors vLLM can be given by name alone.
NAMES = ("UCMConnector", "UCMDirectConnector")

_MODULE = "ucm.integration.vllm.connector"


def register() -> None:
    """Register what is not registered yet; vLLM calls this in every process, sometimes twice. Never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name in NAMES:
            if name not in KVConnectorFactory._registry:
                KVConnectorFactory.register_connector(name, _MODULE, name)
    except Exception as error:
        logging.getLogger("ucm.vllm").warning("the connectors are not registered with vLLM: %r", error)
    try:
        from ucm.integration.vllm.attention.registering import register as register_backends

        register_backends()
    except Exception as error:
        logging.getLogger("ucm.vllm").warning("sparse attention is not registered with vLLM: %r", error)
