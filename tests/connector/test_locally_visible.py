"""Blocks that the ranks can read before others see them are hits of their own engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from parts import BLOCK, Memory, Rig, configured_store, dump, small_store

from ucm.integration.vllm.connector.metadata import RankReport, join_keys
from ucm.integration.vllm.connector.scheduler.lookup import LocallyVisible
from ucm.integration.vllm.connector.worker.worker import take_locally_visible
from ucm.store import part_mask, record_ids


def visible_ids(rig: Rig, request: Any, blocks: range, rank: int = 0) -> bytes:
    """Record ids of some blocks of a request on one rank, as its report carries them."""
    keys = rig.keys(rig.readiness.identity_text).first(request)[blocks.start : blocks.stop]
    return join_keys(record_ids(keys, part_mask(0, 0, rank)))


def claimed_blocks(rig: Rig, name: str, length: int) -> int:
    """Blocks claimed for another request of the same tokens."""
    request = rig.request(name, length)
    rig.later.run()
    claimed = rig.scheduler.get_num_new_matched_tokens(request, 0)[0]
    while claimed is None and rig.store.questions:
        rig.store.questions[-1].answered = True
        claimed = rig.scheduler.get_num_new_matched_tokens(request, 0)[0]
    return (claimed or 0) // BLOCK


@pytest.mark.parametrize("has_thread", [False, True])
def test_ids_named_by_one_rank_extend_the_published_prefix(has_thread: bool) -> None:
    rig = Rig()
    rig.store.questions = [] if has_thread else None
    request = rig.request("a", 6 * BLOCK)
    rig.stored(request, 2)
    rig.report(RankReport(0, ready=True, added=visible_ids(rig, request, range(2, 4))))
    assert claimed_blocks(rig, "b", 6 * BLOCK) == 4
    rig.store.ids.update(
        record_ids(rig.keys(rig.readiness.identity_text).first(request)[4:5], part_mask(0, 0, 0))
    )
    assert claimed_blocks(rig, "c", 6 * BLOCK) == 5, "published, locally visible, published"
    rig.report(RankReport(0, ready=True, removed=visible_ids(rig, request, range(3, 4))))
    assert claimed_blocks(rig, "d", 6 * BLOCK) == 3


def test_every_rank_must_have_a_block_published_or_locally_visible() -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 6 * BLOCK)
    rig.stored(request, 3, ranks=[0])
    rig.report(RankReport(1, ready=True, added=visible_ids(rig, request, range(2), rank=1)))
    assert claimed_blocks(rig, "b", 6 * BLOCK) == 2
    rig.report(RankReport(0, ready=True, added=visible_ids(rig, request, range(6), rank=1)))
    assert claimed_blocks(rig, "c", 6 * BLOCK) == 2, "a rank speaks for itself"


def test_all_ranks_that_share_a_part_must_have_a_block() -> None:
    hits = LocallyVisible()
    hits.open([[0, 1]])
    ids = [bytes([n]) * 16 for n in range(3)]
    assert hits.run(ids, 0) == 0
    hits.report(0, join_keys(ids), b"")
    assert hits.run(ids, 0) == 0
    hits.report(1, join_keys(ids[:2]), b"")
    assert (hits.run(ids, 0), hits.run(ids, 1), hits.run(ids, 2), hits.run(ids, 3)) == (2, 1, 0, 0)


def test_a_block_that_was_just_published_is_a_hit(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ucm._core", reason="the core is not compiled here")
    from ucm.store.pc import UcmPcStore

    config = small_store(tmp_path)
    with UcmPcStore(config) as rank, UcmPcStore(config | {"device_id": -1}) as scheduler:
        rig = Rig(stores=[configured_store("Pc", lambda config: scheduler)])
        request = rig.request("a", 4 * BLOCK + 1)
        assert take_locally_visible(rank) == (b"", b"")
        dump(rank, record_ids(rig.keys_of(request), part_mask(0, 0, 0)))
        assert list((tmp_path / "root").rglob("*.seg")), "it has its name"
        added, removed = take_locally_visible(rank)
        rig.report(RankReport(0, ready=True, added=added, removed=removed))
        assert claimed_blocks(rig, "b", 4 * BLOCK + 1) == 4


def test_the_number_of_remembered_ids_is_bounded() -> None:
    hits = LocallyVisible(limit=2)
    hits.open([[0]])
    ids = [bytes([n]) * 16 for n in range(4)]
    hits.report(0, join_keys(ids), b"")
    assert hits.run(ids, 0) == 2
    hits.report(0, b"", join_keys(ids[:1]))
    hits.report(0, join_keys(ids[2:]), b"")
    assert hits.run(ids, 1) == 2, "the room of what was removed is used again"


def test_a_failing_store_reports_no_ids() -> None:
    class Odd(Memory):
        def early(self) -> tuple[list[bytes], list[bytes]]:
            raise RuntimeError("no")

    assert take_locally_visible(Odd()) == (b"", b"")
    assert take_locally_visible(Memory()) == (b"", b"")


@pytest.mark.parametrize("word", ["unhealthy", "lookup_late"])
def test_a_prefix_ends_where_the_store_does_not_answer(word: str) -> None:
    rig = Rig()
    request = rig.request("a", 4 * BLOCK)
    rig.report(RankReport(0, ready=True, added=visible_ids(rig, request, range(4))))

    def explained(ids: Sequence[bytes]) -> tuple[int, str]:
        return -1, word

    rig.store.explain_on_prefix = explained  # type: ignore[method-assign]
    assert claimed_blocks(rig, "b", 4 * BLOCK) == 0


def test_alternations_are_bounded() -> None:
    rig = Rig()
    request = rig.request("a", 12 * BLOCK)
    keys = rig.keys(rig.readiness.identity_text).first(request)
    ids = record_ids(keys, part_mask(0, 0, 0))
    rig.store.ids.update(ids[::2])
    rig.report(RankReport(0, ready=True, added=join_keys(ids[1::2])))
    assert claimed_blocks(rig, "b", 12 * BLOCK) == 8
