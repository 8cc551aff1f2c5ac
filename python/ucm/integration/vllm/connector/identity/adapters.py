"""Content digests of LoRA adapters, so that another adapter at the same path gets other block keys.

vLLM knows an adapter by its name, number and path, and loads it once. ucm keys blocks by the
SHA-256 over the adapter's files. If these changed since the engine started, or one number stands
for two paths, the content that the engine holds is not known: requests of that adapter are neither
looked up nor stored.
"""

from __future__ import annotations

import fnmatch
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ucm.errors import NotFoundError, UcmError
from ucm.integration.vllm.connector.identity.file_digest import (
    DigestMemory,
    FileChangedError,
    FileStamp,
    combined,
    hash_file,
)
from ucm.integration.vllm.connector.identity.unkeyable import UnkeyableError
from ucm.integration.vllm.connector.identity.weights import CLOCK_SLACK_NS, engine_start_ns
from ucm.reasons import MissReason

#: The files of an adapter that vLLM reads.
ADAPTER_FILES = ("adapter_config.json", "adapter_model*", "new_embeddings*")

#: How long the first question about an adapter may wait for its digest, in seconds. Later ones
#: never wait.
FIRST_WAIT_S = 0.5

#: Most adapters that are remembered; requests of further ones are not cached.
LIMIT = 16384

#: At most this often, in seconds, the files of an adapter in use are looked at again for lookups; a
#: look that takes longer says that nothing is known.
RECHECK_S = 1.0

_LABEL = b"UCMADAPTER"


def adapter_digest(
    path: str, root: str | None = None, *, now_ns: Callable[[], int] = time.time_ns
) -> bytes:
    """SHA-256 over the files of the adapter at a local ``path``, 32 bytes; reads them, which may
    take long.

    ``root`` is a directory in which digests are remembered. Raises
    :class:`~ucm.errors.NotFoundError` when there is no adapter, :class:`OSError`, and
    :class:`~.file_digest.FileChangedError`.
    """
    return _digest(path, DigestMemory(root, now_ns), now_ns)[0]


def _digest(
    path: str, memory: DigestMemory, now_ns: Callable[[], int]
) -> tuple[bytes, dict[str, FileStamp]]:
    directory = os.path.expanduser(path)
    names = sorted(
        {name for pattern in ADAPTER_FILES for name in fnmatch.filter(_listed(directory), pattern)}
    )
    if not any(name.startswith("adapter_model") for name in names):
        raise NotFoundError("no adapter_model file lies there", context={"path": path})
    stamps, parts = {}, []
    for name in names:
        file = os.path.join(directory, name)
        stamp, started_ns = FileStamp.of(os.stat(file)), now_ns()
        content = memory.recall(file, stamp)
        if content is None:
            content, seen = hash_file(file)
            if seen != stamp:
                raise FileChangedError(
                    "an adapter file was replaced while it was being read", context={"path": file}
                )
            memory.learn(file, stamp, content, started_ns)
        stamps[file] = stamp
        parts.append((name, stamp.size, content))
    try:
        memory.save()
    except OSError:
        pass  # it is hashed again next time
    return combined(_LABEL, parts), stamps


def _listed(directory: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(directory) if entry.is_file()]
    except OSError as error:
        raise NotFoundError(
            "the adapter is not a local directory; load it from a local path to have its blocks"
            " kept",
            context={"path": directory},
        ) from error


class _Adapter:
    """What is known about one adapter number."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ready = threading.Event()
        self.digest = b""
        self.stamps: dict[str, FileStamp] = {}
        self.problem = ""  # why it has no name and never will
        self.waited = False
        self.checked = float("-inf")  # when the last look began that found the files unchanged
        self.asked: float | None = None  # when the look was asked for that has not ended yet


class AdapterDigests:
    """Digests of the adapters of one engine, computed on one thread and looked after on another.

    Questions are answered from memory; one adapter that takes long to hash holds up no look at
    another.

    Files must be older than ``since_ns`` (the engine's start unless given): the moment at which
    vLLM loads an adapter is not told to connectors. ``trust_new_files`` lifts that for servers that
    add adapters while they run and never write to a path again.
    """

    def __init__(
        self,
        root: str | None = None,
        *,
        since_ns: int | None = None,
        trust_new_files: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._root, self._clock, self._now_ns = root, clock, now_ns
        self._since_ns = engine_start_ns() if since_ns is None else since_ns
        self._trust_new_files = trust_new_files
        self._adapters: dict[int, _Adapter] = {}
        self._lock = threading.Lock()
        self._hashing = _Worker("ucm-adapters")
        self._looking = _Worker("ucm-adapter-files")

    def payload(self, lora_request: Any) -> bytes:
        """What stands in the key for this adapter. Raises :class:`UnkeyableError`.

        The first question about an adapter waits :data:`FIRST_WAIT_S` at most, later ones not at
        all.
        """
        adapter = self._adapter(lora_request)
        if not adapter.ready.is_set():
            first, adapter.waited = not adapter.waited, True
            if not first or not adapter.ready.wait(FIRST_WAIT_S):
                raise _pending("the adapter is still being hashed", adapter)
        if adapter.problem:
            raise UnkeyableError(adapter.problem, context={"path": adapter.path})
        now = self._clock()
        if now - adapter.checked >= RECHECK_S:
            self._look_again(adapter, now)
        asked = adapter.asked
        if asked is not None and now - asked >= RECHECK_S:
            raise _pending("whether the adapter's files changed takes long to find out", adapter)
        # The same file means two things to vLLM depending on this flag of the request.
        return adapter.digest + (
            b"\x01" if getattr(lora_request, "is_3d_lora_weight", False) else b""
        )

    def current(self, lora_request: Any, since: float) -> bool | None:
        """Whether a look at the adapter's files that began after ``since`` (of the clock) found
        them unchanged.

        False is final. None: no such look has ended, one is under way; ask again. Never waits. What
        the adapter computed before ``since`` then has the name that :meth:`payload` gave.
        """
        try:
            adapter = self._adapter(lora_request)
        except UnkeyableError:
            return False
        if adapter.problem:
            return False
        if adapter.checked > since:
            return True
        if adapter.ready.is_set():
            self._look_again(adapter, self._clock())
        return None

    def close(self) -> None:
        """End the threads when their jobs are done; joins nothing. Idempotent."""
        self._hashing.close()
        self._looking.close()

    def _adapter(self, lora_request: Any) -> _Adapter:
        number, path = int(lora_request.lora_int_id), str(lora_request.lora_path)
        with self._lock:
            adapter = self._adapters.get(number)
            if adapter is None:
                if len(self._adapters) >= LIMIT:
                    raise UnkeyableError(
                        "too many adapters to keep track of", context={"limit": LIMIT}
                    )
                adapter = self._adapters[number] = _Adapter(path)
                self._hashing.submit(lambda: self._hash(adapter))
            elif adapter.path != path and not adapter.problem:
                adapter.problem = (
                    f"adapter number {number} stands for two paths, {adapter.path} and {path}"
                )
            return adapter

    def _hash(self, adapter: _Adapter) -> None:
        try:
            digest, stamps = _digest(
                adapter.path, DigestMemory(self._root, self._now_ns), self._now_ns
            )
            newest = max(stamp.ctime_ns for stamp in stamps.values())
            if newest > self._since_ns - CLOCK_SLACK_NS and not self._trust_new_files:
                adapter.problem = adapter.problem or "the adapter changed after the engine started"
            adapter.digest, adapter.stamps = digest, stamps
        except UcmError as error:
            adapter.problem = error.message
        except Exception as error:  # without a digest there is no name
            adapter.problem = f"the adapter cannot be read: {error}"
        adapter.ready.set()

    def _look_again(self, adapter: _Adapter, now: float) -> None:
        with self._lock:
            if adapter.asked is not None:
                return
            adapter.asked = now
        self._looking.submit(lambda: self._look(adapter))

    def _look(self, adapter: _Adapter) -> None:
        began = self._clock()
        for path, stamp in adapter.stamps.items():
            try:
                changed = FileStamp.of(os.stat(path)) != stamp
            except OSError:
                changed = True
            if changed:
                adapter.problem = (
                    adapter.problem or f"the adapter changed while the engine runs: {path}"
                )
        if not adapter.problem:
            adapter.checked = began
        adapter.asked = None


class _Worker:
    """One daemon thread, started by its first job, that does one job after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _pending(why: str, adapter: _Adapter) -> UnkeyableError:
    return UnkeyableError(why, context={"path": adapter.path}, reason=MissReason.IDENTITY_PENDING)
