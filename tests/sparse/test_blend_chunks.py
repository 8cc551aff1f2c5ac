"""The pieces of a prompt, and the chunks of stored prompts in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.errors import InvalidInputError
from ucm.sparse.blend import chunks
from ucm.sparse.blend.chunks import (
    KEY,
    ChunkFinder,
    Hit,
    check_hits,
    pieces_of,
    requested_chunks,
    separators_of,
)

BLOCK, CHUNK = 4, 8
TOKEN = st.integers(0, 3)  # few, so that chunks are equal by chance too


def keys_of(tokens: Sequence[int], salt: int = 0) -> list[bytes]:
    """One for each full block, of all tokens up to its end."""
    text = [salt, *tokens]
    return [
        hashlib.sha256(repr(text[: 1 + end]).encode()).digest()[:KEY]
        for end in range(BLOCK, len(tokens) + 1, BLOCK)
    ]


class Stored:
    """Prompts that were stored, and their finder."""

    def __init__(self, prompts: Sequence[Sequence[int]], **given: Any) -> None:
        self.finder = ChunkFinder(BLOCK, CHUNK, **given)
        self.by_key: dict[bytes, tuple[int, list[int]]] = {}  # the block's first token, and tokens
        for number, prompt in enumerate(prompts):
            self.add(prompt, number)

    def add(self, prompt: Sequence[int], salt: int = 0, **given: Any) -> None:
        keys = keys_of(prompt, salt)
        self.finder.add(prompt, keys, **given)
        for at, key in enumerate(keys):
            self.by_key[key] = at * BLOCK, list(prompt[at * BLOCK : (at + 1) * BLOCK])

    def check(self, prompt: Sequence[int], hits: Sequence[Hit]) -> None:
        """Every token of a hit is that of the records that it names."""
        check_hits(hits, len(prompt))
        for hit in hits:
            keys = [hit.keys[at : at + KEY] for at in range(0, len(hit.keys), KEY)]
            blocks = [self.by_key[key] for key in keys]
            first = blocks[0][0]
            assert [begin for begin, _ in blocks] == [first + BLOCK * i for i in range(len(blocks))]
            held = [token for _, tokens in blocks for token in tokens]
            begin = hit.source - first
            assert 0 <= begin < BLOCK, "no record too many in front"
            assert held[begin : begin + hit.tokens] == list(prompt[hit.start : hit.end])
            assert len(held) - begin - hit.tokens < BLOCK, "or behind"


def aligned(prompts: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """The aligned chunks of stored prompts."""
    return {
        tuple(prompt[at : at + CHUNK])
        for prompt in prompts
        for at in range(0, len(prompt) // CHUNK * CHUNK, CHUNK)
    }


def covered(hits: Sequence[Hit]) -> set[int]:
    return {token for hit in hits for token in range(hit.start, hit.end)}


@settings(deadline=None)
@given(
    st.lists(st.lists(TOKEN, max_size=60), max_size=4),
    st.lists(TOKEN, max_size=80),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
)
def test_every_aligned_chunk_is_found_at_any_offset(
    prompts: list[list[int]], prompt: list[int], first: int, copied: bool, alone: bool
) -> None:
    """Of chunks alone the first one of each prompt."""
    if copied and prompts:  # a new prompt with parts of stored ones
        prompt = [*prompt[:5], *prompts[0][8:32], *prompt[5:9], *prompts[-1]]
    first = min(first, len(prompt))
    stored = Stored(prompts, alone=alone)
    hits = stored.finder.find(prompt, first=first)
    stored.check(prompt, hits)
    known = aligned([prompt[:CHUNK] for prompt in prompts] if alone else prompts)
    at, expected = first, set[int]()
    while at + CHUNK <= len(prompt):  # from the left
        if tuple(prompt[at : at + CHUNK]) in known:
            expected |= set(range(at, at + CHUNK))
            at += CHUNK
        else:
            at += 1
    assert covered(hits) == expected


@settings(deadline=None)
@given(
    st.lists(st.lists(TOKEN, min_size=1, max_size=11), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.lists(TOKEN, max_size=5),
)
def test_pieces_are_found_in_any_order(
    pieces: list[list[int]], random: Any, tail: list[int]
) -> None:
    """They begin and end anywhere in blocks; a piece whose end lies in no full block is found up to
    there."""

    def joined(order: list[list[int]]) -> tuple[list[int], list[tuple[int, int]]]:
        tokens, ranges = list[int](), list[tuple[int, int]]()
        for piece in order:
            ranges.append((len(tokens), len(tokens) + len(piece)))
            tokens += piece
        return tokens, ranges

    stored, (tokens, ranges) = Stored([]), joined(pieces)
    stored.add([*tokens, *tail], pieces=ranges)
    other = list(pieces)
    random.shuffle(other)
    prompt, places = joined(other)
    hits = stored.finder.find(prompt, pieces=places)
    stored.check(prompt, hits)
    held = len([*tokens, *tail]) // BLOCK * BLOCK
    whole = {tuple(piece) for piece, (_, end) in zip(pieces, ranges, strict=True) if end <= held}
    last = {tuple(p): end for p, (_, end) in zip(pieces, ranges, strict=True)}
    for piece, (start, end) in zip(other, places, strict=True):
        if tuple(piece) in whole and last[tuple(piece)] <= held:
            assert set(range(start, end)) <= covered(hits)


def test_hits_that_continue_each_other_are_one() -> None:
    prompt = list(range(100, 140))
    stored = Stored([prompt, list(range(200, 216))])
    new = [1, 2, 3, *prompt[8:32], *range(200, 216), *prompt[:8]]
    hits = stored.finder.find(new)
    stored.check(new, hits)
    assert [(hit.start, hit.end, hit.source) for hit in hits] == [
        (3, 27, 8),
        (27, 43, 0),
        (43, 51, 0),
    ]
    assert [hit.prompt for hit in hits] == [1, 2, 1]
    # Pieces share the block in which one ends and the next one begins.
    stored = Stored([])
    stored.add(prompt, pieces=[(0, 6), (6, 13), (13, 30)])
    again = [9, *prompt[6:30]]
    (hit,) = stored.finder.find(again, pieces=[(0, 1), (1, 8), (8, 25)])
    stored.check(again, [hit])
    assert (hit.start, hit.end, hit.source, len(hit.keys)) == (1, 25, 6, 7 * KEY)


def test_a_piece_is_kept_as_far_as_some_prompt_has_it() -> None:
    piece, other = list(range(50, 60)), list(range(8))
    stored = Stored([])
    stored.add([*piece, *other], pieces=[(0, 10)])
    stored.add([*other, 1, 2, *piece], 1, pieces=[(10, 20)])
    assert [hit.tokens for hit in stored.finder.find(piece, pieces=[(0, 10)])] == [10]
    stored.add([*other, 1, 2, 3, *piece], 2, pieces=[(11, 21)])  # its last token is in no block
    (hit,) = stored.finder.find(piece, pieces=[(0, 10)])
    assert (hit.tokens, hit.prompt) == (10, 2)
    stored = Stored([])
    stored.add([*other, 1, 2, 3, *piece], pieces=[(11, 21)])
    (hit,) = stored.finder.find(piece, pieces=[(0, 10)])
    stored.check(piece, [hit])
    assert hit.tokens == 9


def test_other_adapters_and_tenants_have_chunks_of_their_own() -> None:
    prompt = list(range(16))
    stored = Stored([])
    stored.add(prompt, extra=b"a")
    assert stored.finder.find(prompt) == []
    assert stored.finder.find(prompt, extra=b"b") == []
    assert len(stored.finder.find(prompt, extra=b"a")) == 1
    stored.add(prompt, 1, extra=b"b")
    for extra, number in ((b"a", 1), (b"b", 2)):
        assert [hit.prompt for hit in stored.finder.find(prompt, extra=extra)] == [number]


def test_no_chunk_touches_an_image() -> None:
    prompt, image = list(range(32)), [(10, 12)]
    stored = Stored([])
    stored.add(prompt, pieces=[(0, 9), (9, 13), (13, 20)], without=image)
    hits = stored.finder.find(prompt, pieces=[(0, 9), (9, 13), (13, 20)])
    assert covered(hits) == {*range(9), *range(13, 20), *range(24, 32)}
    assert covered(stored.finder.find(prompt, without=[(25, 26)])) == {*range(8), *range(16, 24)}


def test_the_table_is_bounded_and_keeps_what_was_used_last() -> None:
    stored = Stored([], entries=3)
    parts = [list(range(at, at + CHUNK)) for at in range(0, 800, 100)]
    for number, part in enumerate(parts[:3]):
        stored.add(part, number)
    assert len(stored.finder.find(parts[0])) == 1
    stored.add(parts[3], 3)
    assert len(stored.finder) == 3
    assert [len(stored.finder.find(part)) for part in parts[:4]] == [1, 0, 1, 1]
    assert len(stored.finder._aligned) == 3


def test_long_pieces_leave_room_for_fewer_chunks() -> None:
    """Three aligned chunks of two blocks are at most nine blocks."""
    stored = Stored([], entries=3)
    first, second = ([at + token for token in range(6 * BLOCK)] for at in (0, 1000))
    for number, prompt in enumerate((first, second)):
        stored.add(prompt, number, pieces=[(1, len(prompt))])
    assert len(stored.finder) == 2
    assert len(stored.finder.find([7, *second[1:]], pieces=[(1, len(second))])) == 1
    assert stored.finder.find([7, *first[1:]], pieces=[(1, len(first))]) == []
    too_long = [2000 + token for token in range(10 * BLOCK)]
    stored.add(too_long, 2, pieces=[(0, len(too_long))])
    assert len(stored.finder) == len(stored.finder._aligned) == stored.finder._bytes == 0


def test_an_equal_rolling_hash_of_other_tokens_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only some of them are checked."""
    monkeypatch.setattr(chunks, "_BASE", 0)
    monkeypatch.setattr(chunks, "_mixed", lambda tokens: np.zeros(tokens.shape, dtype=np.uint64))
    checked = []
    digest = chunks._digest
    monkeypatch.setattr(chunks, "_digest", lambda *a: checked.append(1) or digest(*a))
    stored = Stored([list(range(CHUNK))])
    assert len(stored.finder.find(list(range(CHUNK)))) == 1
    checked.clear()
    assert stored.finder.find(list(range(1000, 2000))) == []
    assert len(checked) == chunks.FALSE_MATCHES


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 40))
def test_a_window_has_the_hash_of_its_tokens(tokens: list[int], size: int) -> None:
    row = np.array(tokens, dtype=np.uint32)
    if size > len(row):
        return
    windows = chunks._windows(row, size)
    assert len(windows) == len(row) - size + 1
    each = [int(chunks._rolled(row[None, at : at + size])[0]) for at in range(len(windows))]
    assert windows.tolist() == each


# The pieces of a prompt
# --------------------------------------------------------------------------------------------------


def test_pieces_end_with_separators_and_the_rest_is_the_question() -> None:
    tokens = [5, 6, 1, 2, 7, 9, 8, 1, 2, 3, 4]
    assert pieces_of(tokens, separators=[(1, 2)]) == [(0, 4), (4, 9)]
    assert pieces_of(tokens, chunk_end_token_id=9) == [(0, 6)]
    assert pieces_of(tokens, separators=[(1, 2)], chunk_end_token_id=9) == [(0, 4), (4, 6), (6, 9)]
    assert pieces_of([1, 1, 1], separators=[(1, 1)]) == [(0, 2)], "separators do not overlap"
    assert pieces_of(tokens) == []
    assert pieces_of([], chunk_end_token_id=9) == []
    assert pieces_of(tokens, chunks=[(1, 3), (3, 8)], chunk_end_token_id=9) == [(1, 3), (3, 8)]
    many = pieces_of([9] * (chunks.PIECES + 10), chunk_end_token_id=9)
    assert len(many) == chunks.PIECES


def test_a_request_names_its_chunks() -> None:
    assert requested_chunks(None) is None
    assert requested_chunks({"do_remote_prefill": True, "ucm": {"dump": False}}) is None
    assert requested_chunks({"ucm": {"chunks": [[0, 4], (4, 9)]}}) == [(0, 4), (4, 9)]
    for wrong in ([[0]], [[0, True]], [["0", 4]], {"0": 4}, "0-4", [3, 4]):
        with pytest.raises(InvalidInputError, match="list of \\[start, end\\]"):
            requested_chunks({"ucm": {"chunks": wrong}})
    for wrong in ([(0, 4), (3, 5)], [(4, 4)], [(-1, 2)], [(0, 12)]):
        with pytest.raises(InvalidInputError, match="in order"):
            pieces_of(range(11), chunks=wrong)
    with pytest.raises(InvalidInputError, match="at most"):
        pieces_of(range(10_000), chunks=[(at, at + 1) for at in range(chunks.PIECES + 1)])


def test_a_separator_is_tokens() -> None:
    assert separators_of(["##", "a"], lambda text: [ord(c) for c in text]) == [(35, 35), (97,)]
    with pytest.raises(InvalidInputError, match="at least one token"):
        separators_of([""], lambda text: [ord(c) for c in text])
    with pytest.raises(InvalidInputError, match="above 0"):
        ChunkFinder(0)
    with pytest.raises(InvalidInputError, match="0 or above"):
        check_hits([Hit(0, 4, -1)], 4)
    assert ChunkFinder(48, 256).chunk_tokens == 288
