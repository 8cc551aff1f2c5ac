"""What the proxy knows of vLLM's requests and answers. No connections, no state.

A request for tokens is sent to a prefill server first, as a request for one token with
``do_remote_decode``. The ``kv_transfer_params`` of its answer are added to the client's request,
which then goes to a decode server. Everything that shapes the prompt stays as it is, because both
servers must compute the same blocks; a request whose prompt they could see differently, or of which
a decode server computes the prompt in any case, skips the prefill server. Bodies are changed only
where this module says so: any other field, and a body that it cannot read, passes unchanged.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#: The field with the prompt, by endpoint.
PROMPTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/inference/v1/generate": "token_ids",
}
#: Fields that shape only the answer. A prefill server gets none of them.
ANSWER_FIELDS = {
    *("stream", "stream_options", "stream_interval", "n", "best_of", "min_tokens", "echo"),
    *("min_completion_tokens", "logprobs", "top_logprobs", "logprob_token_ids", "length_penalty"),
    *("return_tokens_as_token_ids", "return_token_ids", "return_prompt_text"),
}
#: Bytes of a prompt between two of its prefixes, and how many prefixes are kept of one prompt.
PREFIX_BYTES, MOST_PREFIXES = 1024, 512

#: Types of vLLM's and Anthropic's errors that another server may not have, by reason.
ERROR_TYPES = {
    "ServiceUnavailableError": "unavailable",
    "Service Unavailable": "unavailable",
    "overloaded_error": "unavailable",
    "InternalServerError": "error",
    "api_error": "error",
}
STATUSES = {429: "busy", 500: "error", 502: "error", 503: "unavailable", 504: "error"}


@dataclass(frozen=True)
class Generation:
    """A client's request for tokens. ``skips`` says why it goes to one server only: empty if it is
    sent to a prefill server first."""

    endpoint: str
    raw: bytes
    body: dict[str, Any]
    skips: str

    @property
    def params(self) -> dict[str, Any]:
        """The client's own ``kv_transfer_params``."""
        params = self.body.get("kv_transfer_params")
        return params if isinstance(params, dict) else {}

    @property
    def prefills_only(self) -> bool:
        """True if another proxy sent this as the prefill of a request."""
        return bool(self.params.get("do_remote_decode"))

    def for_prefill(self) -> bytes:
        """The body for a prefill server."""
        body = {key: value for key, value in self.body.items() if key not in ANSWER_FIELDS}
        if self.endpoint == "/inference/v1/generate":
            sampling = _sampling(self.body)
            kept = {key: value for key, value in sampling.items() if key not in ANSWER_FIELDS}
            body["sampling_params"] = kept | {"max_tokens": 1}
        else:
            body["max_tokens"] = 1
            if "max_completion_tokens" in body:
                body["max_completion_tokens"] = 1
        body["stream"] = False
        body["kv_transfer_params"] = self.params | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
        }
        return json.dumps(body).encode()

    def for_decode(self, answered: dict[str, Any] | None) -> bytes:
        """The body for a decode server, with what a prefill server answered. ``"ucm"`` has keys of
        the client and keys of the answer."""
        if not answered:
            return self.raw
        params = self.params | answered
        mine, theirs = self.params.get("ucm"), answered.get("ucm")
        if isinstance(mine, dict) and isinstance(theirs, dict):
            params["ucm"] = mine | theirs
        return json.dumps(self.body | {"kv_transfer_params": params}).encode()

    @cached_property
    def prefixes(self) -> list[bytes]:
        """Digests of the prompt's prefixes, shortest first. Requests with an equal one begin
        alike."""
        begin = [self.body.get(key) for key in ("model", "cache_salt", "tools", "system")]
        text = json.dumps([*begin, self.body[PROMPTS[self.endpoint]]]).encode()
        found, digest = [], hashlib.blake2b(digest_size=8)
        for number in range(min(len(text) // PREFIX_BYTES, MOST_PREFIXES)):
            digest.update(text[number * PREFIX_BYTES : (number + 1) * PREFIX_BYTES])
            found.append(digest.digest())
        return found


def read(endpoint: str, raw: bytes, prefill_from: int = 0) -> Generation | None:
    """The request for tokens in a body; None if it is none that this module understands."""
    field = PROMPTS.get(endpoint)
    if field is None:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or field not in body:
        return None
    return Generation(endpoint, raw, body, _why_not(body, body[field], len(raw), prefill_from))


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    sampling = body.get("sampling_params")
    return sampling if isinstance(sampling, dict) else {}


def _why_not(body: dict[str, Any], prompt: Any, length: int, prefill_from: int) -> str:
    """Why a request is not sent to a prefill server first; empty if it is."""
    params, options = body.get("kv_transfer_params"), body | _sampling(body)
    if isinstance(params, dict):
        if params.get("do_remote_decode") or params.get("do_remote_prefill"):
            return "split already"
    elif params is not None:
        return "unknown params"
    if length < prefill_from:
        return "short"
    # One answer cannot name the blocks of several prompts.
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) and prompt[1:]:
        return "several prompts"
    # vLLM reads no cached block for these, and computes the prompt where it answers.
    if options.get("prompt_logprobs") is not None or (
        options.get("echo") and options.get("logprobs") is not None
    ):
        return "prompt logprobs"
    if options.get("use_beam_search"):
        return "beam search"
    # Cut to what max_tokens leaves, so that another max_tokens is another prompt.
    if options.get("truncate_prompt_tokens") == -1:
        return "truncated"
    return "no tokens" if options.get("max_tokens") == 0 else ""


def answered_params(raw: bytes) -> dict[str, Any] | None:
    """The ``kv_transfer_params`` of a prefill server's answer. None for a prompt without a full
    block."""
    document = _json(raw)
    params = document.get("kv_transfer_params")
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def why_retry(status: int, raw: bytes) -> str:
    """Why an answer that no client has seen yet may be retried: ``busy``, ``unavailable``,
    ``error``; empty if it is final. ``raw`` is the JSON document, or the first event of a
    stream."""
    if status >= 400 and status not in STATUSES:
        document = _json(raw)
        return "unavailable" if _code(document) == "engine_paused" else ""
    if status in STATUSES:
        return STATUSES[status]
    if b'"error"' not in raw and b'"abort"' not in raw:
        return ""
    document = _json(raw)
    error = document.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        if code == "engine_paused":
            return "unavailable"
        known = STATUSES.get(code) if isinstance(code, int) else None
        return known or ERROR_TYPES.get(str(error.get("type")), "")
    # An engine that is paused or stopped ends its requests so.
    choices = document.get("choices")
    ends = [one.get("finish_reason") for one in choices or () if isinstance(one, dict)]
    return "unavailable" if "abort" in ends else ""


def _code(document: dict[str, Any]) -> Any:
    error = document.get("error")
    return error.get("code") if isinstance(error, dict) else None


def _json(raw: bytes) -> dict[str, Any]:
    """The document of an answer, or of the ``data`` of an event; empty if it is no object."""
    if not raw.lstrip().startswith(b"{"):
        lines = raw.splitlines()
        raw = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def error_body(endpoint: str, status: int, text: str) -> dict[str, Any]:
    """An error of the proxy itself, in the form of the endpoint."""
    kinds = {413: "BadRequestError", 408: "BadRequestError", 429: "RateLimitError"}
    kind = kinds.get(status, "ServiceUnavailableError" if status == 503 else "BadGatewayError")
    if endpoint == "/v1/messages":
        names = {413: "request_too_large", 408: "invalid_request_error", 429: "rate_limit_error"}
        name = names.get(status, "overloaded_error" if status == 503 else "api_error")
        return {"type": "error", "error": {"type": name, "message": text}}
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}


def error_event(endpoint: str, text: str) -> bytes:
    """The last event of a stream that cannot go on."""
    event = b"event: error\n" if endpoint == "/v1/messages" else b""
    return event + b"data: " + json.dumps(error_body(endpoint, 502, text)).encode() + b"\n\n"


def event_end(data: bytes, first: bool = False) -> int:
    """Where the first or the last complete event in ``data`` ends; 0 if none does."""
    find = data.find if first else data.rfind
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := find(mark)) >= 0]
    if not ends:
        return 0
    return min(ends) if first else max(ends)
