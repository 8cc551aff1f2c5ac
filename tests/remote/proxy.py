"""A proxy between a store and its server that can refuse, hang, delay, or reply like a busy
server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Literal

#: ``pass``: transparent. ``refuse``: no listener. ``reset``: connections end at once. ``silent``:
#: data is swallowed without a reply. ``slow``: every piece is delayed. ``busy``, ``fail``,
#: ``full``: the replies of an HTTP server that is overloaded, broken, or full.
Mode = Literal["pass", "refuse", "reset", "silent", "slow", "busy", "fail", "full"]

_ANSWERS = {
    "busy": (503, "Slow Down", "SlowDown"),
    "fail": (500, "Internal Server Error", "InternalError"),
    "full": (507, "Insufficient Storage", "XMinioStorageFull"),
}
_PIECE = 1 << 16


class Proxy:
    """Listens on a port of its own, in a thread; a context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.mode: Mode = "pass"
        #: Delay of a piece in ``slow``, in seconds.
        self.delay = 0.05
        #: Number of requests with a reply of the proxy.
        self.answered = 0
        self.port = 0

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def at(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    def become(self, mode: Mode) -> None:
        """Sets the mode; open connections end, except in ``silent``, where they stay open without
        data."""
        self._do(self._become(mode))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _become(self, mode: Mode) -> None:
        before, self.mode = self.mode, mode
        if mode == "refuse":
            await self._close()
        elif mode != "silent":
            await self._end_connections()
        if before == "refuse" and mode != "refuse":
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._end_connections()

    async def _end_connections(self) -> None:
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self.mode == "reset":
                return
            if self.mode in _ANSWERS:
                await self._answer(reader, writer)
                return
            await self._pass_on(reader, writer)
        except (
            OSError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            pass  # cancelled by _end_connections, which does not wait
        finally:
            self._connections.discard(task)
            with contextlib.suppress(OSError, RuntimeError):
                writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pipe(reader, back))
                both.create_task(self._pipe(there, writer))
        except* OSError:
            pass
        finally:
            back.transport.abort()

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(_PIECE):
            if self.mode == "silent":
                continue
            if self.mode == "slow":
                await asyncio.sleep(self.delay)
            target.write(piece)
            await target.drain()
        raise ConnectionResetError  # the other direction ends too

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Replies to requests one by one, as long as the mode requires it."""
        while self.mode in _ANSWERS:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next(
                (
                    line.split(":")[1]
                    for line in head.split("\r\n")
                    if line.startswith("content-length:")
                ),
                "0",
            )
            await reader.readexactly(int(length))
            status, reason, code = _ANSWERS[self.mode]
            body = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
            lines = [
                f"HTTP/1.1 {status} {reason}",
                f"Content-Length: {len(body)}",
                "Content-Type: application/xml",
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            self.answered += 1
