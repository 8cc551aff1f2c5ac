"""The names users of the original import."""

from ucm.integration.vllm.connector import UCMConnector, UCMDirectConnector
from ucm.store.request_hasher import RequestHasher

__all__ = ["RequestHasher", "UCMConnector", "UCMDirectConnector"]
