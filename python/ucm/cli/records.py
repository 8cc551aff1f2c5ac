"""Records and segments of a root, read and verified by the core, and the manifest of a namespace.

Reads of a live root bypass the page cache where possible, at a bounded rate. A refused record is
read a second time, through a fresh open. If it does not exist any more, a process removed it that
may do so, and this is no error.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ucm import _core
from ucm.cli.roots import FORMAT, PAGE, AnyRoot, Found
from ucm.cli.terminal import short
from ucm.reasons import MissReason

#: How the core is called in results.
READER = "compiled core"
#: Most bytes of a record: of the longest header, the most KV and the most side shards.
MAX_RECORD = 102_400 + (1 << 30) + (16 << 20)
#: What the header of a record says, as ``ucm inspect`` shows it.
Header = dict[str, Any]


class Refused(Exception):  # noqa: N818 - a verdict on bytes, not an error of the program
    """These bytes are not the requested record: the reason, and a sentence about it."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = MissReason(reason)
        self.found = found


def header_of(data: bytes) -> Header:
    """What the header at the start of ``data`` says; raises :class:`Refused`."""
    header, reason, found = _core.read_header(data)
    if header is None:
        raise Refused(reason, found)
    return header


def verify_record(
    data: bytes,
    record_id: bytes | None,
    namespace: bytes,
    shape: Shape | None,
    keys: _core.RecordKeys | None,
) -> dict[str, Any]:
    """What the core found in a record that is sound (:func:`ucm._core.verify_record`); raises
    :class:`Refused` for another."""
    whole, reason, found = _core.verify_record(data, record_id, namespace, shape, keys)
    if whole is None:
        raise Refused(reason, found)
    return whole


#: Keys of an identity that are shown in words.
_WORDS = (
    "architecture",
    "dtype",
    "kv_dtype",
    "attention_backend",
    "kv_layout",
    "position",
    "block_tokens",
    "world_size",
    "weights",
)
#: Most characters of a value in words.
_SHORT = 100


@dataclass
class Manifest:
    """A manifest: its state (``ok``, ``missing``, ``damaged``, ``newer``, ``other digest``) and
    what it says."""

    state: str
    digest: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def words(self) -> list[tuple[str, str]]:
        """The identity in words: labels first, then what distinguishes models, and the shape of a
        block's parts."""
        rows = [(str(name), str(value)) for name, value in self.labels.items()]
        rows += [(key, say(self.identity.get(key))) for key in _WORDS]
        groups = self.identity.get("kv_groups")
        rows += [
            (f"kv group {at}", _group(one))
            for at, one in enumerate(groups if isinstance(groups, list) else ())
        ]
        for key in ("tensor_parallel", "pipeline_parallel", "decode_context_parallel"):
            value = self.identity.get(key)
            parallel = value.get("size") if isinstance(value, dict) else value
            if isinstance(parallel, int) and parallel > 1:
                rows.append((key, str(parallel)))
        return [(name, short(value, _SHORT)) for name, value in rows if value]


def say(value: Any) -> str:
    """A value of an identity in words; empty for what says nothing."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text}" for key, inner in value.items() if (text := say(inner)))
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(text for inner in value if (text := say(inner))))
    return "" if value is None else str(value)


def _group(group: Any) -> str:
    """A KV cache group in words: layers, heads and their size, kind."""
    if not isinstance(group, dict):
        return ""
    layers = group.get("layers")
    found = group.get("spec")
    spec: dict[str, Any] = found if isinstance(found, dict) else {}
    words = [f"{len(layers)} layers" if isinstance(layers, list) else ""]
    for key, text in (("num_kv_heads", "heads {}"), ("head_size", "head size {}"), ("dtype", "{}")):
        words.append(text.format(spec[key]) if spec.get(key) is not None else "")
    words.append(say(group.get("kind")))
    return ", ".join(word for word in words if word)


def read_manifest(root: AnyRoot, namespace: str) -> Manifest:
    """The manifest of a namespace. Never fails: what is wrong with it is its state."""
    try:
        found = root.manifest(namespace)
    except (ValueError, OSError, RecursionError):
        return Manifest("damaged")
    if found is None:
        return Manifest("missing")
    if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
        return Manifest("damaged")
    if not isinstance(found.get("format"), int) or found["format"] > FORMAT:
        return Manifest("newer" if isinstance(found.get("format"), int) else "damaged")
    identity: dict[str, Any] = found["identity"]
    text = json.dumps(identity, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    state = "ok" if digest[:32] == namespace and found.get("digest") == digest else "other digest"
    labels = found.get("labels")
    return Manifest(
        state,
        str(found.get("digest", "")),
        identity,
        labels if isinstance(labels, dict) else {},
        _shapes(found.get("parts")),
    )


def differences(identities: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By key (dots between levels) the values of each identity, only for keys in which any two
    differ. A key that an identity does not have is absent there."""
    flat = {name: dict(_flatten(identity)) for name, identity in identities.items()}
    found = {
        key: {name: values[key] for name, values in flat.items() if key in values}
        for key in dict.fromkeys(key for values in flat.values() for key in values)
    }
    return {
        key: values
        for key, values in found.items()
        if len(values) < len(flat)
        or any(value != next(iter(values.values())) for value in values.values())
    }


def _flatten(value: Any, at: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        dot = f"{at}." if at else ""
        return [pair for key, inner in value.items() for pair in _flatten(inner, f"{dot}{key}")]
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        return [pair for i, inner in enumerate(value) for pair in _flatten(inner, f"{at}[{i}]")]
    return [(at, value)]


#: Sizes of a part's blocks, as its manifest lists them: bytes of a layer's tensors, layers, tokens,
#: name of the type.
Shape = tuple[list[int], int, int, str]
_PART = re.compile(r"g[0-9]+p[0-9]+t[0-9]+")


def _shapes(parts: Any) -> dict[str, Shape]:
    """The shapes that can be understood, by the name of their part; the others are left out, and
    their records verified without."""
    shapes: dict[str, Shape] = {}
    for name, entry in parts.items() if isinstance(parts, dict) else ():
        try:
            tensors = [int(size) for size in entry["tensors"]]
            layers, tokens = int(entry["layers"]), int(entry["block_tokens"])
            dtype = str(entry["dtype"])
        except (ValueError, KeyError, TypeError):
            continue
        if _PART.fullmatch(name) and all(
            0 <= size < 1 << 32 for size in (*tensors, layers, tokens)
        ):
            shapes[name] = (tensors, layers, tokens, dtype)
    return shapes


#: Bytes of the first read: nearly every record whole, and longer than every header.
FIRST = 8 << 20
#: The same of a segment's entry.
HEADER_FIRST = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """What a record is: ``good``, ``newer``, ``bad``, ``unreadable`` or ``removed``; why, in words;
    its header.

    ``damaged_sides``: side shards of a good one that are none, with what is wrong with each.
    """

    state: str
    reason: str = ""
    found: str = ""
    header: Header | None = None
    decrypted: bool = False
    damaged_sides: Mapping[str, str] = field(default_factory=dict)

    @property
    def looks_bad(self) -> bool:
        """Whether something is wrong, so that it is read again."""
        return self.state in ("bad", "unreadable") or bool(self.damaged_sides)


def verdict_of(error: OSError | Refused) -> Verdict:
    """The verdict on what could not be read, or was refused."""
    if isinstance(error, Refused):
        state = "newer" if error.reason is MissReason.NEWER_VERSION else "bad"
        return Verdict(state, str(error.reason), error.found)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Verdict("removed")
    return Verdict("unreadable", "io_error", error.strerror or str(error))


class Pace:
    """Bounds a stream of bytes to a rate (bytes per second, ``None``: no bound); at most one unused
    second is carried over."""

    def __init__(
        self,
        rate: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free = clock()

    def spend(self, count: int) -> None:
        """Waits until ``count`` more bytes may be read."""
        if self._rate is None:
            return
        now = self._clock()
        self._free = max(self._free, now - 1.0)
        if self._free > now:
            self._sleep(self._free - now)
        self._free += count / self._rate


class RecordVerifier:
    """Verifies the records of one root."""

    def __init__(self, root: AnyRoot, pace: Pace, keys: _core.RecordKeys | None = None) -> None:
        self._root = root
        self._pace = pace
        #: Decrypts records; None: encrypted ones are verified by the checksums of what is stored.
        self._keys = keys

    def verify(self, found: Found, manifest: Manifest, entry: Entry | None = None) -> Verdict:
        """The verdict on a record, or on that of an ``entry`` of a segment, after a second read if
        something was wrong."""
        verdict = self._once(found, manifest, entry)
        return self._once(found, manifest, entry) if verdict.looks_bad else verdict

    def _once(self, found: Found, manifest: Manifest, entry: Entry | None) -> Verdict:
        try:
            data, header = self._read(found, entry)
            record_id = entry.record_id if entry else bytes.fromhex(found.name[:32])
            namespace, shape = bytes.fromhex(found.namespace), manifest.shapes.get(header["part"])
            whole = verify_record(data, record_id, namespace, shape, self._keys)
        except (OSError, Refused) as error:
            return verdict_of(error)
        damaged = {
            name: text for name, reason, text in whole["lost_sides"] if reason != MissReason.ABSENT
        }
        return Verdict(
            "good", header=whole["header"], decrypted=whole["decrypted"], damaged_sides=damaged
        )

    def _read(self, found: Found, entry: Entry | None) -> tuple[bytes, Header]:
        """A record and its header. More than the first bytes are read only as far as the header
        says: a file may have been exchanged for a huge one, and a footer may lie."""
        offset = entry.offset if entry else 0
        first = min(HEADER_FIRST, entry.length) if entry else FIRST
        self._pace.spend(min(first, found.size))
        data, size = self._root.read(found, first, offset)
        header = header_of(data)
        length = entry.length if entry else size
        if length > len(data):
            length = min(length, most_to_read(header))
            self._pace.spend(length)
            data, _ = self._root.read(found, length, offset)
        return data, header

    def footer(self, found: Found) -> Segment:
        """The footer of a segment, after a second read if the first was refused.

        Raises :class:`Refused` or :class:`OSError`.
        """
        try:
            return read_footer(self._root, found)
        except Refused:
            return read_footer(self._root, found)


def most_to_read(header: Header) -> int:
    """Bytes by which a record is known to be as long as its header says: those, and a page. Raises
    :class:`Refused` where no record can be as long."""
    length = int(header["record_bytes"])
    if length > MAX_RECORD:
        raise Refused(MissReason.BAD_HEADER, f"a record of {length} bytes, more than {MAX_RECORD}")
    return length + PAGE


class Entry(NamedTuple):
    """Where a record lies in its segment, in bytes."""

    record_id: bytes
    offset: int
    length: int


@dataclass(frozen=True)
class Segment:
    """What the footer of a segment says."""

    part: str
    entries: list[Entry]


def read_footer(root: AnyRoot, found: Found) -> Segment:
    """The footer of a segment; raises :class:`Refused` or :class:`OSError`."""
    tail, size = root.read(found, PAGE, max(0, found.size - 1) // PAGE * PAGE)
    listed, length, reason = _core.read_footer(tail, size)
    if length:
        tail, size = root.read(found, length, size - length)
        listed, length, reason = _core.read_footer(tail, size)
    if listed is None:
        raise Refused(reason or MissReason.TRUNCATED, "the footer of a segment")
    name, namespace, part, records = listed
    if namespace[:16].hex() != found.namespace:
        raise Refused(MissReason.FOREIGN_IDENTITY, f"identity {namespace.hex()}")
    if name != found.name:
        raise Refused(MissReason.FOREIGN_ID, f"segment {name}")
    return Segment(part, [Entry(*record) for record in records])
