"""Representations by physical block: the same in any split of their tokens, and scored only when
they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import BLOCK, DIM, GEOMETRY, HEADS, keys
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.errors import BusyError, ConfigError
from ucm.sparse.policy import settings_of
from ucm.sparse.rep_store import HUGE_PAGE, RepStore, bytes_per_block
from ucm.sparse.selector import BlockSelector, rep_bytes
from ucm.sparse.selectors import make_selector

FEW = settings(max_examples=40, deadline=None)
LAYERS = (0, 2)


def store_of(algorithm: str = "ESA", blocks: int = 16, **given: Any) -> RepStore:
    return RepStore(selector_of(algorithm), LAYERS, blocks, **given)


def selector_of(algorithm: str) -> BlockSelector:
    return make_selector(
        settings_of(algorithm, {"merge": 2} if algorithm == "KVStarMultiStep" else {}), GEOMETRY
    )


def write(store: RepStore, table: list[int], k: torch.Tensor, start: int, end: int) -> None:
    """Tokens start..end of one sequence whose keys are ``k [t, h, d]``; the layers differ by a
    factor."""
    plan = store.plan_write([table[t // BLOCK] * BLOCK + t % BLOCK for t in range(start, end)])
    for layer in LAYERS:
        store.write(layer, k[start:end] * (layer + 1), plan)


@pytest.mark.parametrize(
    "algorithm", ["ESA", "GSAOnDevice", "KVStarMultiStep", "Quest", "InfLLM", "Oracle"]
)
@FEW
@given(data=st.data())
def test_chunks_do_not_matter(algorithm: str, data: st.DataObject) -> None:
    """Token by token, in any chunks, or at once: the same bytes, and ready exactly when a block is
    full."""
    tokens = data.draw(st.integers(1, 6 * BLOCK))
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=6)) | {tokens})
    store, k, table = store_of(algorithm), keys(6).flatten(0, 1), [9, 3, 12, 5, 0, 7]
    start = 0
    for end in cuts:
        write(store, table, k, start, end)
        start = end
        assert store.missing(table) == table[end // BLOCK :]
    full = tokens // BLOCK
    for layer in LAYERS:
        expected = store.selector.encode(
            layer, (k * (layer + 1))[: full * BLOCK].view(full, BLOCK, HEADS, DIM)
        )
        assert torch.equal(store.get(layer, table[:full]), expected)


@pytest.mark.parametrize("algorithm", ["ESA", "GSAOnDevice"])
def test_sequences_of_a_batch_do_not_mix(algorithm: str) -> None:
    store, a, b = store_of(algorithm), keys(2, 1).flatten(0, 1), keys(2, 2).flatten(0, 1)
    for t in range(2 * BLOCK):
        plan = store.plan_write(
            [(4 + t // BLOCK) * BLOCK + t % BLOCK, -1, (8 + t // BLOCK) * BLOCK + t % BLOCK]
        )
        for layer in LAYERS:
            store.write(layer, torch.stack([a[t], torch.full_like(a[t], torch.nan), b[t]]), plan)
    assert torch.equal(store.get(0, [4, 5]), store.selector.encode(0, keys(2, 1)))
    assert torch.equal(store.get(0, [8, 9]), store.selector.encode(0, keys(2, 2)))
    assert store.missing(range(16)) == [0, 1, 2, 3, 6, 7, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("algorithm", ["ESA", "GSAOnDevice"])
def test_a_block_that_is_used_again_is_not_ready_before_it_is_full_again(algorithm: str) -> None:
    store, first, second = store_of(algorithm), keys(1, 1).flatten(0, 1), keys(1, 2).flatten(0, 1)
    write(store, [6], first, 0, BLOCK)
    assert store.ready([6])
    write(store, [6], second, 0, 2)  # another sequence begins in it, and ends there
    assert store.missing([6]) == [6]
    write(store, [6], first, 0, 3)
    write(store, [6], first, 3, BLOCK)
    assert store.ready([6]) and torch.equal(
        store.get(2, [6]), store.selector.encode(2, keys(1, 1) * 3)
    )


@pytest.mark.parametrize("algorithm", ["ESA", "GSAOnDevice"])
def test_a_block_that_was_half_loaded_is_never_ready_by_what_is_written_behind_it(
    algorithm: str,
) -> None:
    """A load brings the first tokens without representations: the last one alone does not make a
    block whole."""
    store, k = store_of(algorithm), keys(1).flatten(0, 1)
    write(store, [6], keys(1, 9).flatten(0, 1), 0, BLOCK)
    store.invalidate([6])
    write(store, [6], k, BLOCK - 1, BLOCK)
    assert store.missing([6]) == [6]


@pytest.mark.parametrize("algorithm", ["ESA", "GSAOnDevice"])
def test_a_token_written_again_into_a_block_that_is_ready_leaves_it_ready(algorithm: str) -> None:
    """The last token of a prompt that was hit whole is computed again."""
    store, k = store_of(algorithm), keys(1).flatten(0, 1)
    store.update(0, keys(1), [6])
    store.update(2, keys(1) * 3, [6])
    store.mark_ready([6])
    write(store, [6], k, BLOCK - 1, BLOCK)
    assert store.ready([6]) and torch.equal(
        store.get(2, [6]), store.selector.encode(2, keys(1) * 3)
    )


def test_representations_go_out_and_come_in() -> None:
    """As sides do: what was made on one device block is put beside another, and is ready once all
    layers are there."""
    store, other = store_of(), store_of()
    write(store, [1, 2, 3], keys(3).flatten(0, 1), 0, 3 * BLOCK)
    for layer in LAYERS:
        other.put(layer, [14, 4, 9], store.get(layer, [1, 2, 3]))
    assert other.missing([4, 9, 14]) == [4, 9, 14]
    other.mark_ready([4, 9, 14])
    assert other.ready([4, 9, 14]) and torch.equal(
        other.get(2, [14, 4, 9]), store.get(2, [1, 2, 3])
    )


def test_blocks_that_leave_the_device_keep_their_representations() -> None:
    store = store_of(spare=3)
    write(store, [1, 2, 3], keys(3).flatten(0, 1), 0, 3 * BLOCK)
    expected = store.get(2, [1, 3])
    rows = store.adopt([1, 3])
    assert len(set(rows)) == 2 and all(row >= 16 for row in rows)
    write(store, [1, 3], keys(2, 5).flatten(0, 1), 0, 2 * BLOCK)  # the blocks are others' now
    assert store.ready(rows) and torch.equal(store.get(2, rows), expected)
    with pytest.raises(BusyError, match="spare"):
        store.adopt([1, 2])
    store.release(rows)
    assert store.missing(rows) == rows
    assert len(store.adopt([1, 2, 3])) == 3


def test_more_open_blocks_than_there_is_room_for_cost_only_selection() -> None:
    """The longest unused one is given up: its block never becomes ready, the others do."""
    store = store_of(open_blocks=2)
    k = keys(4).flatten(0, 1)
    for block in (1, 2, 3):
        write(store, [block], k, 0, 2)
    for block in (1, 2, 3):
        write(store, [block], k, 2, BLOCK)
    assert store.missing([1, 2, 3]) == [1]
    for block in (2, 3):
        assert torch.equal(store.get(0, [block]), store.selector.encode(0, keys(4)[:1]))


@pytest.mark.parametrize("algorithm", ["ESA", "GSAOnDevice"])
@FEW
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=24),
    st.integers(1, 3),
)
def test_ready_representations_are_right_after_any_writes(
    algorithm: str, steps: list[list[int]], room: int
) -> None:
    """Sequences begin, grow and end in any order, several in a step, in blocks that are used again:
    a block that is ready holds the representation of what was last written into it; and every full
    one is ready, where keys need not be held until then."""
    store = store_of(algorithm, open_blocks=room, blocks=6)
    written: dict[int, list[torch.Tensor]] = {}
    for number, blocks in enumerate(steps):
        slots = []
        for block in blocks:
            if len(written.get(block, [])) in (0, BLOCK):
                written[block] = []
            slots.append(block * BLOCK + len(written[block]))
            written[block].append(torch.full((HEADS, DIM), float(number * 10 + block)))
        plan = store.plan_write(slots)
        for layer in LAYERS:
            store.write(layer, torch.stack([written[block][-1] for block in blocks]), plan)
        for known, tokens in written.items():
            assert store.ready([known]) or len(tokens) < BLOCK or not store.selector.token_wise
            if store.ready([known]):
                assert len(tokens) == BLOCK
                expected = store.selector.encode(0, torch.stack(tokens)[None])
                assert torch.equal(store.get(0, [known]), expected)


def test_a_step_with_more_new_blocks_than_rows_holds_what_it_can() -> None:
    store, k = store_of(open_blocks=2), keys(1).flatten(0, 1)
    for place in range(BLOCK):
        plan = store.plan_write([block * BLOCK + place for block in (1, 2, 3)])
        for layer in LAYERS:
            store.write(layer, k[place].expand(3, -1, -1), plan)
    assert store.missing([1, 2, 3]) == [3]
    assert torch.equal(store.get(0, [1, 2]), store.selector.encode(0, keys(1)).expand(2, -1, -1))


def test_bytes_are_counted() -> None:
    store = store_of("GSAOnDevice", spare=2)
    assert bytes_per_block(store.selector, len(LAYERS)) == BLOCK * HEADS * 16 * 2
    assert store.nbytes == (16 + 2) * bytes_per_block(store.selector, len(LAYERS))
    kv = 16 * len(LAYERS) * 2 * BLOCK * HEADS * DIM * 2
    assert store.share(kv) == store.nbytes / kv
    held = store_of("ESA", open_blocks=3)
    assert held.nbytes == 16 * bytes_per_block(held.selector, 2) + 2 * 3 * BLOCK * HEADS * DIM * 4


def test_keys_are_held_in_the_type_of_the_cache() -> None:
    store = store_of(key_dtype=torch.bfloat16)
    k = keys(1).flatten(0, 1).bfloat16()
    write(store, [3], k, 0, 3)
    write(store, [3], k, 3, BLOCK)
    assert torch.equal(store.get(0, [3]), store.selector.encode(0, k[None]))


@pytest.mark.parametrize("algorithm", ["ESA", "GSAOnDevice"])
def test_a_step_of_padding_alone_writes_nothing(algorithm: str) -> None:
    store = store_of(algorithm)
    store.write(0, keys(1)[0], store.plan_write([-1] * BLOCK))
    assert not store.all(0).any()
    assert store.missing(range(16)) == list(range(16))


def test_slots_may_have_the_type_of_an_engine() -> None:
    store = store_of()
    for slots in ([8], np.array([8]), torch.tensor([8]), torch.tensor([8], dtype=torch.int32)):
        assert store.plan_write(slots).tokens.tolist() == [0]
    assert store.plan_write([]).tokens.tolist() == []
    with pytest.raises(ConfigError):
        store_of(blocks=0)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_large_representations_ask_for_huge_pages() -> None:
    """What a step reads from end to end: the mapping is marked for the kernel."""
    store = RepStore(
        selector_of("GSAOnDevice"), LAYERS, HUGE_PAGE // rep_bytes(selector_of("GSAOnDevice")) + 1
    )
    for layer in LAYERS:
        reps = store.all(layer)
        assert not reps.any() and "hg" in flags_of(reps.data_ptr())


def test_small_representations_are_no_mapping_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags would not tell: malloc may place a small tensor in memory that another one had
    marked."""
    mapped: list[int] = []
    monkeypatch.setattr("ucm.sparse.rep_store.mmap.mmap", lambda _file, size: mapped.append(size))
    assert not RepStore(selector_of("GSAOnDevice"), LAYERS, 4).all(0).any() and mapped == []


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(half, 16) for half in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping at {address:#x}")
