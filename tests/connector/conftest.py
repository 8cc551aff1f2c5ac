"""These tests need vLLM's classes, not an engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "store"))
sys.path.append(str(Path(__file__).parents[1] / "vllm"))
