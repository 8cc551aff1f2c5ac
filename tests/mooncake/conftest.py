"""A real master of Mooncake and processes that lend it memory, over TCP on loopback.

``make test-mooncake`` installs the package in ``.tools/mooncake``. It is loaded into this process,
threads and all, so these tests have a run of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / ".tools" / "mooncake"
sys.path[:0] = [str(HERE), str(HERE.parent / "store"), str(PACKAGE)]
sys.path.append(str(HERE.parents[1] / "demo"))

from mooncake_pool import Pool, why_not  # noqa: E402
from required_servers import missing_server  # noqa: E402


def need_mooncake() -> None:
    """Skip or fail the test if Mooncake does not run."""
    if reason := why_not():
        missing_server(reason)


@pytest.fixture(autouse=True, scope="session")
def _mooncake() -> None:
    need_mooncake()
    pytest.importorskip("ucm._core", reason="the core is not compiled here")


@pytest.fixture(scope="session")
def shared_pool(_mooncake: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool for tests that do not disturb it, each with an identity of its own."""
    with Pool(tmp_path_factory.mktemp("pool")) as pool:
        pool.lend(128 << 20)
        yield pool


@pytest.fixture
def own_pool(_mooncake: None, tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Pools for tests that kill and stop their processes."""
    pools: list[Pool] = []

    def make(lent: int = 64 << 20, **flags: Any) -> Pool:
        pool = Pool(tmp_path / f"pool-{len(pools)}", **flags)
        pools.append(pool)
        pool.__enter__()
        if lent:
            pool.lend(lent)
        return pool

    yield make
    for pool in pools:
        pool.__exit__(None, None, None)
