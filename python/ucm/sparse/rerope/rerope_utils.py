"""The configuration of ReRoPE, by the name of the original and the book. No engine reads it."""

from __future__ import annotations

import os
from types import SimpleNamespace

#: The original's object with its two settings, as the environment has them.
default_config = SimpleNamespace(
    rerope_window=int(os.environ.get("REROPE_WINDOW") or 32768),
    training_length=int(os.environ.get("TRAINING_LENGTH") or 32768),
)
