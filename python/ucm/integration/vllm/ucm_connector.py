"""The names users of the original import."""

from typing import Any

from ucm.integration.vllm.connector import UCMBlendConnector, UCMConnector, UCMDirectConnector
from ucm.integration.vllm.connector.metadata import UCMConnectorMetadata
from ucm.refused import refuse
from ucm.store.names import RequestHasher, compute_block_hash

__all__ = [
    "RequestHasher",
    "UCMBlendConnector",
    "UCMConnector",
    "UCMConnectorMetadata",
    "UCMDirectConnector",
    "compute_block_hash",
]


def __getattr__(name: str) -> Any:
    raise refuse(__name__, name)
