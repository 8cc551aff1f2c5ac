"""Names of metrics, the dashboard over them, and their server where there is no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucm.metrics.serving import UCMMetrics

__all__ = ["UCMMetrics"]


def __getattr__(name: str) -> Any:
    if name != "UCMMetrics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ucm.metrics.serving import UCMMetrics  # with prometheus-client: not before it is needed

    return UCMMetrics
