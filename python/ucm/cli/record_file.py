"""``ucm inspect FILE``: the fields of one record's header, and the verdict of the second reader on
all of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from ucm.cli import manifest as manifests
from ucm.cli import show
from ucm.cli.checksum import fastest
from ucm.cli.manifest import part_name
from ucm.cli.roots import MARKER, Root
from ucm.cli.verifier import most_to_read
from ucm.errors import UcmError
from ucm.store.planes import find_zstd
from ucm.store.record import Expect, Header, Part, Refused, Shape, lost_sides, parse_header, verify

#: Longer than every header.
_HEAD = 128 << 10
_RECORD = re.compile(r"([0-9a-f]{32})/blocks/([0-9a-f]{2})/(\2[0-9a-f]{30})\.bin")


def inspect_file(path: str) -> dict[str, Any]:
    """Everything there is to say of one record, as it stands in the JSON document."""
    checksum = fastest()
    document: dict[str, Any] = {"file": os.path.abspath(path), "bytes": os.path.getsize(path)}
    named = _RECORD.fullmatch("/".join(Path(path).absolute().parts[-4:]))
    try:
        header = parse_header(_read(path, _HEAD), checksum.of)
        document["header"] = _fields(header)
        expect = Expect()
        if named is not None:
            shape = _shapes(Path(path).absolute().parents[3], named[1]).get(header.part)
            expect = Expect(bytes.fromhex(named[3]), bytes.fromhex(named[1]), shape=shape)
        # Not further than the header says, whatever lies there.
        data = _read(path, most_to_read(header))
        verify(data, expect, checksum.of, find_zstd())
        document |= {"verdict": "good", "reason": None, "found": None}
        lost = lost_sides(data, header, checksum.of)
        for side in document["header"]["sides"]:
            side["verdict"] = str(lost[side["name"]].reason) if side["name"] in lost else "good"
    except Refused as refused:
        document.setdefault("header", None)
        document |= {"verdict": "refused", "reason": str(refused.reason), "found": refused.found}
    return document | {"name_checked": named is not None, "reader": checksum.name}


def show_file(record: dict[str, Any]) -> None:
    """Prints it for people."""
    click.echo(f"record {record['file']}")
    verdict = "good: every checksum is right" if record["verdict"] == "good" else ""
    rows: list[tuple[str, object]] = [
        ("verdict", verdict or f"refused, {record['reason']}: {record['found']}"),
        ("length", f"{record['bytes']} bytes"),
    ]
    if not record["name_checked"]:
        rows.append(
            (
                "name",
                "not that of a record in a root, so id and namespace were not compared with it",
            )
        )
    if header := record["header"]:
        rows += [
            (name.replace("_", " "), value) for name, value in header.items() if name != "sides"
        ]
        rows += [(f"side shard {side['name']}", _side(side)) for side in header["sides"]]
        at = rows.index(("time", header["time"]))
        rows[at] = ("time", show.ago(int(header["time"]) * 10**9, show.wall_ns()))
    show.pairs(rows)


def _side(side: dict[str, Any]) -> str:
    verdict = side.get("verdict")
    return f"{side['bytes']} bytes, version {side['version']}" + (f", {verdict}" if verdict else "")


def _read(path: str, most: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(most)


def _fields(header: Header) -> dict[str, Any]:
    return {
        "version": header.version,
        "record_id": header.record_id.hex(),
        "block_key": header.block_key.hex(),
        "without_kv": header.without_kv,
        "block_record_id": header.block_record_id.hex(),
        "namespace_digest": header.namespace.hex(),
        "part": part_name(header.part),
        "dtype": header.dtype_name,
        "layers": header.layers,
        "tensors": header.tensors,
        "layer_bytes": header.layer_len,
        "block_tokens": header.block_tokens,
        "tokens": header.tokens,
        "ordinal": header.ordinal,
        "parent": header.parent.hex(),
        "header_bytes": header.header_len,
        "kv_bytes": header.raw_len,
        "codec": f"{header.codec:#x}" if header.compressed else "as is",
        "key": header.key_id.hex() if header.key_id is not None else "not encrypted",
        "tenant": header.tenant.hex() if any(header.tenant) else "none",
        "stored_bytes": header.stored_len,
        "record_bytes": header.record_len,
        "time": header.time_ns // 10**9,
        "writer": f"{header.writer:016x}",
        "sides": [
            {"name": side.name, "version": side.version, "bytes": side.length}
            for side in header.sides
        ],
    }


def _shapes(root: Path, namespace: str) -> dict[Part, Shape]:
    if not (root / MARKER).exists():
        return {}
    try:
        with Root(root) as opened:
            return manifests.read(opened, namespace).shapes
    except UcmError:
        return {}
