"""Ports for servers of the tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port on which no server listens, kept for one that this process starts: it stays bound as
    long as this process lives, so that the system gives it to nobody else. A server that reuses
    addresses, as all of these do, can listen there, a minute later too."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = int(kept.getsockname()[1])
    kept.detach()
    return port
