"""Settings known for some models: those that the original ships for its hash method. An unknown
model gets the defaults.

The original's least number of concurrent requests is not among them: with it the answer to a
request would depend on its neighbours (``min_concurrency`` still says it where it is wanted).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

_log = logging.getLogger("ucm.sparse")


@dataclass(frozen=True, slots=True)
class Preset:
    """What is known for models whose name holds :attr:`name`."""

    name: str
    topk_tokens: int
    #: Requests with fewer tokens are dense.
    min_tokens: int
    #: Layers without selection.
    dense_layers: tuple[int, ...]


#: From the most to the least special name.
PRESETS: tuple[Preset, ...] = (
    Preset("DeepSeek-V2-Lite", 2048, 2048, (0, 1, 2, 3, 4, 5)),
    Preset("DeepSeek-R1", 4096, 16384, (0, 1, 2, 3, 4, 5)),
    Preset("Qwen3-Coder-30B-A3B", 8192, 32768, (0, 1, 2)),
    Preset("Qwen3-32B", 8192, 32768, (0, 1, 2, 3, 4, 5, 6, 61, 62, 63)),
    Preset("Qwen3-4B", 2048, 2048, (0, 1, 2, 3, 4, 5, 6)),
)


@cache
def preset_for(model: str) -> Preset | None:
    """The preset of the model of this name or path; None, and a line in the log, once, where there
    is none."""
    folded = model.lower()
    for preset in PRESETS:
        if preset.name.lower() in folded:
            return preset
    _log.info(
        'no settings of sparse attention are known for the model "%s": defaults are used', model
    )
    return None
