"""Behaviour of a test without its server: one switch for every kind of server."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

#: Set by ``.ci/run``. The tests of the crates read it too
#: (``crates/ucm-store/tests/common/servers.rs``).
SWITCH = "UCM_REQUIRE_SERVERS"


def missing_server(why: str) -> NoReturn:
    """Skip this test with a reason; with :data:`SWITCH` in the environment fail it."""
    if os.environ.get(SWITCH):
        pytest.fail(f"{SWITCH} is set, but {why}")
    pytest.skip(why)
