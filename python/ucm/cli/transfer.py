"""``ucm export`` and ``ucm import``: records from one root into another, by way of the store's own
loads and dumps.

An archive is a root: what inspects, verifies or serves a root does so with an archive. A record is
verified when it is loaded, encrypted by the key of its new root when it is dumped, and becomes
visible whole or not at all. What the target has already is passed over, so a command that was
interrupted goes on where it ended. Blocks are copied in the order of their prompts, beginnings
first: what is there can be hit. The side shards of a block follow it, where it has them all in its
record, else in records of their own.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ucm.cli import terminal
from ucm.cli.records import (
    FIRST,
    HEADER_FIRST,
    Header,
    Manifest,
    Refused,
    Shape,
    header_of,
    read_footer,
    read_manifest,
    verdict_of,
)
from ucm.cli.roots import MARKER, AnyRoot, Found, Kind, open_root, pick_each
from ucm.errors import ConfigError, TaskError, UcmError
from ucm.logger import in_units
from ucm.reasons import MissReason, reason_of

#: Bytes of KV that are copied at a time.
BATCH = 64 << 20
#: Seconds for which a store that takes or gives no blocks for now is waited for, and between two
#: attempts.
PATIENCE_S, PAUSE_S = 60.0, 0.2
#: Room in an archive beyond the records, as a share of them and in bytes.
_SPARE, _LEAST = 1.25, 256 << 20
#: Kinds of error after which a row is sent again, or a side shard is read again, and those of one
#: that is not there.
_AGAIN, _FOR_NOW = ("busy", "no_space", "unhealthy"), ("busy", "timeout", "unhealthy")
_NONE = ("not_found", "corrupt", "foreign")
#: Reasons of records that a second run may copy.
_PASSING = frozenset(
    (MissReason.BUSY, MissReason.TIMEOUT, MissReason.UNHEALTHY, MissReason.IO_ERROR)
)
_PART = re.compile(r"g([0-9]+)p([0-9]+)t([0-9]+)")


def _common(command: Any) -> Any:
    for option in (
        terminal.json_output,
        terminal.of_store,
        click.option("--to-key-file", metavar="FILE", help="Key with which the target encrypts."),
        click.option("--key-file", metavar="FILE", help="Keys with which the source is decrypted."),
        click.option(
            "--keys",
            "ids_file",
            type=click.File(),
            metavar="FILE",
            help="Copy only records with these ids, 32 hex digits on a line of their own.",
        ),
        terminal.namespaces,
        click.pass_context,
    ):
        command = option(command)
    return command


@click.command("export")
@click.argument("source", metavar="ROOT")
@click.argument("target", metavar="ARCHIVE")
@_common
def export(ctx: click.Context, **arguments: Any) -> None:
    """Copy the records of ROOT into ARCHIVE, a directory that is a root itself.

    Exit status: 0 all copied or there before, 1 some were not, 2 it could not be done, 130
    interrupted (run it again, it goes on).
    """
    _run(ctx, "export", **arguments)


@click.command("import")
@click.argument("source", metavar="ARCHIVE")
@click.argument("target", metavar="ROOT")
@click.option("--capacity", metavar="SIZE", help="storage_capacity of a ROOT that is new.")
@_common
def import_(ctx: click.Context, **arguments: Any) -> None:
    """Copy the records of ARCHIVE, or of any root, into ROOT; engines may use it during the copy.

    Exit status: as of export.
    """
    _run(ctx, "import", **arguments)


def _run(
    ctx: click.Context,
    command: str,
    source: str,
    target: str,
    wanted: tuple[str, ...],
    ids_file: Any,
    key_file: str | None,
    to_key_file: str | None,
    options: Mapping[str, str],
    as_json: bool,
    capacity: str | None = None,
) -> None:
    ids = _ids(ids_file.read()) if ids_file is not None else None
    began, counts = time.monotonic(), Counter[str]()
    with open_root(source, options if terminal.scheme_of(source) else {}) as root:
        ((_, names),) = pick_each([root], wanted)
        size = sum(found.size for name in names for found in root.scan(name).files)
        if command == "export":
            capacity = str(int(size * _SPARE) + _LEAST)
        ends = (_End(source, key_file, options, None), _End(target, to_key_file, options, capacity))
        interrupted, patience = False, _Patience()
        try:
            for name in names:
                _Copy(root, name, ends, ids, counts, patience).run()
        except KeyboardInterrupt:
            interrupted = True
    document = {
        "command": command,
        "source": root.shown,
        "target": target,
        "namespaces": names,
        **{key: counts[key] for key in ("copied", "present", "failed", "bytes", "sides")},
        "reasons": {key[7:]: n for key, n in sorted(counts.items()) if key.startswith("reason ")},
        "seconds": round(time.monotonic() - began, 3),
        "interrupted": interrupted,
    }
    terminal.document(document) if as_json else _show(document)
    ctx.exit(130 if interrupted else 1 if counts["failed"] else 0)


def _ids(text: str) -> frozenset[bytes]:
    lines = text.split()
    if wrong := next((line for line in lines if not re.fullmatch("[0-9a-fA-F]{32}", line)), None):
        raise click.UsageError(f"--keys: {wrong!r} is no record id of 32 hex digits")
    return frozenset(map(bytes.fromhex, lines))


@dataclass(frozen=True)
class _End:
    """Where records come from or go to."""

    place: str
    key_file: str | None
    options: Mapping[str, str]
    capacity: str | None

    def open(self, manifest: Manifest, part: str, shape: Shape, sides: Mapping[str, Any]) -> Any:
        """The store there, for the records of one part of a namespace, with these side shards."""
        from ucm.config.words import DEFAULT_STORE, STORE_OF_SCHEME
        from ucm.store.factory import UcmConnectorFactoryV1

        tensors, layers, tokens, dtype = shape
        scheme, found = terminal.scheme_of(self.place), _PART.fullmatch(part)
        assert found is not None  # the name of a shape
        store = STORE_OF_SCHEME.get(scheme, DEFAULT_STORE) if scheme else DEFAULT_STORE
        layer = sum(tensors)
        config = {
            "storage_backends": [self.place],
            "identity": json.dumps(manifest.identity, separators=(",", ":"), ensure_ascii=True),
            "labels": {name: str(value) for name, value in manifest.labels.items()},
            "part": tuple(map(int, found.groups())),
            "tensor_size_list": tensors,
            "shard_size": layer * layers,
            "block_size": layer * layers,
            "block_tokens": tokens,
            "dtype": dtype,
            "sides": {name: {"bytes": n, "version": at} for name, (at, n) in sides.items()},
            "staging_capacity": max(2 * BATCH, 8 * layer * layers),
            "deadlines": {"load_max_s": 600.0, "load_unknown_s": 600.0, "dump_s": 600.0},
            **(dict(self.options) if scheme else {}),
        }
        if self.key_file is not None:
            config["encryption_key_file"] = self.key_file
        if self.capacity is not None and not os.path.exists(os.path.join(self.place, MARKER)):
            config |= {"storage_capacity": self.capacity, "free_space_floor": 0}
        return UcmConnectorFactoryV1.create_connector(store, config)


class _Patience:
    """Sends rows again that a store refused for now. Kinds of work are waited for one by one, and
    only progress renews the wait, so that batches behind one that was given up are tried once."""

    def __init__(self) -> None:
        #: By kind of work: when it was first refused since its last progress.
        self._refused: dict[str, float] = {}

    def moved(
        self, work: str, rows: int, send: Callable[..., None], passing: Sequence[str] = _AGAIN
    ) -> dict[int, UcmError]:
        """Loads or stores this many rows, those of a list by ``send``; the failures by row. Those
        with a ``passing`` kind of error are sent again: by default rows given up because another of
        their task failed, or because a store is busy, unhealthy or counts what it holds. Raises an
        error of all rows that no wait mends."""
        failures: dict[int, UcmError] = {}
        left = list(range(rows))
        while left:
            try:
                send(left)
            except UcmError as error:
                if not (error.retryable or isinstance(error, TaskError)):
                    raise
                found = getattr(error, "failures", {}) or dict.fromkeys(range(len(left)), error)
                failures |= {left[row]: why for row, why in found.items()}
            again = [at for at in failures if failures[at].kind in passing]
            if len(again) < len(left):
                self._refused.pop(work, None)
            else:
                now = time.monotonic()
                if now - self._refused.setdefault(work, now) >= PATIENCE_S:
                    break
                time.sleep(PAUSE_S)
            left = again
            for at in left:
                del failures[at]
        return failures


class _Copy:
    """One namespace."""

    def __init__(
        self,
        root: AnyRoot,
        namespace: str,
        ends: tuple[_End, _End],
        ids: frozenset[bytes] | None,
        counts: Counter[str],
        patience: _Patience,
    ) -> None:
        self._root, self._namespace, self._ends = root, namespace, ends
        self._ids, self._counts, self._moved = ids, counts, patience.moved
        #: Side shards by part and name: newest version, and bytes.
        self._sides: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)

    def run(self) -> None:
        """Copies its records, those of one part after the other."""
        from tqdm import tqdm

        manifest = read_manifest(self._root, self._namespace)
        if manifest.state != "ok":
            text = f"the manifest of {self._namespace[:12]} is {manifest.state}; its records stay"
            raise ConfigError(text)
        headers = list(self._headers())
        hidden = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "disable": None}
        total = sum(header["kv_bytes"] for header in headers)
        with tqdm(total=total, desc=self._namespace[:12], file=sys.stderr, **hidden) as bar:
            for part in sorted({header["part"] for header in headers}):
                own = [header for header in headers if header["part"] == part]
                if part not in manifest.shapes:
                    self._failed(len(own), "unknown shape")
                    continue
                of = manifest, part, manifest.shapes[part], self._sides[part]
                with self._ends[0].open(*of) as source, self._ends[1].open(*of) as target:
                    for batch in _batches(sorted(own, key=lambda header: header["ordinal"])):
                        self._copy(batch, source, target, manifest.shapes[part])
                        self._copy_sides(batch, source, target)
                        bar.update(sum(header["kv_bytes"] for header in batch))

    def _failed(self, records: int, reason: str) -> None:
        self._counts["failed"] += records
        self._counts[f"reason {reason}"] += records

    def _headers(self) -> Iterator[Header]:
        """Those of the records with KV that are wanted, each once."""
        root, contents, seen = self._root, self._root.scan(self._namespace), set()
        for found in (*contents.records, *contents.segments):
            try:
                for offset in self._offsets(found):
                    header = header_of(root.read(found, min(HEADER_FIRST, FIRST), offset)[0])
                    name = bytes.fromhex(header["record_id"])
                    for side in header["sides"]:
                        of, spec = self._sides[header["part"]], (side["version"], side["bytes"])
                        of[side["name"]] = max(of.get(side["name"], spec), spec)
                    wanted = self._ids is None or name in self._ids
                    if wanted and not header["without_kv"] and name not in seen:
                        seen.add(name)
                        yield header
            except (OSError, Refused) as error:
                if (verdict := verdict_of(error)).state != "removed":
                    self._failed(1, verdict.reason)

    def _offsets(self, found: Found) -> list[int]:
        if found.kind is Kind.RECORD:
            return [0]
        return [entry.offset for entry in read_footer(self._root, found).entries]

    def _copy(self, headers: Sequence[Header], source: Any, target: Any, shape: Shape) -> None:
        import numpy as np

        names = [bytes.fromhex(header["record_id"]) for header in headers]
        there = target.lookup(names)
        wanted = [header for header, is_there in zip(headers, there, strict=True) if not is_there]
        self._counts["present"] += len(headers) - len(wanted)
        if not wanted:
            return
        tensors, layers, _, _ = shape
        pieces = np.concatenate(([0], np.cumsum(tensors * layers)))
        memory = np.empty((len(wanted), int(pieces[-1])), dtype=np.uint8)
        first = np.uint64(memory.ctypes.data)
        starts = first + np.arange(len(wanted), dtype=np.uint64) * np.uint64(pieces[-1])
        rows = starts[:, None] + pieces[:-1].astype(np.uint64)[None, :]
        ids = np.array([bytes.fromhex(header["record_id"]) for header in wanted], dtype=object)

        def load(left: list[int]) -> None:
            source.wait(source.load_data(list(ids[left]), [0] * len(left), rows[left]))

        bad = self._moved("load", len(ids), load)
        good = [at for at in range(len(wanted)) if at not in bad]
        for tenant in sorted({wanted[at]["tenant"] for at in good}):
            own = [at for at in good if wanted[at]["tenant"] == tenant]
            target.describe(
                list(ids[own]),
                parents=[bytes.fromhex(wanted[at]["parent"]) for at in own],
                ordinals=[wanted[at]["ordinal"] for at in own],
                tokens=[wanted[at]["tokens"] for at in own],
                tenant=None if tenant == "none" else bytes.fromhex(tenant),
            )
        sound, kv = ids[good], rows[good]
        sides = {side: self._side("source", source, sound, side) for side in source.side_sizes}
        beside = bool(sides) and all(found.all() for _, found, _ in sides.values())

        def send(left: list[int]) -> None:
            of = {side: data[left] for side, (data, _, _) in sides.items()} if beside else None
            target.wait(target.dump_data(list(sound[left]), [0] * len(left), kv[left], sides=of))

        unsent = self._moved("dump", len(sound), send)
        for why in (*bad.values(), *unsent.values()):
            self._failed(1, str(reason_of(why)))
        copied = [wanted[at]["kv_bytes"] for row, at in enumerate(good) if row not in unsent]
        self._counts["copied"] += len(copied)
        self._counts["bytes"] += sum(copied)
        self._counts["sides"] += len(copied) * len(sides) * beside

    def _copy_sides(self, headers: Sequence[Header], source: Any, target: Any) -> None:
        """Side shards that the target has not beside these blocks."""
        import numpy as np

        ids = np.array([bytes.fromhex(header["record_id"]) for header in headers], dtype=object)
        ids = ids[np.array(target.lookup(list(ids)), dtype=bool)]
        for side in source.side_sizes:
            left = ids[~self._side("target", target, ids, side)[1]]
            data, found, unread = self._side("source", source, left, side)
            left, data = left[found], data[found]

            def send(rows: list[int]) -> None:
                target.wait(target.dump_sides(list(left[rows]), {side: data[rows]}))  # noqa: B023

            unsent = self._moved("dump side shards", len(left), send)
            self._counts["sides"] += len(left) - len(unsent)
            for why in (*unread, *unsent.values()):
                self._failed(1, str(reason_of(why)))

    def _side(self, end: str, store: Any, ids: Any, side: str) -> tuple[Any, Any, list[UcmError]]:
        """The bytes of a side shard of these blocks, whether each is there and sound, and the
        errors of those that may be there all the same."""
        import numpy as np

        data = np.zeros((len(ids), store.side_sizes[side]), dtype=np.uint8)
        found = np.zeros(len(ids), dtype=bool)

        def load(left: list[int]) -> None:
            store.wait(task := store.load_sides(list(ids[left]), side))
            data[left], found[left] = task.result()
            if missing := task.missing():
                raise TaskError("not every side shard was read", failures=missing)

        failures = self._moved(f"side shards of the {end}", len(ids), load, _FOR_NOW)
        return data, found, [why for why in failures.values() if why.kind not in _NONE]


def _batches(headers: Sequence[Header]) -> Iterator[Sequence[Header]]:
    step = max(1, BATCH // max(1, headers[0]["kv_bytes"])) if headers else 1
    for at in range(0, len(headers), step):
        yield headers[at : at + step]


def _show(document: dict[str, Any]) -> None:
    click.echo(f"{document['source']} -> {document['target']}")
    rows: list[tuple[str, object]] = [
        ("copied", f"{document['copied']} ({in_units(document['bytes'])})"),
        ("there before", document["present"]),
        ("side shards", document["sides"]),
    ]
    if document["failed"]:
        whys = ", ".join(f"{count} {reason}" for reason, count in document["reasons"].items())
        rows.append(("not copied", f"{document['failed']}: {whys}"))
    terminal.pairs(rows)
    why = "interrupted" if document["interrupted"] else ""
    if not why and not _PASSING.isdisjoint(document["reasons"]):
        why = "not all could be copied for now"
    if why:
        click.echo(f"\n{why}: run the same command again, and it goes on")
