"""Fixtures of the proxy's tests."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside these tests
sys.path.append(str(Path(__file__).parents[1] / "vllm"))  # ends_with_us

if importlib.util.find_spec("starlette") is None:  # the wheel does not need them; these tests do
    collect_ignore_glob = ["test_proxy.py", "test_servers.py"]
else:
    from loopback import Site


@pytest.fixture
def site() -> Iterator[Site]:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    site = Site()
    yield site
    site.close()


@pytest.fixture
def event(site: Site) -> Callable[[], asyncio.Event]:
    """Makes events of the servers' loop; ``site.loop.call_soon_threadsafe`` sets them."""

    async def make() -> asyncio.Event:
        return asyncio.Event()

    return lambda: site.do(make())
