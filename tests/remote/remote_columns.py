"""The columns of the matrix: network stores and their real servers.

:data:`MOONCAKE` and :data:`DS3FS` are columns of the engines alone: Mooncake's client brings
threads of its own into the process that loads it (``tests/mooncake`` has its matrix), and 3FS is a
library in the process (``tests/store``).
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from mooncake_pool import PACKAGE, Pool
from moto_server import MotoServer
from required_servers import missing_server

from servers import BUCKET, MissingError, redis_server, s3_server

#: Prefix of every name in a bucket.
PREFIX = "tests"
#: 3FS's client library in software, which ``make`` builds.
SOFT3FS = os.path.abspath(os.environ.get("UCM_TEST_SOFT3FS", "target/drivers/debug/libsoft3fs.so"))


class Medium(Protocol):
    """The keeper of the blocks, mostly a server; a context manager. It can be stopped and
    restarted."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def at(self) -> str:
        """Where it is."""

    def kill(self) -> None:
        """It ends at once."""

    def start(self) -> None:
        """It is back."""

    def restart(self) -> None:
        """The one and then the other."""


@dataclass(frozen=True)
class Column:
    """A kind of store on a kind of server."""

    name: str
    store: str
    start: Callable[[Path], Any]
    #: Keys of the store for a server, or a proxy before it, at this ``host:port``.
    keys: Callable[[str], Mapping[str, Any]]
    #: True if the server keeps its data over a restart.
    keeps: bool
    #: True if it uses HTTP, so that the proxy can reply in its place.
    http: bool
    #: The client's path for an engine.
    pythonpath: tuple[str, ...] = ()


def _on_redis(at: str) -> dict[str, Any]:
    return {"storage_backends": f"redis://{at}"}


def _on_s3(at: str) -> dict[str, Any]:
    return {
        "storage_backends": f"s3://{BUCKET}/{PREFIX}",
        "object_endpoint": f"http://{at}",
        "object_region": "us-east-1",
        "object_age": 0.2,
        "object_refresh": 1,
    }


def _on_mooncake(at: str) -> dict[str, Any]:
    return {
        "storage_backends": f"mooncake://{at}",
        "global_segment_size": 0,
        "local_buffer_size": "16MiB",
    }


def _on_3fs(at: str) -> dict[str, Any]:
    return {"storage_backends": f"{at}/root", "hf3fs_library": SOFT3FS, "free_space_floor": 0}


class MooncakeMaster(Pool):
    """A master, and a process that lends memory to the master at its address. Raises
    :class:`MissingError`."""

    def __init__(self, directory: Path) -> None:
        if not (PACKAGE / "mooncake" / "mooncake_master").exists():
            raise MissingError(
                "Mooncake's package is not installed; `make .tools/.stamp-mooncake` installs it"
            )
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            raise MissingError(
                "Mooncake needs libibverbs.so.1, of the system's package libibverbs1"
            ) from None
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory)

    def __enter__(self) -> Self:
        super().__enter__()
        self.lend(256 << 20)
        return self

    @property
    def at(self) -> str:
        """``host:port``."""
        return self.address

    def kill(self) -> None:
        """Kills the master; the lenders' data is lost with it."""
        self.kill_master()

    def restart(self) -> None:
        """Kills the master and starts another."""
        self.kill()
        self.start()


class Mount3fs:
    """A directory that the software library treats as a mount of 3FS. It can be unmounted and
    mounted again."""

    def __init__(self, directory: Path) -> None:
        if not os.path.exists(SOFT3FS):
            raise MissingError(f"{SOFT3FS} is missing; `cargo build -p soft3fs` builds it")
        self._mount, self._away = directory / "mount", directory / "away"
        (self._mount / "3fs-virt").mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def at(self) -> str:
        """The mount point."""
        return str(self._mount)

    def kill(self) -> None:
        """Unmounts it: its path does not exist any more."""
        self._mount.rename(self._away)

    def start(self) -> None:
        """Mounts it again, over files created at its path since."""
        if self._mount.exists():
            self._mount.rename(self._away.with_name("hidden"))
        self._away.rename(self._mount)

    def restart(self) -> None:
        """Unmounts it and mounts it again."""
        self.kill()
        self.start()


REDIS = Column("redis", "UcmRedisStore", redis_server, _on_redis, keeps=False, http=False)
REDIS_AOF = Column(
    "redis, kept",
    "UcmRedisStore",
    lambda directory: redis_server(directory, keeps=True),
    _on_redis,
    keeps=True,
    http=False,
)
S3S_FS = Column("s3s-fs", "UcmObjectStore", s3_server, _on_s3, keeps=True, http=True)
MOTO = Column("moto", "UcmObjectStore", MotoServer, _on_s3, keeps=False, http=True)
MOONCAKE = Column(
    "mooncake",
    "UcmMooncakeStore",
    MooncakeMaster,
    _on_mooncake,
    keeps=False,
    http=False,
    pythonpath=(str(PACKAGE),),
)
DS3FS = Column("3fs", "UcmDs3fsStore", Mount3fs, _on_3fs, keeps=True, http=False)
#: Those of `make test`, and all.
COLUMNS = (REDIS, REDIS_AOF, S3S_FS, MOTO) if os.environ.get("UCM_TEST_LONG") else (REDIS, MOTO)


def redis_says(server: Any, *words: str | bytes) -> None:
    """Sends a command to a Redis server, which must reply with OK."""
    assert redis_asks(server, *words) == b"OK"


def redis_asks(server: Any, *words: str | bytes) -> Any:
    """A reply of a Redis server: a text, a number, or several of them."""
    question = b"*%d\r\n" % len(words)
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        question += b"$%d\r\n%b\r\n" % (len(data), data)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(question)
        with connection.makefile("rb") as answers:
            return _answer(answers)


def _answer(answers: BinaryIO) -> Any:
    line = answers.readline()
    kind, said = line[:1], line[1:].rstrip()
    if kind == b"+":
        return said
    if kind == b":":
        return int(said)
    if kind == b"$":
        return None if said == b"-1" else answers.read(int(said) + 2)[:-2]
    assert kind == b"*", line
    return [_answer(answers) for _ in range(int(said))]


def started(column: Column, directory: Path) -> Any:
    """The server of a column; without one the test is skipped, or fails with
    ``UCM_REQUIRE_SERVERS``."""
    try:
        return column.start(directory)
    except MissingError as missing:
        missing_server(str(missing))
