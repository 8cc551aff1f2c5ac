"""Ports for servers of the tests."""

from __future__ import annotations

import socket

#: Bound, and not listening: the system finds no other user for their ports, and a server that
#: reuses addresses, as all of these do, can take them.
_kept: list[socket.socket] = []


def free_port() -> int:
    """A port on which no server listens, kept for one that this process starts: the server may need
    a minute until it listens, and servers of other tests look for ports in the meantime."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    _kept.append(kept)
    return int(kept.getsockname()[1])
