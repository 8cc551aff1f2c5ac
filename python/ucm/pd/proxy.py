"""The proxy of ``ucm pd-proxy``: an ASGI application that carries each request through a prefill
and a decode server.

Until the client has received the first byte, a request may be sent to another server: no answer is
passed on before its first event, or all of it if it is no stream. After that byte nothing is
retried, because other tokens could follow: the stream ends with an error. If no prefill server
answers in time, the decode server computes the prompt. A client that disconnects ends its requests
at all servers. Every wait has a limit, and so do requests, bodies and queues.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ucm import __version__
from ucm.logger import init_logger
from ucm.pd import Settings
from ucm.pd.protocol import (
    PROMPTS,
    Generation,
    answered_params,
    error_body,
    error_event,
    event_end,
    read,
    why_retry,
)
from ucm.pd.servers import FullError, Pool, Server, describe

logger = logging.getLogger("ucm.pd")

#: Largest answer that is kept whole before it is passed on, and the largest kept part of a stream.
MOST_ANSWER, MOST_EVENT = 16 << 20, 1 << 20
#: All bodies together may have this many times the largest body.
BODIES = 16
#: First and longest pause between two rounds over the decode servers, in seconds.
PAUSES = 0.05, 1.0
#: Headers that belong to one connection (RFC 9110, 7.6.1), and those that the proxy sets.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade host content-length x-request-id expect".split()
)
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)


class Metrics:
    """The proxy's metrics, in a registry of their own."""

    def __init__(self, pools: list[Pool]) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered", "endpoint", "status")
        self.prefills = self._counter("prefills", "Prefills by result or reason", "result")
        self.failures = self._counter("failures", "Requests that a server failed", "role", "why")
        self.cancelled = self._counter("cancelled", "Requests whose client disconnected")
        self.broken = self._counter("broken_answers", "Answers that ended with an error")
        self.prefill_seconds = self._histogram("prefill_seconds", "Time of prefills")
        self.first_byte_seconds = self._histogram("first_byte_seconds", "Time to the first byte")
        for name, text, value in (
            ("server_up", "1 if the server answers", lambda server: server.up),
            ("in_flight", "Requests at the server", lambda server: server.in_flight),
        ):
            gauge = Gauge(f"ucm_pd_{name}", text, ["role", "server"], registry=self.registry)
            for server in (server for pool in pools for server in pool.servers):
                one = gauge.labels(server.role, server.url)
                one.set_function(lambda server=server, value=value: float(value(server)))

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return Counter(f"ucm_pd_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Any:
        return Histogram(f"ucm_pd_{name}", text, buckets=SECONDS, registry=self.registry)


class DisconnectedError(Exception):
    """The client has disconnected, or does not read."""


class RefusedError(Exception):
    """The proxy answers a request itself."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass
class Answer:
    """An answer of a server of which the client has seen nothing yet. ``body`` is its first part,
    ``rest`` what follows; without ``rest`` it is complete."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    rest: AsyncIterator[bytes] | None
    stream: bool


@dataclass
class Failure:
    """Why a server did not answer a request: ``unreachable`` (never sent), ``busy``,
    ``unavailable``, ``error`` or ``broken`` (no whole answer). ``answer`` is what it did answer."""

    why: str
    text: str
    answer: Answer | None = None


@dataclass
class Exchange:
    """One request of a client, and what became of it."""

    method: str
    path: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    id: str
    raw: bytes = b""
    #: Requests and bytes by which it counts at this moment.
    counted: int = 0
    length: int = 0
    generation: Generation | None = None
    status: int = 0
    failures: int = 0
    notes: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def headers_for(self, role: str, attempt: int) -> list[tuple[bytes, bytes]]:
        """The headers for a server. Each further attempt has an id of its own, since the last one
        may still be running there."""
        request_id = self.id if attempt == 0 else f"{self.id}-{attempt}"
        dropped = HOP_BY_HOP | ({b"x-data-parallel-rank"} if role == "prefill" else set())
        headers = {b"x-request-id": request_id.encode()}
        if self.generation is not None:  # its answer is read here
            headers[b"accept-encoding"] = b"identity"
        kept = [pair for pair in self.headers if pair[0] not in dropped | headers.keys()]
        return kept + list(headers.items())


class Proxy:
    """Carries requests to servers and answers back. An ASGI application for every path."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.decoders = Pool("decode" if settings.decode else "mixed", settings.decoders, settings)
        self.prefillers = Pool("prefill", settings.prefill, settings)
        self.metrics = Metrics([self.prefillers, self.decoders])
        self._requests = 0
        self._body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        exchange = _exchange(scope)
        await self._admitted(exchange, receive, send)
        endpoint = exchange.path if exchange.path in PROMPTS else "other"
        self.metrics.requests.labels(endpoint, exchange.status or "none").inc()
        what = f"{exchange.method} {exchange.path} {exchange.status or 'without an answer'}"
        if exchange.failures:
            exchange.notes.append(f"failures of servers: {exchange.failures}")
        took = f"{time.monotonic() - exchange.start:.3f} s in all"
        logger.info("request %s: %s", exchange.id, ", ".join([what, *exchange.notes, took]))

    async def _admitted(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        self._requests += 1
        exchange.counted = 1
        try:
            if self._requests > self.settings.max_requests:
                raise RefusedError(429, "the proxy has too many requests; try again later")
            await self._read_body(exchange, receive)
            exchange.generation = read(exchange.path, exchange.raw, self.settings.prefill_from)
            await self._unless_disconnected(exchange, receive, send)
        except RefusedError as refused:
            await self._refuse(exchange, refused, send)
        except DisconnectedError:
            self._disconnected(exchange)
        finally:
            self._leave(exchange)

    def _leave(self, exchange: Exchange) -> None:
        """Makes room for another request: before the last bytes are sent, because the client may
        ask again as soon as it has them."""
        self._requests -= exchange.counted
        self._body_bytes -= exchange.length
        exchange.counted, exchange.length = 0, 0

    async def _unless_disconnected(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Serves the request, unless the client disconnects: then the requests to servers are
        cancelled, which closes their connections."""
        work = asyncio.create_task(self._serve(exchange, send))
        left = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled = not work.done()
            work.cancel()
            left.cancel()
            results = await asyncio.gather(work, left, return_exceptions=True)
        if cancelled:
            self._disconnected(exchange)
        elif isinstance(results[0], BaseException):
            raise results[0]

    def _disconnected(self, exchange: Exchange) -> None:
        exchange.notes.append("the client disconnected")
        self.metrics.cancelled.inc()

    async def _read_body(self, exchange: Exchange, receive: Receive) -> None:
        """Reads the body, whose length is counted at once."""
        most, more, parts = self.settings.max_body, True, []
        try:
            async with asyncio.timeout(self.settings.client_timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError
                    part, more = message.get("body", b""), message.get("more_body", False)
                    parts.append(part)
                    exchange.length += len(part)
                    self._body_bytes += len(part)
                    if exchange.length > most:
                        raise RefusedError(413, f"the body has more than {most} bytes (--max-body)")
                    if self._body_bytes > BODIES * most:
                        raise RefusedError(429, "the proxy has too many large requests")
        except TimeoutError:
            raise RefusedError(408, "the body did not arrive in time") from None
        exchange.raw = b"".join(parts)

    async def _serve(self, exchange: Exchange, send: Send) -> None:
        generation = exchange.generation
        body, pool = exchange.raw, self.decoders
        if generation is not None and self.prefillers.servers:
            if generation.prefills_only:
                pool = self.prefillers
            elif generation.skips:
                self.metrics.prefills.labels(generation.skips).inc()
                exchange.notes.append(f"no prefill ({generation.skips})")
            else:
                body = generation.for_decode(await self._prefill(exchange, generation))
        await self._answer(exchange, pool, body, send)

    # The prefill server
    # ----------------------------------------------------------------------------------------------

    async def _prefill(self, exchange: Exchange, generation: Generation) -> dict[str, Any] | None:
        """The params that a prefill server answers; None if the decode server computes the
        prompt."""
        start, body = time.monotonic(), generation.for_prefill()
        pool, tried = self.prefillers, set[Server]()
        result, params = "failed", None
        try:
            async with asyncio.timeout(self.settings.prefill_timeout):
                for attempt in range(self.settings.tries):
                    if not any(server.up for server in pool.servers):
                        result = "down"
                        break
                    async with AsyncExitStack() as stack:
                        server = await stack.enter_async_context(pool.server(generation, tried))
                        outcome = await self._try(exchange, server, body, attempt, stack)
                    if isinstance(outcome, Answer):
                        exchange.notes.append(f"prefill server {server.url}")
                        params = answered_params(outcome.body)
                        result = "ok" if params else "without blocks"
                        if outcome.status >= 400:  # the client gets the decode server's answer
                            result = "refused"
                        break
                    tried.add(server)
                    self._failed(exchange, server, outcome)
        except TimeoutError:
            result = "late"
        except FullError:
            result = "full"
        took = time.monotonic() - start
        self.metrics.prefills.labels(result).inc()
        if result in ("ok", "without blocks"):
            self.metrics.prefill_seconds.observe(took)
        exchange.notes.append(f"prefill {result} after {took:.3f} s")
        return params

    # The decode server
    # ----------------------------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange, pool: Pool, body: bytes, send: Send) -> None:
        """Passes on the first answer that a server gives, and after too many failures the last
        one."""
        tried: set[Server] = set()
        attempt, failures, pause, end = 0, 0, PAUSES[0], 0.0
        while True:
            try:
                async with AsyncExitStack() as stack:
                    server = await stack.enter_async_context(
                        pool.server(exchange.generation, tried)
                    )
                    outcome = await self._try(exchange, server, body, attempt, stack)
                    if isinstance(outcome, Answer):
                        exchange.notes.append(f"{server.role} server {server.url}")
                        return await self._pass_on(exchange, server, outcome, send)
            except FullError as full:
                raise RefusedError(429, str(full)) from None
            tried.add(server)
            attempt += 1
            self._failed(exchange, server, outcome)
            counted = outcome.why in ("error", "broken")
            failures += counted
            if counted or attempt == 1:
                end = time.monotonic() + self.settings.retry_for
            final = failures >= self.settings.tries or not _may_repeat(exchange, outcome)
            if not final and not pool.untried(tried):
                if outcome.why == "busy" or time.monotonic() + pause > end:
                    final = True
                else:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, PAUSES[1])
                    tried.clear()
            if final:
                if outcome.answer is not None:
                    return await self._pass_on(exchange, server, outcome.answer, send)
                text = f"no {pool.role} server answered; the last failure: {outcome.text}"
                raise RefusedError(503 if outcome.why == "unreachable" else 502, text)

    async def _try(
        self, exchange: Exchange, server: Server, body: bytes, attempt: int, stack: AsyncExitStack
    ) -> Answer | Failure:
        """Sends the request to one server. Its connection is left open in ``stack`` if the answer
        goes on."""
        request = server.client.build_request(
            exchange.method,
            server.address(exchange.target),
            headers=exchange.headers_for(server.role, attempt),
            content=body,
        )
        try:
            async with asyncio.timeout(self.settings.decode_timeout) as limit:

                async def trace(event: str, _: object) -> None:  # of httpx
                    if event.endswith("send_request_headers.started"):
                        server.unanswered.add(limit)  # before, it is unreachable

                request.extensions["trace"] = trace
                try:
                    response = await server.client.send(request, stream=True)
                    stack.push_async_callback(response.aclose)
                    answer = await _begin(exchange, response)
                finally:
                    server.unanswered.discard(limit)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            server.answers(False, describe(error))
            return Failure("unreachable", describe(error))
        except httpx.HTTPError as error:
            return Failure("broken", describe(error))
        except TimeoutError:
            return Failure("broken", "no answer in time")
        if answer.status < 500:
            server.answers(True)
        if exchange.generation is None:
            return answer
        first = answer.body[: event_end(answer.body, first=True)] if answer.stream else answer.body
        if why := why_retry(answer.status, first):
            if why in ("busy", "unavailable"):
                server.refused()
            return Failure(why, f"status {answer.status}", replace(answer, body=first, rest=None))
        return answer

    def _failed(self, exchange: Exchange, server: Server, failure: Failure) -> None:
        self.metrics.failures.labels(server.role, failure.why).inc()
        exchange.failures += 1
        text = f"the {server.role} server {server.url} failed ({failure.why}): {failure.text}"
        # Others are expected while a server is down or full, and would fill the log.
        level = logging.WARNING if failure.why in ("error", "broken") else logging.DEBUG
        logger.log(level, "request %s: %s", exchange.id, text)

    # The client
    # ----------------------------------------------------------------------------------------------

    async def _pass_on(
        self, exchange: Exchange, server: Server, answer: Answer, send: Send
    ) -> None:
        """Sends an answer to the client. Nothing is retried from here on."""
        exchange.status = answer.status
        took = time.monotonic() - exchange.start
        self.metrics.first_byte_seconds.observe(took)
        exchange.notes.append(f"first byte after {took:.3f} s")
        headers = [*answer.headers, (b"x-request-id", exchange.id.encode())]
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self._send(send, start)
        await self._send_body(exchange, send, answer.body, answer.rest is not None)
        if answer.rest is None:
            return
        try:
            async for part in answer.rest:
                await self._send_body(exchange, send, part, True)
        except (httpx.HTTPError, TimeoutError) as error:
            self.metrics.broken.inc()
            text = f"the {server.role} server failed during the answer: {describe(error)}"
            exchange.notes.append(text)
            if not answer.stream:
                return  # incomplete, so that the connection to the client is closed
            await self._send_body(exchange, send, error_event(exchange.path, text), True)
        await self._send_body(exchange, send, b"", False)

    async def _send_body(self, exchange: Exchange, send: Send, body: bytes, more: bool) -> None:
        if not more:
            self._leave(exchange)
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self.settings.client_timeout):
                await send(message)
        except TimeoutError:
            raise DisconnectedError from None

    async def _refuse(self, exchange: Exchange, refused: RefusedError, send: Send) -> None:
        self._leave(exchange)
        exchange.status = refused.status
        exchange.notes.append(f"refused: {refused.text}")
        headers = {"x-request-id": exchange.id}
        if refused.status in (429, 503):
            headers["retry-after"] = "1"
        body = error_body(exchange.path, refused.status, refused.text)
        response = JSONResponse(body, status_code=refused.status, headers=headers)
        await response({"type": "http"}, _nothing, send)


def _exchange(scope: Scope) -> Exchange:
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    given = dict(headers).get(b"x-request-id", b"").decode("latin-1")
    usable = given.isascii() and given.isprintable() and " " not in given and len(given) <= 128
    query = scope["query_string"]
    target = scope.get("raw_path") or scope["path"].encode()
    return Exchange(
        method=scope["method"],
        path=scope["path"],
        target=target + (b"?" + query if query else b""),
        headers=headers,
        id=given if given and usable else uuid.uuid4().hex,
    )


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _may_repeat(exchange: Exchange, failure: Failure) -> bool:
    """True if no harm is done by sending the request again. Of unknown requests only those that
    change nothing, or were not sent."""
    known = exchange.generation is not None or exchange.method in ("GET", "HEAD", "OPTIONS")
    return known or failure.why == "unreachable"


async def _begin(exchange: Exchange, response: httpx.Response) -> Answer:
    """The begin of a server's answer: nothing of one that the proxy does not know, the first event
    of a stream, any other whole."""
    headers = [(name.lower(), value) for name, value in response.headers.raw]
    answer = Answer(response.status_code, headers, b"", response.aiter_raw(), False)
    if exchange.generation is None:
        kept = HOP_BY_HOP - {b"content-length"}
        answer.headers = [pair for pair in headers if pair[0] not in kept]
        return answer
    answer.headers = [pair for pair in headers if pair[0] not in HOP_BY_HOP]
    answer.stream = response.headers.get("content-type", "").startswith("text/event-stream")
    if answer.stream:
        answer.rest = _whole_events(response.aiter_raw())
    body = bytearray()
    assert answer.rest is not None
    async for part in answer.rest:
        body += part
        if answer.stream or len(body) > MOST_ANSWER:
            answer.body = bytes(body)
            return answer
    if answer.stream:
        raise httpx.RemoteProtocolError("the stream ended without an event")
    answer.body, answer.rest = bytes(body), None
    answer.headers.append((b"content-length", str(len(body)).encode()))
    return answer


async def _whole_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in parts that end where an event ends. If the stream breaks off, the begin of
    an event is dropped."""
    held = b""
    async for part in parts:
        held += part
        end = event_end(held) or (len(held) if len(held) > MOST_EVENT else 0)
        if end:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


def application(settings: Settings) -> Starlette:
    """The ASGI application of the proxy."""
    proxy = Proxy(settings)
    pools = [pool for pool in (proxy.prefillers, proxy.decoders) if pool.servers]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        checks = [asyncio.create_task(pool.watch()) for pool in pools]
        yield
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        for pool in pools:
            await pool.close()

    async def health(_request: Request) -> Response:
        up = any(server.up for server in proxy.decoders.servers)
        return Response(status_code=200 if up else 503)

    async def healthcheck(_request: Request) -> Response:
        up = {pool.role: [server.up for server in pool.servers] for pool in pools}
        counts = {f"{role}_instances": len(servers) for role, servers in up.items()}
        ready = {f"{role}_ready": sum(servers) for role, servers in up.items()}
        return JSONResponse({"status": "ok"} | counts | ready)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(proxy.metrics.registry), media_type="text/plain")

    routes = [
        Route("/health", health),
        Route("/healthcheck", healthcheck),
        Route("/metrics", metrics),
        Route("/{path:path}", proxy),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def run(settings: Settings) -> None:
    """Serves until a signal ends it. Raises :class:`OSError` if the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65_536), most))
    init_logger("ucm.pd")
    init_logger("uvicorn.error", "WARNING")
    roles = {"prefill": settings.prefill, "decode": settings.decode, "mixed": settings.mixed}
    logger.info(
        "ucm %s: pd-proxy on http://%s:%d; %s",
        __version__,
        settings.host,
        listening.getsockname()[1],
        "; ".join(f"{role}: {', '.join(urls)}" for role, urls in roles.items() if urls),
    )
    config = uvicorn.Config(
        application(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(settings.drain_timeout),
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
