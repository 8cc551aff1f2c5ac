"""The servers of one role: which of them gets a request, how many it may have, and whether it
answers.

A request goes to the server where it costs least: what this server has to do, less what it has
computed before of the same prompt. Servers that do not answer come last; those of a pool that are
all full let a request wait for its turn. Health is polled, and what a request meets counts at
once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from ucm.pd import Settings
from ucm.pd.protocol import PREFIX_BYTES, Generation

logger = logging.getLogger("ucm.pd")

#: Work of a request that produces tokens, in bytes of a prompt.
DECODE_WORK = 8192
#: Most prefixes that are remembered of one server.
MOST_SEEN = 32_768
#: Longest wait for the answer to a health check, in seconds.
CHECK_TIMEOUT = 5.0
#: Health checks that fail in a row before requests without an answer are sent elsewhere.
LOST_AFTER = 6
#: Seconds in which a server that refused a request comes after the others.
REFUSAL_PAUSE = 1.0


class FullError(Exception):
    """No server of a role has room for a request."""


class Server:
    """One vLLM server."""

    def __init__(self, role: str, url: str, settings: Settings) -> None:
        self.role, self.url = role, url
        self.up = True
        self.in_flight, self.work = 0, 0
        #: Number of the last request that it got.
        self.turn = 0
        #: Limits of requests that were sent and have seen no byte of its answer yet.
        self.unanswered: set[asyncio.Timeout] = set()
        self._refuses_until = 0.0
        self._failed_checks = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        # A server closes idle connections; a request on one of these would be lost. So ours are
        # closed sooner than those of vLLM (5 s).
        self.client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            timeout=httpx.Timeout(settings.decode_timeout, connect=settings.connect_timeout),
            verify=url.startswith("https:"),  # certificates are loaded only where they are used
            trust_env=False,
        )

    @property
    def ready(self) -> bool:
        """True if it answered last time and does not refuse requests."""
        return self.up and time.monotonic() >= self._refuses_until

    def address(self, target: bytes) -> httpx.URL:
        """The address of a path and query on this server."""
        base = httpx.URL(self.url)
        return base.copy_with(raw_path=base.raw_path.rstrip(b"/") + target)

    def matched(self, request: Generation) -> int:
        """Bytes of the prompt that this server has seen."""
        for number in range(len(request.prefixes), 0, -1):
            if request.prefixes[number - 1] in self._seen:
                return number * PREFIX_BYTES
        return 0

    def remember(self, request: Generation) -> None:
        """It gets this prompt."""
        for prefix in request.prefixes:
            self._seen[prefix] = None
            self._seen.move_to_end(prefix)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def refused(self) -> None:
        """It answered that it takes no request now."""
        self._refuses_until = time.monotonic() + REFUSAL_PAUSE

    def answers(self, answer: bool, why: str = "") -> None:
        """Sets whether it answers; a change is logged."""
        if answer != self.up:
            self.up = answer
            if answer:
                logger.info("the %s server %s answers", self.role, self.url)
            else:
                logger.warning("the %s server %s does not answer: %s", self.role, self.url, why)

    async def check(self) -> None:
        """Checks its health once."""
        try:
            response = await self.client.get(self.address(b"/health"), timeout=CHECK_TIMEOUT)
            why = "" if response.status_code == 200 else f"/health is {response.status_code}"
        except httpx.HTTPError as error:
            why = describe(error)
        self._failed_checks = self._failed_checks + 1 if why else 0
        if self._failed_checks != 1 or "Connect" in why:  # a busy server may be late once
            self.answers(not why, why)
        if self._failed_checks >= LOST_AFTER:
            for limit in self.unanswered:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())


class Pool:
    """The servers of one role. ``limit`` is how many requests each may have."""

    def __init__(self, role: str, urls: Sequence[str], settings: Settings) -> None:
        self.role = role
        self.servers = [Server(role, url, settings) for url in urls]
        self._settings = settings
        self._turns = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def server(self, request: Generation | None, tried: set[Server]) -> AsyncIterator[Server]:
        """The best server for a request, not one of ``tried`` if possible, held while the context
        lasts. Raises :class:`FullError` if no server has room in time."""
        try:
            async with asyncio.timeout(self._settings.queue_timeout):
                server = await self._take(request, tried)
        except TimeoutError:
            raise FullError(f"every {self.role} server is full; try again later") from None
        work = len(request.raw) if request and self.role == "prefill" else DECODE_WORK
        server.in_flight += 1
        server.work += work
        try:
            yield server
        finally:
            server.in_flight -= 1
            server.work -= work
            self._wake(1)

    def untried(self, tried: set[Server]) -> bool:
        """True if a server is ready that was not tried."""
        return any(server.ready and server not in tried for server in self.servers)

    async def watch(self) -> None:
        """Checks the health of every server, again and again."""
        while True:
            up = [server.up for server in self.servers]
            await asyncio.gather(*(server.check() for server in self.servers))
            if up != [server.up for server in self.servers]:
                self._wake(len(self._waiting))
            await asyncio.sleep(self._settings.health_interval)

    async def close(self) -> None:
        """Closes all connections."""
        for server in self.servers:
            await server.client.aclose()

    async def _take(self, request: Generation | None, tried: set[Server]) -> Server:
        queued = bool(self._waiting)
        while queued or (server := self._best(request, tried)) is None:
            queued = False
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:  # the turn was given in the same moment, and is passed on
                    self._wake(1)
                raise
        self._turns += 1
        server.turn = self._turns
        if request is not None:
            server.remember(request)
        return server

    def _best(self, request: Generation | None, tried: set[Server]) -> Server | None:
        ready = [server for server in self.servers if server.ready] or self.servers
        free = [one for one in ready if one.in_flight < self._settings.max_per_server]
        if len(free) < 2 or request is None:
            return min(free, key=lambda one: (one in tried, one.work, one.turn), default=None)
        return min(free, key=lambda one: (one in tried, one.work - one.matched(request), one.turn))

    def _wake(self, number: int) -> None:
        while number and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled, and not removed yet
                turn.set_result(None)
                number -= 1


def describe(error: BaseException) -> str:
    """An error of a connection in words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
