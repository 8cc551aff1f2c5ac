"""Rows with two hosts on one root, and with processes killed at random moments.

A host is a process with a mount namespace, a name and a clock of its own: it has the root at a path
of its own, and its clock is wrong. A small library in this file, compiled here and preloaded before
the C library, shifts the clock; times of files come from the file system, as on a share.
"""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import columns
from child import BLOCKS, SMALL
from ground import Ground, block_ids, wait_until
from harm import header_of
from processes import assert_all_exact, child, ended_well, new_seed

#: Mounts an export at a path while it is entered.
Mounted = Callable[[Path, Path], AbstractContextManager[object]]
#: Seconds by which a host is before or behind the file system.
APART = 3600
#: Limits of one model and of all together, in bytes.
QUOTA, LIMIT = 1 << 20, 4 << 20
_CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    const char *text = getenv("TRUST_CLOCK_SHIFT");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, clock, at);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
#: Names the host, mounts the root privately, and executes the program.
_ENTER = 'hostname "$1" && mount --bind "$2" "$3" && shift 3 && exec "$@"'


def clock_library(base: Path) -> Path:
    """A library that shifts a process's clock by ``TRUST_CLOCK_SHIFT`` seconds."""
    source, library = base / "clock.c", base / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


def two_hosts(base: Path, long: bool, mounted: Mounted | None = None) -> None:
    """Two hosts with different clocks write the same ids, then write, read and remove in little
    space.

    ``mounted`` mounts an export for a host; else each has a mount namespace with a bind mount.
    """
    source, library = random.Random(new_seed()), clock_library(base)
    for number in range(4 if long else 1):
        place = base / f"{number}-wide"
        _run_hosts("write_as_host", place, library, source, mounted)
        ground = Ground(place / "export" / "root")
        assert assert_all_exact(ground) >= set(block_ids(BLOCKS, "shared"))
        headers = [header_of(place.read()) for place in ground.places()]
        times = sorted(header.time_ns for header in headers)
        assert times[-1] - times[0] > APART * 1_000_000_000, "the hosts' clocks were the same"
        assert len({header.writer for header in headers}) > 1, "one of the hosts stored nothing"
        ground.close()
        place = base / f"{number}-small"
        _run_hosts("mix", place, library, source, mounted)
        ground = Ground(place / "export" / "root", storage_capacity=SMALL)
        assert_usage(ground)
        assert_all_exact(ground)
        names = block_ids(3, "after")
        wait_until(lambda ground=ground, names=names: ground.is_healthy(names), "blocks are stored")  # type: ignore[misc]
        ground.close()


def _run_hosts(
    work: str, base: Path, library: Path, source: random.Random, mounted: Mounted | None
) -> None:
    """Runs this work on both hosts until they end."""
    (base / "export").mkdir(parents=True)
    with ExitStack() as stack:
        hosts = []
        for name, shift in (("left", -APART), ("right", APART)):
            place = base / f"seen-by-{name}"
            place.mkdir(exist_ok=True)
            if mounted is None:
                enter = [
                    "unshare",
                    "--mount",
                    "--uts",
                    "sh",
                    "-c",
                    _ENTER,
                    "sh",
                    name,
                    str(base / "export"),
                    str(place),
                ]
            else:
                stack.enter_context(mounted(base / "export", place))
                enter = [
                    "unshare",
                    "--uts",
                    "sh",
                    "-c",
                    'hostname "$1" && shift && exec "$@"',
                    "sh",
                    name,
                ]
            env = {"LD_PRELOAD": str(library), "TRUST_CLOCK_SHIFT": str(shift)}
            host, _ = stack.enter_context(
                child(work, place / "root", source.randrange(1 << 32), enter, env)
            )
            hosts.append(host)
        for host in hosts:
            ended_well(host)
    assert not list(base.glob("seen-by-*/*")), "a host's mount was everybody's"


def random_kills(base: Path, long: bool) -> None:
    """Processes that write, read and remove are killed at random and replaced; one ends normally in
    every round."""
    source, root = random.Random(new_seed()), base / "root"
    for _ in range(20 if long else 2):
        with ExitStack() as stack:
            started = [
                stack.enter_context(child("mix", root, source.randrange(1 << 32))) for _ in range(3)
            ]
            for process, lines in started[1:]:
                for _ in range(source.randrange(1, 100)):
                    assert lines.readline(), "a process ended early"
                process.kill()
                process.wait()
            ended_well(started[0][0])
    ground = Ground(root, storage_capacity=SMALL)
    assert_usage(ground)
    assert_all_exact(ground)
    names = block_ids(16, "after")
    wait_until(lambda: ground.is_healthy(names), "blocks are stored and found again")
    assert_usage(ground)
    ground.close()


def two_collectors(base: Path, long: bool) -> None:
    """The collector stops until another takes over, and then continues."""
    source, root = random.Random(new_seed()), base / "root"
    for _ in range(2 if long else 1):
        with child("mix", root, source.randrange(1 << 32)) as (process, lines):
            wait_until(lambda: list(root.glob("space/collector-*.json")), "it is the collector")
            assert lines.readline(), "the process ended early"
            process.send_signal(signal.SIGSTOP)
            ground = Ground(root, storage_capacity=SMALL)
            wait_until(
                lambda ground=ground: ground.store.stats()["storage_collector"] == 1,
                "another follows",
                120,
            )  # type: ignore[misc]
            process.send_signal(signal.SIGCONT)
            for step in range(30):
                names = block_ids(8, f"beside {step}")
                ground.dump(names)  # published, or refused for lack of space
                ground.load(names)
            ended_well(process)
            ground.close()
            # counts again: both may have written the same block
            ground = Ground(root, storage_capacity=SMALL)
            assert_usage(ground)
            assert_all_exact(ground)
            wait_until(
                lambda ground=ground: ground.is_healthy(block_ids(3, "after")), "blocks are stored"
            )  # type: ignore[misc]
            ground.close()


def quota(base: Path, long: bool) -> None:
    """One model writes three times its quota; the other's blocks stay, and its own newest ones are
    hits."""
    del long
    root = base / "root"
    rules = {"namespace_quota": QUOTA, "storage_capacity": LIMIT}
    other = Ground(root, identity=f"another {columns.RUN}", **rules)
    kept = block_ids(10, "kept")
    wait_until(lambda: other.is_healthy(kept), "blocks are stored")
    theirs = other.files()
    ground = Ground(root, **rules)
    names = block_ids(130, "many")
    for first in range(0, len(names), 10):
        some = names[first : first + 10]
        wait_until(lambda some=some: not ground.dump(some), "blocks are stored")  # type: ignore[misc]

    def used() -> int:
        return ground.bytes_stored() - sum(path.stat().st_size for path in theirs)

    # Every count enforces it, and there is one after each sixteenth of the limit.
    wait_until(lambda: used() <= QUOTA + LIMIT // 16, "the quota is kept")
    other.assert_hits(kept)
    for first in range(0, len(names), 32):
        ground.load(names[first : first + 32])  # each one right, or removed for the quota
    wait_until(lambda: ground.is_healthy(names[:3]), "blocks are stored and found again")
    ground.close()
    other.close()


def assert_usage(ground: Ground) -> None:
    """The store's used bytes are those of the files, within the limit."""
    wait_until(lambda: ground.store.stats()["storage_counted"], "the root was counted")
    limit = ground.store.stats()["storage_capacity_bytes"]
    assert ground.bytes_stored() <= limit, "more bytes are stored than the limit"
    wait_until(
        lambda: ground.store.stats()["storage_used_bytes"] == ground.bytes_stored(),
        "the number of bytes used is that of the files",
    )
