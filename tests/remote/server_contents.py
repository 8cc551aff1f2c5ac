"""The contents of a server, read and changed by the server's own commands, without our stores and
tools: the values of Redis, the objects of a bucket."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from plain_segment import parse_footer
from remote_columns import PREFIX, Column, redis_asks, redis_says

from servers import BUCKET, Server


@dataclass(frozen=True)
class Where:
    """The location of a block's record."""

    #: Name of its value or object, and its offset.
    name: str
    offset: int
    #: Its names in ``ucm gc`` (the value or object) and ``ucm verify`` (the record).
    file: str
    record: str


class Values:
    """The values of a Redis server."""

    #: A name that is none of ours, among ours.
    foreign = "ucm:notes"

    def __init__(self, server: Server) -> None:
        self._server = server

    def close(self) -> None:
        """Nothing is kept open."""

    def sizes(self) -> dict[str, int]:
        """Names and bytes of everything."""
        names = sorted(key.decode() for key in redis_asks(self._server, "KEYS", "*"))
        return {name: redis_asks(self._server, "STRLEN", name) for name in names}

    def records(self, namespace: str = "") -> dict[str, int]:
        """Names and bytes of values or objects with records, of one namespace or of all."""
        ours = {
            name: size for name, size in self.sizes().items() if len(name.rpartition(":")[2]) == 32
        }
        return {name: size for name, size in ours.items() if name.startswith(f"ucm:{namespace}")}

    def get(self, name: str) -> bytes:
        """What has this name."""
        value: bytes = redis_asks(self._server, "GET", name)
        return value

    def put(self, name: str, data: bytes) -> None:
        """Stores it under this name, replacing an existing one."""
        redis_says(self._server, "SET", name, data, "KEEPTTL")

    def remove(self, name: str) -> None:
        """Removes it."""
        assert redis_asks(self._server, "DEL", name) == 1

    def set_limit(self, size: int) -> None:
        """Sets the server's capacity."""
        redis_says(self._server, "CONFIG", "SET", "maxmemory", str(size))

    def lift_limit(self) -> None:
        """Removes the limit."""
        self.set_limit(0)

    def find(self, namespace: str, block: bytes) -> Where:
        """Where the record of a block is."""
        path = f"{namespace}/blocks/{block.hex()[:2]}/{block.hex()}.bin"
        return Where(f"ucm:{namespace}:{block.hex()}", 0, path, path)


class Objects:
    """The objects of a bucket, below the prefix of the tests."""

    #: A name that is none of ours, among ours.
    foreign = f"{PREFIX}/notes"

    def __init__(self, server: Server) -> None:
        import boto3  # a part of moto: not here where that is not
        from botocore.config import Config

        config = Config(
            s3={"addressing_style": "path"}, request_checksum_calculation="when_required"
        )
        self._client: Any = boto3.client(
            "s3", endpoint_url=f"http://{server.at}", region_name="us-east-1", config=config
        )

    def sizes(self) -> dict[str, int]:
        """Names and bytes of everything."""
        listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/")
        return {found["Key"]: found["Size"] for found in listed.get("Contents", ())}

    def records(self, namespace: str = "") -> dict[str, int]:
        """Names and bytes of values or objects with records, of one namespace or of all."""
        ours = {name: size for name, size in self.sizes().items() if name.endswith(".seg")}
        return {
            name: size for name, size in ours.items() if name.startswith(f"{PREFIX}/{namespace}")
        }

    def get(self, name: str) -> bytes:
        """What has this name."""
        data: bytes = self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        """Stores it under this name, replacing an existing one."""
        self._client.put_object(Bucket=BUCKET, Key=name, Body=data)

    def remove(self, name: str) -> None:
        """Removes it."""
        self._client.delete_object(Bucket=BUCKET, Key=name)

    def set_limit(self, size: int) -> None:
        """Sets the capacity in the bucket's marker."""
        marker = f"{PREFIX}/ucm-root.json"
        self.put(
            marker, json.dumps(json.loads(self.get(marker)) | {"storage_capacity": size}).encode()
        )

    def lift_limit(self) -> None:
        """Removes the limit."""
        self.set_limit(1 << 30)

    def find(self, namespace: str, block: bytes) -> Where:
        """Where the record of a block is."""
        for name in self.records(namespace):
            data = self.get(name)
            for entry in parse_footer(data, len(data)).entries:
                if entry.record_id == block:
                    # A name on the server begins with its time; a name below a root does not.
                    file = f"{namespace}/segments/{name.rpartition('/')[2].partition('-')[2]}"
                    return Where(name, entry.offset, file, f"{file}@{entry.offset}")
        raise AssertionError(f"{block.hex()} is in no segment of {namespace}")

    def make_older(self, name: str, seconds: int) -> None:
        """Makes the segment of this name older."""
        directory, _, file = name.rpartition("/")
        sealed, _, rest = file.partition("-")
        self.put(f"{directory}/{int(sealed, 16) - seconds * 10**9:016x}-{rest}", self.get(name))
        self.remove(name)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()


def contents_of(column: Column, server: Server) -> Values | Objects:
    """The contents of a column's server."""
    return Objects(server) if column.http else Values(server)
