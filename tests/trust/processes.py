"""Rows with several processes, other users or other clocks: each function runs over a directory and
asserts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import columns
import harm
import roots
from child import BLOCKS
from fuse import Fuse
from ground import SHAPE, Ground, assert_no_wait, block_ids, counted, wait_until

CHILD = Path(__file__).with_name("child.py")


def new_seed() -> int:
    """A new seed, or that of an earlier run: ``UCM_TEST_SEED``. Printed if a test fails."""
    seed = int(os.environ.get("UCM_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"UCM_TEST_SEED={seed}")
    return seed


@contextmanager
def child(
    work: str,
    root: Path,
    seed: int,
    before: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Runs ``child.py`` with some work; ``before`` is a command that executes it. Its standard
    error is printed if a test fails."""
    process = subprocess.Popen(
        [*before, sys.executable, str(CHILD), work, str(root), str(seed)],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.kill()
        print(process.communicate()[1], end="")


def ended_well(process: subprocess.Popen[str]) -> list[str]:
    """The output of a child that ended by itself."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[-1] == "end"
    return lines


def assert_all_exact(ground: Ground, judged: set[tuple[str, int, int]] | None = None) -> set[bytes]:
    """Both readers accept every record; returns the stored ids.

    A published file is never written again, so the slow reader skips those in ``judged``. With
    little space the collector may remove some before they are loaded: those are absent everywhere.
    """
    judged = set() if judged is None else judged
    found = set()
    for place in ground.places():
        try:
            seen = (place.path.name, place.path.stat().st_ino, place.offset)
            if seen not in judged:
                place.judge(SHAPE)
        except FileNotFoundError:
            continue  # just removed, to free space
        found.add(place.record_id)
        judged.add(seen)
    # One by one, because a load cancels the blocks behind the first failure.
    missed = {
        block for block in found if not ground.store.lookup([block])[0] or ground.load([block])[1]
    }

    def are_gone() -> bool:
        return missed.isdisjoint(place.record_id for place in ground.places())

    wait_until(are_gone, "a missed block does not exist", 30)
    reasons = {reason for reason, count in ground.store.stats()["misses"].items() if count}
    assert not missed or reasons <= {"absent"}, "not taken by the collector"
    return found


def killed_writers(base: Path, long: bool) -> None:
    """Writers are killed after a random number of blocks, repeatedly over one root."""
    names, source, root = block_ids(BLOCKS, "shared"), random.Random(new_seed()), base / "root"
    published: set[int] = set()
    judged: set[tuple[str, int, int]] = set()
    for _ in range(40 if long else 3):
        # Each finds the blocks of its predecessors; the last of many rounds finds nearly all
        # present.
        with child("write", root, source.randrange(1 << 32)) as (process, lines):
            for _ in range(source.randrange(1, BLOCKS)):
                line = lines.readline().split()
                assert line, "the writer ended early"
                if line[0] == "published":
                    published.add(int(line[1]))
            process.kill()
            process.wait()
        ground = Ground(root)
        found = assert_all_exact(ground, judged)
        assert found >= {names[number] for number in published}, (
            "a block reported as published is lost"
        )
        # Unfinished files of dead writers are visible to no process. Complete records in them may
        # be taken over during the check, and are then blocks like any other.
        absent = [name for name in names if name not in found]
        late = {
            name for name, there in zip(absent, ground.store.lookup(absent), strict=True) if there
        }
        assert not late or late <= assert_all_exact(ground, judged)
        private = list(root.glob("*/tmp/*"))
        assert all(path.suffix == ".tmp" for path in private)
        ground.close()
    ground = Ground(root)
    for first in range(0, BLOCKS, 40):
        some = names[first : first + 40]
        wait_until(lambda some=some: ground.is_healthy(some), "blocks are stored and found again")  # type: ignore[misc]
    ground.close()


def killed_in_calls(base: Path, long: bool) -> None:
    """A writer is killed in the middle of each kind of call that makes a record, and the call ends
    without it."""
    names, source, seen = block_ids(BLOCKS, "shared"), random.Random(new_seed()), base / "seen"
    system = Fuse(base / "shown", seen)
    try:
        for number in range(24 if long else 4):
            requests = (["CREATE"], ["WRITE"], ["FLUSH"], ["RENAME", "RENAME2"])[number % 4]
            root = seen / str(number)
            with child("write", root, source.randrange(1 << 32)) as (process, lines):
                for _ in range(source.randrange(1, 20)):
                    assert lines.readline().startswith("published"), "the writer ended early"
                system.behave(stall=requests)
                system.await_stalled()
                process.kill()
                system.behave()
                process.wait()
            ground = Ground(base / "shown" / root.name)  # the same, without the detour
            assert_all_exact(ground)
            wait_until(
                lambda ground=ground: ground.is_healthy(names[:20]),
                "blocks are stored and found again",
            )  # type: ignore[misc]
            assert_all_exact(ground)
            ground.close()
    finally:
        system.close()


def dead_root(base: Path, long: bool) -> None:
    """A root that hangs while a process opens, uses and closes a store on it."""
    del long
    system = Fuse(base / "shown", base / "seen")
    try:
        root, names = base / "seen" / "root", block_ids(3)
        ground = Ground(root)
        wait_until(lambda: ground.is_healthy(names), "blocks are stored and found again")
        ground.close()
        system.behave(
            stall=[
                "LOOKUP",
                "GETATTR",
                "OPEN",
                "READ",
                "CREATE",
                "WRITE",
                "OPENDIR",
                "READDIR",
                "STATFS",
            ]
        )
        with child("hang", root, 1) as (process, lines):
            assert [lines.readline() for _ in range(2)] == ["used\n", "closed\n"]
            # a thread in the kernel keeps its process until the file system responds
            system.behave()
            assert lines.readline() == "end\n"
            assert process.wait() == 0
        ground = Ground(root)
        wait_until(
            lambda ground=ground: ground.is_healthy(names), "blocks are stored and found again"
        )  # type: ignore[misc]
        ground.close()
    finally:
        system.close()


def much_damage(base: Path, long: bool) -> None:
    """More bad records than the breaker tolerates: they stay misses, none is wrong, and all are
    stored again."""
    del long
    names = block_ids(12, "much")
    ground = Ground(base / "root", breaker={"cool_down_s": 0.5, "damaged_per_minute": 4})
    ground.fill(names)
    ground.assert_hits(names)
    for name in names:
        for victim in ground.victims(name, names[0], "much"):
            harm.flip(lambda header: header.header_len)(victim)
    ground.forget()
    before = ground.counts()
    for name in names:
        assert ground.load([name])[0] == ["blank"]
    assert counted(before, ground.counts())["breaker_opened"]
    wait_until(
        lambda: ground.is_healthy(names), "the breaker has closed and blocks are stored again"
    )
    ground.assert_hits(names)
    ground.close()


def two_writers(base: Path, long: bool) -> None:
    """Two processes write the same ids in different orders; a reader and a remover run at the same
    time."""
    source, root = random.Random(new_seed()), base / "root"
    names = block_ids(BLOCKS, "shared")
    ground = Ground(root)
    before = ground.counts()
    for _ in range(6 if long else 1):
        seeds = [source.randrange(1 << 32) for _ in range(2)]
        with (
            child("write", root, seeds[0]) as (one, _),
            child("write", root, seeds[1]) as (other, _),
        ):
            while one.poll() is None or other.poll() is None:
                ground.load(source.sample(names, 8))  # each one right, or failed and blank
                if source.random() < 0.3 and (files := ground.files()):
                    source.choice(files).unlink(missing_ok=True)
            ended_well(one)
            ended_well(other)
        assert_all_exact(ground)
        for path in ground.files():
            path.unlink()
    news = counted(before, ground.counts())
    assert set(news) & {"absent"} or ground.column.memory, (
        "a removed block is a miss, unless it is in memory"
    )
    assert not set(news) & {
        "bad_checksum",
        "bad_header",
        "truncated",
        "wrong_length",
        "records_refused",
    }, news
    # A process that knows the locations of records detects their removal about once a second.
    wait_until(lambda: ground.is_healthy(names[:3]), "blocks are stored and found again")
    ground.close()


def clock_jumps(base: Path, long: bool) -> None:
    """Files from the far past and future are hits; space is still freed, and new blocks are
    stored."""
    del long
    names = block_ids(120, "clocks")
    ground = Ground(base / "root", storage_capacity="1MiB")
    old, ahead, new = names[:3], names[3:6], names[6:]
    wait_until(lambda: ground.is_healthy(old + ahead), "the root was counted and has space")
    for year, blocks in ((1971, old), (2100, ahead)):
        for block in blocks:
            for victim in ground.victims(block, block, "clocks"):
                harm.set_times(year)(victim)
    ground.forget()
    before = ground.counts()
    ground.assert_hits(old + ahead)
    assert_no_wait(counted(before, ground.counts()))
    for block in new:  # nearly three times the limit
        wait_until(lambda block=block: not ground.dump([block]), "there is room again")  # type: ignore[misc]
    assert ground.bytes_stored() <= 1 << 20
    for first in range(0, len(new), 32):
        ground.load(new[first : first + 32])  # each one right, or removed to free space
    wait_until(lambda: ground.is_healthy(old), "there is room again")
    ground.close()


def no_descriptors(base: Path, long: bool) -> None:
    """A process at its limit of open files: loads and dumps fail, no wrong byte is read, and it
    recovers."""
    del long
    with child("starve", base / "root", 1) as (process, _):
        lines = ended_well(process)
    said = next(line for line in lines if line.startswith("counted")).split()
    assert ("publishes_failed" if columns.current().memory else "io_error") in said
    assert not {"timeout", "lookup_late", "records_refused"} & set(said)


def no_memory(base: Path, long: bool) -> None:
    """A process at its limit of memory: open stores work, a new one fails, and the process
    survives."""
    del long
    with child("hunger", base / "root", 1) as (process, _):
        said = ended_well(process)
    assert "hungry" in said, "there was memory left"
    assert any(line.startswith("refused") for line in said), "a store took memory that is not there"


def missing_root(base: Path, long: bool) -> None:
    """A root that cannot be created when the store opens is used when it can be."""
    del long
    obstacle = base / "parent"
    obstacle.write_text("a file where a directory should be")
    ground = Ground(obstacle / "root")
    names = block_ids(3)
    before = ground.counts()
    assert ground.store.lookup(names) == [False] * 3
    states, failures = ground.load(names)
    assert states == ["blank"] * 3
    assert set(failures) == {0, 1, 2}
    assert counted(before, ground.counts())["unhealthy"] >= 3
    obstacle.unlink()
    wait_until(lambda: ground.is_healthy(names), "the root was taken up")
    ground.assert_hits(names)
    ground.close()


def owned_by_another(base: Path, long: bool) -> None:
    """One record that this user may not read: refused, and replaced by a file of this user's
    own."""
    del long
    with roots.new_root(base, "tmpfs") as root, roots.as_nobody(*columns.current().roots(root)):
        ground = Ground(root)
        names = block_ids(3)
        ground.fill(names)
        with roots.as_root():
            for victim in ground.victims(names[1], names[0], "owned"):
                os.chown(victim.path, 0, 0)
        # another store is used, because this one has memory
        before = {} if ground.column.memory else ground.counts()
        ground.forget()
        states, failures = ground.load(names)
        assert states[1] == "blank"
        assert 1 in failures
        news = counted(before, ground.counts())
        # A process that opens the store again cannot read the footer either, and finds no record.
        anew = ground.column.memory and ground.column.in_segments
        assert ("absent" if anew else "io_error") in news, f"counted: {news}"
        assert_no_wait(news)
        assert not ground.dump(names)
        ground.assert_hits(names)
        assert ground.place(names[1]).path.stat().st_uid == roots.NOBODY
        ground.close()
