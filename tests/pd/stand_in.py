"""A server that stands in for vLLM: the same endpoints, answers that depend on the prompt alone,
and faults on request.

It listens on a port of this machine, so that connections are real. The tokens of an answer are
words made from the prompt; a prefill answers ``kv_transfer_params`` as a producer does. A fault is
taken by the next request for tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/inference/v1/generate": "token_ids",
}
#: Shortest prompt, as JSON, that has a full block.
BLOCK = 40


def word(prompt: Any, number: int) -> str:
    """One word of the answer to a prompt."""
    return hashlib.sha256(f"{json.dumps(prompt)} {number}".encode()).hexdigest()[:6]


def words(prompt: Any, count: int) -> list[str]:
    """The answer to a prompt."""
    return [word(prompt, number) for number in range(count)]


@dataclass
class Seen:
    """One request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    left: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The body as JSON."""
        return dict(json.loads(self.raw))


@dataclass
class Fault:
    """What happens to one request: it waits for ``gate``; then an answer of ``status`` and
    ``document``, a first event ``event``, or an end of the connection after ``events`` events and a
    half one."""

    gate: asyncio.Event | None = None
    status: int = 0
    document: dict[str, Any] | None = None
    event: dict[str, Any] | None = None
    events: int | None = None


@dataclass
class StandIn:
    """The server."""

    healthy: bool = True
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    #: Every request waits for this.
    gate: asyncio.Event | None = None
    at: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            return
        if scope["path"].endswith("/health"):
            await _answer(send, 200 if self.healthy else 503, b"")
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        path = (scope["raw_path"] + query).decode()
        seen = Seen(scope["method"], path, headers, raw)
        self.seen.append(seen)
        work = asyncio.create_task(self._serve(scope["path"], seen, send))
        left = asyncio.create_task(_until_left(receive))
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            seen.left = True
        for task in (work, left):
            task.cancel()
        await asyncio.gather(work, left, return_exceptions=True)

    async def _serve(self, path: str, seen: Seen, send: Send) -> None:
        if path not in PROMPTS:
            document = {"path": seen.path, "method": seen.method, "raw": seen.raw.decode()}
            await _answer(send, 200, json.dumps(document).encode(), [(b"x-mine", b"yes")])
            return
        fault = self.faults.pop(0) if self.faults else Fault()
        for gate in (self.gate, fault.gate):
            if gate is not None:
                await gate.wait()
        if fault.status:
            await _answer(send, fault.status, json.dumps(fault.document or {}).encode())
        elif seen.body.get("stream"):
            await self._stream(path, seen.body, fault, send)
        elif fault.events is not None:
            await _start(send, 200, b"application/json")
            await send({"type": "http.response.body", "body": b'{"half', "more_body": True})
        else:
            document = fault.document or self._document(path, seen.body)
            await _answer(send, 200, json.dumps(document).encode())

    def _document(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body[PROMPTS[path]]
        options = body.get("sampling_params", body)
        count = options.get("max_completion_tokens") or options.get("max_tokens") or 16
        text = " ".join(words(prompt, count))
        answer: dict[str, Any] = {"model": body.get("model"), "from": self.at}
        if path == "/v1/messages":
            answer |= {"content": [{"type": "text", "text": text}], "stop_reason": "max_tokens"}
        else:
            answer |= {"choices": [{"index": 0, "text": text, "finish_reason": "length"}]}
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") and len(json.dumps(prompt)) >= BLOCK:
            key = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "ucm": {"key": key, "tokens": len(json.dumps(prompt)), "identity": "one"},
            }
        return answer

    async def _stream(self, path: str, body: dict[str, Any], fault: Fault, send: Send) -> None:
        await _start(send, 200, b"text/event-stream; charset=utf-8")
        async for event in _events(path, body, fault):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)  # sending alone would not let others run
        if fault.events is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(path: str, body: dict[str, Any], fault: Fault) -> AsyncIterator[bytes]:
    if fault.event is not None:
        yield f"data: {json.dumps(fault.event)}\n\ndata: [DONE]\n\n".encode()
        return
    options = body.get("sampling_params", body)
    for number in range(options.get("max_tokens") or 16):
        choice = {"index": 0, "text": word(body[PROMPTS[path]], number)}
        event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        if number == fault.events:
            yield event[:12]  # a killed server may have sent part of an event
            return
        yield event
    yield b"data: [DONE]\n\n"


async def _start(send: Send, status: int, kind: bytes, more: Any = ()) -> None:
    headers = [(b"content-type", kind), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Send, status: int, body: bytes, more: Any = ()) -> None:
    await _start(send, status, b"application/json", more)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _until_left(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
