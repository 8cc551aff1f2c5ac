"""Ports for servers of the tests: those of the demo's servers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "demo"))

from servers import free_port as free_port
from servers import held_port as held_port
