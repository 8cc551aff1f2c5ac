"""Ports for servers of the tests."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """Bound to a port that the system gives to nobody else until this is closed. A server that
    reuses addresses, as all of these do, can listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def free_port() -> int:
    """A port on which no server listens, held as long as this process lives."""
    held = held_port()
    port = int(held.getsockname()[1])
    held.detach()
    return port
