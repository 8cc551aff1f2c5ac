"""The tests of the shape ``Values`` over a real pool of Mooncake, from a core that is built for
tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

core = pytest.importorskip("ucm._core", reason="the core is not compiled here")

sys.path += [str(Path(__file__).parents[1] / "mooncake"), str(Path(__file__).parents[2] / "demo")]

from mooncake_pool import PACKAGE, Pool, why_not  # noqa: E402
from required_servers import missing_server  # noqa: E402

if not hasattr(core, "check_mooncake_values"):
    pytest.skip("this core is not built for tests; run: make test-kinds", allow_module_level=True)


def test_it_does_what_every_medium_of_its_shape_does(tmp_path: Path) -> None:
    if reason := why_not():
        missing_server(reason)
    sys.path.append(str(PACKAGE))
    with Pool(tmp_path / "pool") as pool:
        pool.lend(64 << 20)
        core.check_mooncake_values(pool.address)
