"""Processes of engines, forked from one that has imported vLLM, because the import takes longer
than the rest of a start.

Run as ``fork_server.py <fd>``: a socket that passes the descriptors of one engine after the other,
until its other end is closed. There is a server for each import environment of vLLM; an engine's
process sets the rest of its environment (``engine_child.py``).
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
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import ClassVar

#: The imports of every engine, without ucm, which engines must find by themselves.
IMPORTED = [
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "prometheus_client",
]
#: Most servers kept. Each uses half a GiB for the imported vLLM.
KEPT = 2
#: Most seconds of importing vLLM, or of ending a server, to end hangs.
DEADLINE = 600.0
#: Seconds between two polls of an engine's process for another's message.
PAUSE = 0.0003


class EngineProcess:
    """The process of an engine, which leads a group of its own, as ``subprocess.Popen`` shows
    one."""

    def __init__(self, status: Connection) -> None:
        self._status = status
        self._code: int | None = None
        try:
            if not status.poll(DEADLINE):
                raise TimeoutError(f"vLLM was not imported within {DEADLINE:.0f} s")
            self.pid: int = status.recv()
        except EOFError:
            raise ChildProcessError(
                "vLLM could not be imported; the end of the engine's log has the reason"
            ) from None

    def poll(self) -> int | None:
        """How it ended, if it did: as :func:`os.waitstatus_to_exitcode` says it."""
        try:
            if self._code is None and self._status.poll():
                self._code = self._status.recv()
        except EOFError:  # the process that waited for it was killed
            self._code = -signal.SIGKILL
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it ended; ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        wait([self._status], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout or 0.0)
        return code


class ForkServer:
    """A process that has imported vLLM under one environment."""

    _kept: ClassVar[dict[frozenset[tuple[str, str]], ForkServer]] = {}

    def __init__(self, environment: Mapping[str, str], log: int) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @classmethod
    def of(cls, environment: Mapping[str, str], log: int) -> ForkServer:
        """The server of that environment. A new one writes to this log and replaces the least
        recently used one."""
        key = frozenset(environment.items())
        server = cls._kept.pop(key, None)
        if server is not None and server._process.poll() is not None:
            server.close()
            server = None
        while len(cls._kept) >= KEPT:
            cls._kept.pop(next(iter(cls._kept))).close()
        cls._kept[key] = server = server or cls(environment, log)
        return server

    def fork(self, connection: int, log: int) -> EngineProcess:
        """Forks an engine with this descriptor of its connection; its output goes to that of
        ``log``."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"!"], [connection, log, theirs.fileno()])
        return EngineProcess(Connection(ours.detach()))

    def close(self) -> None:
        """Ends it; its engines continue."""
        self._control.close()
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @classmethod
    def close_all(cls) -> None:
        """Ends all that are kept."""
        while cls._kept:
            cls._kept.popitem()[1].close()


atexit.register(ForkServer.close_all)


def serve(control: socket.socket) -> int | None:
    """Forks engines until no more are wanted; in an engine's process it returns the descriptor of
    its connection."""
    for name in IMPORTED:
        importlib.import_module(name)
    platform = importlib.import_module("vllm.platforms").current_platform
    importlib.import_module(f"vllm.v1.worker.{'cpu' if platform.is_cpu() else 'gpu'}_worker")
    wait_asleep()
    inspect_here()
    sys.stdout.flush()
    keep_frozen()
    gc.freeze()  # otherwise the first collection of every engine would copy all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while files := socket.recv_fds(control, 1, 3)[1]:
        if os.fork() == 0:
            control.close()
            return fork_engine(*files)
        for file in files:
            os.close(file)
    return None


def wait_asleep() -> None:
    """While an engine's processes wait for each other they poll for a second: with sleeps in
    between, because otherwise it would use one of two processors of the concurrent tests."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(PAUSE)


def keep_frozen() -> None:
    """At its end an engine of vLLM collects garbage among all that was ever imported, which takes a
    second."""
    gc.unfreeze = lambda: None


def inspect_here() -> None:
    """vLLM queries each model class once for what it can do, in a new process that imports it all,
    because the class may initialise a device. On a CPU this process queries it."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda ask: ask()


def fork_engine(connection: int, log: int, status: int) -> int:
    """Forks an engine, sends its id, waits for its end and sends its status; returns in the
    engine."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    engine = os.fork()
    if engine:
        try:
            os.close(connection)
            os.close(log)
            code = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
            Connection(status).send(code)
        finally:
            os._exit(0)  # also if the requester has ended: the rest is the engine's
    os.setsid()
    with Connection(status) as told:
        told.send(os.getpid())
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    return connection


if __name__ == "__main__":
    if (descriptor := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        importlib.import_module("engine_child").main(descriptor)
