"""Why a directory cannot be used, and what to do, where only its owner can mend that: a file system
that is read-only, a directory without permission, a file in its place."""

from __future__ import annotations

import errno
import os
import pwd
import re
import uuid

#: The core's error of one operation on a file: its path, and the system's number.
_FAILED = re.compile(r"\[path=([^\]]+)\][^;]*\(os error (\d+)\)")
#: The file that makes a directory a store's root.
ROOT_MARKER = "ucm-root.json"
#: Errors that no retry mends.
LASTING = (errno.EROFS, errno.EACCES, errno.ENOTDIR)


def remedy(trouble: str) -> str:
    """The cause and the cure of what the core reports of a store, a sentence for each directory;
    empty where the store may recover by itself."""
    found = [(path, int(number)) for path, number in _FAILED.findall(trouble)]
    texts = [cause_and_cure(path, number) for path, number in found if number in LASTING]
    return "; ".join(dict.fromkeys(texts))


def why_unusable(root: str) -> str:
    """Makes a directory if it is missing, and a file in it that is removed again. Returns why that
    fails, with the cure where there is one; empty if it does not. A root that is complete is only
    read: one on a read-only file system serves."""
    private = os.path.join(root, f".{uuid.uuid4().hex}.tmp")
    try:
        if os.path.exists(os.path.join(root, ROOT_MARKER)):
            os.listdir(root)
            return ""
        os.makedirs(root, exist_ok=True)
        os.close(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(private)
    except OSError as error:
        if error.errno in LASTING:
            return cause_and_cure(root, error.errno)
        return f"{root} cannot be used: {error.strerror}"
    return ""


def cause_and_cure(path: str, number: int) -> str:
    """A sentence for one of :data:`LASTING` on a path: the cause, a colon, what to do."""
    if path.endswith((".tmp", ROOT_MARKER)):  # the root's own files
        path = os.path.dirname(path)
    there = _nearest(path)
    if number == errno.ENOTDIR:
        return f"{there} is a file, not a directory: remove it, or choose another directory"
    if number == errno.EROFS:
        mount = _mount_of(there)
        return (
            f"{path} is on a file system that is mounted read-only at {mount}: mount it for"
            " writing (in a container: the volume without :ro), or choose another directory"
        )
    return (
        f"{path} may not be used by {_user(os.geteuid())}: {there} {_owned(there)}; change its"
        " owner or mode, run the engine as its owner, or choose another directory"
    )


def _nearest(path: str) -> str:
    """The longest part of a path that exists and is reachable; a file where a directory should
    be."""
    there = os.path.abspath(path)
    while not os.path.exists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    return there


def _mount_of(path: str) -> str:
    there = os.path.realpath(path)
    while not os.path.ismount(there):
        there = os.path.dirname(there)
    return there


def _owned(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"belongs to {_user(status.st_uid)} with mode {status.st_mode & 0o7777:04o}"


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
