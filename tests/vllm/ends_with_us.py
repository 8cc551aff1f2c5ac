"""Processes that end with the one that started them. pytest may be killed, and a server that it
started would keep its port, its memory and its engine's processes for ever."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

#: Kills the group as soon as the other end of its input is closed. That end is ours alone: it is
#: closed when this process ends, whatever ends it.
_KEEPER = 'read -r _; kill -9 "-$1"'


class Group:
    """A process and its children; a context manager that kills them. ``more``: of
    :class:`subprocess.Popen`."""

    def __init__(self, command: Sequence[str | Path], **more: Any) -> None:
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            command, start_new_session=True, **more
        )
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "sh", str(self.process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends all of them at once. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._keeper.kill()
        for process in (self._keeper, self.process):
            with process:  # closes its pipes and waits for it
                pass
