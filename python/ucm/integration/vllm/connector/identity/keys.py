"""The keys of a request's blocks: its tokens hashed under the identity of the engine, with
everything else that shapes their KV.

:class:`ExtraKeys` makes the inputs beside the tokens into frames (block index, tag, bytes). LoRA
content and cache salt stand in block 0, and the hash chain carries them to the blocks that follow.
Multimodal items and prompt embeddings stand in every block they touch. A request that cannot be
described exactly raises :class:`UnkeyableError` and is computed without the cache.

vLLM knows an adapter by its name, number and path, and loads it once; :class:`AdapterDigests` uses
the SHA-256 over its files. If these changed since the engine started, or one number stands for two
paths, the content in the engine is not known, and requests of that adapter are neither looked up
nor stored.

vLLM names a multimodal item by a hash it computed or by a text of the client, and caches under that
name the encoder's output and blocks of its prefix cache. If a client uses one name for two
contents, the KV of every request with that name may be wrong. :class:`Items` remembers which
content each name was used for, and requests with an ambiguous name are not stored.

:class:`TenantTags` makes the tag in a record's header for the ``cache_salt`` of its request. The
salt itself is part of the keys, so tenants with different salts never share a block; the tag only
lets records be counted by tenant. With a key it is HMAC-SHA256 of the salt, against which guesses
of a salt cannot be tested; else SHA-256.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import hmac
import itertools
import os
import queue
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ucm.config.fields import read_secret
from ucm.config.words import TENANT_KEY_VARIABLE
from ucm.errors import ConfigError, NotFoundError, UcmError, UnsupportedError
from ucm.integration.vllm.connector.identity.weights import (
    CLOCK_SLACK_NS,
    DigestMemory,
    FileChangedError,
    FileStamp,
    combined,
    engine_start_ns,
    hash_file,
)
from ucm.reasons import MissReason
from ucm.store import BlockHasher

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class UnkeyableError(UnsupportedError):
    """A request whose blocks have no name: it is computed as usual, and neither looked up nor
    stored. ``reason`` is that of its misses: ``identity_pending`` where a later attempt may
    succeed."""

    def __init__(
        self,
        message: str,
        *,
        context: dict[str, Any] | None = None,
        reason: MissReason = MissReason.UNKEYABLE,
    ) -> None:
        super().__init__(message, context=context)
        self.reason = reason

    @property
    def pending(self) -> bool:
        """Whether a later attempt may succeed."""
        return self.reason == MissReason.IDENTITY_PENDING


# Tags of tenants
# --------------------------------------------------------------------------------------------------

#: Bytes of a tag.
TENANT_TAG = 32
#: Fewest bytes of a key, and most that are read of its file.
LEAST_TENANT_KEY, _MOST_TENANT_KEY = 16, 4096
#: Separates these digests from others of the same bytes.
_TENANT_LABEL = b"UCMTENANT"


class TenantTags:
    """Makes the tag of a request."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    @classmethod
    def configured(
        cls, key_file: str | None, environ: Mapping[str, str] = os.environ
    ) -> TenantTags:
        """With the key of this file, else of ``UCM_TENANT_KEY``, else without one. Raises
        :class:`~ucm.errors.ConfigError` for a file that cannot be read or that other users may
        read, and for a key that is too short."""
        key = environ.get(TENANT_KEY_VARIABLE, "").strip().encode("utf-8", "surrogateescape")
        origin = f"environment {TENANT_KEY_VARIABLE}"
        if key_file is not None:
            origin = f"tenant_key_file {key_file}"
            try:
                key = read_secret(key_file, "tenant_key_file", _MOST_TENANT_KEY).strip()
            except OSError as error:
                raise ConfigError(f"{origin} cannot be read: {error.strerror}") from error
        elif not key:
            return cls()
        if len(key) < LEAST_TENANT_KEY:
            raise ConfigError(
                f"{origin} holds a key of {len(key)} bytes, at least {LEAST_TENANT_KEY} are"
                " needed; make one with: openssl rand -hex 32"
            )
        return cls(key)

    def of(self, request: Any) -> bytes:
        """The tag of this request, empty where it has no salt."""
        salt = getattr(request, "cache_salt", None)
        return self.of_salt(str(salt)) if salt else b""

    def of_salt(self, salt: str) -> bytes:
        """The tag of this salt."""
        message = _TENANT_LABEL + salt.encode("utf-8", "surrogatepass")
        if self._key is None:
            return hashlib.sha256(message).digest()
        return hmac.digest(self._key, message, "sha256")


# Multimodal items
# --------------------------------------------------------------------------------------------------

#: Most names remembered, least recently used first out. vLLM itself forgets a name once its blocks
#: and its encoder output are evicted, which that many distinct items cause on any device.
NAMES = 1 << 17

#: Most contents of one name without a digest; a name with more counts as ambiguous.
_WAITING_ITEMS = 16

_ITEM_LABEL = b"UCMITEM"


class _Content:
    """The data of one item, which requests may share, and its digest once it is known."""

    __slots__ = ("digest", "lock", "ref")

    def __init__(self, ref: weakref.ref[Any]) -> None:
        self.ref = ref
        self.digest = b""
        self.lock = threading.Lock()


class Items:
    """Digests of the items of one engine, each computed once, and the contents of each name.

    :meth:`digest` may be called from several threads, the rest from the scheduler's. ``submit``
    runs a function on another thread, or returns False.
    """

    def __init__(
        self, submit: Callable[[Callable[[], None]], bool] | None = None, names: int = NAMES
    ) -> None:
        self._submit = submit
        self._limit = names
        self._contents: dict[int, _Content] = {}  # by id of the data, as long as that lives
        #: What each name was used for, None where that is known to be several contents.
        self._names: OrderedDict[bytes, list[tuple[_Content, str]] | None] = OrderedDict()

    def digest(self, item: Any) -> bytes:
        """SHA-256 of what one item of ``mm_features`` feeds to the model, 32 bytes; computed the
        first time. Raises :class:`UnkeyableError` (``unsupported``) when its data are not in this
        process or cannot be described."""
        data = item.data
        if not _at_hand(data):
            raise UnkeyableError(
                "the data of a multimodal item are not in the scheduler's process",
                reason=MissReason.UNSUPPORTED,
            )
        content = self._content(data)
        with content.lock:
            if not content.digest:
                content.digest = _digest_data(data)
            found = content.digest
        mask = getattr(item.mm_position, "is_embed", None)
        if mask is None:
            return found
        # Not all tokens of its place take the encoder's output.
        return hashlib.sha256(found + b"".join(_described(mask))).digest()

    def used(self, items: Iterable[Any], beside: str = "") -> None:
        """A step computes with these items; to be called for every request before blocks of the
        step are offered. ``beside``: other inputs of vLLM's encoder output of them."""
        for item in items:
            name = _name_digest(item.identifier)
            if name not in self._names:
                while len(self._names) >= self._limit:
                    self._names.popitem(last=False)
                self._names[name] = []
            self._names.move_to_end(name)
            known = self._names[name]
            if known is None:
                continue
            if not _at_hand(item.data):
                self._names[name] = None
                continue
            content = self._content(item.data)
            if (content, beside) not in known:
                known.append((content, beside))
                self._hash_soon(item, content)

    def current(self, items: Iterable[Any]) -> bool | None:
        """Whether the name of each item stands for one content alone; None while a digest is
        computed."""
        answers = [self._stands_for_one(_name_digest(item.identifier)) for item in items]
        if False in answers:
            return False
        return None if None in answers else True

    def _stands_for_one(self, name: bytes) -> bool | None:
        known = self._names.get(name)
        if known is None:  # ambiguous, or forgotten
            return False
        lost = any(not content.digest and content.ref() is None for content, _ in known)
        if lost or len(known) > _WAITING_ITEMS:
            self._names[name] = None  # its content can no longer be compared
            return False
        if any(not content.digest for content, _ in known):
            return None
        if len({(content.digest, beside) for content, beside in known}) > 1:
            self._names[name] = None
            return False
        del known[1:]
        return True

    def _hash_soon(self, item: Any, content: _Content) -> None:
        """Does not wait for the request's lookup: there may be none, and the data may be freed."""
        if self._submit is not None and not content.digest:
            self._submit(lambda: self._try_digest(item))

    def _try_digest(self, item: Any) -> None:
        try:
            self.digest(item)
        except UnkeyableError:
            pass  # the request's own call reports it, and the name never stands for one content

    def _content(self, data: Any) -> _Content:
        key = id(data)
        found = self._contents.get(key)
        if found is None or found.ref() is not data:
            fresh = _Content(weakref.ref(data, lambda ref: self._forget(key, ref)))
            found = self._contents.setdefault(key, fresh)
            if found.ref() is not data:
                self._contents[key] = found = fresh
        return found

    def _forget(self, key: int, ref: weakref.ref[Any]) -> None:
        found = self._contents.get(key)
        if found is not None and found.ref is ref:
            del self._contents[key]


def _name_digest(name: object) -> bytes:
    """A name of vLLM's, of any length, in 16 bytes."""
    return hashlib.blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _at_hand(data: Any) -> bool:
    """Whether these are the data themselves: they may be left out, or be an address in a shared
    memory of workers."""
    if not data or "address" in data:
        return False
    return all(_field_value(data, name) is not None for name in data)


def _field_value(data: Any, name: str) -> Any:
    return getattr(data[name], "data", data[name])


def _digest_data(data: Any) -> bytes:
    """SHA-256 over the fields by name, each with types, shapes and bytes."""
    digest = hashlib.sha256(_ITEM_LABEL)
    for name in sorted(data):
        for piece in itertools.chain(_described(name), _described(_field_value(data, name))):
            digest.update(piece)
    return digest.digest()


def _described(value: Any) -> Iterable[bytes | memoryview]:
    """A value in pieces that can be read back in one way only."""
    import numpy as np
    import torch

    if value is None:
        yield b"N"
    elif isinstance(value, torch.Tensor):
        content = value.detach().to("cpu").contiguous()
        yield _framed_text(b"T", str(content.dtype)) + _framed_shape(content.shape)
        yield content.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield _framed_text(b"A", value.dtype.str) + _framed_shape(value.shape)
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, list | tuple):
        yield struct.pack("<cQ", b"L", len(value))
        for each in value:
            yield from _described(each)
    elif isinstance(value, dict):
        yield struct.pack("<cQ", b"D", len(value))
        for key in sorted(value):
            yield from _described(key)
            yield from _described(value[key])
    elif isinstance(value, bool | int | float | np.generic):
        yield _framed_text(b"V", f"{type(value).__name__} {value!r}")
    elif isinstance(value, str):
        yield _framed_text(b"S", value)
    elif isinstance(value, bytes):
        yield struct.pack("<cQ", b"B", len(value)) + value
    else:
        raise UnkeyableError(
            f"a multimodal item holds a {type(value).__name__}, which has no stable description",
            reason=MissReason.UNSUPPORTED,
        )


def _framed_shape(shape: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(shape)}Q", len(shape), *shape)


def _framed_text(kind: bytes, text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return kind + struct.pack("<Q", len(encoded)) + encoded


# Adapters
# --------------------------------------------------------------------------------------------------

#: The files of an adapter that vLLM reads.
ADAPTER_FILES = ("adapter_config.json", "adapter_model*", "new_embeddings*")

#: Seconds that the first request of an adapter may wait for its digest. Later ones never wait.
FIRST_WAIT_S = 0.5

#: Most adapters that are remembered; requests of further ones are not cached.
LIMIT = 16384

#: Seconds between two checks of the files of an adapter in use, for lookups; while a check takes
#: longer, nothing is known.
RECHECK_S = 1.0

_ADAPTER_LABEL = b"UCMADAPTER"


def _digest_files(
    path: str, memory: DigestMemory, now_ns: Callable[[], int]
) -> tuple[bytes, dict[str, FileStamp]]:
    """SHA-256 over the files of the adapter at a local ``path``, and their stamps. Raises
    :class:`~ucm.errors.NotFoundError` when there is no adapter, :class:`OSError`, and
    :class:`~.weights.FileChangedError`."""
    directory = os.path.expanduser(path)
    listed = _listed(directory)
    names = sorted({name for one in ADAPTER_FILES for name in fnmatch.filter(listed, one)})
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
    with contextlib.suppress(OSError):  # it is hashed again next time
        memory.save()
    return combined(_ADAPTER_LABEL, parts), stamps


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
    """The state of one adapter number."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ready = threading.Event()
        self.digest = b""
        self.stamps: dict[str, FileStamp] = {}
        self.problem = ""  # why it has no name and never will
        self.waited = False
        self.checked = float("-inf")  # when the last check began that found the files unchanged
        self.requested: float | None = None  # when the check under way was requested


class AdapterDigests:
    """Digests of the adapters of one engine, computed on one thread; another compares their files,
    so that no adapter that takes long to hash delays it.

    Files must be older than ``since_ns`` (the engine's start unless given): connectors do not learn
    when vLLM loads an adapter. ``trust_new_files`` lifts that for servers that add adapters while
    they run and never write to a path again.
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
        self._hashing = _AdapterThread("ucm-adapters")
        self._looking = _AdapterThread("ucm-adapter-files")

    def payload(self, lora_request: Any) -> bytes:
        """The bytes for this adapter in the key. The first call for an adapter waits
        :data:`FIRST_WAIT_S` at most, later ones not at all. Raises :class:`UnkeyableError`."""
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
        requested = adapter.requested
        if requested is not None and now - requested >= RECHECK_S:
            raise _pending("whether the adapter's files changed takes long to find out", adapter)
        # The same file means two things to vLLM depending on this flag of the request.
        is_3d = getattr(lora_request, "is_3d_lora_weight", False)
        return adapter.digest + (b"\x01" if is_3d else b"")

    def current(self, lora_request: Any, since: float) -> bool | None:
        """Whether a check of the adapter's files that began after ``since`` (of the clock) found
        them unchanged. False is final; None while no such check has ended: one is under way. Never
        waits. True: KV computed before ``since`` has the name that :meth:`payload` returned."""
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
                    limit = {"limit": LIMIT}
                    raise UnkeyableError("too many adapters to keep track of", context=limit)
                adapter = self._adapters[number] = _Adapter(path)
                self._hashing.submit(lambda: self._hash(adapter))
            elif adapter.path != path and not adapter.problem:
                paths = f"{adapter.path} and {path}"
                adapter.problem = f"adapter number {number} stands for two paths, {paths}"
            return adapter

    def _hash(self, adapter: _Adapter) -> None:
        try:
            memory = DigestMemory(self._root, self._now_ns)
            digest, stamps = _digest_files(adapter.path, memory, self._now_ns)
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
            if adapter.requested is not None:
                return
            adapter.requested = now
        self._looking.submit(lambda: self._look(adapter))

    def _look(self, adapter: _Adapter) -> None:
        began = self._clock()
        for path, stamp in adapter.stamps.items():
            try:
                changed = FileStamp.of(os.stat(path)) != stamp
            except OSError:
                changed = True
            if changed and not adapter.problem:
                adapter.problem = f"the adapter changed while the engine runs: {path}"
        if not adapter.problem:
            adapter.checked = began
        adapter.requested = None


class _AdapterThread:
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


# Frames and keys
# --------------------------------------------------------------------------------------------------

#: Tags of frames, as in ``docs/format.md``.
LORA, MULTIMODAL, SALT, EMBEDS = 1, 2, 3, 4

#: (block index, tag, bytes)
Frame = tuple[int, int, bytes]


class ExtraKeys:
    """Makes the frames of requests. :meth:`of` is thread safe, the rest is for the scheduler's
    thread."""

    def __init__(
        self,
        block_tokens: int,
        adapters: AdapterDigests | None = None,
        items: Items | None = None,
        *,
        foreign_encoder: bool = False,
        adapted_encoder: bool = False,
    ) -> None:
        """``items`` remembers multimodal items; ``foreign_encoder``: other engines pass the
        encoder's output of an item by its name, so its data say nothing here; ``adapted_encoder``:
        adapters change the encoder's output."""
        self._block_tokens = block_tokens
        self._adapters = adapters
        self._known = items or Items()
        self._foreign_encoder, self._adapted_encoder = foreign_encoder, adapted_encoder

    @classmethod
    def for_engine(
        cls, vllm_config: VllmConfig, block_tokens: int, adapters: AdapterDigests, items: Items
    ) -> ExtraKeys:
        """As the constructor, with what the engine's configuration says."""
        foreign = getattr(vllm_config, "ec_transfer_config", None) is not None
        lora = getattr(vllm_config, "lora_config", None)
        adapted = bool(getattr(lora, "enable_tower_connector_lora", False))
        return cls(block_tokens, adapters, items, foreign_encoder=foreign, adapted_encoder=adapted)

    def of(self, request: Request, start: int = 0, end: int | None = None) -> list[Frame]:
        """The frames of blocks ``start`` up to ``end`` (all full ones unless given), sorted by
        block and tag. Raises :class:`UnkeyableError`."""
        if end is None:
            end = request.num_tokens // self._block_tokens
        _refuse_unkeyable(request)
        frames: list[Frame] = []
        if start == 0 and end > 0:
            frames += self._whole_request(request)
        frames += self._items(request, start, end)
        frames += self._embeds(request, start, end)
        # stable: items of one block stay in the order of their places
        frames.sort(key=lambda frame: frame[:2])
        return frames

    @staticmethod
    def only_tokens(request: Request) -> bool:
        """Whether a request has no adapter, items or embeddings, which may take long to name."""
        beside = request.lora_request, request.prompt_embeds
        return not request.mm_features and all(one is None for one in beside)

    def current(self, request: Request, since: float) -> bool | None:
        """Whether the result of :meth:`of` still held at ``since`` (monotonic, in seconds); never
        waits. None when that is not known yet; False is final. To be called before blocks of the
        request are stored."""
        if request.lora_request is not None:
            known = self._adapters
            adapter = False if known is None else known.current(request.lora_request, since)
            if not adapter:
                return adapter
        return self._known.current(request.mm_features) if request.mm_features else True

    def used(self, request: Any, computed: int = 0) -> None:
        """A step computes with the items of a request that end past its first ``computed`` tokens.
        To be called for every request, cached or not, before blocks of the step are offered."""
        items = [item for item in request.mm_features or () if sum(_tokens_of(item)) > computed]
        if items:
            lora = request.lora_request if self._adapted_encoder else None
            self._known.used(items, "" if lora is None else str(lora.lora_path))

    def _whole_request(self, request: Any) -> Iterator[Frame]:
        if request.lora_request is not None:
            if self._adapters is None:
                raise UnkeyableError("requests with adapters are not kept here")
            yield 0, LORA, self._adapters.payload(request.lora_request)
        if request.cache_salt:
            yield 0, SALT, str(request.cache_salt).encode("utf-8", "surrogatepass")

    def _items(self, request: Any, start: int, end: int) -> Iterator[Frame]:
        size = self._block_tokens
        for item in sorted(request.mm_features or (), key=_tokens_of):
            offset, length = int(item.mm_position.offset), int(item.mm_position.length)
            first, last = offset // size, (offset + max(length, 1) - 1) // size
            touched = range(max(first, start), min(last + 1, end))
            content = self._content(item) if touched else b""
            for block in touched:
                place = struct.pack("<qQ", offset - block * size, length)
                yield block, MULTIMODAL, place + content

    def _content(self, item: Any) -> bytes:
        if self._foreign_encoder:
            raise UnkeyableError(
                "encoder outputs come from other engines, which know multimodal items by name"
                " alone",
                reason=MissReason.UNSUPPORTED,
            )
        modality = f"{getattr(item, 'modality', '')}\0"
        return modality.encode("utf-8", "surrogatepass") + self._known.digest(item)

    def _embeds(self, request: Any, start: int, end: int) -> Iterator[Frame]:
        embeds = request.prompt_embeds
        if embeds is None:
            return
        is_token = getattr(request, "prompt_is_token_ids", None)
        size, rows = self._block_tokens, int(embeds.shape[0])
        for block in range(start, min(end, -(-rows // size))):
            first, last = block * size, min((block + 1) * size, rows)
            # Where the prompt has tokens, the tokens are in the key and the rows are not used.
            used = [row for row in range(first, last) if is_token is None or not is_token[row]]
            if used:
                yield block, EMBEDS, _digest_rows(embeds, used, first)


def _refuse_unkeyable(request: Any) -> None:
    extra = getattr(getattr(request, "pooling_params", None), "extra_kwargs", None)
    if extra and any("token_type" in name for name in extra):
        raise UnkeyableError("token types change what is computed and are not part of the keys")


def _tokens_of(item: Any) -> tuple[int, int]:
    return int(item.mm_position.offset), int(item.mm_position.length)


def _digest_rows(embeds: Any, rows: list[int], first: int) -> bytes:
    """SHA-256 over dtype, width, places within the block and bytes of some rows."""
    import torch

    whole = len(rows) == rows[-1] - rows[0] + 1
    content = embeds[rows[0] : rows[-1] + 1] if whole else embeds[rows]
    content = content.detach().to("cpu").contiguous()
    places = struct.pack(f"<{len(rows)}I", *(row - first for row in rows))
    head = f"{content.dtype} {tuple(content.shape[1:])} {len(rows)}\0"
    digest = hashlib.sha256(head.encode() + places)
    digest.update(memoryview(content.view(torch.uint8).numpy()).cast("B"))
    return digest.digest()


class KeyMaker:
    """Hashes token blocks under one identity."""

    def __init__(
        self, identity: str, block_tokens: int, hash_method: str, extra: ExtraKeys
    ) -> None:
        seed = hashlib.sha256(identity.encode()).digest()
        self._hasher = BlockHasher(seed, block_tokens, hash_method)
        self._extra = extra
        self.block_tokens = block_tokens

    def first(self, request: Request) -> list[bytes]:
        """Keys of all full blocks of the tokens known now. May read an adapter's files: for
        background threads."""
        return self.more(request, [])

    def at_once(self, request: Request, tokens: int) -> bool:
        """Whether :meth:`first` is quick: only tokens, at most ``tokens`` of them."""
        return request.num_tokens <= tokens and self._extra.only_tokens(request)

    def current(self, request: Request, since: float) -> bool | None:
        """Whether the keys name what the request computed before ``since``: see
        :meth:`ExtraKeys.current`."""
        return self._extra.current(request, since)

    def more(self, request: Request, keys: list[bytes]) -> list[bytes]:
        """Keys of the full blocks after those of ``keys``. Raises :class:`UnkeyableError` for a
        request that has no keys."""
        tokens = request._all_token_ids
        start, end = len(keys), len(tokens) // self.block_tokens
        if end <= start:
            return []
        extra = self._extra.of(request, start, end)
        parent = keys[-1] if keys else None
        return self._hasher.hash_blocks(tokens, parent=parent, start=start, extra=extra)
