"""The mode of engines at run time: whether they load and store blocks. ``ucm mode`` writes it into
a small file, without a restart.

The file lies in a root, for every engine that uses the root, or in the state directory, for the
engines of one user on one machine. An engine follows all of them with :class:`ModeWatch`, whose
threads read them once a second: a read may hang on a network share, so no step of the engine reads.
Only the scheduler side follows the mode. It decides which blocks are loaded and stored, and the
ranks do what its metadata says, so ranks never differ.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from enum import StrEnum

from ucm.config.words import STATE_VARIABLE
from ucm.errors import ConfigError

#: The file of a mode; in the same form in a root and in the state directory.
MODE_NAME = "ucm-mode.json"
#: Seconds between two reads, and those that an engine waits for the first one.
PERIOD_S, FIRST_S = 1.0, 1.0
#: Most bytes of such a file.
_LONGEST = 4096


class Mode(StrEnum):
    """What engines do with stored blocks."""

    READ_WRITE = "read-write"
    READ_ONLY = "read-only"
    WRITE_ONLY = "write-only"
    OFF = "off"

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded."""
        return self in (Mode.READ_WRITE, Mode.READ_ONLY)

    @property
    def dumps(self) -> bool:
        """Whether blocks are stored."""
        return self in (Mode.READ_WRITE, Mode.WRITE_ONLY)


def strictest(modes: Sequence[Mode]) -> Mode:
    """The mode of an engine that follows several."""
    loads, dumps = all(mode.loads for mode in modes), all(mode.dumps for mode in modes)
    if loads:
        return Mode.READ_WRITE if dumps else Mode.READ_ONLY
    return Mode.WRITE_ONLY if dumps else Mode.OFF


def state_directory() -> str | None:
    """The directory of files that belong to no root: ``UCM_STATE_DIR``, or ``ucm`` below the
    directory of the XDG standard (``XDG_STATE_HOME``, ``~/.local/state``); None for a user without
    a home."""
    if named := os.environ.get(STATE_VARIABLE):
        return os.path.abspath(named)
    below = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(below):  # the standard ignores such a value
        below = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(below, "ucm") if os.path.isabs(below) else None


def read_mode(directory: str) -> Mode:
    """The mode in a directory; ``read-write`` without a file. Raises :class:`OSError`, also where
    the directory is missing (an unmounted share), and :class:`ValueError` for a damaged file."""
    try:
        how = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(os.path.join(directory, MODE_NAME), how), "rb") as file:
            return Mode(json.loads(file.read(_LONGEST))["mode"])
    except FileNotFoundError:
        os.stat(directory)
        return Mode.READ_WRITE
    except (KeyError, TypeError) as error:
        raise ValueError(f"no mode: {error}") from None


def write_mode(directory: str, mode: Mode) -> str:
    """Writes the mode into a directory as a whole; returns the path of the file. Raises
    :class:`OSError`."""
    path = os.path.join(directory, MODE_NAME)
    private = os.path.join(directory, f".{uuid.uuid4().hex}.tmp")
    handle = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(handle, "w", encoding="ascii") as file:
            json.dump({"version": 1, "mode": str(mode)}, file)
        os.replace(private, path)
    except BaseException:
        os.unlink(private)
        raise
    return path


def switched(directory: str, wanted: Mode | None = None) -> dict[str, str]:
    """The mode in a directory and its file, by name, after writing the wanted one if there is any;
    makes the directory. Raises :class:`OSError`, and :class:`ConfigError` for a damaged file."""
    path = os.path.join(directory, MODE_NAME)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if wanted:
        write_mode(directory, wanted)
    try:
        return {"file": path, "mode": str(read_mode(directory))}
    except ValueError:
        raise ConfigError(f"{path} is damaged, and engines keep their mode; write one") from None


class ModeWatch:
    """Follows the modes of several directories. Reading :attr:`now` never blocks."""

    def __init__(self, directories: Sequence[str]) -> None:
        """Waits a second at most for the first answer of each."""
        #: The mode of this engine.
        self.now = Mode.READ_WRITE
        self._modes = dict.fromkeys(directories, Mode.READ_WRITE)
        self._lock, self._ended = threading.Lock(), threading.Event()
        answered = [threading.Event() for _ in directories]
        for directory, event in zip(directories, answered, strict=True):
            work = (directory, event)
            threading.Thread(target=self._run, args=work, name="ucm-mode", daemon=True).start()
        for event in answered:
            event.wait(FIRST_S)

    def poll(self, directory: str) -> None:
        """Reads the mode of one directory. One that cannot be read keeps its mode."""
        try:
            mode = read_mode(directory)
        except (OSError, ValueError):
            return
        with self._lock:
            self._modes[directory] = mode
            before, self.now = self.now, strictest(list(self._modes.values()))
        if self.now != before:
            path = os.path.join(directory, MODE_NAME)
            logging.getLogger("ucm.vllm").warning("the mode is %s now, by %s", self.now, path)

    def close(self) -> None:
        """Ends the threads; one that hangs is left behind."""
        self._ended.set()

    def _run(self, directory: str, answered: threading.Event) -> None:
        while not self._ended.is_set():
            self.poll(directory)
            answered.set()
            self._ended.wait(PERIOD_S)
