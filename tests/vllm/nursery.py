"""Processes of engines, forked from one that has imported vLLM: to import it takes as long as all else of a start.

Run as ``nursery.py <fd>``: a socket by which the files of one engine come at a time, until its other end is closed. An
engine finds the same environment as if it were started anew: what was imported in another one is not for it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

#: What every engine imports; nothing of ucm, which engines are to find by themselves.
IMPORTED = [
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "prometheus_client",
]
#: Most nurseries kept. Each holds what vLLM needs once it is imported, half a GiB.
KEPT = 2


class EngineProcess:
    """The process of an engine, which leads a group of its own, as ``subprocess.Popen`` shows one."""

    def __init__(self, minder: Connection) -> None:
        self._minder = minder
        self._code: int | None = None
        self.pid: int = minder.recv()

    def poll(self) -> int | None:
        """How it ended, if it did: as :func:`os.waitstatus_to_exitcode` says it."""
        if self._code is None and self._minder.poll():
            self._code = self._minder.recv()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it ended; ``subprocess.TimeoutExpired`` after so many seconds."""
        wait([self._minder], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout or 0.0)
        return code


class Nursery:
    """A process that has imported vLLM under one environment."""

    _kept: dict[frozenset[tuple[str, str]], Nursery] = {}

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Nursery:
        """The one of that environment, which is started if it has to be; the one used longest ago is ended for it."""
        key = frozenset(environment.items())
        nursery = cls._kept.pop(key, None)
        if nursery is None or nursery._process.poll() is not None:
            nursery = cls(environment)
        while len(cls._kept) >= KEPT:
            cls._kept.pop(next(iter(cls._kept))).close()
        cls._kept[key] = nursery
        return nursery

    def fork(self, connection: int, log: int) -> EngineProcess:
        """An engine with the end of its connection that has this descriptor; what it says goes to that of ``log``."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"!"], [connection, log, theirs.fileno()])
        return EngineProcess(Connection(ours.detach()))

    def close(self) -> None:
        """Ends it; its engines go on."""
        self._control.close()
        self._process.wait()

    @classmethod
    def close_all(cls) -> None:
        """Ends all that are kept."""
        while cls._kept:
            cls._kept.popitem()[1].close()


atexit.register(Nursery.close_all)


def serve(control: socket.socket) -> int | None:
    """Forks engines until nobody wants more; in an engine's process it returns the descriptor of its connection."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or the first collection of every engine would copy all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while files := socket.recv_fds(control, 1, 3)[1]:
        if os.fork() == 0:
            control.close()
            return mind(*files)
        for file in files:
            os.close(file)
    return None


def mind(connection: int, log: int, status: int) -> int:
    """Forks an engine, tells its id and then how it ended; returns in the engine."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    engine = os.fork()
    if engine:
        os.close(connection)
        os.close(log)
        minder = Connection(status)
        minder.send(engine)
        minder.send(os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1]))
        os._exit(0)
    os.close(status)
    os.setsid()
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    return connection


if __name__ == "__main__":
    if (connection := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        import engine_child

        engine_child.main(connection)
