"""The chunks of a prompt, and the stored prompts that have them at another position.

A chunk has no record of its own. Its name is the hash of its tokens alone, with what else shapes
its KV (``extra``: adapter and salt), and stands for the records of the blocks of a stored prompt in
which it lies. So no byte is stored twice, and nothing is computed for the cache alone.

A prompt's pieces are named by its request, or end at separators (:func:`pieces_of`).
:class:`ChunkFinder` finds pieces by their hash, and in the rest of a prompt, at any offset, the
aligned chunks of stored prompts by a rolling hash. A match counts if the hash of its tokens is
equal too. The table is bounded and lives in memory: after a restart it fills again with the prompts
that are stored or found.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.errors import InvalidInputError

#: Tokens of an aligned chunk, rounded up to blocks, and chunks of the table, by default.
CHUNK_TOKENS, ENTRIES = 256, 1 << 16
#: Bytes of a block's key.
KEY = 16
#: Bits of a rolling hash that reject most windows of a prompt.
_BITS = 20
#: Most pieces of a prompt, and most equal rolling hashes of other tokens that are checked in it.
PIECES, FALSE_MATCHES = 4096, 64

#: Base of the rolling hash: odd, so that it has an inverse.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)

Range = tuple[int, int]
_Tokens = npt.NDArray[np.uint32]
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens ``[start, end)`` of a prompt whose KV was computed elsewhere, the first of them at
    position ``source``."""

    start: int
    end: int
    source: int
    #: Keys of the blocks that hold it, one after the other, from the block of ``source`` on.
    keys: bytes = b""
    #: Number of the stored prompt that these are blocks of.
    prompt: int = 0

    @property
    def tokens(self) -> int:
        """Its length in tokens."""
        return self.end - self.start

    @property
    def follows(self) -> bool:
        """Whether tokens stand before it, here or where it was computed."""
        return self.start > 0 or self.source > 0


def check_hits(hits: Sequence[Hit], tokens: int) -> None:
    """Raises :class:`~ucm.errors.InvalidInputError` unless the hits lie in a prompt of ``tokens``
    tokens, in order, without overlap."""
    check_ranges([(hit.start, hit.end) for hit in hits], tokens)
    for hit in hits:
        if hit.source < 0:
            raise InvalidInputError("a position is 0 or above", context={"source": hit.source})


def check_ranges(ranges: Sequence[Range], tokens: int) -> None:
    """The same for ranges ``(start, end)``."""
    before = 0
    for start, end in ranges:
        if not before <= start < end <= tokens:
            raise InvalidInputError(
                f"chunks are ranges [start, end] of the {tokens} tokens of a prompt, in order,"
                " without overlap",
                context={"start": start, "end": end},
            )
        before = end


# The pieces of a prompt
# --------------------------------------------------------------------------------------------------


def requested_chunks(kv_transfer_params: Mapping[str, Any] | None) -> list[Range] | None:
    """The ranges of tokens that a request names: ``{"ucm": {"chunks": [[start, end], ...]}}``;
    None where it names none. Raises :class:`~ucm.errors.InvalidInputError` for another form."""
    given = kv_transfer_params  # of any form, as a client sent it
    ours = given.get("ucm") if isinstance(given, Mapping) else None
    chunks = ours.get("chunks") if isinstance(ours, Mapping) else None
    if chunks is None:
        return None
    if not isinstance(chunks, list | tuple) or not all(map(_is_range, chunks)):
        raise InvalidInputError(
            'kv_transfer_params {"ucm": {"chunks": ...}} is a list of [start, end], each a range of'
            " tokens of the prompt"
        )
    return [(start, end) for start, end in chunks]


def _is_range(value: Any) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def separators_of(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> list[tuple[int, ...]]:
    """The tokens of separators; ``encode`` is a tokenizer's, without special tokens. A text that
    becomes other tokens between its neighbours is not found: a special token is safest. Raises
    :class:`~ucm.errors.InvalidInputError` for a text without tokens."""
    found = [tuple(encode(text)) for text in texts]
    if not all(found):
        raise InvalidInputError("a separator has at least one token; leave out empty texts")
    return found


def pieces_of(
    tokens: Sequence[int],
    *,
    chunks: Sequence[Range] | None = None,
    separators: Sequence[Sequence[int]] = (),
    chunk_end_token_id: int | None = None,
) -> list[Range]:
    """The pieces ``[start, end)`` of a prompt, in order: those of ``chunks`` (of its request);
    else those that end with a separator or with ``chunk_end_token_id``. Tokens behind the last one
    are no piece: they are the question. Raises :class:`~ucm.errors.InvalidInputError` for chunks
    that are no ranges of this prompt, and for more than :data:`PIECES` chunks; further separators
    are ignored."""
    if chunks is not None:
        check_ranges(chunks, len(tokens))
        if len(chunks) > PIECES:
            raise InvalidInputError(f"a request names at most {PIECES} chunks")
        return list(chunks)
    marks = [list(each) for each in separators]
    if chunk_end_token_id is not None:
        marks.append([chunk_end_token_id])
    ends, row = [0], np.asarray(tokens, dtype=np.int64)
    for start, end in sorted(_places(row, marks)):
        if start >= ends[-1] and len(ends) <= PIECES:
            ends.append(end)
    return list(itertools.pairwise(ends))


def _places(row: npt.NDArray[np.int64], marks: Iterable[Sequence[int]]) -> Iterable[Range]:
    """Where these tokens stand in a row."""
    for mark in marks:
        places = max(len(row) - len(mark) + 1, 0)
        equal = np.ones(places, dtype=np.bool_)
        for at, token in enumerate(mark):
            equal &= row[at : at + places] == token
        yield from ((int(start), int(start) + len(mark)) for start in np.flatnonzero(equal))


# The finder
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a chunk lies in a stored prompt, and its rolling hash if it is aligned."""

    prompt: int
    source: int
    tokens: int  # with KV in full blocks: a piece may end behind them
    keys: bytes
    rolling: int | None


class ChunkFinder:
    """The chunks of stored prompts of one engine, the least recently used first out. Not
    thread-safe."""

    def __init__(
        self,
        block_tokens: int,
        chunk_tokens: int = CHUNK_TOKENS,
        entries: int = ENTRIES,
        alone: bool = False,
    ) -> None:
        """``block_tokens`` of a stored block; ``chunk_tokens`` of an aligned chunk, rounded up to
        blocks; ``entries``: most chunks that are remembered, fewer where pieces are longer than
        aligned chunks: the number of their blocks is bounded too; ``alone``: only chunks with which
        a stored prompt began are remembered, since nothing before them shaped their KV."""
        if min(block_tokens, chunk_tokens, entries) < 1:
            raise InvalidInputError("block_tokens, chunk_tokens and entries are above 0")
        self.block_tokens = block_tokens
        self.chunk_tokens = -(-chunk_tokens // block_tokens) * block_tokens
        self._limit, self._alone = entries, alone
        self._most_bytes = entries * KEY * (self.chunk_tokens // block_tokens + 1)
        self._bytes = 0  # of the keys of all entries
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by digest
        self._aligned: dict[int, bytes] = {}  # rolling hash -> digest
        self._begins = np.zeros(1 << _BITS, dtype=np.uint32)  # of these hashes, by their first bits
        self._prompts = 0

    def __len__(self) -> int:
        """Chunks that are remembered."""
        return len(self._entries)

    def add(
        self,
        tokens: Sequence[int],
        keys: Sequence[bytes],
        *,
        pieces: Sequence[Range] = (),
        extra: bytes = b"",
        without: Sequence[Range] = (),
    ) -> None:
        """A stored prompt: ``keys`` of its full blocks from the first on, and its ``pieces``.
        ``without``: ranges whose KV depends on more than tokens (multimodal items); no chunk that
        touches one is remembered. Raises :class:`~ucm.errors.InvalidInputError` for pieces that are
        no ranges of this prompt."""
        check_ranges(pieces, len(tokens))
        row, size, block = _row(tokens), self.chunk_tokens, self.block_tokens
        stored = min(len(keys), len(row) // block) * block
        barred = _counts(without, len(row))
        self._prompts += 1
        whole = stored // size * size
        if self._alone:
            whole, pieces = min(whole, size), [piece for piece in pieces if piece[0] == 0]
        rolled = _rolled(row[:whole].reshape(-1, size)) ^ np.uint64(_salt(extra))
        for at, rolling in enumerate(rolled.tolist()):
            self._enter(row, keys, (at * size, (at + 1) * size), stored, extra, barred, rolling)
        for piece in pieces:
            self._enter(row, keys, piece, stored, extra, barred, None)

    def find(
        self,
        tokens: Sequence[int],
        *,
        first: int = 0,
        pieces: Sequence[Range] = (),
        extra: bytes = b"",
        without: Sequence[Range] = (),
    ) -> list[Hit]:
        """The chunks of a prompt from token ``first`` on (behind its exact prefix) that stored
        prompts have, in order: pieces with equal tokens, and aligned chunks in what they leave,
        from the left. Hits that continue each other in one stored prompt are one hit. Whether the
        store still has the records is to be looked up."""
        check_ranges(pieces, len(tokens))
        row, at, found = _row(tokens), first, list[Hit]()
        barred = _counts(without, len(row))
        for start, end in [*pieces, (len(row), len(row))]:
            if start < at:
                continue
            hit = self._piece(row, (start, end), extra, barred) if end > start else None
            if hit is None and end > start:
                continue
            found += self._scan(row, (at, start), extra, barred)
            if hit is not None:
                found.append(hit)
                at = hit.end
        return self._joined(found)

    def _enter(
        self,
        row: _Tokens,
        keys: Sequence[bytes],
        place: Range,
        stored: int,
        extra: bytes,
        barred: npt.NDArray[np.int64],
        rolling: int | None,
    ) -> None:
        start, end = place
        if barred[start] != barred[end] or start >= stored:
            return
        digest, size = _digest(row[start:end], extra), self.block_tokens
        known, held = self._entries.pop(digest, None), min(end, stored)
        lie_in = b"".join(keys[start // size : -(-held // size)])
        entry = _Entry(self._prompts, start, held - start, lie_in, rolling)
        if known is not None and known.tokens > entry.tokens:
            entry = known  # the new one ends behind the last full block
        elif known is not None and rolling is None:
            entry = replace(entry, rolling=known.rolling)
        self._entries[digest], rolling = entry, entry.rolling
        self._bytes += len(entry.keys) - (len(known.keys) if known else 0)
        if rolling is not None:
            self._begins[rolling >> 64 - _BITS] += rolling not in self._aligned
            self._aligned[rolling] = digest
        while len(self._entries) > self._limit or self._bytes > self._most_bytes:
            self._forget(*self._entries.popitem(last=False))

    def _forget(self, digest: bytes, entry: _Entry) -> None:
        self._bytes -= len(entry.keys)
        if entry.rolling is not None and self._aligned.get(entry.rolling) == digest:
            del self._aligned[entry.rolling]
            self._begins[entry.rolling >> 64 - _BITS] -= 1

    def _piece(
        self, row: _Tokens, place: Range, extra: bytes, barred: npt.NDArray[np.int64]
    ) -> Hit | None:
        """The hit of one range whose tokens are equal."""
        start, end = place
        if barred[start] != barred[end]:
            return None
        digest = _digest(row[start:end], extra)
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        return Hit(start, start + entry.tokens, entry.source, entry.keys, entry.prompt)

    def _scan(
        self, row: _Tokens, place: Range, extra: bytes, barred: npt.NDArray[np.int64]
    ) -> list[Hit]:
        """Aligned chunks at any offset of a range, from the left."""
        (start, end), size, found = place, self.chunk_tokens, list[Hit]()
        if end - start < size or not self._aligned:
            return found
        windows = _windows(row[start:end], size) ^ np.uint64(_salt(extra))
        likely = np.flatnonzero(self._begins[windows >> np.uint64(64 - _BITS)])
        at, wrong = start, 0
        for behind, rolling in zip(likely.tolist(), windows[likely].tolist(), strict=True):
            if (offset := start + behind) < at or rolling not in self._aligned:
                continue
            hit = self._piece(row, (offset, offset + size), extra, barred)
            if hit is not None:
                found.append(hit)
                at = hit.end
            elif (wrong := wrong + 1) >= FALSE_MATCHES:
                break
        return found

    def _joined(self, hits: Sequence[Hit]) -> list[Hit]:
        """Hits, with those joined that continue each other: a chunk that follows the chunk before
        it in the stored prompt too has its context."""
        found = list(hits[:1])
        for hit in hits[1:]:
            last = found[-1]
            behind = last.source + last.tokens
            if (last.end, last.prompt, behind) != (hit.start, hit.prompt, hit.source):
                found.append(hit)
                continue
            shared = KEY if hit.source % self.block_tokens else 0
            found[-1] = replace(last, end=hit.end, keys=last.keys + hit.keys[shared:])
        return found


def _row(tokens: Sequence[int]) -> _Tokens:
    return np.asarray(tokens, dtype=np.int64).astype(np.uint32)


def _counts(ranges: Sequence[Range], tokens: int) -> npt.NDArray[np.int64]:
    """For each position, tokens of these ranges before it: ``[tokens + 1]``."""
    inside = np.zeros(tokens + 1, dtype=np.int64)
    for start, end in ranges:
        inside[max(start, 0) + 1 : max(end, 0) + 1] = 1
    return inside.cumsum()


def _digest(tokens: _Tokens, extra: bytes) -> bytes:
    """The name of a chunk."""
    head = b"UCMCHUNK" + struct.pack("<I", len(extra)) + extra
    return hashlib.sha256(head + tokens.astype("<u4").tobytes()).digest()[:KEY]


def _salt(extra: bytes) -> int:
    """Keeps rolling hashes with other extra keys apart."""
    return int.from_bytes(hashlib.sha256(extra).digest()[:8], "little") if extra else 0


def _mixed(tokens: _Tokens) -> _Words:
    """Tokens as 64-bit numbers without a pattern (the finalizer of SplitMix64)."""
    x = tokens.astype(np.uint64) + np.uint64(_BASE)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _powers(base: int, count: int) -> _Words:
    """``base`` to the power of 0, 1, ... modulo 2^64."""
    row = np.full(count, base, dtype=np.uint64)
    row[:1] = 1
    powers: _Words = np.multiply.accumulate(row)
    return powers


def _rolled(chunks: npt.NDArray[np.uint32]) -> _Words:
    """The rolling hash of each row of tokens: ``Σ mixed(t_j) · base^j`` modulo 2^64."""
    terms = _mixed(chunks) * _powers(_BASE, chunks.shape[1])
    hashes: _Words = terms.sum(axis=1, dtype=np.uint64)
    return hashes


def _windows(row: _Tokens, size: int) -> _Words:
    """The rolling hash of every window of ``size`` tokens of a row."""
    sums = np.zeros(len(row) + 1, dtype=np.uint64)
    np.add.accumulate(_mixed(row) * _powers(_BASE, len(row)), out=sums[1:])
    return (sums[size:] - sums[:-size]) * _powers(_INVERSE, len(row) - size + 1)
