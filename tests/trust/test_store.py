"""The matrix at the store level: every row against every kind of store, through the compiled
core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import roots
from _pytest.mark import ParameterSet
from apart import R, cells, known_fault
from columns import FILES, Column, use
from disk import Disk
from fuse import Fuse
from ground import SHAPE, Ground, Memory, assert_no_wait, block_ids, counted, wait_until
from harm import Victim
from kinds import LONG, FileRow, FuseRow, ProcessRow, RootRow
from places import Place
from plain_record import Refused
from rows import FILE_ROWS, FUSE_ROWS, PROCESS_ROWS, ROOT_ROWS

from ucm.errors import TaskError

#: Longer than any wait: a store without space tries again after up to a minute.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def ours(kv_transfer_config: dict[str, object] | None) -> None:
    """These rows test this store; another connector is tested in the engine's column only."""
    if kv_transfer_config is not None:
        pytest.skip("--kv-transfer-config names another connector: only engines are tested")


@pytest.fixture(autouse=True)
def used(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store of the test and its child processes is of the column's kind."""
    use(column, monkeypatch)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Cleanup at the end of the test."""
    with ExitStack() as stack:
        yield stack


def each(rows: Sequence[R]) -> list[ParameterSet]:
    """The cells of this run as parameters; one that is known to fail must fail."""
    return [
        pytest.param(
            row,
            column,
            id=f"{column.name}-{row.name}",
            marks=[pytest.mark.xfail(reason=why, strict=True)]
            if (why := known_fault(row, column))
            else [],
        )
        for row, column in cells(rows)
    ]


@pytest.mark.parametrize(("row", "column"), each(FILE_ROWS))
def test_file(row: FileRow, column: Column, tmp_path: Path, stack: ExitStack) -> None:
    ground = Ground(tmp_path / "root")
    stack.callback(lambda: ground.close())
    names = block_ids(3, row.name)
    ground.fill(names)
    ground.assert_hits(names)
    known = [ground.place(name) for name in names]
    assert known[1].judge(SHAPE).compressed == column.compressed

    victims = ground.victims(names[1], names[2], row.name)
    for victim in victims:
        row.harm(victim)
    if row.judged and not (row.behind and column.in_segments):
        with pytest.raises(Refused) as caught:
            known[1].judge(SHAPE)
        assert caught.value.reason in row.reasons, "the second reader sees something else"
    met = False
    if column.memory:  # blocks above are sound, and no copy from below replaces them
        before = ground.counts()
        for _ in range(2):
            ground.assert_hits(names)
        assert "records_refused" not in counted(before, ground.counts())
        ground.forget()
    elif column.in_segments:  # a process that knows the segment, then one that does not
        if row.moved:
            ground.load(names)  # each one right, from the open segment, or blank
        else:
            met = _assert_met(row, ground, names, known)
        ground.reopen()
    met |= _assert_met(row, ground, names, [ground.newest(name) for name in names])
    assert met != row.harmless, (
        "the harm reached nobody" if not met else "the harm should reach nobody"
    )

    left = row.heals == "left" and not (column.in_segments and row.judged is False)
    before = ground.counts()
    if left:
        kept = [_content(victim.path) for victim in victims]
        ground.dump(names)
        assert [_content(victim.path) for victim in victims] == kept, "a foreign file was replaced"
        found = ground.store.lookup(names)  # a memory may have it after the new dump
        assert found[:1] + found[2:] == [True, True]
        assert not found[1] or (column.memory and not row.judged), (
            "a block that was not replaced is a hit"
        )
        ground.assert_hits([name for name, there in zip(names, found, strict=True) if there])
        for victim in victims:
            roots.remove(victim.path)
        ground.forget()
        # A process that knew the missing segment with other records detects this by a check about
        # once a second.
        wait_until(lambda: ground.is_healthy(names), "all are stored again")
    ground.fill(names)
    ground.assert_hits(names)
    for name in names:
        ground.place(name).judge(SHAPE)
    assert_no_wait(counted(before, ground.counts()))
    if column != FILES or LONG:  # files have no additional state
        ground.reopen()
        ground.assert_hits(names)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _assert_met(
    row: FileRow, ground: Ground, names: list[bytes], copies: list[Place | None]
) -> bool:
    """The store agrees with the second reader about these copies: hits, or misses without waiting;
    true if any is a hit."""
    bad = [index for index, copy in enumerate(copies) if copy is None or not copy.is_right(SHAPE)]
    # A process that knew a segment checks it about once a second: without its footer all of it may
    # be misses by now.
    either = [
        index
        for index, name in enumerate(names)
        if index not in bad and ground.newest(name) is None
    ]
    before = ground.counts()
    ground.store.lookup(names)
    # one load: blocks behind a bad one may be cancelled, never wrong
    states, failures = ground.load(names)
    assert set(bad) <= set(failures)
    first = min(failures, default=None)
    assert first in either or first == min(bad, default=None), (
        "all before the first bad block are loaded"
    )
    for index in bad:
        assert states[index] == "blank", "bytes of a bad record reached the device"
        assert ground.load([names[index]])[1], "a bad record was loaded the second time"
        assert ground.store.lookup([names[index]]) == [False]
    ground.assert_hits([name for index, name in enumerate(names) if index not in bad + either])
    for index in either:
        ground.load([names[index]])  # right, or failed and blank
    news = counted(before, ground.counts())
    if bad:
        # with the footer all records of a segment are lost
        gone = ("absent",) if ground.column.in_segments else ()
        assert set(row.reasons + gone) & set(news), f"counted: {news}"
    assert_no_wait(news)
    return bool(bad)


#: Rows in which the bytes of one of two copies are harmed; the lower one must serve.
ONE_OF_TWO = [(row, column) for row, column in cells(FILE_ROWS) if column.directories == 2]


@pytest.mark.parametrize(
    ("row", "column"),
    [pytest.param(row, column, id=f"{column.name}-{row.name}") for row, column in ONE_OF_TWO],
)
def test_one_of_two_copies(row: FileRow, column: Column, tmp_path: Path, stack: ExitStack) -> None:
    """The other directory serves a block that is bad in one, and the bad copy is replaced if it is
    ours."""
    ground = Ground(tmp_path / "root")
    stack.callback(lambda: ground.close())
    names = block_ids(3, row.name)
    ground.fill(names)
    ground.settle(names)
    ground.forget()
    victim: Victim = ground.victims(names[1], names[2], row.name)[0]
    row.harm(victim)
    kept = _content(victim.path)
    before = ground.counts()
    ground.assert_hits(names)
    news = counted(before, ground.counts())
    assert_no_wait(news)
    assert not {"posix2.copies_refused", "posix2.failures"} & set(news), f"counted: {news}"
    if row.heals == "left":
        ground.dump(names)
        ground.assert_hits(names)
        assert _content(victim.path) == kept, "a foreign file was replaced"
    else:
        wait_until(lambda: ground.newest(names[1], 0) is not None, "a sound copy is above again")
    ground.forget()
    ground.assert_hits(names)


@pytest.mark.parametrize(("row", "column"), each(ROOT_ROWS))
def test_root(row: RootRow, column: Column, tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(roots.new_root(tmp_path, row.kind))
    if row.nobody:
        stack.enter_context(roots.as_nobody(*column.roots(root)))
    ground = Ground(root)
    stack.callback(lambda: ground.close())
    names = block_ids(6, row.name)
    old, new, held = names[:3], names[3:], block_ids(2, f"{row.name}, in memory")
    ground.fill(old)
    ground.assert_hits(old)
    ground.settle(old)
    ground.forget()
    if column.memory:
        ground.fill(held)
    wait_until(
        lambda: ground.store.stats()["storage_counted"],
        "the root was counted, so that no count is running",
    )

    before = ground.counts()
    reasons = set(row.reasons) - ({"absent", "io_error"} if column.directories == 2 else set())
    harmed = row.harm(root)
    next(harmed)
    if column.memory:
        ground.assert_hits(held)  # independent of the harm below
    if row.reads or column.directories == 2:
        ground.assert_hits(old)
    else:
        assert column.in_segments or ground.store.lookup(old) == [False] * 3
        states, failures = ground.load(old)
        # An open segment is still read, even if its root is unreachable.
        through_kept = column.in_segments and row.whole and not failures
        assert states == (["right"] if through_kept else ["blank"]) * 3
        assert through_kept or set(failures) == {0, 1, 2}
        reasons -= {"absent", "io_error"} if through_kept else set()
    if row.dumps == "fail":
        assert ground.dump(new[:1])
        found = ground.store.lookup(new)
        assert found[1:] == [False] * 2
        assert column.memory or not found[0], "a block that was not published is a hit"
        ground.assert_hits([name for name, there in zip(new, found, strict=True) if there])
    news = counted(before, ground.counts())
    assert reasons <= set(news), f"counted: {news}"
    assert not {"timeout", "lookup_late"} & set(news), f"counted: {news}"

    next(harmed, None)
    wait_until(lambda: ground.is_healthy(new), "blocks are stored and found again")
    if not row.lost:
        wait_until(lambda: all(ground.store.lookup(old)), "stored blocks are found again")
        ground.assert_hits(old)
    # After a full file system, some are still being removed.
    wait_until(lambda: ground.is_healthy(names), "all are stored and found again")
    ground.await_all_right()
    wait_until(lambda: not list(root.glob("*/tmp/*")), "no private files are left behind", 60)


#: Short for the one affected call, long for all others.
SOON, LATE = 0.5, 60


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuse]:
    """One file system for all its rows, each with a root of its own."""
    roots.need_root()
    base = tmp_path_factory.mktemp("fuse")
    system = Fuse(base / "export", base / "mount")
    yield system
    system.close()


@pytest.fixture
def system(mounted: Fuse) -> Iterator[Fuse]:
    """The file system, without faults before and afterwards."""
    yield mounted
    mounted.behave()


@pytest.mark.parametrize(("row", "column"), each(FUSE_ROWS))
def test_file_system(
    row: FuseRow, column: Column, system: Fuse, tmp_path: Path, stack: ExitStack
) -> None:
    soon = {
        call: SOON if row.waits and row.call == call else LATE
        for call in ("lookup", "load", "dump")
    }
    deadlines = {
        "lookup_ms": int(soon["lookup"] * 1000),
        "load_unknown_s": soon["load"],
        "dump_s": soon["dump"],
    }
    # No name with a colon: that separates directories.
    place = (
        system.mount_point
        / f"{FUSE_ROWS.index(row)}-{column.name.replace('/', '-').replace('|', '-')}"
    )
    if row.disk:
        place.mkdir()
        place = stack.enter_context(Disk(place / "image", tmp_path / "disk")).mount_point
    stack.callback(system.behave)  # before anything that may wait for it
    ground = Ground(place / "root", io_direct=row.disk)
    stack.callback(lambda: ground.close())
    stack.callback(system.behave)
    names, warm = block_ids(6, row.name), block_ids(1, f"{row.name}, before")
    old, new = names[:3], names[3:]
    ground.fill(old)
    ground.settle(old)
    # it has empty memory and no open segments
    ground.reopen(deadlines=deadlines)
    # A new process first waits for space.
    wait_until(lambda: ground.is_healthy(warm), "there is room")

    before = ground.counts()
    system.behave(**row.manners)
    target = Memory(old, filled=False)  # kept, to check that no byte is late
    if row.call == "lookup":
        assert ground.store.lookup(old) == [False] * 3
    elif row.call == "load":
        with pytest.raises(TaskError) as caught:
            ground.store.wait(ground.store.load_data(old, [0] * 3, target.addresses()))
        assert set(caught.value.failures) == {0, 1, 2}
    elif row.believed:
        assert not ground.dump(new)
        if column.memory:
            ground.assert_hits(new)
            if column.directories > 1:
                ground.settle(new)  # the copy above is also written during the fault
            system.behave()
            ground.forget()
            before = {}
        assert set(ground.load(new)[1]) == {0, 1, 2}
    else:
        assert set(ground.dump(new)) == {0, 1, 2}
    news = counted(before, ground.counts())
    lost = row.believed and column.in_segments and column.memory  # the footer is zeros too
    assert ({"absent"} if lost else set(row.reasons)) <= set(news), f"counted: {news}"
    tasks = {"lookup": "lookups", "load": "load_tasks", "dump": "dump_tasks"}[row.call]
    assert lost or row.believed or news[tasks] == 1, "the deadline was met more than once"
    if not row.waits:
        assert not {"timeout", "lookup_late"} & set(news), f"counted: {news}"

    system.behave()
    wait_until(lambda: not ground.counts()["workers_stuck"], "what was held has returned")
    for name in new:
        if ground.store.lookup([name]) == [True]:
            if row.believed and ground.load([name])[1]:
                continue  # harmed by another row before, and detected now
            # a held rename may still publish a complete record
            ground.assert_hits([name])
    wait_until(lambda: ground.is_healthy(new), "blocks are stored and found again")
    wait_until(lambda: ground.is_healthy(old), "stored blocks are found again")
    assert target.states() == ["blank"] * 3, "bytes were written after the load was over"
    # With two directories an unread copy of the lower one is detected at its first read.
    if not (row.believed and column.directories == 2):
        ground.await_all_right()


#: Deadline of a load when one of two directories hangs: half of it is for the other.
SHARED = 8.0


@pytest.mark.parametrize(
    ("row", "column"),
    [
        pytest.param(row, column, id=f"{column.name}-{row.name}")
        for row, column in cells(FUSE_ROWS)
        if column.directories == 2 and row.call == "load" and not row.disk
    ],
)
def test_one_of_two_file_systems(
    row: FuseRow, column: Column, system: Fuse, tmp_path: Path, stack: ExitStack
) -> None:
    """The upper directory is on a faulty file system: the lower one serves the missing blocks in
    time."""
    shown = system.mount_point / f"{FUSE_ROWS.index(row)}-upper"
    shown.mkdir()
    (tmp_path / "root-upper").symlink_to(shown)
    ground = Ground(
        tmp_path / "root",
        deadlines={"lookup_ms": LATE * 1000, "load_unknown_s": SHARED, "dump_s": LATE},
    )
    stack.callback(lambda: ground.close())
    stack.callback(system.behave)
    names = block_ids(3, row.name)
    wait_until(lambda: ground.is_healthy(names), "blocks are stored")
    ground.settle(names)
    ground.forget()
    system.behave(**row.manners)
    states, failures = ground.load(names)
    assert states == ["right"] * 3
    assert not failures
    system.behave()
    wait_until(lambda: not ground.counts()["workers_stuck"], "what was held has returned")
    ground.forget()
    ground.assert_hits(names)
    ground.await_all_right()


@pytest.mark.parametrize(("row", "column"), each(PROCESS_ROWS))
def test_processes(row: ProcessRow, column: Column, tmp_path: Path) -> None:
    if row.needs_root:
        roots.need_root()
    row.run(tmp_path, LONG)
