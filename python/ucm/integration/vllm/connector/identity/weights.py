"""Which weights an engine computes with: their files, the digest of every byte, and whether the
memory of each rank still holds them.

:class:`WeightSource` names the files, found as vLLM finds them but without a network: a local
directory as it is, a hub name in the local cache at the revision that vLLM resolved; with the few
other files that change what is computed (a quantisation's own configuration, the model's code when
the user allowed it to run).

:class:`WeightsDigest` hashes them on threads of its own, at the lowest priority. Its state is
pending, known (the text for the identity), unknown (a file changed since the engine started, so the
content of the memory is not known) or off (there is nothing to read and nothing was declared).
Blocks are stored and found only in the state *known*. A file's digest is remembered while its
metadata is unchanged (:class:`DigestMemory`).

vLLM can replace the weights of a running engine in many ways (``reload_weights``, weight transfer,
sleep level 2, a worker extension that writes them) and reports none to connectors. So
:class:`ModelMemory` takes a fingerprint on each rank right after loading, compares when the
scheduler side requests it, and returns a :class:`WeightsReport`. The fingerprint is a SHA-256 over
samples of every parameter and persistent buffer: small ones whole, of others :data:`MEMORY_SAMPLES`
bytes at even distances. Training, merging and loading change every sample of a tensor; an edit of
single numbers that misses all samples of a large tensor is not detected. Some kernels pack a weight
into an object of their own and leave an empty parameter behind (oneDNN on a CPU): such an object
counts as unchanged while it is the same object.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import hashlib
import json
import os
import queue
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ucm._core import QuietSha256
from ucm.errors import ConfigError, NotFoundError, UcmError, UnsupportedError
from ucm.integration.vllm.connector.guard import logger
from ucm.integration.vllm.connector.stores import RootFile
from ucm.logger import in_units

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# The files of the weights
# --------------------------------------------------------------------------------------------------

#: File name patterns by load format, in the order in which vLLM tries them; the first with a match
#: wins.
_ANY = ("*.safetensors", "*.bin", "*.pt")
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("auto", "hf", "bitsandbytes"), _ANY),
    **dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor"), _ANY[:1]),
    **dict.fromkeys(("runai_streamer", "runai_streamer_sharded"), _ANY[:1]),
    "sharded_state": ("*.safetensors", "*.pt"),
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
    "gguf": ("*.gguf",),
}

#: Indices that say which safetensors files belong together, with the pattern of these files.
_INDICES = (
    ("consolidated.safetensors.index.json", "consolidated*.safetensors"),
    ("model.safetensors.index.json", "*.safetensors"),
)

#: Files of a training run that look like weights and are not.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

#: Configuration that a quantisation method reads beside the weights.
_QUANTISATION = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")

#: Patterns of further directories of the same model, by architecture.
_SUBDIRECTORIES: dict[str, tuple[str, ...]] = {
    "Cosmos3EdgeForConditionalGeneration": ("[tv]*er",),
    "Cosmos3ForConditionalGeneration": ("[tv]*er",),
    "MoonshotKimiaForCausalLM": ("whisper-large-v3",),
}

#: Keys of a model's configuration that name a second model whose weights are read too.
_SECOND_MODELS = ("audio_model_id", "text_model_id")

#: Ways to draft that use a model, or parts of one, without KV.
_DRAFTS_WITHOUT_KV = ("medusa", "mlp_speculator")

#: Names of a hub cache's blobs: a SHA-1 of git, or a SHA-256.
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")

_DECLARE = "set identity.weights to declared:<text>, with another text whenever the weights change"


@dataclass(frozen=True)
class WeightSource:
    """What decides which files are read."""

    model: str
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    subdirectories: tuple[str, ...] = ()
    second_models: tuple[tuple[str, str], ...] = ()
    with_code: bool = False
    #: Of the model that drafts tokens, where it has weights and KV of its own.
    draft: WeightSource | None = None
    #: Why no set of files identifies the weights, as a sentence; empty when one can.
    unknowable: str = ""


@dataclass(frozen=True)
class WeightFile:
    """A file that is part of the weights: its name within the model, and where it lies."""

    name: str
    path: str


def weight_source(vllm_config: VllmConfig) -> WeightSource:
    """Where this engine's weights come from. Reads no file."""
    model, load = vllm_config.model_config, vllm_config.load_config
    draft, drafted = draft_model(vllm_config), None
    if draft is not None:
        own = getattr(vllm_config.speculative_config, "draft_load_config", None)
        drafted = _source(draft, own or load)
    return _source(model, load, drafted)


def models_of(vllm_config: VllmConfig) -> list[str]:
    """The models of an engine, directories or names as vLLM was given them; the draft model too."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    drafts = [getattr(speculative, "model", None)] if speculative is not None else []
    return [str(model) for model in (vllm_config.model_config.model, *drafts) if model]


def draft_model(vllm_config: VllmConfig) -> Any:
    """vLLM's ModelConfig of a model of its own whose layers draft tokens and keep KV, or None."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if (
        draft is None
        or speculative.method in _DRAFTS_WITHOUT_KV
        or draft.model == vllm_config.model_config.model
    ):
        return None
    return draft


def _source(model: Any, load: Any, draft: WeightSource | None = None) -> WeightSource:
    architectures = getattr(model.hf_config, "architectures", None) or []
    second = [(key, getattr(model.hf_config, key, None)) for key in _SECOND_MODELS]
    below = [name for arch in architectures for name in _SUBDIRECTORIES.get(arch, ())]
    return WeightSource(
        model=model.model,
        load_format=str(load.load_format),
        revision=model.revision,
        download_dir=load.download_dir,
        subdirectories=tuple(below),
        second_models=tuple((key, str(value)) for key, value in second if value),
        with_code=bool(model.trust_remote_code),
        draft=draft,
        unknowable=_unknowable(model, load) or (draft.unknowable if draft is not None else ""),
    )


def _unknowable(model: Any, load: Any) -> str:
    load_format = str(load.load_format)
    remote = getattr(model, "model_weights", "")
    if load_format == "dummy":
        return f"load format dummy makes up weights from a seed, so they are in no file; {_DECLARE}"
    if load_format not in _PATTERNS:
        return (
            f"load format {load_format} does not read its weights from files ucm knows; {_DECLARE}"
        )
    if remote and remote != model.model:
        return (
            f"the weights are streamed from {remote}, so there is no local file to read; {_DECLARE}"
        )
    return ""


def find_weight_files(source: WeightSource) -> list[WeightFile]:
    """The files, sorted by name. Raises :class:`~ucm.errors.NotFoundError` when there are none."""
    root = _locate(source.model, source.revision, source.download_dir)
    if os.path.isfile(root):
        return [WeightFile(os.path.basename(root), root)]
    entries = os.listdir(root) if source.subdirectories else []
    below = [name for each in source.subdirectories for name in fnmatch.filter(entries, each)]
    found: list[WeightFile] = []
    for where in ("", *below):
        directory, prefix = os.path.join(root, where), f"{where}/" if where else ""
        names = _chosen(directory, source.load_format) + _companions(directory, source.with_code)
        found += [WeightFile(prefix + name, os.path.join(directory, name)) for name in names]
    for key, model in source.second_models:
        directory = _locate(model, None, source.download_dir)
        names = _chosen(directory, "auto")
        found += [WeightFile(f"{key}/{name}", os.path.join(directory, name)) for name in names]
    if source.draft is not None:
        drafts = find_weight_files(source.draft)
        found += [WeightFile(f"draft/{file.name}", file.path) for file in drafts]
    if all(file.name.endswith((".json", ".py")) for file in found):
        patterns = ", ".join(_PATTERNS[source.load_format])
        raise NotFoundError(
            f"no weight file ({patterns}) lies in {root}; {_DECLARE}",
            context={"model": source.model},
        )
    return sorted(set(found), key=lambda file: file.name)


def is_content_addressed(path: str) -> bool:
    """Whether the path leads to a hub cache's blob, whose name is made from its content."""
    directory, name = os.path.split(os.path.realpath(path))
    return os.path.basename(directory) == "blobs" and bool(_BLOB.fullmatch(name))


def blob_sha256(path: str) -> bytes | None:
    """The SHA-256 in the name of a hub cache's blob, None for any other file; not checked."""
    name = os.path.basename(os.path.realpath(path))
    return bytes.fromhex(name) if len(name) == 64 and is_content_addressed(path) else None


def _locate(model: str, revision: str | None, download_dir: str | None) -> str:
    if os.path.exists(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=download_dir, local_files_only=True
        )
        return str(found)
    except (OSError, ValueError) as error:  # the hub's own errors are both
        raise NotFoundError(
            f"{model} is neither a local path nor in the local hub cache; {_DECLARE}",
            context={"model": model, "revision": revision},
        ) from error


def _chosen(directory: str, load_format: str) -> list[str]:
    """Names of the weight files in one directory."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_file()]
    except NotADirectoryError:
        return [os.path.basename(directory)]
    except FileNotFoundError:
        return []
    patterns = _PATTERNS[load_format]
    if load_format == "auto" and fnmatch.filter(names, "consolidated*.safetensors"):
        patterns = _PATTERNS["mistral"] + patterns
    for pattern in patterns:
        matching = [name for name in fnmatch.filter(names, pattern) if name not in _NOT_WEIGHTS]
        if matching:
            return _in_index(directory, pattern, matching)
    return []


def _in_index(directory: str, pattern: str, names: list[str]) -> list[str]:
    """Without the files that an index leaves out: a second copy of the weights is not loaded."""
    for index, of in _INDICES:
        path = os.path.join(directory, index)
        if pattern == of and os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                listed = set(json.load(file).get("weight_map", {}).values())
            return [name for name in names if name in listed] or names
    return names


def _companions(directory: str, with_code: bool) -> list[str]:
    names = [name for name in _QUANTISATION if os.path.isfile(os.path.join(directory, name))]
    if with_code and os.path.isdir(directory):
        names += fnmatch.filter(os.listdir(directory), "*.py")
    return names


# Digests of files
# --------------------------------------------------------------------------------------------------

#: Bytes hashed in one call: large enough that the hash, not the call, is what costs.
CHUNK = 4 << 20

#: A file whose ctime is younger than this may change again within the same tick: its digest is not
#: used.
SETTLED_NS = 2_000_000_000

#: File below a store's root in which digests are remembered, and how many it holds at most.
MEMORY_NAME = "ucm-digests.json"
MEMORY_LIMIT = 4096

#: Samples of a file, spread evenly, the first and the last bytes among them.
FILE_SAMPLES, SAMPLE_BYTES = 64, 65536


class FileChangedError(UcmError):
    """A file was written or replaced while it was being read."""

    kind, retryable = "io", True


@dataclass(frozen=True)
class FileStamp:
    """What changes when a file does."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStamp:
        """From a stat of the file (links followed)."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def hash_file(
    path: str, sampled: bool = False, progress: Callable[[int], None] | None = None
) -> tuple[bytes, FileStamp]:
    """SHA-256 of a file's content, or of its samples, and its stamp, which did not change.

    Threads of the core hash it at the lowest priority: a Python thread that holds the interpreter
    without a processor would delay the engine. ``progress`` is called with the bytes of each piece
    read. Raises :class:`FileChangedError` and :class:`OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        before = FileStamp.of(os.fstat(file.fileno()))
        digest = QuietSha256()
        for start, length in _sample_ranges(before.size) if sampled else [(0, before.size)]:
            _feed(digest, file, start, length, progress)
        after = FileStamp.of(os.fstat(file.fileno()))
    if not before == after == FileStamp.of(os.stat(path)):
        raise FileChangedError("the file changed while it was being read", context={"path": path})
    return digest.digest(), before


def _sample_ranges(size: int) -> Iterable[tuple[int, int]]:
    if size <= FILE_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    last = size - SAMPLE_BYTES
    return [(last * i // (FILE_SAMPLES - 1), SAMPLE_BYTES) for i in range(FILE_SAMPLES)]


def _feed(
    digest: QuietSha256, file: Any, start: int, length: int, progress: Callable[[int], None] | None
) -> None:
    end = start + length
    while start < end:
        got = digest.update(file.fileno(), start, min(end - start, CHUNK))
        if not got:
            raise FileChangedError(
                "the file became shorter while it was being read", context={"path": file.name}
            )
        start += got
        if progress is not None:
            progress(got)


def combined(label: bytes, files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """SHA-256 over the sorted (name, size in bytes, digest) of several files, after ``label``."""
    digest = hashlib.sha256(label)
    for name, size, content in sorted(files):
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(struct.pack("<I", len(encoded)) + encoded + struct.pack("<Q", size) + content)
    return digest.digest()


class DigestMemory:
    """Digests remembered in one small JSON file, by path, inode, size, mtime and ctime. A lost
    entry costs a hash and nothing else."""

    def __init__(self, root: str | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._file = None if root is None else RootFile(root, MEMORY_NAME, "files", MEMORY_LIMIT)
        self._now_ns = now_ns
        self._known = {} if self._file is None else self._file.read_soon()
        self._new: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def settled(self, stamp: FileStamp) -> bool:
        """Whether a file with this stamp could not have been written again without a new ctime. A
        ctime in whole seconds is coarse or made up by a read-only image, and is not enough."""
        return stamp.ctime_ns + SETTLED_NS <= self._now_ns() and stamp.ctime_ns % 1_000_000_000 != 0

    def recall(self, path: str, stamp: FileStamp) -> bytes | None:
        """The content digest of a file with this stamp, where it is certain."""
        entry = self._known.get(os.path.abspath(path))
        if entry is None or not self.settled(stamp) or entry.get("stamp") != _numbers(stamp):
            return None
        try:
            digest = bytes.fromhex(entry["sha256"])
        except (KeyError, TypeError, ValueError):
            return None
        return digest if len(digest) == 32 else None

    def learn(self, path: str, stamp: FileStamp, digest: bytes, started_ns: int) -> None:
        """Remember a digest whose computation began at ``started_ns``, unless the file was too
        young then."""
        if stamp.ctime_ns + SETTLED_NS <= started_ns and self.settled(stamp):
            with self._lock:
                entry = {"sha256": digest.hex(), "stamp": _numbers(stamp)}
                self._new[os.path.abspath(path)] = entry

    def save(self) -> None:
        """Write new digests, together with those that others have written since. Kept for the next
        call while the root is not marked or does not answer. Raises :class:`OSError`."""
        with self._lock:
            if self._file is None or not self._new:
                return
            new = dict(self._new)
        known = self._file.merge_soon(new)
        if known is None:
            return
        with self._lock:
            self._known = known
            self._new = {path: it for path, it in self._new.items() if new.get(path) != it}


def _numbers(stamp: FileStamp) -> list[int]:
    return [stamp.inode, stamp.size, stamp.mtime_ns, stamp.ctime_ns]


# The digest of all weights
# --------------------------------------------------------------------------------------------------

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
    process's start. A file server whose clock runs behind ours hides changes by as much."""
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
    """Finds, hashes and watches the weight files of one engine. Thread safe.

    ``mode`` is ``full`` (SHA-256 of every file), ``sampled`` (64 pieces of each: an edit that
    misses them all is not seen) or ``declared:<text>`` (no file is read). ``root`` is the directory
    in which digests are remembered, None for nowhere. ``since_ns`` is :func:`engine_start_ns`
    unless given.
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
                wrong = "declared: needs a text that names these weights"
                raise ConfigError(f"identity.weights: {wrong}")
            self._state = WeightsState("known", mode)
        elif mode not in ("full", "sampled"):
            wrong = f"is {mode!r}; write full, sampled or declared:<text>"
            raise ConfigError(f"identity.weights {wrong}")
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
        """The text for the identity, None while it is pending. Raises
        :class:`~ucm.errors.UnsupportedError` with the reason when it cannot, or can no longer, be
        known."""
        state = self._state
        if state.kind in ("unknown", "off"):
            raise UnsupportedError(state.reason, context={"model": self._source.model})
        return state.text or None

    @property
    def state(self) -> WeightsState:
        """The state as of now, without waiting."""
        return self._state

    def wait(self, timeout: float = CONSTRUCTOR_WAIT_S) -> WeightsState:
        """The state, after at most ``timeout`` seconds of waiting while it is pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.kind != "pending", timeout)
            return self._state

    def recheck(self, timeout: float = 1.0) -> WeightsState:
        """Compare the stamps of the files: unknown from now on when one of them changed.

        Call it when the store has been opened: digests computed before its root existed are then
        remembered. Waits at most ``timeout`` seconds; a late result shows in :attr:`state`.
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
            reason = f"the weight files of {self._source.model} cannot be read: {error}"
            state = WeightsState("off", reason=reason)
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
                return f"the weight file {path} cannot be read any more: {error.strerror}"
            return (
                f"the weight file {path} changed while the engine runs, so a restart would compute"
                " something else"
            )
        return ""

    def _digest(self, files: list[WeightFile]) -> str:
        for file in files:
            stamp = FileStamp.of(os.stat(file.path))
            young = stamp.ctime_ns > self._since_ns - CLOCK_SLACK_NS
            if young and not is_content_addressed(file.path):
                raise FileChangedError(
                    "a weight file changed after the engine started, so it may not be what was"
                    " loaded",
                    context={"path": file.path},
                )
            self._stamps[file.path] = stamp
        digests = self._full(files) if not self._sampled else self._hash_all(files)
        stamps = self._stamps
        parts = [(file.name, stamps[file.path].size, digests[file.path]) for file in files]
        total = combined(_LABEL, parts)
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
            while not self._turn.wait_for(lambda: self._error or not self._missing, PROGRESS_S):
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
            "hashing the weights: %s of %s in %.0f s; requests are computed as usual until it is"
            " done",
            in_units(self._done_bytes),
            in_units(self._total),
            seconds,
        )


# Weights in memory
# --------------------------------------------------------------------------------------------------

#: A tensor of at most this many bytes is fingerprinted whole; of a larger one at least as many
#: bytes are read.
WHOLE, MEMORY_SAMPLES = 64 << 10, 1024


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What a rank reports of the weights in its memory."""

    generation: int  # that of the request
    unchanged: bool | None  # since the last request, or since loading; None: not known
    named: WeightSource | None  # the files vLLM names since then, if it names others
    since_ns: int  # Unix time at which memory was last found to hold what it held before


@dataclass(frozen=True)
class Fingerprint:
    """What a model's tensors look like."""

    digest: bytes
    packed: tuple[weakref.ref[Any], ...]  # objects that hold weights which no tensor shows

    def equals(self, other: Fingerprint) -> bool:
        """Whether both are of the same weights, as far as this shows."""
        same = self.digest == other.digest and self.packed == other.packed
        return same and all(holder() is not None for holder in self.packed)


class ModelMemory:
    """The weights of one rank. Every method takes milliseconds and is called between forward
    passes."""

    def __init__(
        self,
        layers: Callable[[], Sequence[torch.nn.Module]],
        source: Callable[[], WeightSource],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """``layers``: the attention layers whose KV is stored; ``source``: the files that vLLM read
        last."""
        self._layers, self._source, self._now_ns = layers, source, now_ns
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._known: Fingerprint | None = None
        self._known_source: WeightSource | None = None
        self._seen_ns = 0  # when memory was last found to hold what is known

    def remember(self) -> None:
        """The weights have just been loaded: memory holds the content of the files."""
        try:
            self._models = [weakref.ref(model) for model in models_with(self._layers())]
            self._known, self._known_source = self._look(), self._source()
        except Exception as error:  # later changes cannot be detected, which compare() says
            logger.warning("the model's weights cannot be read in memory: %r", error)
        self._seen_ns = self._now_ns()

    def compare(self, generation: int) -> WeightsReport:
        """Compare memory with the last fingerprint, and take a new one. Never raises."""
        before, since = self._known, self._seen_ns
        named, self._known = None, None
        try:
            self._known = self._look()
            source = self._source()
            named = source if source != self._known_source else None
            self._known_source = source
        except Exception as error:
            logger.warning("the model's weights cannot be read in memory: %r", error)
        self._seen_ns = self._now_ns()
        now = self._known
        if before is None or now is None:
            return WeightsReport(generation, None, None, since)
        return WeightsReport(generation, before.equals(now), named, since)

    def _look(self) -> Fingerprint | None:
        models = [model() for model in self._models]
        if not models or any(model is None for model in models):
            return None
        return fingerprint([model for model in models if model is not None])


def models_with(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The whole models that these layers are part of: modules that contain one of them and that no
    other module holds. vLLM passes its connector layers only, so all living modules are
    searched."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    wanted = {id(layer) for layer in layers}
    tops = (module for module in modules if id(module) not in inner)
    return [top for top in tops if any(id(module) in wanted for module in top.modules())]


def fingerprint(models: Sequence[torch.nn.Module]) -> Fingerprint | None:
    """The fingerprint of these models, in the order of their tensors' names; None where weights are
    hidden."""
    digest = hashlib.sha256()
    samples: list[torch.Tensor] = []
    packed: list[weakref.ref[Any]] = []
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            empty = False
            for key, tensor in _tensors(module):
                text = f"{number} {name} {key} {tensor.dtype} {tuple(tensor.shape)}\0"
                digest.update(text.encode())
                if tensor.numel():
                    samples.append(_samples(tensor))
                empty = empty or not tensor.numel()
            if empty:
                holders = _holders(module)
                if not holders:
                    return None
                packed += holders
    for device in {sample.device for sample in samples}:  # one copy from each device
        there = [sample for sample in samples if sample.device == device]
        digest.update(memoryview(torch.cat(there).cpu().numpy()))
    return Fingerprint(digest.digest(), tuple(packed)) if samples else None


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers; others are scratch, or made from these."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter.detach()
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer.detach()


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of the memory that a tensor spans, whatever its strides."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * abs(stride) for extent, stride in extents)
    size = span * tensor.element_size()
    first = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    # An odd step reads high and low bytes of the numbers in turn.
    step = 1 if size <= WHOLE else (size // MEMORY_SAMPLES - 1) | 1
    return memory[first : first + size : step]


def _holders(module: torch.nn.Module) -> list[weakref.ref[Any]]:
    """The functions and objects in which a module may keep the weight of an empty parameter."""
    found = []
    for value in vars(module).values():
        if callable(value) and not isinstance(value, type | torch.nn.Module):
            with contextlib.suppress(TypeError):  # an object that says nothing about the weight
                found.append(weakref.ref(value))
    return found
