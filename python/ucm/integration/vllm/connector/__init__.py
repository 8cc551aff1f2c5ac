"""The vLLM connector: ``UCMConnector`` picks the configured mode, ``UCMDirectConnector`` names the
direct one.

vLLM makes one connector in its scheduler and one in every worker. In this order, each part imports
only parts above it:

- ``guard``, ``platforms``, ``stores``, ``stats``: what both sides need, and what they count
- ``identity``: the names under which KV is stored: ``weights``, ``engine_identity``, and the
  ``keys`` of blocks
- ``metadata``: what the scheduler side and the workers send each other in every step
- ``admission``: which hits are worth loading: ``rates``, ``admission``
- ``scheduler`` and ``worker``: the two sides, which do not import each other. The scheduler side:
  ``lookup``, ``requests``, ``readiness``, ``dumps``, ``hints``, ``offload``, ``sparse``, ``blend``,
  ``scheduler``; the worker side: ``transfers``, ``sparse``, ``blend``, ``worker``
- ``factory``: makes a side from the configuration; ``connector``: the class that vLLM calls
"""

from ucm.integration.vllm.connector.connector import (
    UCMBlendConnector,
    UCMConnector,
    UCMDirectConnector,
)

__all__ = ["UCMBlendConnector", "UCMConnector", "UCMDirectConnector"]
