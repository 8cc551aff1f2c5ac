"""An HTTP server on a real socket that streams completions as vLLM does, and has its metrics.

It has no model: token ``n`` of an answer is ``n``, and a token of a prompt counts as a hit where
the same beginning was asked before. A gate holds answers until a number of them have begun.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Tokens of a block, as of a prefix cache.
BLOCK = 16


class StubServer(ThreadingHTTPServer):
    """A context manager; ``requests`` has the bodies in the order of their arrival."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, max_model_len: int = 4096, fails_after: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.max_model_len, self.fails_after = max_model_len, fails_after
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.resets = 0
        self.may_reset = True
        self.has_metrics = self.has_cache = True
        self.gate = 0
        self.most_at_once = self._running = 0
        self.changed = threading.Condition()
        self._known: set[tuple[int, ...]] = set()
        self.asked = self.hit = 0
        self.loads: list[float] = []
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def prompts(self, output: int | None = None) -> list[list[int]]:
        """Prompts of requests for answers of this length."""
        return [r["prompt"] for r in self.requests if output in (None, r["max_tokens"])]

    def begin(self, body: dict[str, Any]) -> int:
        """Counts a request; its cached tokens, or -1 where it is to fail."""
        with self.changed:
            self.requests.append(body)
            fails = self.fails_after is not None and len(self.requests) > self.fails_after
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most_at_once >= self.gate, 60)
            prompt, cached = body["prompt"], 0
            for end in range(BLOCK, len(prompt) + 1, BLOCK):
                if (key := tuple(prompt[:end])) in self._known:
                    cached = end
                if self.has_cache:
                    self._known.add(key)
            self.asked += len(prompt)
            self.hit += cached
            self.loads.append(0.25)
            return -1 if fails else cached

    def end(self) -> None:
        with self.changed:
            self._running -= 1

    def metrics(self) -> str:
        with self.changed:
            return (
                "# TYPE vllm:prefix_cache_queries counter\n"
                f'vllm:prefix_cache_queries_total{{engine="0"}} {self.asked}\n'
                "# TYPE vllm:prefix_cache_hits counter\n"
                f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hit // 4}\n'
                "# TYPE vllm:external_prefix_cache_hits counter\n"
                f'vllm:external_prefix_cache_hits_total{{engine="0"}} {self.hit - self.hit // 4}\n'
                "# TYPE ucm_load_seconds histogram\n"
                f'ucm_load_seconds_bucket{{rank="0",le="+Inf"}} {len(self.loads)}\n'
                f'ucm_load_seconds_count{{rank="0"}} {len(self.loads)}\n'
                f'ucm_load_seconds_sum{{rank="0"}} {sum(self.loads)}\n'
            )


class _Handler(BaseHTTPRequestHandler):
    server: StubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(self, text: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            model = {"id": "stub", "max_model_len": self.server.max_model_len}
            self._answer(json.dumps({"data": [model]}))
        elif self.path == "/metrics" and self.server.has_metrics:
            self._answer(self.server.metrics())
        else:
            self._answer("", 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/reset_prefix_cache":
            self.server.resets += 1
            status = 200 if self.server.may_reset else 404
            # Busy the first time, as an engine that still stores blocks.
            self._answer(json.dumps({"success": self.server.resets > 1}), status)
            return
        assert self.path == "/v1/completions"
        self.server.keys.append(self.headers["Authorization"])
        self._complete(json.loads(body))

    def _complete(self, body: dict[str, Any]) -> None:
        cached = self.server.begin(body)
        try:
            if cached < 0:
                self._answer('{"error": {"message": "no room"}}', 503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for token in range(body["max_tokens"]):
                self._event({"choices": [{"text": "w", "token_ids": [token]}]})
            usage = {
                "prompt_tokens": len(body["prompt"]),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        finally:
            self.server.end()

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
