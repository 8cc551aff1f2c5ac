"""A pool of Mooncake: its master, and processes that lend memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from servers import held_port

HOST = "127.0.0.1"
HERE = Path(__file__).resolve().parent
PACKAGE = Path(__file__).resolve().parents[2] / ".tools" / "mooncake"
#: Tries, a twentieth of a second apart, until a condition holds.
TRIES = 1200

#: A process that lends memory until its input ends.
LEND = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


def why_not() -> str:
    """Why Mooncake does not run here; empty if it does."""
    if not (PACKAGE / "mooncake" / "mooncake_master").exists():
        return "Mooncake's package is not installed; run: make .tools/.stamp-mooncake"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "Mooncake needs libibverbs.so.1; install libibverbs1, a package of the system"
    return ""


def _end_with_parent() -> None:
    """Runs in a new process: the kernel ends it when its parent dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _started(command: list[str], log: Path, **more: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "MC_LOG_LEVEL": "WARNING"}
    with log.open("ab") as errors:
        return subprocess.Popen(
            command, env=environment, stderr=errors, text=True, preexec_fn=_end_with_parent, **more
        )


class Pool:
    """A master that can be killed and started again at the same address, and lenders. ``flags``: of
    the master."""

    def __init__(self, directory: Path, **flags: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.flags = flags
        self._held = [held_port(), held_port()]
        self.rpc, self.metrics = (held.getsockname()[1] for held in self._held)
        self.master: subprocess.Popen[str] | None = None
        self.lenders: list[subprocess.Popen[str]] = []

    @property
    def address(self) -> str:
        return f"{HOST}:{self.rpc}"

    @property
    def config(self) -> dict[str, Any]:
        """The pool's keys for a store that lends nothing."""
        return {
            "master_server_address": self.address,
            "global_segment_size": 0,
            "local_buffer_size": "16MiB",
        }

    def start(self) -> None:
        """Starts the master and waits until it accepts connections."""
        command = [
            str(PACKAGE / "mooncake" / "mooncake_master"),
            "--rpc_address",
            HOST,
            "--rpc_port",
            str(self.rpc),
        ]
        command += ["--metrics_host", HOST, "--metrics_port", str(self.metrics), "--logtostderr"]
        command += [f"--{name}={value}" for name, value in self.flags.items()]
        self.master = _started(command, self.directory / "master.log", stdout=subprocess.DEVNULL)
        pause = threading.Event()
        for _ in range(TRIES):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((HOST, self.rpc), timeout=5),
            ):
                return
            assert self.master.poll() is None, (self.directory / "master.log").read_text()
            pause.wait(0.05)
        raise AssertionError("the master does not listen")

    def lend(self, size: int) -> None:
        """Starts a process that lends memory."""
        command = [sys.executable, "-c", LEND, self.address, str(size)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        lender = _started(command, self.directory / "lender.log", **pipes)
        self.lenders.append(lender)
        assert lender.stdout is not None
        said = lender.stdout.readline()
        assert said == "0\n", (said, (self.directory / "lender.log").read_text()[-2000:])

    def kill_master(self) -> None:
        assert self.master is not None
        self.master.kill()
        self.master.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()
        for process in (*self.lenders, self.master):
            if process is not None:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
