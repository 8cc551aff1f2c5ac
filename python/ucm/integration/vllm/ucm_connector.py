"""The names users of the original import."""

from ucm.integration.vllm.connector import UCMConnector, UCMDirectConnector
from ucm.store.names import RequestHasher

__all__ = ["RequestHasher", "UCMConnector", "UCMDirectConnector"]
