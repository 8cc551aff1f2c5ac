"""Harm to a root under an open store: every function harms it, waits, and reverts the harm.

Mounts are real and need root. Every mount point is in the test's own directory and is unmounted
when the test ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import pytest
from fuse import unmount

#: An unprivileged user that owns nothing.
NOBODY = 65534
MARKER = "ucm-root.json"

Kind = Literal["plain", "tmpfs", "bind"]
RootHarm = Callable[[Path], Iterator[None]]


def is_root() -> bool:
    """True if this process may mount and change its user."""
    return os.geteuid() == 0 and _can_mount()


def need_root() -> None:
    """Skips without root, with the reason; with ``UCM_REQUIRE_ROOT_TESTS`` in the environment that
    is a failure."""
    if is_root():
        return
    words = "mounting file systems and changing the user needs root"
    if os.environ.get("UCM_REQUIRE_ROOT_TESTS"):
        pytest.fail(f"UCM_REQUIRE_ROOT_TESTS is set, but {words}")
    pytest.skip(words)


def _can_mount() -> bool:
    capabilities = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    return bool(int(capabilities.split()[1], 16) & (1 << 21))  # CAP_SYS_ADMIN


def mount(*words: str | Path) -> None:
    """Runs mount; an error of it fails the test."""
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True, text=True)


@contextmanager
def new_root(base: Path, kind: Kind, size: str = "8m", inodes: int = 400) -> Iterator[Path]:
    """A root below ``base``: a directory, a small file system of its own, or a bind mount."""
    root = base / "root"
    with ExitStack() as stack:
        if kind != "plain":
            need_root()
            root.mkdir()
            stack.callback(unmount, root)
            place = root if kind == "tmpfs" else base / "export"
            place.mkdir(exist_ok=True)
            mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=0700", "none", place)
            if kind == "bind":
                stack.callback(unmount, place)
                mount("--bind", place, root)
        yield root


@contextmanager
def as_nobody(*roots: Path) -> Iterator[None]:
    """This process, all its threads, without the rights of root; it owns these directories and can
    reach them."""
    need_root()
    for root in roots:
        root.mkdir(exist_ok=True)
        for path in [root, *root.rglob("*")]:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    above = {path for root in roots for path in root.parents}
    # those that pytest made
    shut = [path for path in above if path.stat().st_mode & 0o777 == 0o700]
    for path in shut:
        path.chmod(0o711)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for path in shut:
            path.chmod(0o700)


@contextmanager
def as_root() -> Iterator[None]:
    """Root's rights again, during a change behind the store's back."""
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(NOBODY)


def remove(path: Path) -> None:
    """Removes anything under a block's name."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# Harms
# --------------------------------------------------------------------------------------------------


def read_only(root: Path) -> Iterator[None]:
    """The file system is mounted again, read-only."""
    mount("-o", "remount,ro", root)
    yield
    mount("-o", "remount,rw", root)


def moved_away(root: Path) -> Iterator[None]:
    """Renames the whole directory, and back. To a store that is the same as one that was removed:
    the collector, which looks once a second, may make an empty root in its place."""
    aside = root.with_name("aside")
    root.rename(aside)
    yield
    made = [*root.rglob("*.bin"), *root.rglob("*.seg")]
    for _ in range(1000):
        if root.exists():
            _remove_tree(root)
        try:
            aside.rename(root)
            break
        except OSError as error:  # one was made since
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    assert not made, "records were written in the place of a moved root"


def _empty(directory: Path) -> None:
    """Removes everything below, while a store may still write into it."""
    for _ in range(1000):
        try:
            for path in directory.iterdir():
                remove(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
    raise AssertionError(f"{directory} is filled faster than it can be emptied")


def _remove_tree(directory: Path) -> None:
    """Removes a directory, while a store may still write into it."""
    for _ in range(1000):
        _empty(directory)
        try:
            directory.rmdir()
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    raise AssertionError(f"{directory} is filled faster than it can be removed")


def removed(root: Path) -> Iterator[None]:
    """The whole directory is removed and does not come back."""
    _remove_tree(root)
    yield


def emptied(root: Path) -> Iterator[None]:
    """Everything below is removed, marker included; only the marker comes back."""
    marker = (root / MARKER).read_bytes()
    _empty(root)
    yield
    (root / MARKER).write_bytes(marker)
    assert not [
        *root.rglob("*.bin"),
        *root.rglob("*.seg"),
    ], "something was written to a directory that is no root"


def no_namespace(root: Path) -> Iterator[None]:
    """The namespace's directory is removed and does not come back."""
    _remove_tree(next(root.glob("*/manifest.json")).parent)
    yield


def no_temporary_directory(root: Path) -> Iterator[None]:
    """The directory of private files is removed and does not come back."""
    _remove_tree(next(root.glob("*/tmp")))
    yield


def no_marker(root: Path) -> Iterator[None]:
    """The marker is moved away, and back."""
    marker, aside = root / MARKER, root / "aside"
    marker.rename(aside)
    yield
    aside.rename(marker)


def unmounted(root: Path) -> Iterator[None]:
    """The share is unmounted under the running process; below it is an empty directory of another
    device."""
    unmount(root)
    yield
    written = list(root.iterdir())
    mount("--bind", root.with_name("export"), root)
    assert not written, "something was written below the mount point"


def covered(root: Path) -> Iterator[None]:
    """Another, empty file system is mounted over the root."""
    mount("-t", "tmpfs", "none", root)
    yield
    written = list(root.iterdir())
    unmount(root)
    assert not written, "something was written to another file system"


def full(root: Path) -> Iterator[None]:
    """Another program uses all space of the file system."""
    filler, chunk = root / "filler", bytes(4096)
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(chunk):
                pass
        except OSError:
            pass
    yield
    filler.unlink()


def no_inodes(root: Path) -> Iterator[None]:
    """Another program uses all inodes of the file system."""
    fillers = root / "fillers"
    fillers.mkdir()
    for number in range(100_000):
        try:
            (fillers / str(number)).touch()
        except OSError:
            break
    yield
    shutil.rmtree(fillers)


def other_owner(root: Path) -> Iterator[None]:
    """Root becomes the owner of the directory and closes it; the store runs as another user."""
    with as_root():
        os.chown(root, 0, 0)
        root.chmod(0o700)
    yield
    with as_root():
        os.chown(root, NOBODY, NOBODY)


def no_permission(root: Path) -> Iterator[None]:
    """The blocks' directory loses its mode bits; the store runs as an unprivileged user."""
    (blocks,) = [*root.glob("*/blocks"), *root.glob("*/segments")]
    blocks.chmod(0)
    yield
    blocks.chmod(0o700)
