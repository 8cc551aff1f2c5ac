"""What ``make demo STORE=...`` runs over: what an engine is told of the store, and what has to be started for it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from process import DemoError
from servers import BUCKET, KEYS, MissingError, Server, redis_server, s3_server

#: The names of the runs, each an engine of its own.
RUNS = ("cold", "warm", "damaged")


@dataclass(frozen=True)
class Service:
    """A store on a server of its own, which keeps what it has over a restart."""

    #: One line about it.
    words: str
    #: The keys of the configuration.
    config: Mapping[str, Any]
    #: What an engine and a tool need in their environment.
    environment: Mapping[str, str]
    server: Server

    @property
    def address(self) -> str:
        """Where the blocks are, as the tools are told."""
        return str(self.config["storage_backends"])


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
    # A file for each block, so that there is something to look at; left out, the quicker layout is found out.
    config = {"storage_backend": "posix", "storage_path": str(root), "layout": "file"}
    yield Place(f"block files in {root}", dict.fromkeys(RUNS, config), root)


@contextlib.contextmanager
def share(out: pathlib.Path) -> Iterator[Place]:
    """An export that two hosts mount, over the file system of the tests that does what an NFS client does.

    The engine that computes runs on one host, those that load on the other.
    """
    sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "trust"))
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        raise DemoError("STORE=nfs mounts a file system of the tests, which needs root and /dev/fuse")
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
            return {"storage_backend": "nfs", "storage_path": root, "layout": "file", "deadlines": patient}

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
        yield Service(f"a redis-server on {server.at}", config, {}, server)


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
        yield Service(f"an S3 server (s3s-fs) on {server.at}", config, KEYS, server)


#: Word of ``STORE`` -> what makes it ready, below a directory for what it leaves.
STORES: Mapping[str, Callable[[pathlib.Path], contextlib.AbstractContextManager[Place | Service]]] = {
    "posix": directory,
    "nfs": share,
    "redis": redis,
    "s3": s3,
}
