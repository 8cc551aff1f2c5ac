"""Options of the test run. They stand here because pytest reads options only from what it loads first."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the trust matrix."""
    group = parser.getgroup("trust", "trust matrix (tests/trust)")
    group.addoption("--trust-table", metavar="FILE", help="write the table of the trust matrix as markdown")
    group.addoption(
        "--kv-transfer-config",
        metavar="JSON",
        help="run the engine's rows with another connector; of ours only tokens and failures are then asked",
    )
