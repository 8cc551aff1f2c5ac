"""Names of metrics, the dashboard over them, and their server where there is no vLLM."""

from typing import TYPE_CHECKING

from ucm.lazy import lazy

if TYPE_CHECKING:
    from ucm.metrics.serving import UCMMetrics

__all__ = ["UCMMetrics"]

# It needs prometheus-client.
__getattr__ = lazy(__name__, dict.fromkeys(__all__, "ucm.metrics.serving"))
