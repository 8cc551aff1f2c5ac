"""``ucm inspect``: what lies below a root, whose it is and how identities differ; or what one
record says of itself, and the verdict on all of it.

It only reads. Of the records below a root it reads some headers, evenly spread, to say which parts
are there: to verify records is what ``ucm verify`` is for.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from ucm.cli import terminal
from ucm.cli.records import (
    READER,
    Manifest,
    Refused,
    Shape,
    differences,
    header_of,
    most_to_read,
    read_footer,
    read_manifest,
    verdict_of,
    verify_record,
)
from ucm.cli.roots import (
    LOW,
    MARKER,
    PAGE,
    AnyRoot,
    Contents,
    Found,
    Kind,
    Root,
    foreigners,
    open_root,
    uses,
)
from ucm.cli.terminal import scheme_of
from ucm.errors import UcmError
from ucm.logger import in_units

#: Headers read of each namespace.
HEADERS = 64
#: Bytes that hold every header.
_HEADER_MOST = 26 * PAGE
#: Characters shown of what two long values have in common, before they differ.
_BEFORE = 8
#: Foreign names shown to people.
_SHOWN = 10


@click.command()
@terminal.roots
@click.option(
    "--tenants",
    is_flag=True,
    help="Read every record's header and count records and bytes by tenant.",
)
@terminal.of_store
@terminal.json_output
def inspect(paths: Sequence[str], tenants: bool, options: Mapping[str, str], as_json: bool) -> None:
    """Show what lies below each ROOT, or what a record says if ROOT is a file.

    Namespaces with their identity in words, how identities differ, use against storage_capacity,
    private, foreign and seed-form files. Changes nothing.
    """
    roots, records = [], []
    for path in paths:
        if scheme_of(path) or os.path.isdir(path):
            with open_root(path, options) as root:
                roots.append(describe(root) | ({"tenants": count_tenants(root)} if tenants else {}))
        else:
            records.append(inspect_file(path))
    if as_json:
        terminal.document({"command": "inspect", "roots": roots, "records": records})
        return
    terminal.each(_show_root, roots)
    for at, record in enumerate(records):
        if at or roots:
            click.echo()
        show_file(record)


def describe(root: AnyRoot) -> dict[str, Any]:
    """Everything there is to say of a root, as it stands in the JSON document."""
    beside = root.beside()
    foreign = [*beside.foreign]
    namespaces, identities = [], {}
    files = beside.files
    for name in root.namespaces():
        contents = root.scan(name)
        manifest = read_manifest(root, name)
        foreign += contents.foreign
        files += contents.files
        if manifest.identity:
            identities[name] = manifest.identity
        namespaces.append(_namespace(root, name, contents, manifest))
    size, free = root.file_system()
    count, sizes = Counter(found.kind for found in files), Counter[Kind]()
    for found in files:
        sizes[found.kind] += found.size
    used = sizes.total()
    return {
        "root": root.shown,
        "uuid": root.uuid,
        "format": root.marker["format"],
        "created": root.marker.get("created"),
        "storage_capacity": root.limit,
        "layout": root.layout,
        "low_watermark": int(root.limit * LOW),
        "used_bytes": used,
        "used_share": round(used / root.limit, 4) if root.limit else None,
        "records": count[Kind.RECORD],
        "record_bytes": sizes[Kind.RECORD],
        "segments": count[Kind.SEGMENT],
        "segment_bytes": sizes[Kind.SEGMENT],
        "segment_records": sum(space["segment_records"] for space in namespaces),
        "private": count[Kind.PRIVATE],
        "private_bytes": sizes[Kind.PRIVATE],
        "file_system_bytes": size,
        "file_system_free_bytes": free,
        "space_documents": _sorted(Counter(_sort_of(found.name) for found in beside.space)),
        "namespaces": namespaces,
        "differences": differences(identities) if len(identities) > 1 else {},
        **foreigners(root, foreign),
    }


def count_tenants(root: AnyRoot) -> list[dict[str, Any]]:
    """Records and bytes of each tag, most bytes first; the tag of what belongs to no tenant is
    empty. A record whose header is refused is not counted."""
    records: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name in root.namespaces():
        contents = root.scan(name)
        places = [(found, 0, found.size) for found in contents.records]
        for segment in contents.segments:
            with suppress(OSError, Refused):
                entries = read_footer(root, segment).entries
                places += [(segment, entry.offset, entry.length) for entry in entries]
        for found, offset, size in places:
            with suppress(OSError, Refused):
                header = header_of(root.read(found, min(size, _HEADER_MOST), offset)[0])
                tag = "" if header["tenant"] == "none" else header["tenant"]
                records[tag] += 1
                sizes[tag] += size
    return [
        {"tenant": tag, "records": records[tag], "bytes": size} for tag, size in sizes.most_common()
    ]


def _namespace(root: AnyRoot, name: str, contents: Contents, manifest: Manifest) -> dict[str, Any]:
    sample = _spread(contents.records, HEADERS)
    parts, sides, refused = Counter[str](), Counter[str](), Counter[str]()
    for found in sample:
        with _counted(refused):
            header = header_of(root.read(found, _HEADER_MOST)[0])
            parts[header["part"]] += 1
            sides.update(side["name"] for side in header["sides"])
    in_segments, footers_refused = Counter[str](), Counter[str]()
    for found in contents.segments:
        with _counted(footers_refused):
            footer = read_footer(root, found)
            in_segments[footer.part] += len(footer.entries)
    segment_bytes = sum(found.size for found in contents.segments)
    return {
        "namespace": name,
        "manifest": manifest.state,
        "digest": manifest.digest,
        "labels": manifest.labels,
        "words": dict(manifest.words()),
        "identity": manifest.identity,
        "parts_described": sorted(manifest.shapes),
        "parts_present": _sorted(parts + in_segments),
        "sides_present": _sorted(sides),
        "headers_read": len(sample),
        "headers_refused": _sorted(refused),
        "records": len(contents.records) + in_segments.total(),
        "bytes": sum(found.size for found in contents.records) + segment_bytes,
        "segments": len(contents.segments),
        "segment_bytes": segment_bytes,
        "segment_records": in_segments.total(),
        "footers_refused": _sorted(footers_refused),
        **uses([*contents.records, *contents.segments]),
        "private": len(contents.private),
        "private_bytes": sum(found.size for found in contents.private),
    }


@contextmanager
def _counted(reasons: Counter[str]) -> Iterator[None]:
    """Counts why something cannot be read; what was removed in between is no reason."""
    try:
        yield
    except (OSError, Refused) as error:
        verdict = verdict_of(error)
        if verdict.state != "removed":
            reasons[verdict.reason] += 1


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def _spread(records: list[Found], most: int) -> list[Found]:
    """At most ``most``, evenly spread."""
    if len(records) <= most:
        return records
    return [records[at * len(records) // most] for at in range(most)]


def _inside(records: int) -> str:
    return f", {terminal.many(records, 'record')} in them" if records else ""


def _sort_of(name: str) -> str:
    """The kind of a document about space; a bucket's records of use are named by their writer."""
    return "uses" if re.fullmatch(r"[0-9a-f]{16}\.json", name) else name.partition("-")[0]


def _layout(kept: dict[str, Any] | None) -> str:
    if kept is None:
        return "not decided: as the configuration says"
    return f"{kept.get('kind')} ({kept.get('why')})"


def _show_root(root: dict[str, Any]) -> None:
    click.echo(f"root {root['root']}")
    created = root["created"]
    used = in_units(root["used_bytes"])
    if root["storage_capacity"]:
        share = "" if root["used_share"] is None else f" ({root['used_share']:.1%})"
        limit = in_units(root["storage_capacity"])
        used += f" of {limit}{share}, storage_capacity as it was at the first start"
    else:
        used += ", no limit is known"
    rows: list[tuple[str, object]] = [
        ("uuid", f"{root['uuid']}, format {root['format']}"),
        ("made", terminal.ago(created if isinstance(created, int) else None)),
        ("layout", _layout(root["layout"])),
        ("used", used),
        *_free(root),
        ("records", _amount(root["records"], root["record_bytes"])),
        (
            "segments",
            _amount(root["segments"], root["segment_bytes"]) + _inside(root["segment_records"]),
        ),
        ("private", _amount(root["private"], root["private_bytes"])),
        ("foreign", _amount(root["foreign"], root["foreign_bytes"])),
        ("seed form", _amount(root["seed_form"], root["seed_form_bytes"])),
    ]
    terminal.pairs(rows)
    if not root["namespaces"]:
        click.echo("\n  no namespaces")
        return
    click.echo("\nnamespaces")
    terminal.listed(
        ("namespace", "records", "bytes", "oldest use", "newest use", "parts", "manifest"),
        ({**one, "parts": " ".join(one["parts_present"]) or "-"} for one in root["namespaces"]),
    )
    for space in root["namespaces"]:
        click.echo(f"\nnamespace {space['namespace']}")
        terminal.pairs(
            list(space["words"].items())
            or [("identity", f"not known: the manifest is {space['manifest']}")]
        )
        for what, preposition in (("sides_present", "in"), ("headers_refused", "of")):
            if space[what]:
                reasons = ", ".join(f"{count} {reason}" for reason, count in space[what].items())
                of = f"{preposition} {space['headers_read']} headers read"
                click.echo(f"  {what.replace('_', ' ')}: {reasons} {of}")
    _show_differences(root)
    if "tenants" in root:
        click.echo("\ntenants")
        tags = ({**one, "tag": one["tenant"] or "none"} for one in root["tenants"])
        terminal.listed(("tag", "records", "bytes"), tags)
    if root["foreign_files"]:
        click.echo("\nnot ours, left alone")
        shown = ({**one, "what": _foreign(one)} for one in root["foreign_files"][:_SHOWN])
        terminal.listed(("path", "what", "bytes"), shown)
        if root["foreign"] > _SHOWN:
            click.echo(f"  and {root['foreign'] - _SHOWN} more")


def _free(root: dict[str, Any]) -> list[tuple[str, object]]:
    """What is free of the file system; nothing where there is none."""
    size, free = root["file_system_bytes"], root["file_system_free_bytes"]
    return [] if size is None else [("free", f"{in_units(free)} of {in_units(size)}")]


def _show_differences(root: dict[str, Any]) -> None:
    known = [space["namespace"] for space in root["namespaces"] if space["identity"]]
    if len(known) < 2:
        return
    click.echo("\nidentities differ in")
    if not root["differences"]:
        click.echo("  nothing that the manifests say")
        return
    terminal.table(
        ("key", *(name[:8] for name in known)),
        [
            (key, *_shortened([values.get(name, "-") for name in known]))
            for key, values in root["differences"].items()
        ],
    )


def _shortened(values: list[object]) -> list[str]:
    """Each value short; where that hides what differs, from there on."""
    texts = [str(value) for value in values]
    shown = [terminal.short(text) for text in texts]
    if len(set(shown)) < len(set(texts)):
        alike = next(at for at, letters in enumerate(zip_longest(*texts)) if len(set(letters)) > 1)
        at = max(alike - _BEFORE, 0)
        shown = [terminal.short("..." + text[at:] if at else text) for text in texts]
    return shown


def _foreign(found: dict[str, Any]) -> str:
    many = terminal.many(found["seed_form"], "file") + " " if found["what"] == "directory" else ""
    return (
        f"{found['what']}, {many}of the seed's form" if found["seed_form"] else str(found["what"])
    )


def _amount(count: int, size: int) -> str:
    return f"{count}, {in_units(size)}" if count else "none"


#: Longer than every header.
_HEAD = 128 << 10
_RECORD = re.compile(r"([0-9a-f]{32})/blocks/([0-9a-f]{2})/(\2[0-9a-f]{30})\.bin")


def inspect_file(path: str) -> dict[str, Any]:
    """Everything there is to say of one record, as it stands in the JSON document."""
    document: dict[str, Any] = {"file": os.path.abspath(path), "bytes": os.path.getsize(path)}
    named = _RECORD.fullmatch("/".join(Path(path).absolute().parts[-4:]))
    record_id, namespace, shape = None, b"", None
    try:
        with open(path, "rb") as file:
            header = document["header"] = header_of(file.read(_HEAD))
            file.seek(0)  # not further than the header says, whatever lies there
            data = file.read(most_to_read(header))
        if named is not None:
            record_id, namespace = bytes.fromhex(named[3]), bytes.fromhex(named[1])
            shape = _shapes(Path(path).absolute().parents[3], named[1]).get(header["part"])
        lost = verify_record(data, record_id, namespace, shape, None)["lost_sides"]
        document |= {"verdict": "good", "reason": None, "found": None}
        reasons = {name: reason for name, reason, _ in lost}
        for side in header["sides"]:
            side["verdict"] = reasons.get(side["name"], "good")
    except Refused as refused:
        document.setdefault("header", None)
        document |= {"verdict": "refused", "reason": str(refused.reason), "found": refused.found}
    return document | {"name_checked": named is not None, "reader": READER}


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
        rows[at] = ("time", terminal.ago(int(header["time"])))
    terminal.pairs(rows)


def _side(side: dict[str, Any]) -> str:
    verdict = side.get("verdict")
    return f"{side['bytes']} bytes, version {side['version']}" + (f", {verdict}" if verdict else "")


def _shapes(root: Path, namespace: str) -> dict[str, Shape]:
    if not (root / MARKER).exists():
        return {}
    try:
        with Root(root) as opened:
            return read_manifest(opened, namespace).shapes
    except UcmError:
        return {}
