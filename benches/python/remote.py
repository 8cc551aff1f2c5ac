"""Network stores compared with their client libraries alone, in one run: ``make bench-remote``.

For each server (a ``redis-server``, ``s3s-fs``, a master of Mooncake with a process that lends
memory over TCP) and each size of block the *arms* take turns, in a random order each round: ucm's
store with its checksums on; the same client library alone with the same connections, concurrency
and sizes (the crates ``redis`` and ``object_store``, in ``benches/src/bin/clients``; Mooncake's
Python client); and LMCache's adapter for Redis if it is installed. Each is a process of its own,
started once. A round of an arm has an empty server of its own; the same number of other blocks are
put and got before the clock starts.

Timed: *put*, until every block is on the server, *get*, until every block is in memory of the
caller, seven lookups (the median) with all blocks present and with none, and single blocks in
sequence. The returned bytes are compared with the put ones. A ratio is ucm's figure to the other's
of the same round, above 1 if ucm is faster; the median of the ratios counts, with the interval of
:mod:`paired`. The goal is 0.9 of the client library alone.

Notes. Measure on an idle machine: ucm's threads are batch work (``ucm_io::use_batch_policy``) and
do not preempt a model's thread, so on a busy machine they wait where the clients alone do not. ucm
verifies every byte by checksums and copies it from the slot to the caller's memory, which in
production is the accelerator's. Over Redis a block counts as stored for 30 seconds after its write,
and over a bucket there is an index, so those lookups need no server; Mooncake's master is queried
each time. The client of a bucket puts many blocks into one object, like the store: ucm's *put* also
reserves space and writes its index. A single block is an object of its own, and the store waits 200
ms between two such.

A directory (segments, through the page cache) and memory of this host are also measured, without a
comparison: ``--write`` fills the table of all stores in ``docs/stores-compared.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
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
from contest import Contest
from mooncake_pool import PACKAGE, Pool
from remote_report import Row

from servers import BUCKET, KEYS, MissingError, redis_server, s3_server

BLOCKS_KIB = (256, 1024)
#: Most seconds of a round of one arm.
PATIENCE = 300.0
#: Blocks that are put and got one after the other.
SINGLES = 16


@dataclass(frozen=True)
class Medium:
    """A server and its arms: ucm first, then the client library alone, then others."""

    name: str
    #: An empty server for the time of a block, for these bytes in this directory; its address.
    start: Callable[[int, Path], contextlib.AbstractContextManager[str]]
    arms: Sequence[Arm]


@contextlib.contextmanager
def nothing(_bytes: int, directory: Path) -> Iterator[str]:
    """No server: a directory."""
    yield str(directory)


def served(server: Callable[[Path], Any]) -> Callable[[int, Path], Any]:
    """Function that starts a server below a directory."""

    @contextlib.contextmanager
    def start(_bytes: int, directory: Path) -> Iterator[str]:
        with server(directory) as running:
            yield running.at

    return start


@contextlib.contextmanager
def mooncake(most: int, directory: Path) -> Iterator[str]:
    """A master of Mooncake, and a process that lends more than a round stores."""
    if not (PACKAGE / "mooncake" / "mooncake_master").exists():
        raise MissingError("Mooncake's package is not installed; run: make .tools/.stamp-mooncake")
    with Pool(directory) as pool:
        pool.lend(4 * most + (256 << 20))
        yield pool.address


def media(clients: Path) -> Sequence[Medium]:
    """The measurements; ``clients`` is the program of `cargo build -p ucm-benches --bin
    clients`."""

    def alone(name: str, kind: str) -> Arm:
        return Arm(name, "", kind, program=str(clients))

    def ucm(store: str, **keys: Any) -> Arm:
        return Arm("ucm", "peer_remote", "UcmRemote", {"store": store, "keys": keys}, own=True)

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
            served(redis_server),
            (
                ucm("UcmRedisStore", storage_backends="redis://{at}"),
                alone("redis alone", "redis"),
                Arm("LMCache resp", "peer_lmcache", "LMCacheRedis"),
            ),
        ),
        Medium(
            "s3",
            served(s3_server),
            (
                ucm("UcmObjectStore", storage_backends=f"s3://{BUCKET}/bench", **at),
                alone("object_store alone", "s3"),
            ),
        ),
        Medium(
            "mooncake",
            mooncake,
            (
                ucm("UcmMooncakeStore", **pool),
                Arm("Mooncake's client alone", "peer_remote", "MooncakeAlone", own=True),
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
        "--quick", action="store_true", help="8 MiB, one round: checks that everything runs"
    )
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.mib, chosen.rounds = 8, 1
    return chosen


def environment(arm: Arm) -> dict[str, str]:
    """The environment of an arm's process: ucm from this source tree, the others as installed."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "UCM_", "AWS_"))
    }
    path = [str(ROOT / "python"), str(PACKAGE)] if arm.own else []
    return kept | KEYS | {"PYTHONPATH": os.pathsep.join(path), "MC_LOG_LEVEL": "WARNING"}


def contest_of(medium: Medium, chosen: argparse.Namespace, scratch: Path) -> Contest:
    """The arms of a medium, not started yet."""
    arms = []
    for arm in medium.arms:
        lmcache = "lmcache" in arm.module
        python = str((chosen.peers / "bin" / "python").absolute()) if lmcache else sys.executable
        arms.append(ArmProcess(arm, arm.program or python, environment(arm), scratch))
    return Contest(arms, scratch, PATIENCE)


def main() -> None:
    """Measures and reports."""
    chosen = arguments()
    chosen.dir.mkdir(parents=True, exist_ok=True)
    head = machine.head(chosen.dir, chosen)
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(
        prefix="remote-", dir=chosen.dir, ignore_cleanup_errors=True
    ) as scratch:
        for medium in media(chosen.clients.resolve()):
            if chosen.medium and medium.name not in chosen.medium:
                continue
            print(medium.name, flush=True)
            contest = contest_of(medium, chosen, Path(scratch))
            missing = []
            try:
                contest.greet()
                for kib in chosen.block_kib:
                    count = max(1, (chosen.mib << 20) // (kib << 10))
                    request = {"block_bytes": kib << 10, "count": count, "direct": False}
                    request["singles"] = SINGLES
                    start = functools.partial(medium.start, count * (kib << 10))
                    contest.case(kib, f"{kib} KiB", chosen.rounds, request, start)
            except MissingError as error:
                missing.append(str(error))
            finally:
                contest.stop()
            names = [arm.name for arm in medium.arms]
            for kib in chosen.block_kib:
                rows += report.rows(medium.name, kib, names, contest.rounds)
            notes += [f"{medium.name}, {note}" for note in [*contest.notes(), *missing]]
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(
        json.dumps(head | {"rows": [row.__dict__ for row in rows], "notes": notes}, indent=1) + "\n"
    )
    measured = machine.sentence(head)
    text = f"{measured}\n\n"
    text += report.table(rows, not chosen.quick) + "\n\n" + "".join(f"- {note}\n" for note in notes)
    chosen.json.with_suffix(".md").write_text(text)
    print(f"\n{text}")
    if chosen.write is not None:
        report.write(chosen.write, [measured, "", *report.own_figures(rows)])


if __name__ == "__main__":
    main()
