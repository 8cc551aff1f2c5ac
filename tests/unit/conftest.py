"""The modules beside these tests can be imported by them, whichever file is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
