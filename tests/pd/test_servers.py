"""Which server gets a request, and who waits."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from ucm.pd import Settings
from ucm.pd.protocol import Generation, read
from ucm.pd.servers import FullError, Pool, Server


def generation(prompt: str) -> Generation:
    found = read("/v1/completions", json.dumps({"prompt": prompt}).encode())
    assert found is not None
    return found


def pool(role: str = "prefill", count: int = 3, **settings: Any) -> Pool:
    return Pool(role, [f"http://127.0.0.1:{9000 + n}" for n in range(count)], Settings(**settings))


async def chosen(stack: AsyncExitStack, of: Pool, prompt: str, *tried: Server) -> int:
    server = await stack.enter_async_context(of.server(generation(prompt), set(tried)))
    return of.servers.index(server)


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_the_least_work_first(loop: asyncio.Runner) -> None:
    async def check() -> None:
        async with AsyncExitStack() as stack:
            of = pool()
            assert await chosen(stack, of, "a" * 5000) == 0
            assert await chosen(stack, of, "b" * 900) == 1
            assert await chosen(stack, of, "c" * 900) == 2
            assert await chosen(stack, of, "d" * 900) == 1
            assert [server.in_flight for server in of.servers] == [1, 2, 1]
        assert [server.in_flight for server in of.servers] == [0, 0, 0]
        assert [server.work for server in of.servers] == [0, 0, 0]

    loop.run(check())


def test_a_known_beginning_is_worth_its_length(loop: asyncio.Runner) -> None:
    async def check() -> None:
        async with AsyncExitStack() as stack:
            of = pool("decode")
            begin = "x" * 40_000
            assert await chosen(stack, of, begin) == 0
            # Four requests' work, then another server is sooner.
            got = [await chosen(stack, of, begin + str(n)) for n in range(5)]
            assert got[:3] == [0, 0, 0]
            assert set(got[3:]) & {1, 2}

    loop.run(check())


def test_servers_that_do_not_answer_come_last(loop: asyncio.Runner) -> None:
    async def check() -> None:
        async with AsyncExitStack() as stack:
            of = pool(max_per_server=2)
            a, b, c = of.servers
            a.answers(False, "")
            b.refused()
            assert [await chosen(stack, of, str(n)) for n in range(2)] == [2, 2]
            assert not of.untried({c})
        async with AsyncExitStack() as stack:
            c.answers(False, "")
            assert await chosen(stack, of, "a", a, c) == 1
            assert await chosen(stack, of, "a", a, b, c) in (0, 2)
            c.answers(True)
            assert await chosen(stack, of, "a", c) == 2

    loop.run(check())


def test_turns_are_given_in_order_and_none_is_lost(loop: asyncio.Runner) -> None:
    """Requests that wait, give up and end in any order: each gets its turn once, and never more
    than a server may have."""

    async def check() -> None:
        source = random.Random(7)
        of = pool(count=2, max_per_server=2)
        served, most = 0, 0

        async def one() -> None:
            nonlocal served, most
            async with of.server(None, set()):
                most = max(most, *(server.in_flight for server in of.servers))
                for _ in range(source.randrange(4)):
                    await asyncio.sleep(0)
                served += 1

        tasks = [asyncio.create_task(one()) for _ in range(300)]
        while not all(task.done() for task in tasks):
            task = source.choice(tasks)
            if source.random() < 0.3:
                task.cancel()
            await asyncio.sleep(0)
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        assert served >= sum(not task.cancelled() for task in tasks) > 50
        assert any(task.cancelled() for task in tasks)
        assert most == 2
        assert [server.in_flight for server in of.servers] == [0, 0]
        async with of.server(None, set()):
            pass

    loop.run(check())


def test_no_turn_in_time(loop: asyncio.Runner) -> None:
    async def check() -> None:
        of = pool(count=1, max_per_server=1, queue_timeout=0.01)
        async with of.server(None, set()):
            with pytest.raises(FullError, match="every prefill server is full"):
                async with of.server(None, set()):
                    pass
        async with of.server(None, set()):
            pass

    loop.run(check())
