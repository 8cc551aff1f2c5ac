"""Prefill/decode separation: the proxy of ``ucm pd-proxy`` and its settings.

Prefill servers compute prompts and store their blocks, decode servers load them and produce the
tokens; both are vLLM servers with ucm on one store. :mod:`ucm.pd.protocol` is what the proxy knows
of requests and answers, :mod:`ucm.pd.servers` chooses among servers, :mod:`ucm.pd.proxy` carries a
request through both. ``docs/pd.md`` is the page for operators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """What ``ucm pd-proxy`` can be given: one option a field. Times are seconds."""

    prefill: tuple[str, ...] = _option((), "A server that computes prompts; repeatable.")
    decode: tuple[str, ...] = _option((), "A server that produces tokens; repeatable.")
    mixed: tuple[str, ...] = _option(
        (), "A server of both roles, instead of --prefill and --decode; repeatable."
    )
    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on.")
    prefill_from: int = _option(0, "Shortest body (bytes) that is sent to a prefill server first.")
    max_requests: int = _option(1024, "Most requests at a time; more are answered 429.")
    max_per_server: int = _option(512, "Most requests at one server; more wait for their turn.")
    max_body: int = _option(64 << 20, "Largest body of a request; larger ones are answered 413.")
    tries: int = _option(3, "Most servers of a role that may fail during one request.")
    retry_for: float = _option(15.0, "Time in which a request without a decode server is retried.")
    queue_timeout: float = _option(30.0, "Longest wait for a turn at a server, then 429.")
    connect_timeout: float = _option(5.0, "Longest wait for a connection to a server.")
    prefill_timeout: float = _option(120.0, "Longest prefill; then the decode server computes.")
    decode_timeout: float = _option(1800.0, "Longest wait for the next bytes of an answer.")
    client_timeout: float = _option(60.0, "Longest wait for a client to send, or to read.")
    health_interval: float = _option(5.0, "Time between two health checks of a server.")
    drain_timeout: float = _option(30.0, "Time for running requests when the proxy is stopped.")

    @property
    def decoders(self) -> tuple[str, ...]:
        """The servers that answer clients."""
        return self.decode or self.mixed
