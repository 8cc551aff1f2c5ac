"""The matrix through vLLM: one live engine per model runner, vLLM's own cache off, its root harmed between requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import roots
from fuse import Fuse
from harm import Victim, judge
from harness import EngineHost, wait_until
from kinds import FileRow, FuseRow, RootRow
from live import BLOCKS, Live, Prompt, counted, poll, spec_of
from rows import FILE_ROWS, FUSE_ROWS, ROOT_ROWS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

#: The block that is harmed, and its neighbour.
VICTIM, OTHER = 1, 2
#: How often a file system may misbehave before a request meets it.
GOES = 4
#: What tells of waiting: nothing of it is counted while a file is bad.
WAITS = {"timeout", "lookup_late", "busy", "unhealthy", "breaker_opened"}


@pytest.fixture(scope="module")
def live(
    runner: str, host: EngineHost, model: Path, work: Path, kv_transfer_config: dict[str, Any] | None
) -> Iterator[Live]:
    """The engine. As root its root is a small file system of its own, mounted from elsewhere."""
    base = work / f"trust-{runner}"
    base.mkdir()
    with roots.new_root(base, "bind" if roots.is_root() else "plain", size="64m", inodes=4000) as root:
        yield Live(host, spec_of(model, runner, root, kv_transfer_config), root)
        host.stop()


@pytest.fixture(autouse=True)
def revived(live: Live) -> None:
    """The engine runs when a row begins."""
    live.revive()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in FILE_ROWS if row.in_engine])
def test_file(row: FileRow, live: Live) -> None:
    if not (live.ours or row.any_file):
        pytest.skip("this row is about records of ours")
    stored = live.store_prompt()
    at, other = (VICTIM, OTHER) if live.ours else (len(stored.files) // 2, len(stored.files) // 2 - 1)
    victim = Victim(stored.files[at], stored.files[other], random.Random(row.name))

    before = live.counts()
    row.harm(victim)
    answer = live.ask(stored.tokens)
    assert answer.tokens == stored.right.tokens, "wrong tokens"
    news = counted(before, live.counts())
    if live.ours:
        assert set(row.reasons) & set(news), f"counted: {news}"
        assert not WAITS & set(news), f"counted: {news}"

    if row.heals == "left":
        kept = victim.path.read_bytes() if victim.path.is_file() else None
        assert live.ask(stored.tokens).tokens == stored.right.tokens
        assert (victim.path.read_bytes() if victim.path.is_file() else None) == kept, "what is not ours was replaced"
        roots.remove(victim.path)
        if row.known:
            assert live.ask(stored.tokens).tokens == stored.right.tokens
            return
    live.await_hit(stored, "the prompt is stored and found again")
    if live.ours:
        for path in stored.files[:BLOCKS]:
            judge(path)
        assert not WAITS & set(counted(before, live.counts()))


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROOT_ROWS if row.in_engine])
def test_root(row: RootRow, live: Live) -> None:
    if row.kind != "plain":
        roots.need_root()
    old, fresh = live.store_prompt(), live.new_prompt()
    right = live.ask(fresh, salt="another key, the same computation")

    before = live.counts()
    harmed = row.harm(live.root)
    next(harmed)
    try:
        hit = live.is_hit(old)
        assert hit or not row.reads, "a block that was stored is no hit any more"
        for _ in range(2):
            assert live.ask(fresh).tokens == right.tokens, "wrong tokens"
            assert live.ask(old.tokens).tokens == old.right.tokens, "wrong tokens"
        if live.ours:  # dumps end behind the back of the request
            wait_until(
                lambda: set(row.reasons) <= set(counted(before, live.counts())), f"{row.reasons} are counted", 60
            )
            news = counted(before, live.counts())
            assert not {"timeout", "lookup_late"} & set(news), f"counted: {news}"
    finally:
        next(harmed, None)

    live.await_hit(old, "what was stored is a hit again, or was stored again")
    again = live.store_prompt()
    if live.ours:
        for path in again.files[:BLOCKS]:
            judge(path)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in FUSE_ROWS if row.in_engine])
def test_file_system(row: FuseRow, live: Live) -> None:
    """The file system is mounted over the root and shows what was there, with bad manners."""
    roots.need_root()
    system = Fuse(live.root.with_name("export"), live.root)
    try:
        told = []
        for _ in range(GOES):
            old, before = live.store_prompt(), live.counts()
            if _meets(row, live, system, old):
                break
            system.behave()
            told.append(counted(before, live.counts()))
        else:
            raise AssertionError(f"{row.reasons} are never counted, but {told}")
    finally:
        system.behave()
        system.close()
    live.await_hit(old, "what was stored is a hit again, or was stored again")


def _meets(row: FuseRow, live: Live, system: Fuse, old: Prompt) -> bool:
    """Asks while the file system has bad manners, and judges; whether the request met them.

    It does not where the store found out first, by itself: then it is unhealthy for a moment and nothing is promised.
    """
    fresh = live.new_prompt()
    right = live.ask(fresh, salt="another key, the same computation")
    before = live.counts()
    system.behave(**row.manners)
    if row.believed:  # stored as zeros; read back when the disk is honest again
        assert live.ask(fresh).tokens == right.tokens, "wrong tokens"
        live.await_written()
        system.behave()
    tokens, expected = (fresh, right) if row.call == "dump" else (old.tokens, old.right)
    assert live.ask(tokens).tokens == expected.tokens, "wrong tokens"

    def is_met() -> bool:
        return not live.ours or set(row.reasons) <= set(counted(before, live.counts()))

    met = poll(is_met, 15)
    if live.ours:
        news = counted(before, live.counts())
        assert news.get("load_tasks", 0) <= 1, "a failed load was tried again by its request"
        most = BLOCKS if row.waits else 0
        assert {name: news.get(name, 0) for name in ("timeout", "lookup_late") if news.get(name, 0) > most} == {}, news
    assert live.ask(fresh).tokens == right.tokens, "wrong tokens"
    return met or is_met()  # a request that came while the store was off met nothing, and the one after it did
