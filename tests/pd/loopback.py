"""Servers that stand in for vLLM and the proxy before them: all listen on ports of this machine, in
one event loop beside the tests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import uvicorn
from ports import held_port
from stand_in import StandIn

from ucm.pd import Settings
from ucm.pd.proxy import application

T = TypeVar("T")


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Polls until the condition is true; fails after a time that only a hang reaches."""
    end, pause = time.monotonic() + 100, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        pause.wait(0.005)


class Site:
    """An event loop in a thread, with servers in it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._running: dict[str, tuple[uvicorn.Server, Any]] = {}
        #: The ports of all servers, so that no other process gets that of a stopped one.
        self._held: list[socket.socket] = []

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def serve(self, app: Any, lifespan: str = "off", at: str = "") -> str:
        """Serves an application; its address."""
        if not at:
            self._held.append(held_port())
        port = int(at.rpartition(":")[2]) if at else int(self._held[-1].getsockname()[1])
        listening = socket.create_server(("127.0.0.1", port))
        # Connections have this small buffer too, so that a reader that is too slow is noticed soon.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        at = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(
            app, log_config=None, lifespan=lifespan, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        running = asyncio.run_coroutine_threadsafe(server.serve([listening]), self.loop)
        wait_until(lambda: server.started or running.done(), f"{at} listens")
        self._running[at] = (server, running)
        return at

    def stop(self, at: str) -> None:
        """Ends a server and its connections at once."""
        server, running = self._running.pop(at)
        server.should_exit = True
        running.result(30)

    def stand_in(self) -> StandIn:
        """A server in place of vLLM."""
        server = StandIn()
        server.at = self.serve(server)
        return server

    def proxy(self, around: Callable[[Any], Any] = lambda app: app, **options: Any) -> httpx.Client:
        """A client of a new proxy, of its application as ``around`` returns it."""
        settings = Settings(
            **{
                "health_interval": 0.05,
                "retry_for": 10.0,
                **{
                    key: tuple(one.at for one in value) if isinstance(value, list) else value
                    for key, value in options.items()
                },
            }
        )
        at = self.serve(around(application(settings)), "on")
        # Plain HTTP: to load certificates would take a while.
        return httpx.Client(base_url=at, trust_env=False, timeout=30, verify=False)  # noqa: S501

    def close(self) -> None:
        """Ends everything."""
        for server, _ in self._running.values():
            server.should_exit = True
        for at in list(self._running):
            self.stop(at)
        self.do(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for held in self._held:
            held.close()
