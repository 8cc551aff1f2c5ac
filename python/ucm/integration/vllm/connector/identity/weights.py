"""The digest of the weights an engine loaded, computed in the background.

:class:`WeightsDigest` hashes on threads of its own, at the lowest priority. Its answer is one of
four states: pending, known (the text for the identity), unknown (a file changed since the engine
started, so what is in memory is not known) or off (there is nothing to read and nothing was
declared). Blocks are stored and found only in the state *known*.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ucm.errors import ConfigError, NotFoundError, UnsupportedError
from ucm.integration.vllm.connector.identity.file_digest import (
    DigestMemory,
    FileChangedError,
    FileStamp,
    combined,
    hash_file,
)
from ucm.integration.vllm.connector.identity.weight_files import (
    WeightFile,
    WeightSource,
    blob_sha256,
    find_weight_files,
    is_content_addressed,
    weight_source,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

#: How long a constructor may wait for the digest, in seconds.
CONSTRUCTOR_WAIT_S = 5.0

#: Seconds between two lines of progress.
PROGRESS_S = 10.0

#: Files are stamped with a clock that may lag behind ours by a tick.
CLOCK_SLACK_NS = 20_000_000

_LABEL = b"UCMWEIGHTS"
#: Start of the mode in which the user names the weights.
DECLARED = "declared:"


def engine_start_ns() -> int:
    """Unix time in ns before which a file must have been written to be what the engine loaded: this
    process's start.

    A file server whose clock runs behind ours hides changes of its files by as much.
    """
    return min(_process_start_ns(), _IMPORTED_NS)


def _process_start_ns() -> int:
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # the name before it may hold spaces
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_NS
    return time.time_ns() - int(age_s * 1e9)


_IMPORTED_NS = time.time_ns()


@dataclass(frozen=True)
class WeightsState:
    """What is known about the weights right now."""

    kind: Literal["pending", "known", "unknown", "off"]
    text: str = ""  #: for the identity, when known
    reason: str = ""  #: a sentence, when unknown or off


PENDING = WeightsState("pending")


class WeightsDigest:
    """Finds, hashes and watches the weight files of one engine. Safe to ask from any thread.

    ``mode`` is ``full`` (SHA-256 of every file), ``sampled`` (64 pieces of each: an edit that
    misses them all goes unseen, so this is probabilistic) or ``declared:<text>`` (not checked; no
    file is read). ``root`` is the directory in which digests are remembered, None for nowhere.
    ``since_ns`` is :func:`engine_start_ns` unless given.
    """

    def __init__(
        self,
        source: WeightSource,
        mode: str = "full",
        root: str | None = None,
        *,
        since_ns: int | None = None,
        threads: int | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._source, self._root, self._now_ns = source, root, now_ns
        self._sampled = mode == "sampled"
        self._since_ns = engine_start_ns() if since_ns is None else since_ns
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._changed = threading.Condition()
        self._state = PENDING
        self._stamps: dict[str, FileStamp] = {}
        self._closed = False
        self._memory: DigestMemory | None = None
        self._asked, self._answered = 0, 0
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        if mode.startswith(DECLARED):
            if not mode[len(DECLARED) :].strip():
                raise ConfigError(
                    "identity.weights: declared: needs a text that names these weights"
                )
            self._state = WeightsState("known", mode)
        elif mode not in ("full", "sampled"):
            raise ConfigError(
                f"identity.weights is {mode!r}; write full, sampled or declared:<text>"
            )
        elif source.unknowable:
            self._state = WeightsState("off", reason=source.unknowable)
        else:
            threading.Thread(target=self._run, name="ucm-weights", daemon=True).start()

    @classmethod
    def for_engine(
        cls, vllm_config: VllmConfig, mode: str, roots: Sequence[str] = ()
    ) -> WeightsDigest:
        """The digest of this engine's weights, remembered below the first of the store's
        ``roots``."""
        return cls(weight_source(vllm_config), mode, roots[0] if roots else None)

    @property
    def value(self) -> str | None:
        """The text for the identity, None while it is pending.

        Raises :class:`~ucm.errors.UnsupportedError` with the reason when it is not, or no longer,
        to be known.
        """
        state = self._state
        if state.kind in ("unknown", "off"):
            raise UnsupportedError(state.reason, context={"model": self._source.model})
        return state.text or None

    @property
    def state(self) -> WeightsState:
        """The state as of now, without waiting."""
        return self._state

    def wait(self, timeout: float = CONSTRUCTOR_WAIT_S) -> WeightsState:
        """The state, after at most ``timeout`` seconds of waiting for it to be no longer
        pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.kind != "pending", timeout)
            return self._state

    def recheck(self, timeout: float = 1.0) -> WeightsState:
        """Look at the files again (their stamps only): unknown from now on when one of them
        changed.

        Call it when the store has been opened: what was learnt before its root existed is then
        remembered. Waits at most ``timeout`` seconds, 0 for not at all; an answer that is late
        shows in :attr:`state`.
        """
        with self._changed:
            if self._state.kind != "known" or not self._stamps or self._closed:
                return self._state
            # one under way, which may have begun too early, and one after it
            if self._asked - self._answered < 2:
                self._asked += 1
                self._requests.put(True)
            ticket = self._asked
            self._changed.wait_for(lambda: self._answered >= ticket or self._closed, timeout)
            return self._state

    def close(self) -> None:
        """End the threads as soon as the system lets them; joins none. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._requests.put(False)

    def _run(self) -> None:
        try:
            state = WeightsState("known", self._digest(find_weight_files(self._source)))
        except _ClosedError:
            return
        except NotFoundError as error:
            state = WeightsState("off", reason=error.message)
        except FileChangedError as error:
            state = WeightsState("unknown", reason=f"{error.message}: {error.context.get('path')}")
        except Exception as error:  # whatever it is, without a digest there is no identity
            state = WeightsState(
                "off", reason=f"the weight files of {self._source.model} cannot be read: {error}"
            )
        self._settle(state)
        while self._requests.get():
            reason = self._what_changed()
            if reason:
                self._settle(WeightsState("unknown", reason=reason))
            else:
                self._remember()
            with self._changed:
                self._answered += 1
                self._changed.notify_all()

    def _settle(self, state: WeightsState) -> None:
        with self._changed:
            if self._state.kind != "unknown":  # what is in memory cannot become known again
                self._state = state
            self._changed.notify_all()

    def _what_changed(self) -> str:
        for path, stamp in self._stamps.items():
            try:
                if FileStamp.of(os.stat(path)) == stamp:
                    continue
            except OSError as error:
                return f"the weight file {path} cannot be looked at any more: {error.strerror}"
            return (
                f"the weight file {path} changed while the engine runs, so a restart would compute"
                " something else"
            )
        return ""

    def _digest(self, files: list[WeightFile]) -> str:
        for file in files:
            stamp = FileStamp.of(os.stat(file.path))
            if stamp.ctime_ns > self._since_ns - CLOCK_SLACK_NS and not is_content_addressed(
                file.path
            ):
                raise FileChangedError(
                    "a weight file changed after the engine started, so it may not be what was"
                    " loaded",
                    context={"path": file.path},
                )
            self._stamps[file.path] = stamp
        digests = self._full(files) if not self._sampled else self._hash_all(files)
        total = combined(
            _LABEL,
            ((file.name, self._stamps[file.path].size, digests[file.path]) for file in files),
        )
        return f"{'sampled' if self._sampled else 'sha256'}:{total.hex()}"

    def _full(self, files: list[WeightFile]) -> dict[str, bytes]:
        memory = self._memory = DigestMemory(self._root, self._now_ns)
        known: dict[str, bytes] = {}
        for file in files:
            digest = blob_sha256(file.path) or memory.recall(file.path, self._stamps[file.path])
            if digest is not None:
                known[file.path] = digest
        started_ns = self._now_ns()
        fresh = self._hash_all([file for file in files if file.path not in known])
        for path, digest in fresh.items():
            memory.learn(path, self._stamps[path], digest, started_ns)
        self._remember()
        return known | fresh

    def _remember(self) -> None:
        try:
            if self._memory is not None:
                self._memory.save()
        except OSError as error:
            logger.info("digests of weight files cannot be remembered in %s: %s", self._root, error)

    def _hash_all(self, files: list[WeightFile]) -> dict[str, bytes]:
        """Digests by path, on several threads; raises the first error of any of them."""
        work = _Work(files, self._stamps, self._sampled, lambda: self._closed)
        for number in range(min(self._threads, len(files))):
            threading.Thread(target=work.run, name=f"ucm-weights-{number}", daemon=True).start()
        return work.wait()


class _ClosedError(Exception):
    """The digest is not wanted any more."""


class _Work:
    """Files being hashed by several threads, and how far they are."""

    def __init__(
        self,
        files: list[WeightFile],
        stamps: dict[str, FileStamp],
        sampled: bool,
        closed: Callable[[], bool],
    ) -> None:
        # Largest first, so that no thread ends up alone with the largest file.
        self._todo = sorted((file.path for file in files), key=lambda path: stamps[path].size)
        self._stamps, self._sampled, self._closed = stamps, sampled, closed
        self._total = sum(stamps[path].size for path in self._todo)
        self._missing = len(self._todo)
        self._done_bytes = 0
        self._digests: dict[str, bytes] = {}
        self._error: Exception | None = None
        self._turn = threading.Condition()

    def run(self) -> None:
        while True:
            with self._turn:
                if not self._todo or self._error is not None:
                    return
                path = self._todo.pop()
            try:
                digest, stamp = hash_file(path, self._sampled, self._progress)
                if stamp != self._stamps[path]:
                    raise FileChangedError(
                        "a weight file changed while the engine started", context={"path": path}
                    )
            except Exception as error:  # raised where it is waited for
                self._finish(path, error=error)
                return
            self._finish(path, digest)

    def wait(self) -> dict[str, bytes]:
        began = time.monotonic()
        with self._turn:
            while not self._turn.wait_for(
                lambda: self._error is not None or not self._missing, PROGRESS_S
            ):
                if self._closed():
                    raise _ClosedError
                self._log(time.monotonic() - began)
            if self._error is not None:
                raise self._error
            return self._digests

    def _finish(self, path: str, digest: bytes = b"", error: Exception | None = None) -> None:
        with self._turn:
            self._digests[path] = digest
            self._error = self._error or error
            self._missing -= 1
            self._turn.notify_all()

    def _progress(self, count: int) -> None:
        if self._closed():
            raise _ClosedError
        with self._turn:
            self._done_bytes += count

    def _log(self, seconds: float) -> None:
        logger.info(
            "hashing the weights: %.1f of %.1f GB in %.0f s; requests are computed as usual until"
            " it is done",
            self._done_bytes / 1e9,
            self._total / 1e9,
            seconds,
        )
