"""The vLLM connector: ``UCMConnector`` picks the configured mode, ``UCMDirectConnector`` names the
direct one.

vLLM makes one connector in its scheduler and one in every worker. In this order, each part imports
only parts above it:

- ``guard``, ``platforms``, ``cores``, ``root_file``, ``background``, ``configured_stores``: what
  both sides need; ``miss_stats``, ``tier_counts``, ``sparse_counts``, ``metrics``: what they count
- ``identity``: the names under which KV is stored: the engine's identity and the keys of its blocks
- ``metadata``: what the scheduler side and the workers send each other in every step;
  ``prefix_reuse``: whether requests may continue from stored blocks at all
- ``admission``: which hits are worth loading
- ``scheduler``, ``worker``: the two sides, which do not import each other
- ``factory``: puts a half together from the configuration; ``connector``: the class that vLLM calls
"""

from ucm.integration.vllm.connector.connector import UCMConnector, UCMDirectConnector

__all__ = ["UCMConnector", "UCMDirectConnector"]
