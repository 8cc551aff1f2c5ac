"""The vLLM connector: ``UCMConnector`` picks the configured mode, ``UCMDirectConnector`` names the
direct one. They are imported when they are first used, so that ``identity`` does not need vLLM.

vLLM makes one connector in its scheduler and one in every worker. Each part imports only parts
before it: ``guard`` and ``platforms``; ``stores``; ``stats``, what both sides count; ``identity``,
the names under which KV is stored; ``groups``; ``metadata``, what the two sides send each other in
every step; ``admission``, which hits are worth loading; ``scheduler`` and ``worker``, the two
sides, which do not import each other; ``factory``, which makes a side from the configuration;
``connector``, the class that vLLM calls.
"""

from typing import TYPE_CHECKING

from ucm.lazy import lazy

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.connector import (
        UCMBlendConnector,
        UCMConnector,
        UCMDirectConnector,
    )

__all__ = ["UCMBlendConnector", "UCMConnector", "UCMDirectConnector"]
__getattr__ = lazy(__name__, dict.fromkeys(__all__, f"{__name__}.connector"))
