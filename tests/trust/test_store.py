"""The matrix at the store level: every row against the store itself, through the compiled core."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import roots
from _pytest.mark import ParameterSet
from ground import SHAPE, Ground, assert_no_wait, block_ids, counted, wait_until
from harm import Victim, judge
from rows import FILE_ROWS, LONG, PROCESS_ROWS, ROOT_ROWS, STORE, FileRow, ProcessRow, RootRow, Row

from ucm.store.record import Refused

COLUMN = STORE


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
    if row.dumps_fail:
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


@pytest.mark.parametrize("row", each(PROCESS_ROWS))
def test_processes(row: ProcessRow, tmp_path: Path) -> None:
    if row.needs_root:
        roots.need_root()
    row.run(tmp_path, LONG)
