"""Power cuts: a file system in an image, the image copied at random moments, and every copy
mounted.

The image lies on the matrix's own file system (``fuse.py``). While that holds back writes the image
does not change, so a copy made then is the state of a disk after a power cut at that moment: data
that the kernel had not written is lost.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import roots
from child import MANY
from disk import make
from fuse import Fuse
from ground import Ground, block_ids, wait_until
from processes import child, new_seed

#: The write order of the file system: default; without order between a file's bytes and its name;
#: and without ext4's default handling of renamed files.
MODES = ("data=ordered", "data=writeback", "data=writeback,noauto_da_alloc")
SIZE = 96 << 20


def power_cuts(base: Path, long: bool) -> None:
    """A writer works with syncs at intervals; the power is cut. Synced blocks are hits, and no
    block is wrong."""
    source, names = random.Random(new_seed()), block_ids(MANY, "many")
    hits = 0
    for number in range(8 if long else 1):
        place = base / f"round-{number}"
        place.mkdir()
        with ExitStack() as stack:
            disk, mounted = place / "disk", place / "mounted"
            system = Fuse(disk, mounted)
            stack.callback(system.close)
            make(disk / "image", SIZE)
            _mount(mounted / "image", place / "live", source.choice(MODES), stack)
            clones, published = [], 0
            with child("write_many", place / "live" / "root", source.randrange(1 << 32)) as (
                _,
                lines,
            ):
                for cut in range(4 if long else 2):
                    for _ in range(source.randrange(1, 160)):
                        assert lines.readline().startswith("published"), "the writer ended early"
                        published += 1
                    safe = published if source.random() < 0.5 else 0
                    syncing = subprocess.Popen(["sync", "-f", str(place / "live")])
                    if safe:
                        syncing.wait()  # otherwise the cut is in the middle of it
                    clones.append((place / f"clone-{cut}", safe))
                    system.behave(stall=["WRITE"])
                    shutil.copyfile(disk / "image", clones[-1][0])
                    system.behave()
                    syncing.wait()
        shutil.rmtree(place / "disk")
        for clone, safe in clones:
            with ExitStack() as stack:
                _mount(clone, place / "seen", "", stack)
                found = _assert_survived(place / "seen" / "root", names)
                assert found >= safe, "a published and synced block is lost"
                hits += found
            clone.unlink()
    print(f"hits found after power cuts: {hits}")


def _mount(image: Path, place: Path, options: str, stack: ExitStack) -> None:
    place.mkdir(exist_ok=True)
    roots.mount("-o", ",".join(filter(None, ("loop", options))), image, place)
    stack.callback(subprocess.run, ["umount", str(place)], check=True)


def _assert_survived(root: Path, names: list[bytes]) -> int:
    """Checks that every hit is exact and that lost blocks can be stored again, also if a file's
    bytes are missing; returns the hits."""
    # A cut tears more records than a minute may have before the breaker opens.
    ground = Ground(root, breaker={"cool_down_s": 0.5, "damaged_per_minute": 1_000_000})
    # one by one, because a failure cancels others of its load
    hits = sum(not ground.load([name])[1] for name in names)
    for first in range(0, len(names), 32):
        some = names[first : first + 32]
        wait_until(lambda some=some: ground.is_healthy(some), "blocks are stored and found again")  # type: ignore[misc]
    for first in range(0, len(names), 32):
        ground.assert_hits(names[first : first + 32])
    ground.close()
    return hits
