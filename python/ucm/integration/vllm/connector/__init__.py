"""The vLLM connector: ``UCMConnector`` picks the configured mode, ``UCMDirectConnector`` names the direct one."""

from ucm.integration.vllm.connector.connector import UCMConnector, UCMDirectConnector

__all__ = ["UCMConnector", "UCMDirectConnector"]
