"""An arm's process, from the driver's side: requests with a deadline, and the reason of a
failure."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from arms import Arm

HERE = Path(__file__).resolve().parent

#: Importing a peer takes half a minute from a cold disk.
START_SECONDS = 300.0


class ArmProcess:
    """One started arm; ``version`` and ``threads`` after its first message, ``reason`` if it cannot
    run."""

    def __init__(self, arm: Arm, python: str, environment: dict[str, str], directory: Path) -> None:
        self.arm = arm
        self.version = ""
        self.threads = ""
        self.reason = ""
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        if not python or not os.access(python, os.X_OK):
            how = "bench-peers PYTHON312=<CPython 3.12>" if arm.python312 else ".venv-peers/.stamp"
            self.reason = f"not installed: make {how}"
            return
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        child = [
            python,
            str(HERE / "child.py"),
            arm.module,
            arm.kind,
            json.dumps(dict(arm.options)),
        ]
        self._process = subprocess.Popen(
            [arm.program, arm.kind] if arm.program else child,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=directory,
            env=environment,
        )

    def greet(self) -> None:
        """Wait until the arm is ready or reports why it is not."""
        if self._process is None:
            return
        hello = self._answer(START_SECONDS)
        self.version, self.threads = hello.get("version", ""), hello.get("threads", "")
        self.reason = hello.get("unavailable") or hello.get("failed") or ""
        if self.reason:
            self.stop()

    def round(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Figures of one round, or ``unavailable`` or ``failed`` with a reason."""
        if self._process is None or self._process.stdin is None:
            return {"unavailable": self.reason or "it has been stopped"}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            return self._gone(f"its process has ended: {error}")
        return self._answer(seconds)

    def stop(self) -> None:
        """End the process at once."""
        if self._process is None:
            return
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        process.kill()
        process.wait()
        self._log.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line of the process."""
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + seconds
        stream = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
                return self._gone(f"no answer within {seconds:.0f} s")
            piece = os.read(stream, 1 << 16)
            if not piece:
                return self._gone("its process ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self, reason: str) -> dict[str, Any]:
        """The reason why the process cannot be used any more, with its last line."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.stop()
        self.reason = f"{reason}; its last line: {lines[-1].strip()}" if lines else reason
        return {"failed": self.reason}
