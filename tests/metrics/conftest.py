"""The modules that these tests share."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "metrics"), str(TESTS / "store")]  # and required_servers
sys.path.append(str(TESTS / "vllm"))  # ends_with_us
