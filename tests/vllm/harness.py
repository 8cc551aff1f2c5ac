"""Real vLLM engines for tests: one at a time on a machine, each in a process group of its own,
controlled over a pipe.

:class:`Engine` is a running one (``specs.py`` has its description, ``engine_child.py`` its
process); :class:`EngineHost` keeps at most one alive, shares it among tests with equal specs, and
counts the starts. Nothing sleeps for a guessed time: conditions are polled, up to a deadline that
only a hang reaches.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from fork_server import ForkServer
from specs import Ask, EngineSpec, Result

#: Seconds, to end hangs; on a slow machine no test depends on them.
START_DEADLINE = 600.0
CALL_DEADLINE = 240.0
STOP_DEADLINE = 90.0

T = TypeVar("T")
_numbers = itertools.count(1)


class EngineError(AssertionError):
    """The engine failed, refused or hung; the text ends with the last lines of its log."""


def wait_until(condition: Callable[[], T], what: str, deadline: float = CALL_DEADLINE) -> T:
    """Polls until the condition is true; fails with ``what`` at the deadline (seconds)."""
    end, pause = time.monotonic() + deadline, threading.Event()
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:.0f} s: {what}")
        pause.wait(0.01)
    return value


_lock_of_this_process = threading.Lock()


@contextmanager
def machine_lock() -> Iterator[None]:
    """Held while an engine lives: at most one on a machine. ``UCM_TEST_ENGINE_LOCK=0`` leaves it to
    the caller. A process that holds it would wait for itself, so that is an error."""
    if os.environ.get("UCM_TEST_ENGINE_LOCK") == "0":
        yield
        return
    if not _lock_of_this_process.acquire(blocking=False):
        raise EngineError("an engine of these tests still runs: call `host.stop()` before")
    try:
        with open(Path(tempfile.gettempdir()) / "vllm.lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
    finally:
        _lock_of_this_process.release()


def run_program(program: str, environment: Mapping[str, str], log: Path, **arguments: Any) -> Any:
    """The result of ``module:function`` in a new process with vLLM imported, but not ucm. It may
    start engines. ``environment`` is added to that of an engine in its user's process."""
    spec = EngineSpec(Path(), in_process=True, env=environment)
    ours, theirs = socket.socketpair()
    with machine_lock(), Connection(ours.detach()) as connection:
        with theirs, log.open("wb") as file:
            process = ForkServer.of(spec.imported_in(), file.fileno()).fork(
                theirs.fileno(), file.fileno()
            )
        try:
            first = {"program": program, "environment": spec.environment(), "arguments": arguments}
            connection.send(first)
            answered = connection.poll(START_DEADLINE)
            state, value = connection.recv() if answered else ("failed", "no answer")
            assert state == "ready", (
                f"{program}: {value}\n{log.read_text(errors='replace')[-6000:]}"
            )
            return value
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Engine:
    """A running engine. Use as a context manager, or through :class:`EngineHost`."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self._replies: dict[int, tuple[bool, Any]] = {}
        self._killed = False
        self._lock = machine_lock()
        self._lock.__enter__()
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self.log.open("wb") as log:
                server = ForkServer.of(self.spec.imported_in(), log.fileno())
                self.process = server.fork(theirs.fileno(), log.fileno())
        except OSError as error:
            raise EngineError(f"no process for the engine: {error}\n{self.log_tail()}") from error
        self.connection = Connection(ours.detach())
        self.connection.send(self.spec.first_message())
        state, value = self._receive(START_DEADLINE, "start")
        if state != "ready":
            raise EngineError(f"the engine did not start:\n{value}\n{self.log_tail()}")

    # Commands
    # ----------------------------------------------------------------------------------------------

    def submit(self, *asks: Ask) -> list[str]:
        """Starts requests and returns their ids without waiting."""
        requests = [
            {
                "id": f"r{next(_numbers)}",
                "tokens": list(ask.tokens),
                "max_tokens": ask.max_tokens,
                "salt": ask.salt,
                "lora": ask.lora,
                "priority": ask.priority,
                "extra_args": dict(ask.extra_args) if ask.extra_args else None,
                "picture": ask.picture,
                "sequences": ask.sequences,
                "engine": ask.engine,
            }
            for ask in asks
        ]
        return list(self._call("submit", requests=requests))

    def collect(self, ids: Sequence[str]) -> list[Result]:
        """Waits for these requests; their results in the order of the ids."""
        return [Result(**answer) for answer in self._call("collect", ids=list(ids))]

    def generate(self, *asks: Ask) -> list[Result]:
        """Runs requests at the same time."""
        return self.collect(self.submit(*asks))

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Result:
        """Runs one request alone."""
        return self.generate(Ask(tokens, max_tokens, **options))[0]

    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The vector of a prompt, of an embedding engine."""
        return list(self._call("embed", request_id=f"r{next(_numbers)}", tokens=list(tokens)))

    def progress(self, *ids: str) -> list[tuple[int, bool]]:
        """For each request the tokens produced so far, and whether it ended."""
        return [
            (int(produced), bool(ended))
            for produced, ended in self._call("progress", ids=list(ids))
        ]

    def abort(self, *ids: str) -> None:
        """Aborts requests; they end with their tokens so far."""
        self._call("abort", ids=list(ids))

    def reset(self) -> None:
        """Empties vLLM's own prefix cache, when no block is held any more."""
        wait_until(
            lambda: self._call("reset"), "the prefix cache can be reset (some block is still held)"
        )

    def metrics(self) -> dict[str, float]:
        """Prometheus counters and gauges by name, summed over labels; ``name:reason`` and
        ``name:source`` for those that have them."""
        return dict(self._call("metrics"))

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every worker."""
        return list(self._call("rpc", method=method, args=args, kwargs=kwargs))

    def rpc_each(self, method: str, *args: Any) -> list[list[Any]]:
        """The same in every data-parallel engine: the answers of its workers."""
        call: tuple[Any, ...] = (method, None, args, {})
        return list(self._call("utility_each", method="collective_rpc", args=call))

    def call(self, method: str, **kwargs: Any) -> Any:
        """Calls a method of vLLM's engine."""
        return self._call("call", method=method, kwargs=kwargs)

    def step(self, steps: int) -> None:
        """Runs a number of steps of an engine in the process of its user."""
        self._call("step", steps=steps)

    def scheduler(self) -> dict[str, Any]:
        """Free blocks, known requests, KV groups (see ``probe.py``)."""
        return dict(self._call("utility", method="probe_scheduler", args=()))

    def scheduler_eval(self, expression: str) -> str:
        """``repr`` of an expression over ``scheduler`` and ``connector``, for debugging."""
        return str(self._call("utility", method="probe_eval", args=(expression,)))

    def scheduler_each(self, expression: str) -> list[str]:
        """:meth:`scheduler_eval` in every data-parallel engine."""
        return list(self._call("utility_each", method="probe_eval", args=(expression,)))

    def idle(self) -> list[bool]:
        """For each data-parallel engine, whether it knows no request, all its blocks are free and
        no transfer is under way."""
        return [
            bool(
                state["requests"] == 0
                and state["free_blocks"] == state["total_blocks"]
                and not state["transfers"]
            )
            for state in self._call("utility_each", method="probe_scheduler", args=())
        ]

    def wait_idle(self) -> None:
        """Waits until all are idle."""
        wait_until(
            lambda: all(self.idle()),
            "no request is left, all blocks are free and nothing is under way",
        )

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    # The end
    # ----------------------------------------------------------------------------------------------

    def begin_shutdown(self) -> None:
        """Starts the end of the engine without waiting: follow with :meth:`shutdown`."""
        self.connection.send((next(_numbers), "shutdown", {}))
        self._ending = True

    def shutdown(self) -> None:
        """Ends the engine like a server; fails if it hangs or exits with an error."""
        try:
            if not getattr(self, "_ending", False) and self.alive():
                self.begin_shutdown()
            code = self.process.wait(STOP_DEADLINE)
        except (subprocess.TimeoutExpired, OSError) as error:
            raise EngineError(f"the engine did not end: {error}\n{self.log_tail()}") from error
        else:
            # The engine's workers may outlive it while they drain; remaining ones are then killed.
            try:
                wait_until(
                    lambda: not _group_members(self.process.pid),
                    "every process ended",
                    STOP_DEADLINE,
                )
            except AssertionError as error:
                raise EngineError(
                    f"{error}: {_group_members(self.process.pid)}\n{self.log_tail()}"
                ) from None
        finally:
            self.kill()
        if code != 0:
            raise EngineError(f"the engine ended with code {code}\n{self.log_tail()}")

    def kill(self) -> None:
        """Kills the rest of the process group and releases the machine's lock. Idempotent."""
        process = getattr(self, "process", None)
        if process is not None and not self._killed:
            self._killed = True  # once: its number may be another group's later
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            self.connection.close()
        lock, self._lock = self._lock, None  # type: ignore[assignment]
        if lock is not None:
            lock.__exit__(None, None, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.kill()

    def log_text(self) -> str:
        """The engine's whole log so far."""
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """The last lines of the log."""
        return f"--- end of {self.log} ---\n" + "\n".join(self.log_text().splitlines()[-lines:])

    def _call(self, name: str, **arguments: Any) -> Any:
        number = next(_numbers)
        try:
            self.connection.send((number, name, arguments))
        except OSError as error:
            raise EngineError(f"{name}: the engine is gone\n{self.log_tail()}") from error
        while number not in self._replies:
            got, good, value = self._receive(CALL_DEADLINE, name)
            self._replies[got] = (good, value)
        good, value = self._replies.pop(number)
        if not good:
            raise EngineError(f"{name}: {value}\n{self.log_tail()}")
        return value

    def _receive(self, deadline: float, what: str) -> Any:
        end = time.monotonic() + deadline
        try:
            while time.monotonic() < end:
                gone = self.process.poll() is not None
                if self.connection.poll(0 if gone else 1.0):
                    return self.connection.recv()
                if gone:
                    raise EOFError
        except (EOFError, OSError) as error:
            raise EngineError(f"{what}: the engine is gone\n{self.log_tail()}") from error
        tail = self.log_tail()
        self.kill()
        raise EngineError(f"{what}: no reply within {deadline:.0f} s\n{tail}")


def _group_members(group: int) -> list[int]:
    """Ids of the living processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(entry.name))
    return members


class EngineHost:
    """At most one live engine; consecutive tests with equal specs share it."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.started: list[str] = []
        self._live: Engine | None = None

    def get(self, spec: EngineSpec) -> Engine:
        """The live engine if it is of this spec and alive, else a new one after ending the live
        one."""
        if self._live is not None and (self._live.spec != spec or not self._live.alive()):
            self.stop()
        if self._live is None:
            self.started.append(spec.label or spec.runner)
            self._live = Engine(
                spec, self.logs / f"engine-{len(self.started)}-{spec.label or spec.runner}.log"
            )
        return self._live

    def stop(self) -> None:
        """Ends the live engine, if any."""
        live, self._live = self._live, None
        if live is not None and live.alive():
            live.shutdown()
        elif live is not None:
            live.kill()
