"""Files that hold a secret: keys of encryption and of tenants. The core has the same rule for the
files that it reads.

A file of our own that other users may read is refused. One of another owner is read with a warning:
it may be a secret that was mounted for us, whose mode we cannot change.
"""

from __future__ import annotations

import logging
import os
import stat

from ucm.errors import ConfigError

logger = logging.getLogger("ucm.store")

#: Mode bits of all users but the owner.
_OTHERS = 0o077


def read_secret(path: str, what: str, most: int) -> bytes:
    """At most ``most`` bytes of a file that holds a secret; ``what`` is its name in the
    configuration.

    Raises :class:`OSError`, and :class:`~ucm.errors.ConfigError` for a file of our own that others
    may read.
    """
    full = os.path.expanduser(path)
    with open(full, "rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if mode & _OTHERS:
            wrong = (
                f"{what} is a secret, and its file {full} is open to other users (mode {mode:04o})"
            )
            if found.st_uid == os.geteuid():
                raise ConfigError(
                    f"{wrong}: run chmod 600 {full} (where Kubernetes mounts it: defaultMode: 0400)"
                )
            logger.warning(
                "%s; it belongs to another user and is used all the same: let its owner run chmod"
                " 600 %s",
                wrong,
                full,
            )
        return file.read(most)
