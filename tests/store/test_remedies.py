"""Roots that no retry mends: the cause and the cure."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from ucm.store.factory import UcmConnectorFactoryV1, remedy, why_unavailable, why_unusable

SIZES = {"tensor_size": 4096, "shard_size": 4096, "block_size": 4096, "identity": "x"}


def test_a_file_in_the_way_of_a_root_is_named(tmp_path: Path) -> None:
    """As the core reports it."""
    (tmp_path / "file").write_text("in the way")
    config = {"storage_backends": str(tmp_path / "file" / "root"), "device_id": 0, **SIZES}
    store = UcmConnectorFactoryV1.create_connector("UcmPosixStore", config)
    try:
        why = why_unavailable(store)
    finally:
        store.close()
    cure = f"{tmp_path}/file is a file, not a directory: remove it, or choose another directory"
    assert why.endswith(f": {cure}")
    assert remedy(why) == cure
    assert why_unusable(str(tmp_path / "file" / "root")) == cure


def reported(path: str, number: int) -> str:
    return f"posix is off: cannot do it [path={path}]: {os.strerror(number)} (os error {number})"


def test_a_directory_without_permission_is_named_with_its_owner(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    text = remedy(reported(f"{locked}/root/ucm-root.json", errno.EACCES))
    assert text.startswith(f"{locked}/root may not be used by ")
    owner = locked.owner()
    assert f"{locked} belongs to {owner} ({os.getuid()}) with mode 0500" in text
    assert "run the engine as its owner" in text
    assert stat.S_IMODE(locked.stat().st_mode) == 0o500, "nothing is changed"


def test_a_file_system_for_reading_only_is_named_with_its_mount(tmp_path: Path) -> None:
    text = remedy(reported(f"{tmp_path}/.0123.tmp", errno.EROFS))
    mount = tmp_path
    while not mount.is_mount():
        mount = mount.parent
    assert f"{tmp_path} is on a file system that is mounted read-only at {mount}:" in text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENOENT])
def test_what_may_pass_has_no_remedy(number: int) -> None:
    assert remedy(reported("/a", number)) == ""


def test_two_directories_have_a_sentence_each() -> None:
    both = "; ".join(reported(path, errno.EACCES) for path in ("/a/x", "/b/x", "/a/x"))
    assert len(remedy(both).split("; ")) == 2 * 2  # each has a "; change its owner"


def test_a_root_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    assert why_unusable(str(tmp_path / "new" / "root")) == ""
    assert list((tmp_path / "new" / "root").iterdir()) == []
