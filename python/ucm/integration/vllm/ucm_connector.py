"""The names users of the original import."""

from ucm.integration.vllm.connector import UCMConnector, UCMDirectConnector

__all__ = ["UCMConnector", "UCMDirectConnector"]
