"""The matrix at the store level: every row against the store itself, through the compiled core."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import roots
from _pytest.mark import ParameterSet
from fuse import Fuse
from ground import SHAPE, Ground, Memory, assert_no_wait, block_ids, counted, wait_until
from harm import Victim, judge
from kinds import LONG, STORE, FileRow, FuseRow, ProcessRow, RootRow, Row
from rows import FILE_ROWS, FUSE_ROWS, PROCESS_ROWS, ROOT_ROWS

from ucm.errors import TaskError
from ucm.store.record import Refused

COLUMN = STORE
#: Longer than what is awaited may take: a store that found no room asks again after up to a minute.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def ours(kv_transfer_config: dict[str, object] | None) -> None:
    """These rows are about this store; another connector is met in the engine's column alone."""
    if kv_transfer_config is not None:
        pytest.skip("--kv-transfer-config names another connector: only engines are asked")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is taken back when the test ends."""
    with ExitStack() as stack:
        yield stack


def each(rows: Sequence[Row]) -> list[ParameterSet]:
    """The rows as parameters; one that is known to fail must fail."""
    known = [pytest.mark.xfail(reason=row.known, strict=True) if row.known else () for row in rows]
    return [pytest.param(row, id=row.name, marks=marks) for row, marks in zip(rows, known, strict=True)]


@pytest.mark.parametrize("row", each(FILE_ROWS))
def test_file(row: FileRow, tmp_path: Path, stack: ExitStack) -> None:
    ground = Ground(tmp_path / "root")
    stack.callback(ground.close)
    names = block_ids(3, row.name)
    assert not ground.dump(names)
    ground.assert_hits(names)
    victim = Victim(ground.file(names[1]), ground.file(names[2]), random.Random(row.name))
    bad = [1, 2] if row.both else [1]

    row.harm(victim)
    if row.judged:
        with pytest.raises(Refused) as caught:
            judge(victim.path, SHAPE)
        assert caught.value.reason in row.reasons, "the second reader sees something else"
    before = ground.counts()
    ground.store.lookup(names)
    states, failures = ground.load(names)  # one load: what is good in it may be given up, never be wrong
    assert set(bad) <= set(failures)
    for index in bad:
        assert states[index] == "blank", "bytes of a bad record reached the device"
        assert ground.load([names[index]])[1], "a bad record was loaded the second time"
        assert ground.store.lookup([names[index]]) == [False]
    ground.assert_hits([name for index, name in enumerate(names) if index not in bad])
    news = counted(before, ground.counts())
    assert set(row.reasons) & set(news), f"counted: {news}"
    assert_no_wait(news)

    if row.heals == "left":
        kept = victim.path.read_bytes() if victim.path.is_file() else None
        ground.dump(names)
        assert (victim.path.read_bytes() if victim.path.is_file() else None) == kept
        assert ground.store.lookup(names) == [True, False, True]
        roots.remove(victim.path)
    assert not ground.dump(names)
    ground.assert_hits(names)
    for name in names:
        judge(ground.file(name), SHAPE)
    assert_no_wait(counted(before, ground.counts()))


@pytest.mark.parametrize("row", each(ROOT_ROWS))
def test_root(row: RootRow, tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(roots.new_root(tmp_path, row.kind))
    if row.nobody:
        stack.enter_context(roots.as_nobody(root))
    ground = Ground(root)
    stack.callback(ground.close)
    names = block_ids(6, row.name)
    old, new = names[:3], names[3:]
    assert not ground.dump(old)
    ground.assert_hits(old)
    wait_until(lambda: ground.store.stats()["storage_counted"], "the root was counted, so that nobody is at work there")

    before = ground.counts()
    harmed = row.harm(root)
    next(harmed)
    if row.reads:
        ground.assert_hits(old)
    else:
        assert ground.store.lookup(old) == [False] * 3
        states, failures = ground.load(old)
        assert states == ["blank"] * 3
        assert set(failures) == {0, 1, 2}
    if row.dumps == "fail":
        assert ground.dump(new[:1])
        assert ground.store.lookup(new) == [False] * 3
    news = counted(before, ground.counts())
    assert set(row.reasons) <= set(news), f"counted: {news}"
    assert not {"timeout", "lookup_late"} & set(news), f"counted: {news}"

    next(harmed, None)
    wait_until(lambda: ground.is_healthy(new), "blocks are stored and found again")
    if not row.lost:
        ground.assert_hits(old)
    assert not ground.dump(old)
    ground.assert_hits(names)
    for name in names:
        judge(ground.file(name), SHAPE)
    assert not list(root.glob("*/tmp/*")), "private files were left behind"


#: Short for the one call that meets it, long for all others.
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
    """The file system, of good manners before and afterwards."""
    yield mounted
    mounted.behave()


@pytest.mark.parametrize("row", each(FUSE_ROWS))
def test_file_system(row: FuseRow, system: Fuse, stack: ExitStack) -> None:
    soon = {call: SOON if row.waits and row.call == call else LATE for call in ("lookup", "load", "dump")}
    deadlines = {"lookup_ms": int(soon["lookup"] * 1000), "load_unknown_s": soon["load"], "dump_s": soon["dump"]}
    root = system.mount_point / str(FUSE_ROWS.index(row))  # no name with a colon: that separates directories
    ground = Ground(root, deadlines=deadlines)
    stack.callback(ground.close)
    names = block_ids(6, row.name)
    old, new = names[:3], names[3:]
    # With a short deadline a busy machine may need another go.
    wait_until(lambda: ground.is_healthy(old), "blocks are stored")

    before = ground.counts()
    system.behave(**row.manners)
    target = Memory(old, filled=False)  # kept, to see that nothing comes late
    if row.call == "lookup":
        assert ground.store.lookup(old) == [False] * 3
    elif row.call == "load":
        with pytest.raises(TaskError) as caught:
            ground.store.wait(ground.store.load_data(old, [0] * 3, target.addresses()))
        assert set(caught.value.failures) == {0, 1, 2}
    elif row.believed:
        assert not ground.dump(new)
        assert set(ground.load(new)[1]) == {0, 1, 2}
    else:
        assert set(ground.dump(new)) == {0, 1, 2}
    news = counted(before, ground.counts())
    assert set(row.reasons) <= set(news), f"counted: {news}"
    tasks = {"lookup": "lookups", "load": "load_tasks", "dump": "dump_tasks"}[row.call]
    assert news[tasks] == 1, "the deadline was met more than once"
    if not row.waits:
        assert not {"timeout", "lookup_late"} & set(news), f"counted: {news}"

    system.behave()
    wait_until(lambda: not ground.counts()["workers_stuck"], "what was held has returned")
    for name in new:
        if ground.store.lookup([name]) == [True]:
            ground.assert_hits([name])  # a rename that was held may still give a whole record its name
    wait_until(lambda: ground.is_healthy(new), "blocks are stored and found again")
    wait_until(lambda: ground.is_healthy(old), "what was stored is found again")
    assert target.states() == ["blank"] * 3, "bytes came after the load was over"
    for path in ground.files():
        with suppress(FileNotFoundError):  # where a file system was full, some are still being removed
            judge(path, SHAPE)


@pytest.mark.parametrize("row", each(PROCESS_ROWS))
def test_processes(row: ProcessRow, tmp_path: Path) -> None:
    if row.needs_root:
        roots.need_root()
    row.run(tmp_path, LONG)
