"""Stores of the network beside the client library that each is built on, alone, in one run: ``make
bench-remote``.

For each server (a ``redis-server``, ``s3s-fs``, a master of Mooncake with a process that lends
memory over TCP) and each size of block the *arms* take turns, in a random order each round: ucm's
store with its checksums on; the same client library with as many connections, requests at once and
values of the same size, and nothing else (the crates ``redis`` and ``object_store``, in
``benches/src/bin/clients``; Mooncake's Python client); and LMCache's adapter for that server where
it runs. Each is a process of its own, started once. A round of an arm has a server of its own,
which is empty; as many other blocks are put and got before the clock starts.

Timed: *put*, until every block is on the server, *get*, until every block is in memory of the
caller, seven times asking which blocks are there (the median), when all are and when none is, and
single blocks, one after the other. What came back is compared with what was put. A ratio is ucm's
figure over the other's of the same round, above 1 where ucm is faster; of the ratios the median
counts, with the interval of :mod:`paired`. The goal is 0.9 of the client library alone.

What to keep in mind. Measure on a machine that does nothing else: ucm's threads tell the system
that they are batch work (``ucm_io::use_batch_policy``), so that they never push a model's thread
aside, and on a busy machine they wait in turn where the clients alone do not. ucm verifies every
byte by checksums and copies it from the slot, where it is verified, to the caller's memory, which
in use is the accelerator's. Over Redis it believes for 30 seconds that what it wrote is there, over
a bucket it keeps an index, so those answers ask no server; Mooncake is asked each time. A bucket is
also measured as the store uses it, many blocks in one object: to ucm's *put* belongs asking for
room, and writing its index. One block alone is an object of its own, and the store lets 200 ms pass
between two such.

A directory (segments, through the page cache) and memory of this host are measured besides, with
nothing beside them: ``docs/stores.md`` has one table of all stores, which ``--write`` fills in.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from variants import ROOT  # isort: split

sys.path.insert(0, str(ROOT / "benches" / "peers"))
sys.path.insert(0, str(ROOT / "tests" / "mooncake"))

import machine
import remote_report as report
from arm_process import ArmProcess
from arms import Arm
from mooncake_pool import PACKAGE, Pool
from remote_report import Row
from scratch import hollow

from servers import BUCKET, KEYS, MissingError, redis_server, s3_server

BLOCKS_KIB = (256, 1024)
#: Seconds that a round of one arm may take.
PATIENCE = 300.0
#: Blocks that are put and got one after the other.
SINGLES = 16


@dataclass(frozen=True)
class Medium:
    """A server, and what is measured over it: ucm first, then the client library alone, then
    others."""

    name: str
    #: An empty server for the time of a block; its address.
    start: Callable[[Path, int], contextlib.AbstractContextManager[str]]
    arms: Sequence[Arm]


@contextlib.contextmanager
def nothing(directory: Path, _bytes: int) -> Iterator[str]:
    """No server: a directory."""
    yield str(directory)


@contextlib.contextmanager
def redis(directory: Path, _bytes: int) -> Iterator[str]:
    """A Redis server that keeps nothing on disk."""
    with redis_server(directory) as server:
        yield server.at


@contextlib.contextmanager
def s3(directory: Path, _bytes: int) -> Iterator[str]:
    """An S3 server over a directory."""
    with s3_server(directory) as server:
        yield server.at


@contextlib.contextmanager
def mooncake(directory: Path, most: int) -> Iterator[str]:
    """A master of Mooncake, and a process that lends more than a round stores."""
    if not (PACKAGE / "mooncake" / "mooncake_master").exists():
        raise MissingError("Mooncake's package is not installed; run: make .tools/.stamp-mooncake")
    with Pool(directory) as pool:
        pool.lend(4 * most + (256 << 20))
        yield pool.address


def media(clients: Path) -> Sequence[Medium]:
    """What is measured; ``clients`` is the program that `cargo build -p ucm-benches --bin clients`
    makes."""

    def alone(name: str, kind: str) -> Arm:
        return Arm(name, "", kind, program=str(clients))

    def ucm(store: str, **keys: Any) -> Arm:
        return Arm("ucm", "peer_remote", "UcmRemote", {"store": store, "keys": keys}, own=True)

    def lmcache(kind: str, **options: str) -> Arm:
        return Arm(
            f"LMCache {kind}", "peer_lmcache_remote", "LMCacheRemote", {"type": kind, **options}
        )

    at = {"object_endpoint": "http://{at}", "object_region": "us-east-1"}
    pool = {"master_server_address": "{at}", "global_segment_size": 0, "local_buffer_size": "16MiB"}
    directory = {
        "storage_backends": "{at}",
        "layout": "segment",
        "storage_capacity": "64GiB",
        "free_space_floor": "1%",
    }
    return (
        Medium("cache", nothing, (ucm("UcmCacheStore", cache_size="1GiB"),)),
        Medium("posix", nothing, (ucm("UcmPosixStore", **directory),)),
        Medium(
            "redis",
            redis,
            (
                ucm("UcmRedisStore", storage_backends="redis://{at}"),
                alone("redis alone", "redis"),
                lmcache("resp"),
            ),
        ),
        Medium(
            "s3",
            s3,
            (
                ucm("UcmObjectStore", storage_backends=f"s3://{BUCKET}/bench", **at),
                alone("object_store alone", "s3"),
                alone("object_store alone, many blocks in an object", "s3-segments"),
                lmcache("s3", bucket=BUCKET),
            ),
        ),
        Medium(
            "mooncake",
            mooncake,
            (
                ucm("UcmMooncakeStore", **pool),
                Arm("Mooncake's client alone", "peer_remote", "MooncakeAlone", own=True),
                lmcache("mooncake_store"),
            ),
        ),
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="MiB in each round (128)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (9)")
    parser.add_argument(
        "--block-kib", type=int, nargs="+", default=list(BLOCKS_KIB), help="sizes of blocks in KiB"
    )
    parser.add_argument("--medium", nargs="+", help="only these: cache, posix, redis, s3, mooncake")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="where directories are made (build/)"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "remote.json")
    parser.add_argument(
        "--clients", type=Path, required=True, help="the program with the client libraries alone"
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".venv-peers", help="environment with LMCache"
    )
    parser.add_argument(
        "--write", type=Path, help="the document between whose marks our own figures go"
    )
    parser.add_argument(
        "--quick", action="store_true", help="8 MiB, one round: shows that everything runs"
    )
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.mib, chosen.rounds = 8, 1
    return chosen


class Contest:
    """The arms of one medium, their rounds and what went wrong."""

    def __init__(self, medium: Medium, chosen: argparse.Namespace, scratch: Path) -> None:
        self.medium, self.chosen, self.scratch = medium, chosen, scratch
        #: (KiB of a block, arm) -> figures of each round.
        self.rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
        self.notes: list[str] = []
        self.arms: list[ArmProcess] = []

    def greet(self) -> None:
        """Starts the arms; why one cannot run is a note."""
        for arm in self.medium.arms:
            python = (
                self.chosen.peers / "bin" / "python"
                if "lmcache" in arm.module
                else Path(sys.executable)
            )
            if not os.access(python, os.X_OK):
                self._note(arm, "not installed: make .venv-peers/.stamp")
                continue
            process = ArmProcess(
                arm, arm.program or str(python.absolute()), self._environment(arm), self.scratch
            )
            process.greet()
            if process.reason:
                self._note(arm, process.reason)
            else:
                print(f"  {arm.name}: {process.version}, {process.threads}", flush=True)
                self.arms.append(process)

    def _environment(self, arm: Arm) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "UCM_", "AWS_"))
        }
        path = [str(ROOT / "python"), str(PACKAGE)] if arm.own else []
        return kept | KEYS | {"PYTHONPATH": os.pathsep.join(path), "MC_LOG_LEVEL": "WARNING"}

    def _note(self, arm: Arm, reason: str) -> None:
        if (note := f"{self.medium.name}, {arm.name}: {reason}") not in self.notes:
            self.notes.append(note)
        print(f"  {arm.name} cannot run here: {reason}", flush=True)

    def case(self, kib: int) -> None:
        """All rounds with blocks of this size; an arm that fails in one sits out the rest."""
        block_bytes = kib << 10
        count = max(1, (self.chosen.mib << 20) // block_bytes)
        running = list(self.arms)
        for number in range(self.chosen.rounds):
            for arm in random.Random(number).sample(running, len(running)):
                directory = Path(tempfile.mkdtemp(prefix="round-", dir=self.scratch))
                try:
                    with self.medium.start(directory, count * block_bytes) as at:
                        request = {
                            "directory": at,
                            "block_bytes": block_bytes,
                            "count": count,
                            "direct": False,
                        }
                        request |= {"seed": number, "singles": SINGLES}
                        figures = arm.round(request, PATIENCE)
                finally:
                    hollow(str(directory))
                    os.sync()  # the next one finds a file system at rest
                if reason := figures.get("unavailable") or figures.get("failed"):
                    self._note(arm.arm, reason)
                    self.rounds.pop((kib, arm.arm.name), None)
                    running.remove(arm)
                else:
                    self.rounds.setdefault((kib, arm.arm.name), []).append(figures)

    def rows(self) -> list[Row]:
        """Of every case and figure: ucm, and each other arm with its ratio."""
        names = [arm.name for arm in self.medium.arms]
        return [
            row
            for kib in self.chosen.block_kib
            for row in report.rows(self.medium.name, kib, names, self.rounds)
        ]

    def stop(self) -> None:
        """Ends every process."""
        for arm in self.arms:
            arm.stop()


def main() -> None:
    """Measures and reports."""
    chosen = arguments()
    chosen.dir.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "commit": machine.commit(),
        "machine": machine.describe(chosen.dir),
        "settings": {"mib": chosen.mib, "rounds": chosen.rounds, "quick": chosen.quick},
    }
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(
        prefix="remote-", dir=chosen.dir, ignore_cleanup_errors=True
    ) as scratch:
        for medium in media(chosen.clients.resolve()):
            if chosen.medium and medium.name not in chosen.medium:
                continue
            print(medium.name, flush=True)
            contest = Contest(medium, chosen, Path(scratch))
            try:
                contest.greet()
                for kib in chosen.block_kib:
                    contest.case(kib)
            except MissingError as missing:
                contest.notes.append(f"{medium.name}: {missing}")
            finally:
                contest.stop()
            rows += contest.rows()
            notes += contest.notes
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(
        json.dumps(head | {"rows": [row.__dict__ for row in rows], "notes": notes}, indent=1) + "\n"
    )
    about, settings = head["machine"], head["settings"]
    measured = (
        f"Measured {head['date']} at commit {head['commit']}: {about['cores']} cores"
        f" ({about['processor']}), {settings['mib']} MiB in each of {settings['rounds']} rounds,"
        f" load average {about['load_before']} before."
    )
    if chosen.quick:
        measured += " A quick run: it shows that every arm runs, and no speed."
    text = f"{measured}\n\n"
    text += report.table(rows, not chosen.quick) + "\n\n" + "".join(f"- {note}\n" for note in notes)
    chosen.json.with_suffix(".md").write_text(text)
    print(f"\n{text}")
    if chosen.write is not None:
        report.write(chosen.write, [measured, "", *report.own_figures(rows)])


if __name__ == "__main__":
    main()
