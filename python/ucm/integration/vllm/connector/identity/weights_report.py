"""What a rank answers when the scheduler asks whether the weights in its memory changed.

Made by :mod:`.model_memory` on the rank, sent with the rank's report, read by :mod:`.live_identity`
in the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucm.integration.vllm.connector.identity.weight_files import WeightSource


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What a rank says about the weights in its memory."""

    generation: int  # the one it was asked for
    # since it was last asked, or since they were loaded; None: it cannot tell
    unchanged: bool | None
    named: WeightSource | None  # the files vLLM names since then, if it names others
    since_ns: int  # Unix time at which memory was last found to hold what it held before
