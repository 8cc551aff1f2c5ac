"""What rounds leave behind on the medium, so that it does not fall on whoever is measured next."""

from __future__ import annotations

import os


def hollow(directory: str) -> None:
    """Give back what files take on the medium and in the page cache, but not the files: they go at
    the end of the run.

    ext4 passes over every inode that was freed in the last minutes, so that files cost many times
    as much where others were removed just before: the arm that follows one with many files would
    pay for them.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path) and os.path.isfile(path):
                os.truncate(path, 0)
