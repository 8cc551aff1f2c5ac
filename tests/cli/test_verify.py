"""``ucm verify``: every kind of damage is found, on a live root, and nothing is changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cli_damage import DAMAGES, flip, newer
from cli_roots import RECORD, Written
from click.testing import Result

from ucm.cli.records import Pace, RecordVerifier
from ucm.cli.roots import Found, Root
from ucm.errors import UcmError

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]


def around_verifying(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Found], None] = lambda found: None,
    after: Callable[[Found], None] = lambda found: None,
) -> None:
    """Runs a function around the verification of every record."""
    verify = RecordVerifier.verify

    def verifying(self: RecordVerifier, found: Found, *rest: Any) -> Any:
        before(found)
        verdict = verify(self, found, *rest)
        after(found)
        return verdict

    monkeypatch.setattr(RecordVerifier, "verify", verifying)


def test_a_good_root(root: Written, ucm: Run, ucm_json: Json) -> None:
    root.fill("one").fill("two", 2)
    before = root.tree()
    document = ucm_json("verify", root.path)
    assert document["exit"] == 0
    assert (document["records"], document["good"], document["bad"]) == (8, 8, 0)
    assert document["bytes"] == document["bytes_read"] == 8 * RECORD
    assert document["bad_records"] == []
    done = ucm("verify", root.path)
    assert done.exit_code == 0
    assert document["reader"] in done.stdout
    assert root.tree() == before


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_each_kind_is_found(name: str, root: Written, ucm: Run, ucm_json: Json) -> None:
    root.fill("one", 3)
    damage, reason = DAMAGES[name]
    path = root.records()[1]
    damage(path)
    document = ucm_json("verify", root.path)
    assert document["exit"] == 1
    assert (document["good"], document["bad"]) == (2, 1)
    assert document["reasons"] == {reason: 1}
    (bad,) = document["bad_records"]
    assert bad["path"] == str(path.relative_to(root.path))
    done = ucm("verify", root.path)
    assert done.exit_code == 1
    assert reason in done.stdout
    assert path.name in done.stdout


def test_what_is_whole_but_belongs_elsewhere_is_found(root: Written, ucm_json: Json) -> None:
    root.fill("one", 3).fill("two", 1)
    one, other = root.records(root.namespace("one")), root.records(root.namespace("two"))
    shutil.copy(one[1], one[2])
    shutil.copy(other[0], one[0])
    document = ucm_json("verify", root.path)
    assert document["exit"] == 1
    assert document["reasons"] == {"foreign_id": 1, "foreign_identity": 1}


def test_a_part_of_other_sizes_is_reported(root: Written, ucm_json: Json) -> None:
    root.fill("one", 2)
    manifest = root.path / root.namespace("one") / "manifest.json"
    document = json.loads(manifest.read_text())
    document["parts"]["g0p0t0"]["layers"] = 4
    manifest.write_text(json.dumps(document))
    found = ucm_json("verify", root.path)
    assert found["reasons"] == {"foreign_shape": 2}


def test_a_newer_version_is_good_news_and_left_alone(
    root: Written, ucm_json: Json, ucm: Run
) -> None:
    root.fill("one", 2)
    newer(root.records()[0])
    before = root.tree()
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["good"], document["newer"], document["bad"]) == (0, 1, 1, 0)
    assert root.tree() == before


def test_encrypted_records_are_judged_with_and_without_their_key(
    root: Written,
    ucm_json: Json,
    ucm: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCM_ENCRYPTION_KEY", raising=False)
    key, other = tmp_path / "key", tmp_path / "other"
    for file, text in ((key, "5a" * 32), (other, "5b" * 32)):
        file.touch(0o600)
        file.write_text(text)
    root.fill("one", 3, encryption_key_file=str(key))
    for arguments, decrypted in (((), 0), (("--key-file", key), 3), (("--key-file", other), 0)):
        document = ucm_json("verify", root.path, *arguments)
        assert (document["exit"], document["good"]) == (0, 3)
        assert (document["encrypted"], document["decrypted"]) == (3, decrypted)
    assert "their key is not here" in ucm("verify", root.path).stdout
    flip(4100)(root.records()[0])
    for arguments in ((), ("--key-file", key)):
        document = ucm_json("verify", root.path, *arguments)
        assert (document["exit"], document["good"], document["reasons"]) == (
            1,
            2,
            {"bad_checksum": 1},
        )
    wrong = ucm("verify", root.path, "--key-file", tmp_path / "none")
    assert (wrong.exit_code, "cannot be read" in wrong.output) == (2, True)
    key.write_text("5a")
    wrong = ucm("verify", root.path, "--key-file", key)
    assert (wrong.exit_code, "64 hex digits" in wrong.output) == (2, True)
    key.chmod(0o644)
    wrong = ucm("verify", root.path, "--key-file", key)
    assert wrong.exit_code == 2
    assert f"chmod 600 {key}" in wrong.output.replace("\n", " "), wrong.output


def test_records_removed_meanwhile_are_no_errors(
    root: Written, ucm_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 5)
    paths = root.records()

    def remove(found: Found) -> None:
        for path in paths[1:3]:  # after the scan, before they are read
            path.unlink(missing_ok=True)
        shutil.rmtree(paths[3].parent, ignore_errors=True)

    around_verifying(monkeypatch, after=remove)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["good"], document["removed"], document["bad"]) == (
        0,
        2,
        3,
        0,
    )


def test_while_an_engine_writes_and_its_collector_removes(root: Written, ucm_json: Json) -> None:
    root.fill("one", 16)
    with root.open(storage_capacity=str(20 * RECORD)) as store:

        def write() -> None:
            for first in range(100, 200, 4):
                with suppress(UcmError):  # full, or not counted yet: the next ones may fit
                    root.dump(store, 4, first)

        writer = threading.Thread(target=write)
        writer.start()
        seen = [ucm_json("verify", root.path) for _ in range(5)]
        writer.join()
    for document in (*seen, ucm_json("verify", root.path)):
        assert (document["exit"], document["bad"], document["unreadable"]) == (0, 0, 0)
        assert document["good"] + document["removed"] == document["records"]


def test_a_bad_read_is_read_again_before_it_is_believed(
    root: Written, ucm_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 3)
    read, seen = Root.read, set()

    def once_bad(self: Root, found: Found, *where: Any) -> tuple[bytes, int]:
        data, size = read(self, found, *where)
        if found.name in seen:
            return data, size
        seen.add(found.name)
        return data[:-1] + bytes([data[-1] ^ 1]), size

    monkeypatch.setattr(Root, "read", once_bad)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["good"]) == (0, 3)


def test_what_cannot_be_read_is_told_and_left(
    root: Written, ucm_json: Json, ucm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 2)
    name = root.records()[0].name
    read = Root.read

    def failing(self: Root, found: Found, *where: Any) -> tuple[bytes, int]:
        if found.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, found, *where)

    monkeypatch.setattr(Root, "read", failing)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["unreadable"], document["good"]) == (1, 1, 1)
    assert document["reasons"] == {"io_error": 1}
    assert os.strerror(errno.EIO) in ucm("verify", root.path).stdout


def test_a_file_system_without_direct_io(
    root: Written, ucm_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 2)
    opened = os.open

    def without(path: Any, flags: int, *more: Any, **also: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *more, **also)

    monkeypatch.setattr(os, "open", without)
    document = ucm_json("verify", root.path)
    assert (document["good"], document["direct_io"]) == (2, False)


def test_a_sample_and_a_single_namespace(root: Written, ucm_json: Json) -> None:
    root.fill("one", 8).fill("two", 4)
    assert ucm_json("verify", root.path, "--sample", "50%")["good"] == 6
    assert ucm_json("verify", root.path, "--sample", "1")["good"] == 2, (
        "one of each namespace at least"
    )
    assert ucm_json("verify", root.path, "--sample", "0%")["good"] == 0
    two = root.namespace("two")
    document = ucm_json("verify", root.path, "--namespace", two[:6])
    assert (document["namespaces"], document["good"]) == ([two], 4)


def test_links_are_not_followed(root: Written, tmp_path: Path, ucm_json: Json) -> None:
    root.fill("one", 2)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"not a record")
    first = root.records()[0]
    first.with_name(first.name[:2] + "f" * 30 + ".bin").symlink_to(outside)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["records"]) == (0, 2)


def test_interrupted_it_says_what_it_saw(
    root: Written, ucm: Run, ucm_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.fill("one", 3)
    flip(4100)(root.records()[0])
    last = root.records()[2].name

    def interrupt(found: Found) -> None:
        if found.name == last:
            raise KeyboardInterrupt

    around_verifying(monkeypatch, before=interrupt)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["interrupted"]) == (130, True)
    assert document["good"] + document["bad"] == 2
    assert "interrupted" in ucm("verify", root.path).stdout


def test_the_rate_is_held() -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(1000, lambda: now[0], sleep)
    for _ in range(10):
        pace.spend(500)
    assert now[0] == pytest.approx(104.5), "the last 500 bytes are being read still"
    now[0] += 60.0
    before = len(slept)
    for _ in range(3):
        pace.spend(500)
    assert len(slept) == before, "a second is caught up"
    pace.spend(500)
    assert len(slept) == before + 1, "and no more"
    Pace(None, lambda: now[0], sleep).spend(10**12)
    assert len(slept) == before + 1


def test_a_rate_of_the_command_line_reaches_the_pace(root: Written, ucm_json: Json) -> None:
    root.fill("one", 1)
    assert ucm_json("verify", root.path)["rate"] == 256 << 20
    assert ucm_json("verify", root.path, "--rate", "200MiB/s")["rate"] == 200 << 20
    assert ucm_json("verify", root.path, "--rate", "unlimited")["rate"] is None
