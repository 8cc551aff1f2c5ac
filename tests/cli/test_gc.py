"""``ucm gc``: removes exactly the planned files, in order."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_roots import HOUR, RECORD, Written
from click.testing import Result

from ucm.cli.gc import Wish, carry_out, make_plan
from ucm.cli.roots import Root
from ucm.config import Capacity
from ucm.errors import StoreIOError

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]

EVERYTHING = Wish(Capacity(bytes=0), None, chosen=False, stale=True)


def by_use(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def relative(root: Written, paths: list[Path]) -> list[str]:
    return [str(path.relative_to(root.path)) for path in paths]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--to", "0"),
        ("--older-than", "1s"),
        ("--namespace", "NAME"),
        ("--stale",),
    ],
)
def test_a_dry_run_changes_nothing(root: Written, ucm: Run, options: tuple[str, ...]) -> None:
    root.fill("one")
    before = root.tree()
    words = [option.replace("NAME", root.namespace("one")) for option in options]
    for form in ((), ("--json",), ("--list",)):
        assert ucm("gc", root.path, *words, *form).exit_code == 0
        assert root.tree() == before


def test_down_to_a_size_the_oldest_use_first(root: Written, ucm: Run, ucm_json: Json) -> None:
    root.fill("one").fill("two", 2)
    order = by_use(root.records())
    last = order[0]
    os.utime(last)  # used now: removed last
    order = [*order[1:], last]
    target = 3 * RECORD + 5
    planned = ucm_json("gc", root.path, "--to", target, "--list")
    assert (planned["dry_run"], planned["planned"], planned["removed"]) == (True, 5, 0)
    assert planned["files"] == relative(root, order[:5])
    assert (planned["used_bytes"], planned["target_bytes"]) == (8 * RECORD, target)
    assert (
        "dry run: 5 files, 120 KiB would be removed" in ucm("gc", root.path, "--to", target).stdout
    )
    done = ucm_json("gc", root.path, "--to", target, "--yes", "--list")
    assert (done["exit"], done["removed"], done["removed_bytes"]) == (0, 5, 5 * RECORD)
    assert done["files"] == planned["files"]
    assert by_use(root.records()) == order[5:]
    assert "nothing to remove" in ucm("gc", root.path, "--to", target, "--yes").stdout


def test_percents_are_of_the_limit_and_the_default_is_the_low_watermark(
    root: Written, ucm_json: Json
) -> None:
    capacity = 10 * RECORD
    root.fill("one", 9).limit(capacity)
    assert ucm_json("gc", root.path, "--to", "50%")["planned"] == 4
    default = ucm_json("gc", root.path)
    assert default["target_bytes"] == int(capacity * 0.85)
    assert default["planned"] == 1


def test_older_than(root: Written, ucm_json: Json, ucm: Run) -> None:
    root.fill("one")
    day = time.time() - 8 * 24 * HOUR
    old = by_use(root.records())[:2]
    for path in old:
        os.utime(path, (day, day))
    done = ucm("gc", root.path, "--older-than", "7d", "--yes")
    assert done.exit_code == 0
    assert "removed 2 files" in done.stdout
    assert "8 days ago" in done.stdout
    assert len(root.records()) == 4
    assert not any(path.exists() for path in old)
    assert ucm_json("gc", root.path, "--older-than", "7d")["planned"] == 0


def test_a_whole_namespace_goes_and_the_other_stays(root: Written, ucm_json: Json) -> None:
    root.fill("one").fill("two", 2)
    one, two = root.namespace("one"), root.namespace("two")
    kept = root.path / one / "quarantine" / f"{'ab' * 16}.bad_header.1.bin"
    kept.parent.mkdir()
    kept.write_bytes(b"bad")
    os.utime(kept, (time.time() - 2 * HOUR,) * 2)
    done = ucm_json("gc", root.path, "--namespace", one[:8], "--yes")
    assert (done["exit"], done["removed"], done["namespaces_removed"]) == (0, 7, [one])
    assert not (root.path / one).exists()
    assert len(root.records(two)) == 2
    assert (root.path / "ucm-root.json").exists()


def test_a_namespace_in_which_something_else_lies_keeps_it_and_its_manifest(
    root: Written, ucm_json: Json
) -> None:
    root.fill("one")
    space = root.path / root.namespace("one")
    mine = root.records()[0].with_name("notes.txt")
    mine.write_text("mine")
    writing = space / "tmp" / f"{1:016x}-{2:016x}.tmp"
    writing.write_bytes(b"being written")
    done = ucm_json("gc", root.path, "--namespace", space.name, "--yes")
    assert (done["removed"], done["namespaces_removed"]) == (6, [])
    assert mine.read_text() == "mine"
    assert writing.exists(), "its writer lives"
    assert (space / "manifest.json").exists()


def test_a_namespace_and_a_size_is_that_namespace_alone(root: Written, ucm_json: Json) -> None:
    root.fill("one").fill("two", 2)
    done = ucm_json(
        "gc", root.path, "--namespace", root.namespace("one"), "--to", 2 * RECORD, "--yes"
    )
    assert done["removed"] == 4
    assert len(root.records(root.namespace("two"))) == 2


def test_a_live_engine_goes_on(root: Written, ucm_json: Json) -> None:
    with root.open() as store:
        ids = root.dump(store, 4)
        assert all(store.lookup(ids))
        done = ucm_json("gc", root.path, "--namespace", root.namespace("one"), "--yes")
        assert (done["exit"], done["removed"], done["namespaces_removed"]) == (0, 4, []), (
            "somebody writes here"
        )
        assert not any(store.lookup(ids)), "misses, and no error"
        root.dump(store, 4)
        assert all(store.lookup(ids))
    assert ucm_json("verify", root.path)["good"] == 4


def test_private_files_of_the_dead(root: Written, ucm_json: Json) -> None:
    root.fill("one")
    tmp = root.path / root.namespace("one") / "tmp"
    dead, alive, foreign = (
        tmp / name for name in (f"{1:016x}-{1:016x}.tmp", f"{1:016x}-{2:016x}.tmp", "x.tmp")
    )
    beside = root.path / f".{'ab' * 16}.tmp"
    agreed = root.path / "space"
    agreed.mkdir(exist_ok=True)
    writing, document = agreed / dead.name, agreed / f"writer-{7:016x}.json"
    for path in (dead, alive, foreign, beside, writing, document):
        path.write_bytes(b"x")
    before = time.time() - 2 * HOUR
    for path in (dead, foreign, beside, writing, document):
        os.utime(path, (before, before))
    done = ucm_json("gc", root.path, "--stale", "--yes")
    assert (done["removed"], done["private_beside"]) == (3, 2)
    assert not any(path.exists() for path in (dead, beside, writing))
    assert all(path.exists() for path in (alive, foreign, document))
    assert len(root.records()) == 6, "records are not asked for"


def test_damaged_records_that_an_older_version_kept(root: Written, ucm_json: Json) -> None:
    root.fill("one")
    kept = root.path / root.namespace("one") / "quarantine"
    kept.mkdir()
    old, foreign = (kept / f"{'ab' * 16}.{reason}.1.bin" for reason in ("bad_header", "because"))
    for path in (old, foreign):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - 2 * HOUR,) * 2)
    assert ucm_json("gc", root.path, "--stale", "--yes")["removed"] == 1
    assert [path.exists() for path in (old, foreign)] == [False, True]
    assert len(root.records()) == 6


def test_nothing_but_our_own_names_is_ever_removed(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    root.fill("one")
    outside = Written(tmp_path / "outside").fill("two", 3)
    name, here = root.namespace("one"), root.records()[0].parent
    space = root.path / name
    # Links: a namespace, a directory of records, a record.
    (root.path / ("f" * 32)).symlink_to(outside.path / outside.namespace("two"))
    (space / "blocks" / "ff").symlink_to(outside.records()[0].parent)
    (here / f"{here.name}{'e' * 30}.bin").symlink_to(outside.records()[0])
    # Files whose names are nearly ours.
    strange = [
        root.path / "notes.txt",
        root.path / "README.bin",
        space / "config.json",
        here / f"{here.name}{'E' * 30}.bin",
        here / f"{here.name}{'0' * 30}.bin.bak",
        here / f"{here.name}{'0' * 29}.bin",
        space / "blocks" / "x.bin",
        space / "tmp" / f"{1:016x}.tmp",
    ]
    for path in strange:
        path.write_bytes(b"mine")
    # A directory where a file should be, and another root below this one.
    directory = here / f"{here.name}{'d' * 30}.bin"
    directory.mkdir()
    inner = Written(root.path / "inner").fill("three", 2)
    before = outside.tree()
    every = ("--to", "0", "--stale", "--yes")
    assert ucm_json("gc", root.path, *every)["removed"] == 6
    assert ucm_json("gc", root.path, "--namespace", name, "--yes")["namespaces_removed"] == []
    assert outside.tree() == before
    assert all(path.read_bytes() == b"mine" for path in strange)
    assert directory.is_dir()
    assert len(inner.records()) == 2
    assert (space / "blocks" / "ff").is_symlink()


def test_what_was_used_since_stays(root: Written) -> None:
    root.fill("one")
    paths = by_use(root.records())
    with Root(root.path) as opened:
        plan = make_plan(opened, opened.namespaces(), EVERYTHING)
        assert len(plan.removals) == 6
        os.utime(paths[0])
        paths[1].unlink()
        new = paths[2].with_name("new")
        shutil.copy2(paths[2], new)
        new.rename(paths[2])  # another file with the same time
        outcome = carry_out(opened, plan)
    assert (len(outcome.removed), outcome.skipped, outcome.failed) == (3, 3, 0)
    assert sorted(root.records()) == sorted([paths[0], paths[2]])


def test_a_directory_exchanged_for_a_link_leads_nowhere(root: Written, tmp_path: Path) -> None:
    root.fill("one", 3)
    with Root(root.path) as opened:
        plan = make_plan(opened, opened.namespaces(), EVERYTHING)
        space = root.path / root.namespace("one")
        moved = tmp_path / "moved"
        space.rename(moved)
        space.symlink_to(moved)
        outcome = carry_out(opened, plan)
    assert (outcome.removed, outcome.skipped) == ([], 3)
    assert len(list(moved.glob("blocks/*/*.bin"))) == 3


@pytest.mark.parametrize("how", ["unmounted", "other root", "unmarked"])
def test_a_root_that_is_gone_stops_it(root: Written, tmp_path: Path, how: str) -> None:
    root.fill("one", 3)
    with Root(root.path) as opened:
        plan = make_plan(opened, opened.namespaces(), EVERYTHING)
        if how == "unmarked":
            (root.path / "ucm-root.json").unlink()
        else:
            root.path.rename(tmp_path / "away")
            root.path.mkdir()
            if how == "other root":
                shutil.copy(tmp_path / "away" / "ucm-root.json", root.path)
        with pytest.raises(StoreIOError, match="not the root any more"):
            carry_out(opened, plan)
    assert len(list(tmp_path.rglob("*.bin"))) == 3


def test_interrupted_it_says_what_it_did(
    root: Written, ucm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 3)
    unlink, last = os.unlink, by_use(root.records())[2].name

    def interrupting(path: Any, **more: Any) -> None:
        if path == last:
            raise KeyboardInterrupt
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", interrupting)
    done = ucm("gc", root.path, "--to", "0", "--yes")
    assert done.exit_code == 130
    assert "removed 2 files" in done.stdout
    assert "interrupted" in done.stdout
    assert [path.name for path in root.records()] == [last]


def test_what_cannot_be_removed_is_told(
    root: Written, ucm: Run, ucm_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 3)
    unlink, first = os.unlink, root.records()[0].name

    def refused(path: Any, **more: Any) -> None:
        if path == first:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refused)
    done = ucm_json("gc", root.path, "--to", "0", "--yes")
    assert (done["exit"], done["removed"], done["failed"]) == (1, 2, 1)
    assert first in done["failure"]
    text = ucm("gc", root.path, "--to", "0", "--yes")
    assert text.exit_code == 1
    assert "1 could not be removed" in text.stdout
