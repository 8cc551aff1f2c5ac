"""The stores of ``make demo STORE=...``: their settings, and what has to be started for them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from process import DemoError
from servers import BUCKET, KEYS, MissingError, redis_server, s3_server

#: The names of the runs, each an engine of its own.
RUNS = ("cold", "warm", "damaged")
#: What is lent to the pool of Mooncake; the blocks of the demo take some 130 MB.
POOL_BYTES = 256 << 20
#: Seconds that a master may take to answer, or to be lent memory again.
PATIENCE = 60.0


class Restarts(Protocol):
    """A server that can be killed and started again."""

    def restart(self) -> None:
        """Kills it and starts it again at the same address; returns when it is of use."""


@dataclass(frozen=True)
class Service:
    """A store on a server of its own."""

    #: One line about it.
    words: str
    #: The keys of the configuration.
    config: Mapping[str, Any]
    #: What an engine and a tool need in their environment.
    environment: Mapping[str, str]
    server: Restarts
    #: Blocks on the server, and their bytes.
    stored: Callable[[], tuple[int, int]]
    #: Whether it has after a restart what it had before.
    keeps: bool = True


@dataclass(frozen=True)
class Place:
    """A store that is ready to be used."""

    #: One line about it.
    words: str
    #: Run -> the keys of the configuration.
    config: Mapping[str, Mapping[str, Any]]
    #: Where its block files lie.
    files: pathlib.Path


@contextlib.contextmanager
def directory(out: pathlib.Path) -> Iterator[Place]:
    """A directory of this machine."""
    root = (out / "store").resolve()
    # A file for each block, so that there is something to look at; left out, the quicker layout is
    # found out.
    config = {"storage_backend": "posix", "storage_path": str(root), "layout": "file"}
    yield Place(f"block files in {root}", dict.fromkeys(RUNS, config), root)


@contextlib.contextmanager
def share(out: pathlib.Path) -> Iterator[Place]:
    """An export that two hosts mount, over the file system of the tests that does what an NFS
    client does.

    The engine that computes runs on one host, those that load on the other.
    """
    sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "trust"))
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        raise DemoError(
            "STORE=nfs mounts a file system of the tests, which needs root and /dev/fuse"
        )
    from fuse import unmount  # type: ignore[import-not-found, unused-ignore]
    from nfs import NfsClient  # type: ignore[import-not-found, unused-ignore]

    export = (out / "store").resolve()
    mounts = {host: out.resolve() / host for host in ("left", "right")}
    with contextlib.ExitStack() as stack:
        for mount in mounts.values():
            unmount(mount)  # left there by a demo that was killed
            stack.enter_context(contextlib.closing(NfsClient(export, mount)))

        def config(host: str) -> Mapping[str, Any]:
            root = str(mounts[host] / "root")
            # This file system is written in Python; a share answers sooner.
            patient = {"lookup_ms": 5000, "load_unknown_s": 60, "dump_s": 60, "shutdown_s": 60}
            return {
                "storage_backend": "nfs",
                "storage_path": root,
                "layout": "file",
                "deadlines": patient,
            }

        hosts = dict(zip(RUNS, ("left", "right", "right"), strict=True))
        where = f"an export in {export}, mounted by two hosts"
        yield Place(where, {run: config(host) for run, host in hosts.items()}, export / "root")


@contextlib.contextmanager
def redis(out: pathlib.Path) -> Iterator[Service]:
    """A Redis server that writes what it has to a file."""
    try:
        server = redis_server((out / "store").resolve(), keeps=True)
    except MissingError as missing:
        raise DemoError(str(missing)) from None
    with server:
        config = {"storage_backends": f"redis://{server.at}"}
        yield Service(
            f"a redis-server on {server.at}", config, {}, server, lambda: _inspected(config, {})
        )


@contextlib.contextmanager
def s3(out: pathlib.Path) -> Iterator[Service]:
    """An S3 server over a directory."""
    try:
        server = s3_server((out / "store").resolve())
    except MissingError as missing:
        raise DemoError(str(missing)) from None
    with server:
        config = {
            "storage_backends": f"s3://{BUCKET}/demo",
            "object_endpoint": f"http://{server.at}",
            "object_region": "us-east-1",
        }
        words = f"an S3 server (s3s-fs) on {server.at}"
        yield Service(words, config, KEYS, server, lambda: _inspected(config, KEYS))


@contextlib.contextmanager
def mooncake(out: pathlib.Path) -> Iterator[Service]:
    """A pool of Mooncake over TCP: its master, and a process that lends memory. Both forget what
    they had."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "mooncake"))
    from mooncake_pool import PACKAGE, Pool  # type: ignore[import-not-found, unused-ignore]

    if not (PACKAGE / "mooncake" / "mooncake_master").exists():
        raise DemoError("Mooncake's package is not installed; run: make .tools/.stamp-mooncake")
    pool = Pool(out / "store")
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    with pool:
        pool.lend(POOL_BYTES)
        config = {"storage_backend": "mooncake", **pool.config}
        words = (
            f"a pool of Mooncake, master on {pool.address}, {POOL_BYTES >> 20} MiB lent by another"
            " process"
        )
        yield Service(
            words,
            config,
            {"PYTHONPATH": path},
            _Master(pool),
            lambda: _counted(pool.metrics),
            keeps=False,
        )


class _Master:
    """The master of a pool, which forgets every block with its end."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def restart(self) -> None:
        """Kills it and starts another at its address; lenders come to it by themselves."""
        self._pool.kill_master()
        self._pool.start()
        deadline = time.monotonic() + PATIENCE
        while _metric(self._pool.metrics, "master_total_capacity_bytes") < POOL_BYTES:
            if time.monotonic() > deadline:
                raise DemoError(
                    f"no process lends memory to the new master within {PATIENCE:.0f} s"
                )
            time.sleep(0.1)


def _counted(port: int) -> tuple[int, int]:
    """Values in a pool of Mooncake and their bytes, as its master counts them: its client lists no
    keys."""
    return _metric(port, "master_key_count"), _metric(port, "master_allocated_bytes")


def _metric(port: int, name: str) -> int:
    """One figure of a master's; 0 where it has none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.split(" ")[0].split("{")[0] == name
    )


def _inspected(config: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[int, int]:
    """Blocks on a server and their bytes, as ``ucm inspect`` says it."""
    address = str(config["storage_backends"])
    told = [
        text
        for key, value in config.items()
        if key != "storage_backends"
        for text in ("-o", f"{key}={value}")
    ]
    command = [
        str(pathlib.Path(sys.executable).with_name("ucm")),
        "inspect",
        "--json",
        *told,
        address,
    ]
    said = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False
    )
    if said.returncode:
        raise DemoError(f"ucm inspect {address}: {said.stderr.strip()}")
    (root,) = json.loads(said.stdout)["roots"]
    return root["records"] + root["segment_records"], root["record_bytes"] + root["segment_bytes"]


#: Word of ``STORE`` -> what makes it ready, below a directory for what it leaves.
STORES: Mapping[
    str, Callable[[pathlib.Path], contextlib.AbstractContextManager[Place | Service]]
] = {
    "posix": directory,
    "nfs": share,
    "redis": redis,
    "s3": s3,
    "mooncake": mooncake,
}
