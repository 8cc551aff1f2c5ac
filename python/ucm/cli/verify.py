"""``ucm verify``: reads every record of a root and verifies it whole, at a bounded rate, while
engines go on.

What is wrong is reported and stays where it is: an engine refuses it and replaces it with the next
dump of that block.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from ucm._core import RecordKeys
from ucm.cli import terminal
from ucm.cli.records import (
    READER,
    Manifest,
    Pace,
    RecordVerifier,
    Refused,
    Verdict,
    read_manifest,
    verdict_of,
)
from ucm.cli.roots import AnyRoot, Found, Kind, over_roots
from ucm.errors import ConfigError
from ucm.logger import in_units

#: Bad records shown to people.
_SHOWN = 20
_DEFAULT_RATE = "256MiB"
_COUNTED = ("compressed", "encrypted", "decrypted", "sides", "sides_alone")


@click.command()
@terminal.roots
@click.option(
    "--rate",
    type=terminal.rate,
    metavar="SIZE",
    default=_DEFAULT_RATE,
    show_default=True,
    help="Most bytes read per second, or unlimited.",
)
@click.option(
    "--sample",
    type=terminal.percent,
    metavar="PERCENT",
    default="100%",
    help="Verify this share of the records, chosen at random.",
)
@terminal.namespaces
@click.option(
    "--key-file",
    metavar="FILE",
    help=(
        "Decrypt records with the keys in it, as encryption_key_file names them; else those of"
        " UCM_ENCRYPTION_KEY."
    ),
)
@terminal.of_store
@terminal.json_output
@click.pass_context
def verify(
    ctx: click.Context,
    paths: tuple[str, ...],
    rate: int | None,
    sample: float,
    wanted: tuple[str, ...],
    key_file: str | None,
    options: Mapping[str, str],
    as_json: bool,
) -> None:
    """Verify every record below each ROOT by all its checksums.

    Exit status: 0 all good, 1 bad records or side shards found, 2 it could not be done, 130
    interrupted.
    """
    keys = _keys(key_file)

    def scrub(root: AnyRoot, names: list[str]) -> dict[str, Any]:
        return Scrub(root, rate, keys).run(names, sample)

    bad = ("bad", "unreadable", "bad_sides")
    over_roots(ctx, paths, options, wanted, as_json, scrub, _show, bad)


def _keys(key_file: str | None) -> RecordKeys | None:
    """What decrypts records, if there is a key: that of the file, else that of the environment."""
    # with all of the configuration, which other commands do not need
    from ucm.config.fields import read_secret
    from ucm.config.words import ENCRYPTION_KEY_VARIABLE

    try:
        if key_file is not None:
            text = read_secret(key_file, "--key-file", 1 << 16).decode("ascii", "replace")
        else:
            text = os.environ.get(ENCRYPTION_KEY_VARIABLE, "").strip()
        return RecordKeys(text) if text or key_file is not None else None
    except OSError as error:
        raise click.UsageError(
            f"the key file {key_file} cannot be read: {error.strerror}"
        ) from None
    except ConfigError as error:
        raise click.UsageError(f"{key_file or ENCRYPTION_KEY_VARIABLE}: {error.message}") from None


@dataclass
class Scrub:
    """One pass over a root."""

    root: AnyRoot
    rate: int | None
    keys: RecordKeys | None = None
    states: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    bad: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    bad_sides: list[dict[str, Any]] = field(default_factory=list)

    def run(self, namespaces: list[str], percent: float) -> dict[str, Any]:
        """Verifies the records of these namespaces; the answer is the JSON document."""
        from tqdm import tqdm

        start = time.monotonic()
        verifier = RecordVerifier(self.root, Pace(self.rate), self.keys)
        scanned = {name: self.root.scan(name) for name in namespaces}
        chosen = {
            name: _sample([*inside.records, *inside.segments], percent)
            for name, inside in scanned.items()
        }
        total = sum(found.size for records in chosen.values() for found in records)
        interrupted = False
        # disable=None: the bar is drawn on terminals only.
        bar = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            desc="verify",
            file=sys.stderr,
            disable=None,
        )
        with bar:
            try:
                for name, records in chosen.items():
                    manifest = read_manifest(self.root, name)
                    for found in records:
                        if found.kind is Kind.SEGMENT:
                            self._take_segment(found, verifier, manifest)
                        else:
                            verdict = verifier.verify(found, manifest)
                            self._see_sides(found.path, verdict)
                            self._blame(found, "", verdict)
                            self.counts["records"] += 1
                        bar.update(found.size)
            except KeyboardInterrupt:
                interrupted = True
        return {
            "command": "verify",
            "root": self.root.shown,
            "uuid": self.root.uuid,
            "namespaces": namespaces,
            "sample_percent": percent,
            "reader": READER,
            **{key: self.counts[key] for key in _COUNTED},
            "decoder": READER,
            "direct_io": self.root.direct,
            "rate": self.rate,
            "records": self.counts["records"],
            "segments": sum(
                found.kind is Kind.SEGMENT for records in chosen.values() for found in records
            ),
            "bytes": total,
            "bytes_read": self.root.bytes_read,
            "seconds": round(time.monotonic() - start, 3),
            **{
                state: self.states[state]
                for state in ("good", "bad", "unreadable", "newer", "removed")
            },
            "reasons": dict(sorted(self.reasons.items())),
            "bad_records": self.bad,
            "bad_sides": self.bad_sides,
            "interrupted": interrupted,
        }

    def _take_segment(self, found: Found, verifier: RecordVerifier, manifest: Manifest) -> None:
        """Verifies a segment's footer and every record it names."""
        try:
            footer = verifier.footer(found)
        except (OSError, Refused) as error:
            self._blame(found, "", verdict_of(error))
            return
        for entry in footer.entries:
            self.counts["records"] += 1
            verdict = verifier.verify(found, manifest, entry)
            self.counts["compressed"] += (
                verdict.state == "good" and (verdict.header or {}).get("codec") != "as is"
            )
            self._see_sides(f"{found.path}@{entry.offset}", verdict)
            self._blame(found, f"@{entry.offset}", verdict)

    def _see_sides(self, path: str, verdict: Verdict) -> None:
        """Counts the side shards of a good record. A damaged one is reported and kept."""
        if verdict.state == "good" and verdict.header is not None:
            self.counts["encrypted"] += verdict.header["key"] != "not encrypted"
            self.counts["decrypted"] += verdict.decrypted
            self.counts["sides"] += len(verdict.header["sides"])
            self.counts["sides_alone"] += verdict.header["without_kv"]
            damaged = verdict.damaged_sides.items()
            self.bad_sides += [
                {"path": path, "name": name, "found": what} for name, what in damaged
            ]

    def _blame(self, found: Found, where: str, verdict: Verdict) -> None:
        self.states[verdict.state] += 1
        if verdict.state in ("bad", "unreadable"):
            self.reasons[verdict.reason] += 1
            bad = {
                "path": found.path + where,
                "bytes": found.size,
                "reason": verdict.reason,
                "found": verdict.found,
            }
            self.bad.append(bad)


def _sample(records: list[Found], percent: float) -> list[Found]:
    """A share of the records, in the order in which they lie, at least one of any."""
    if percent >= 100:
        return records
    count = min(len(records), max(1, round(len(records) * percent / 100))) if percent else 0
    return [records[at] for at in sorted(random.sample(range(len(records)), count))]


def _show(result: dict[str, Any]) -> None:
    elsewhere = "from where it lies" if result["bytes_read"] else "nothing to read"
    way = {True: "past the page cache", False: "through the page cache", None: elsewhere}[
        result["direct_io"]
    ]
    what = terminal.many(result["records"], "record")
    if result["segments"]:
        what += f", some of them in {terminal.many(result['segments'], 'segment')}"
    sampled = (
        "" if result["sample_percent"] >= 100 else f", a sample of {result['sample_percent']:g}%"
    )
    click.echo(f"root {result['root']}: {what}, {in_units(result['bytes'])}{sampled}")
    rows: list[tuple[str, object]] = [("reader", f"{result['reader']}, {way}")]
    if result["compressed"]:
        how = "decoded and verified by the checksums of the result"
        rows.append(("compressed", f"{terminal.many(result['compressed'], 'record')}, {how}"))
    if result["encrypted"]:
        how = f"{result['decrypted']} of them decrypted and judged by their tags"
        if result["decrypted"] < result["encrypted"]:
            how += (
                "; the others by the checksums of the ciphertext alone: their key is not here"
                " (--key-file)"
            )
        rows.append(("encrypted", f"{terminal.many(result['encrypted'], 'record')}, {how}"))
    if result["sides"]:
        alone = f", {result['sides_alone']} of them alone" if result["sides_alone"] else ""
        rows.append(("side shards", f"{result['sides']}{alone}, {len(result['bad_sides'])} bad"))
    took = result["seconds"]
    rate = f", {in_units(result['bytes_read'] / took)}/s" if took > 0 else ""
    rows.append(("read", f"{in_units(result['bytes_read'])} in {terminal.span(took)}{rate}"))
    rows += [(state, result[state]) for state in ("good", "bad", "unreadable", "newer", "removed")]
    terminal.pairs(rows)
    tables = (
        ("bad records", "reason", result["bad_records"]),
        ("bad side shards: their KV is good", "name", result["bad_sides"]),
    )
    for title, first, bad in tables:
        if bad:
            click.echo(f"\n{title}")
            terminal.listed((first, "path", "found"), bad[:_SHOWN])
        if len(bad) > _SHOWN:
            click.echo(f"  and {len(bad) - _SHOWN} more; --json lists all")
    if result["interrupted"]:
        click.echo("\ninterrupted: this is what was seen until then")
