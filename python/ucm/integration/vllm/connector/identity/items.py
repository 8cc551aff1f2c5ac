"""Content digests of multimodal items: of the data that the model is fed, not of the name vLLM uses
for them.

vLLM names an item by a hash it computed or by a text that a client chose, and caches under that
name: the encoder's output, and blocks of its prefix cache. If a client uses one name for two
contents, the KV of every request with that name may be wrong, whatever the request's own data are.
:class:`Items` remembers which content each name was used for, and requests with an ambiguous name
are not stored.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from ucm.integration.vllm.connector.identity.unkeyable import UnkeyableError
from ucm.reasons import MissReason

#: Names remembered, the least recently used go first. vLLM itself forgets a name once its blocks
#: and its encoder output are evicted; that many distinct items push both out of any device.
NAMES = 1 << 17

#: Contents of one name that wait for their digest; a name with more counts as one that stands for
#: several.
_WAITING = 16

_LABEL = b"UCMITEM"


class _Content:
    """The data of one item, which vLLM may share between requests, and its digest once it is
    known."""

    __slots__ = ("digest", "lock", "ref")

    def __init__(self, ref: weakref.ref[Any]) -> None:
        self.ref = ref
        self.digest = b""
        self.lock = threading.Lock()


class Items:
    """Digests of the items of one engine, each computed once, and what its names stand for.

    :meth:`digest` may be called from several threads, the rest from the scheduler's. ``submit``
    runs a function on another thread, or answers False.
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
        """SHA-256 of what one item of ``mm_features`` feeds to the model, 32 bytes; hashes its data
        the first time.

        Raises :class:`UnkeyableError` (``unsupported``) when its data are not in this process or
        are of a kind that cannot be described.
        """
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
        """A step computes with these items; tell it of every request before blocks of the step are
        offered.

        ``beside`` is what else vLLM's encoder output of them depends on.
        """
        for item in items:
            name = _short(item.identifier)
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
        """Whether the name of each item stands for one content alone; None while that is being
        found out."""
        answers = [self._stands_for_one(_short(item.identifier)) for item in items]
        if False in answers:
            return False
        return None if None in answers else True

    def _stands_for_one(self, name: bytes) -> bool | None:
        known = self._names.get(name)
        if known is None:  # for several; or it was forgotten, and with it for how many
            return False
        if len(known) > _WAITING or any(
            not content.digest and content.ref() is None for content, _ in known
        ):
            self._names[name] = None  # what is gone can no longer be compared
            return False
        if any(not content.digest for content, _ in known):
            return None
        if len({(content.digest, beside) for content, beside in known}) > 1:
            self._names[name] = None
            return False
        del known[1:]
        return True

    def _hash_soon(self, item: Any, content: _Content) -> None:
        """Not left to the request's lookup: it may have none, and its data may go with it."""
        if self._submit is not None and not content.digest:
            self._submit(lambda: self._try_digest(item))

    def _try_digest(self, item: Any) -> None:
        try:
            self.digest(item)
        except UnkeyableError:
            pass  # the request is told when it asks, and the name never stands for one content

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


def _short(name: object) -> bytes:
    """A name of vLLM's, which may be as long as its client liked, in 16 bytes."""
    return hashlib.blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _at_hand(data: Any) -> bool:
    """Whether these are the data themselves: they may be left out, or be an address in a shared
    memory of workers."""
    return (
        bool(data)
        and "address" not in data
        and all(_value(data, name) is not None for name in data)
    )


def _value(data: Any, name: str) -> Any:
    return getattr(data[name], "data", data[name])


def _digest_data(data: Any) -> bytes:
    """SHA-256 over the fields by name, each with types, shapes and bytes, so that different data
    never look alike."""
    digest = hashlib.sha256(_LABEL)
    for name in sorted(data):
        for piece in _described(name):
            digest.update(piece)
        for piece in _described(_value(data, name)):
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
        yield _text(b"T", str(content.dtype)) + struct.pack(
            f"<I{content.dim()}Q", content.dim(), *content.shape
        )
        yield content.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield _text(b"A", value.dtype.str) + struct.pack(
            f"<I{value.ndim}Q", value.ndim, *value.shape
        )
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
        yield _text(b"V", f"{type(value).__name__} {value!r}")
    elif isinstance(value, str):
        yield _text(b"S", value)
    elif isinstance(value, bytes):
        yield struct.pack("<cQ", b"B", len(value)) + value
    else:
        raise UnkeyableError(
            f"a multimodal item holds a {type(value).__name__}, which has no stable description",
            reason=MissReason.UNSUPPORTED,
        )


def _text(kind: bytes, text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return kind + struct.pack("<Q", len(encoded)) + encoded
