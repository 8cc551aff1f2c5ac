"""The vLLM connector: ``UCMConnector`` picks the configured mode, ``UCMDirectConnector`` names the
direct one. Only these need vLLM: the names of blocks and the tags of tenants are made without it.

vLLM makes one connector in its scheduler and one in every worker. Each part imports only parts
before it: ``guard``, ``platforms``, ``stores``, ``stats``; ``identity``, the names under which KV
is stored; ``metadata``, what the two sides send each other in every step; ``admission``, which hits
are worth loading; ``scheduler`` and ``worker``, the two sides; ``factory``, which makes a side from
the configuration; ``connector``, the class that vLLM calls.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import UCMBlendConnector, UCMConnector, UCMDirectConnector

__all__ = ["UCMBlendConnector", "UCMConnector", "UCMDirectConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.connector"), name)
