"""``ucm export`` and ``ucm import``: what is copied is served, byte for byte, under the target's
key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_roots import BLOCK, LAYERS, PIECES, SIDES, Written, sided

from ucm.cli import transfer
from ucm.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    TaskError,
    UcmError,
    UnhealthyError,
)
from ucm.store.posix import UcmPosixStore

Json = Callable[..., dict[str, Any]]


def content(root: Written, ids: list[bytes], **changes: Any) -> np.ndarray:
    """The KV of these blocks, loaded by a store that is opened on a root."""
    found = np.zeros((len(ids), BLOCK), dtype=np.uint8)
    offsets = [layer * sum(PIECES) + at for layer in range(LAYERS) for at in (0, PIECES[0])]
    rows = np.array([[row.ctypes.data + at for at in offsets] for row in found], dtype=np.uint64)
    with root.open(**changes) as store:
        store.wait(store.load_data(ids, [0] * len(ids), rows))
    return found


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_an_archive_holds_and_gives_back_every_record(
    root: Written, tmp_path: Path, ucm_json: Json, layout: str
) -> None:
    root.fill("one", 6, layout=layout)
    ids = list(root.ids)
    root.fill("two", 3, layout=layout)
    before = content(root, ids, layout=layout)
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["failed"]) == (0, 9, 0)
    assert out["bytes"] == 9 * BLOCK
    assert len(out["namespaces"]) == 2
    archive = ucm_json("verify", tmp_path / "archive")
    assert (archive["exit"], archive["good"], archive["bad"]) == (0, 9, 0)
    back = ucm_json("import", tmp_path / "archive", tmp_path / "new", "--capacity", "64MiB")
    assert (back["exit"], back["copied"], back["present"]) == (0, 9, 0)
    new = Written(tmp_path / "new")
    assert (content(new, ids, layout="segment") == before).all()


def test_what_is_there_is_passed_over_so_it_goes_on(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    root.fill("one", 6)
    keys = tmp_path / "keys"
    keys.write_text("\n".join(name.hex() for name in root.ids[:2]))
    first = ucm_json("export", root.path, tmp_path / "archive", "--keys", keys)
    assert (first["copied"], first["present"]) == (2, 0)
    second = ucm_json("export", root.path, tmp_path / "archive")
    assert (second["exit"], second["copied"], second["present"]) == (0, 4, 2)


#: ``ucm import`` in batches of four blocks, which stops in the middle of the third: its blocks were
#: passed to the store, which is writing them.
IN_THE_MIDDLE = """
import sys, threading
from ucm.cli import main, transfer
from ucm.store.posix import UcmPosixStore

transfer._batches = lambda headers: [headers[at : at + 4] for at in range(0, len(headers), 4)]
dumped, dump = [], UcmPosixStore.dump_data

def dump_data(store, *arguments, **more):
    task = dump(store, *arguments, **more)
    dumped.append(task)
    if len(dumped) == 3:
        print("in the middle", flush=True)
        threading.Event().wait()
    return task

UcmPosixStore.dump_data = dump_data
main(sys.argv[1:])
"""


def test_a_killed_import_leaves_whole_records_and_goes_on(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    root.fill("one", 20)
    before = content(root, root.ids)
    new = Written(tmp_path / "new")
    words = ["import", str(root.path), str(new.path), "--capacity", "64MiB"]
    command = [sys.executable, "-c", IN_THE_MIDDLE, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as importing:
        assert importing.stdout is not None
        assert importing.stdout.readline() == "in the middle\n"
        importing.kill()
    visible = ucm_json("verify", new.path)
    assert (visible["exit"], visible["bad"]) == (0, 0), visible
    assert 8 <= visible["good"] < 20
    with new.open(layout="segment") as store:
        there = store.lookup(root.ids)
    seen = [at for at, is_there in enumerate(there) if is_there]
    # More than were published: a store that opens takes over what the dead one had written whole.
    assert visible["good"] <= len(seen) < 20
    found = content(new, [root.ids[at] for at in seen], layout="segment")
    assert (found == before[seen]).all()
    again = ucm_json(*words)
    assert (again["exit"], again["present"], again["failed"]) == (0, len(seen), 0)
    assert again["copied"] == 20 - len(seen)
    assert (content(new, root.ids, layout="segment") == before).all()


def test_a_damaged_record_is_not_copied_and_is_named(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    root.fill("one", 40)
    for path in root.records()[::10]:
        data = bytearray(path.read_bytes())
        data[9000] ^= 1
        path.write_bytes(data)
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["failed"]) == (1, 36, 4)
    assert set(out["reasons"]) <= {"bad_checksum", "refused"}  # the latter in a second attempt
    assert ucm_json("verify", tmp_path / "archive")["good"] == 36


def test_records_are_encrypted_by_the_target_s_key(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    keys = [tmp_path / "old", tmp_path / "new"]
    for at, key in enumerate(keys):
        key.touch(0o600)
        key.write_text(f"{at + 1:064x}\n")
    root.fill("one", 3, encryption_key_file=str(keys[0]))
    before = content(root, root.ids, encryption_key_file=str(keys[0]))
    target = tmp_path / "target"
    options = ("--key-file", keys[0], "--to-key-file", keys[1], "--capacity", "64MiB")
    assert ucm_json("import", root.path, target, *options)["copied"] == 3
    with_new = ucm_json("verify", target, "--key-file", keys[1])
    assert (with_new["good"], with_new["encrypted"], with_new["decrypted"]) == (3, 3, 3)
    new = content(Written(target), root.ids, encryption_key_file=str(keys[1]), layout="segment")
    assert (new == before).all()


def side_bytes(root: Written, ids: list[bytes], name: str, **changes: Any) -> np.ndarray:
    """A side shard of these blocks, which all have it."""
    with root.open(sides=SIDES, layout="segment", **changes) as store:
        task = store.load_sides(ids, name)
        store.wait(task)
        data, found = task.result()
    assert found.all()
    return data


@pytest.mark.parametrize("encrypted", [False, True])
def test_side_shards_follow_their_blocks(
    root: Written, tmp_path: Path, ucm_json: Json, encrypted: bool
) -> None:
    ids = sided(root)
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(f"{7:064x}\n")
    to, of = ("--to-key-file", key), ("--key-file", key)
    first, again = [
        ucm_json("export", root.path, tmp_path / "archive", *(to if encrypted else ()))
        for _ in range(2)
    ]
    assert (first["exit"], first["copied"], first["sides"], first["failed"]) == (0, 4, 7, 0)
    assert (again["exit"], again["present"], again["sides"], again["failed"]) == (0, 4, 0, 0)
    whole = ucm_json("verify", tmp_path / "archive", *(of if encrypted else ()))
    assert (whole["exit"], whole["sides"], whole["bad_sides"]) == (0, 7, [])
    archive = Written(tmp_path / "archive")
    keys = {"encryption_key_file": str(key)} if encrypted else {}
    for name, blocks in [("mean-k", ids[:3]), ("codes", ids[:4])]:
        data = side_bytes(archive, blocks, name, **keys)
        assert (data == SIDES[name] % 251).all()
        assert data.shape == (len(blocks), SIDES[name])
    keys_file = tmp_path / "ids"
    keys_file.write_text("\n".join(one.hex() for one in ids[:3]))
    third = ucm_json("export", root.path, tmp_path / "other", "--keys", keys_file)
    assert (third["copied"], third["sides"]) == (3, 6)
    beside = ucm_json("verify", tmp_path / "other")
    assert (beside["sides"], beside["sides_alone"]) == (6, 0)  # in the records of their blocks


def test_a_damaged_side_shard_stays_and_its_block_goes(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    sided(root)
    path = max(root.records(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["sides"], out["failed"]) == (0, 4, 6, 0)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between two attempts, which pass on a clock of their own. A store is waited for eight
    of them, and each block is copied by itself."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    for name, value in {"time": clock, "PATIENCE_S": 8, "PAUSE_S": 1}.items():
        monkeypatch.setattr(transfer, name, value)
    monkeypatch.setattr(transfer, "_batches", lambda headers: ([header] for header in headers))
    return waits


def refusing(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    passes: int | None,
    kind: type[UcmError] = BusyError,
    first: int = 0,
) -> None:
    """Calls of this name are refused at once with an error of this kind, but for the ``first``
    ones; every one with the number ``passes`` passes."""
    real, tried = getattr(UcmPosixStore, name), iter(range(1, 1000))

    def dump(*arguments: Any, **sides: Any) -> Any:
        number = next(tried)
        if number > first and (passes is None or number % passes):
            raise kind("not now")
        return real(*arguments, **sides)

    monkeypatch.setattr(UcmPosixStore, name, dump)


@pytest.mark.parametrize("call", ["dump_data", "load_data"])
@pytest.mark.parametrize("kind", [BusyError, UnhealthyError])
def test_a_store_that_stays_full_or_unhealthy_is_waited_for_once(
    root: Written,
    tmp_path: Path,
    ucm_json: Json,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    kind: type[UcmError],
) -> None:
    root.fill("one", 5)
    root.fill("two", 3)
    refusing(monkeypatch, call, passes=None, kind=kind)
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["reasons"]) == (1, 0, {kind.kind: 8})
    assert len(waits) == 8


def test_an_import_that_was_given_up_says_that_it_goes_on(
    root: Written,
    tmp_path: Path,
    ucm: Any,
    ucm_json: Json,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root.fill("one", 5)
    of = ("import", root.path, tmp_path / "new", "--capacity", "64MiB")
    with monkeypatch.context() as refused:
        refusing(refused, "dump_data", passes=None, kind=UnhealthyError, first=2)
        result = ucm(*of)
    assert result.exit_code == 1
    assert "copied        2 (" in result.output and "3: 3 unhealthy" in result.output
    sentence = "not all could be copied for now: run the same command again, and it goes on"
    assert sentence in result.output
    again = ucm_json(*of)
    assert (again["exit"], again["copied"], again["present"]) == (0, 3, 2)


def test_an_error_that_no_wait_mends_ends_the_copy(
    root: Written,
    tmp_path: Path,
    ucm: Any,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root.fill("one", 1)
    refusing(monkeypatch, "dump_data", passes=None, kind=ConfigError)
    result = ucm("export", root.path, tmp_path / "archive")
    assert (result.exit_code, len(waits)) == (2, 0)
    assert "not now" in result.stderr


def test_side_shards_that_are_refused_are_waited_for_once(
    root: Written,
    tmp_path: Path,
    ucm_json: Json,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with root.open(sides=SIDES) as store:
        ids = root.dump(store, 5)
        for name, blocks in [("codes", ids), ("mean-k", ids[:1])]:
            data = np.ones((len(blocks), SIDES[name]), dtype=np.uint8)
            store.wait(store.dump_sides(blocks, {name: data}))
    refusing(monkeypatch, "dump_sides", passes=None)
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["sides"]) == (1, 5, 2)  # two beside their block
    assert out["reasons"] == {"busy": 4}
    assert len(waits) == 8


@pytest.mark.parametrize("kind", [BusyError, UnhealthyError])
def test_a_target_that_gets_on_is_waited_for_again(
    root: Written,
    tmp_path: Path,
    ucm_json: Json,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[UcmError],
) -> None:
    root.fill("one", 5)
    refusing(monkeypatch, "dump_data", passes=7, kind=kind)
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["failed"]) == (0, 5, 0)
    assert len(waits) == 5 * 6


def late(count: int | None) -> Callable[..., Any]:
    """``load_sides`` whose first ``count`` calls are past their deadline; None: all. A deadline of
    no time would be the tier's fault on a busy machine, and open its breaker."""
    real, called = UcmPosixStore.load_sides, iter(range(1000))

    def load(store: UcmPosixStore, ids: list[bytes], name: str) -> Any:
        if count is None or next(called) < count:
            late = dict.fromkeys(range(len(ids)), DeadlineError("late"))
            raise TaskError("not every side shard was read", failures=late)
        return real(store, ids, name)

    return load


@pytest.mark.parametrize(
    ("count", "found"),
    [(5, (0, 4, 7, {})), (None, (1, 4, 0, {"timeout": 8}))],
    ids=["some", "all"],
)
def test_a_side_shard_that_cannot_be_read_for_now_is_read_again_and_then_counted(
    root: Written,
    tmp_path: Path,
    ucm_json: Json,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    count: int | None,
    found: tuple[int, int, int, dict[str, int]],
) -> None:
    sided(root)
    monkeypatch.setattr(UcmPosixStore, "load_sides", late(count))
    out = ucm_json("export", root.path, tmp_path / "archive")
    assert (out["exit"], out["copied"], out["sides"], out["reasons"]) == found
    assert out["failed"] == sum(found[3].values())
    assert len(waits) == (count or 2 * 8)  # for the source, and for the target


def test_one_namespace_only_and_the_chain_of_its_blocks(
    root: Written, tmp_path: Path, ucm_json: Json
) -> None:
    with root.open("one") as store:
        ids = [bytes([at]) * 16 for at in range(1, 4)]
        parents, tenant = [bytes(16), *ids[:-1]], b"t" * 32
        store.describe(ids, parents=parents, ordinals=[0, 1, 2], tokens=[16] * 3, tenant=tenant)
        data = np.ones((3, BLOCK), dtype=np.uint8)
        offsets = [layer * sum(PIECES) + at for layer in range(LAYERS) for at in (0, PIECES[0])]
        rows = np.array([[row.ctypes.data + at for at in offsets] for row in data], dtype=np.uint64)
        store.wait(store.dump_data(ids, [0] * 3, rows))
    root.fill("two", 2)
    out = ucm_json("export", root.path, tmp_path / "a", "--namespace", root.namespace("one")[:8])
    assert out["copied"] == 3
    again = ucm_json("import", tmp_path / "a", tmp_path / "b", "--capacity", "64MiB")
    assert again["copied"] == 3
    for path in (root.path, tmp_path / "b"):
        (found,) = ucm_json("inspect", "--tenants", path)["roots"]
        assert [one["tenant"] for one in found["tenants"] if one["tenant"]] == ["74" * 32]


def test_the_parts_of_every_rank_are_copied(root: Written, tmp_path: Path, ucm_json: Json) -> None:
    for rank in range(2):
        with root.open("one", part=(0, 0, rank)) as store:
            root.dump(store, 2, first=2 * rank)
    assert ucm_json("export", root.path, tmp_path / "a")["copied"] == 4
    for path in (root.path, tmp_path / "a"):
        (namespace,) = ucm_json("inspect", path)["roots"][0]["namespaces"]
        assert namespace["parts_present"] == {"g0p0t0": 2, "g0p0t1": 2}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "/nowhere", "/tmp/x"), "/nowhere"),
        (("export", "ROOT", "ARCHIVE", "--namespace", "zz"), "no namespace of"),
        (("export", "ROOT", "ARCHIVE", "--keys", "KEYS"), "is no record id"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    root: Written, tmp_path: Path, ucm: Any, arguments: tuple[str, ...], text: str
) -> None:
    root.fill("one", 1)
    (tmp_path / "keys").write_text("12")
    names = {"ROOT": root.path, "ARCHIVE": tmp_path / "a", "KEYS": tmp_path / "keys"}
    result = ucm(*(names.get(word, word) for word in arguments))
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "a").exists()
