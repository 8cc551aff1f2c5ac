"""Servers that stores of the network keep their blocks on, as the demo and the tests start them:
real ones, each on a port of its own of this machine, ended with the process that started it.

``redis-server`` is a package of the system (``make servers`` installs it where it may), ``s3s-fs``
an S3 server that keeps objects in files and is built by ``make servers-long``.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

#: Seconds that a server may take to listen.
PATIENCE = 60.0
#: Name and password for the S3 servers.
KEYS = {"AWS_ACCESS_KEY_ID": "ucm-tests", "AWS_SECRET_ACCESS_KEY": "ucm-tests-secret"}
#: The bucket that they have.
BUCKET = "bucket"
TOOLS = pathlib.Path(__file__).resolve().parent.parent / ".tools" / "bin"


class MissingError(Exception):
    """A server is not on this machine; the text says which and how it gets there."""


def held_port() -> socket.socket:
    """Bound to a port that the system gives to no other process until this is closed. A server that
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


class Server:
    """A server process on this machine; a context manager. It can be killed and started again on
    the same port."""

    def __init__(self, command: Callable[[int], Sequence[str]], directory: pathlib.Path) -> None:
        """``command``: the command line for a port. ``directory``: where it runs, made if need
        be."""
        directory.mkdir(parents=True, exist_ok=True)
        self._command, self._directory = command, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._held = held_port()  # until the end, also while the server is down
        self.port = int(self._held.getsockname()[1])
        try:
            self.start()
        except MissingError:
            self._held.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._held.close()

    @property
    def at(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        self._pid = self._begin()
        deadline = time.monotonic() + PATIENCE
        while not self._listens():
            if time.monotonic() > deadline or not _is_there(self._pid):
                self.kill()
                raise MissingError(f"{' '.join(self._command(self.port))} does not listen")
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it at once, as a crash would; what it keeps on disk stays."""
        if self._process is None:
            return
        self._process.communicate(b"\n")
        self._process = None

    def _begin(self) -> int:
        """Starts its process and returns that one's id."""
        # A pipe ends it with us, however that is: its standard input is closed then.
        keeper = (
            'trap "" TERM; "$@" </dev/null >/dev/null 2>&1 & pid=$!; echo $pid; read -r _; kill -9'
            " $pid; wait $pid"
        )
        self._process = subprocess.Popen(
            ["sh", "-c", keeper, "sh", *self._command(self.port)],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def restart(self) -> None:
        """Kills it and starts it again."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """It answers nothing from now on, and its connections stay open."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        os.kill(self._pid, signal.SIGCONT)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def redis_server(directory: pathlib.Path, *more: str, keeps: bool = False) -> Server:
    """A Redis server; with ``keeps`` it has what was stored after a restart, too. Raises
    :class:`MissingError`."""
    if shutil.which("redis-server") is None:
        raise MissingError(
            "redis-server is not installed; `make servers` installs it as root (apt-get)"
        )
    kept = ["--appendonly", "yes", "--appendfsync", "always"] if keeps else ["--appendonly", "no"]

    def command(port: int) -> list[str]:
        return [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            *kept,
            *more,
        ]

    return Server(command, directory)


def s3_server(directory: pathlib.Path) -> Server:
    """An S3 server over a directory, with one bucket. Raises :class:`MissingError`."""
    program = TOOLS / "s3s-fs"
    if not program.exists():
        raise MissingError("s3s-fs is not built; `make servers-long` builds it")
    (directory / BUCKET).mkdir(parents=True, exist_ok=True)
    keys = [
        "--access-key",
        KEYS["AWS_ACCESS_KEY_ID"],
        "--secret-key",
        KEYS["AWS_SECRET_ACCESS_KEY"],
    ]
    return Server(
        lambda port: [
            str(program),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *keys,
            str(directory.resolve()),
        ],
        directory,
    )


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
