"""The columns of the matrix: stores of the network and the real servers they are run against."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from servers import BUCKET, MissingError, Server, moto_server, redis_server, s3_server


@dataclass(frozen=True)
class Column:
    """A kind of store on a kind of server."""

    name: str
    store: str
    start: Callable[[Path], Server]
    #: Keys of the store for a server, or a proxy before it, at this ``host:port``.
    keys: Callable[[str], Mapping[str, Any]]
    #: Whether the server has after a restart what it had before.
    keeps: bool
    #: Whether it speaks HTTP, so that the proxy can answer in its place.
    http: bool


def _on_redis(at: str) -> dict[str, Any]:
    return {"storage_backends": f"redis://{at}"}


def _on_s3(at: str) -> dict[str, Any]:
    return {
        "storage_backends": f"s3://{BUCKET}/tests",
        "object_endpoint": f"http://{at}",
        "object_region": "us-east-1",
        "object_age": 0.2,
        "object_refresh": 1,
    }


class _Moto:
    """It has no bucket when it starts."""

    def __call__(self, directory: Path) -> Server:
        server = moto_server(directory)
        start = server.start

        def start_with_bucket() -> None:
            start()
            make_bucket(server.at)

        server.start = start_with_bucket  # type: ignore[method-assign]
        make_bucket(server.at)
        return server


def make_bucket(at: str) -> None:
    """Makes the bucket on a server that asks nobody for keys."""
    host, _, port = at.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("PUT", f"/{BUCKET}")
    connection.getresponse().read()
    connection.close()


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
MOTO = Column("moto", "UcmObjectStore", _Moto(), _on_s3, keeps=False, http=True)
#: Those of `make test`, and all.
COLUMNS = (REDIS, REDIS_AOF, S3S_FS, MOTO) if os.environ.get("UCM_TEST_LONG") else (REDIS, MOTO)


def started(column: Column, directory: Path) -> Server:
    """The server of a column; the test is skipped where there is none, and fails with ``UCM_REQUIRE_SERVERS``."""
    try:
        return column.start(directory)
    except MissingError as missing:
        if os.environ.get("UCM_REQUIRE_SERVERS"):
            raise
        pytest.skip(str(missing))
