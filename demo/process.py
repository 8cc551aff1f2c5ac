"""Runs one engine in a process of its own and shows where it is: one line per stage, with the time
since the start."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

#: Seconds after which an engine is given up. A first start on a slow disk can take minutes.
PATIENCE = 900.0

LABELS = {
    "imported": "vLLM imported, starting the engine",
    "ready": "engine ready, asking",
    "answered": "first token after {first_token_s:.2f} s, {reused} prompt tokens reused",
    "decoded": "all questions answered, {reused} prompt tokens reused",
    "stopped": "engine stopped",
}


#: What vLLM logs when part of a load failed. Its own count of cached tokens still includes those
#: computed after all.
RECOVERED = re.compile(r"Recovered from KV load failure: .*\((\d+) tokens affected\)")


class DemoError(Exception):
    """The demo cannot go on; the text says why and where to look."""


class Progress:
    """Prints stages, and on a terminal a running clock behind the last one."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._live = sys.stdout.isatty()
        self._stage = ""

    def line(self, stage: str, text: str) -> None:
        """A stage has been reached."""
        self._stage = stage
        print(f"{self._clear()}[{self._elapsed():6.1f} s] {stage:<12} {text}", flush=True)

    def tick(self) -> None:
        """Still alive."""
        if self._live:
            print(
                f"{self._clear()}[{self._elapsed():6.1f} s] {self._stage:<12} ...",
                end="",
                flush=True,
            )

    def _clear(self) -> str:
        return "\r\033[K" if self._live else ""

    def _elapsed(self) -> float:
        return time.monotonic() - self._start


def run_engine(
    name: str,
    job: dict[str, Any],
    out: pathlib.Path,
    progress: Progress,
    program: str = "engine.py",
) -> dict[str, Any]:
    """Start an engine, wait for it, return what it answered. Raises :class:`DemoError` when it
    fails. ``program`` is the file beside this one that runs it."""
    log, events, job_file = (out / f"{name}.{ending}" for ending in ("log", "events", "job"))
    events.write_text("")
    job_file.write_text(json.dumps({**job, "events": str(events)}))
    progress.line(name, f"new process, importing vLLM (log: {log})")
    result: dict[str, Any] | None = None
    with log.open("wb") as log_file, _child(program, job_file, log_file) as child:
        seen = 0
        deadline = time.monotonic() + PATIENCE
        while True:
            # asked before reading, so that the last events are read
            ended = child.poll() is not None
            complete = events.read_text().rpartition("\n")[0].splitlines()
            for text in complete[seen:]:
                event = json.loads(text)
                if "reused" in event:
                    event["reused"] = max(0, event["reused"] - _computed_after_all(log))
                progress.line(name, LABELS[event["event"]].format(**event))
                result = event if event["event"] == "stopped" else result
            seen = len(complete)
            if ended:
                break
            if time.monotonic() > deadline:
                raise DemoError(
                    f"the {name} engine did not end within {PATIENCE:.0f} s; its log is {log}"
                )
            progress.tick()
            time.sleep(0.2)
    events.unlink()
    job_file.unlink()
    if child.returncode != 0 or result is None:
        raise DemoError(
            f"the {name} engine failed (exit code {child.returncode}); end of {log}:\n{_tail(log)}"
        )
    return result


@contextlib.contextmanager
def _child(
    program: str, job_file: pathlib.Path, log_file: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The engine as a session of its own, so that nothing of it stays behind when the demo is
    interrupted."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name(program)), str(job_file)]
    environment = os.environ | json.loads(job_file.read_text())["device"]["environment"]
    child = subprocess.Popen(
        command, stdout=log_file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _computed_after_all(log: pathlib.Path) -> int:
    """Tokens whose load failed, so that they were computed."""
    return sum(int(tokens) for tokens in RECOVERED.findall(log.read_text(errors="replace")))


def _tail(log: pathlib.Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
