"""``ucm stats``: hits, misses by reason, tiers and speeds of a live engine, from its ``/metrics``;
or how a root grows, where no engine can be reached."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import click

from ucm.cli import terminal
from ucm.cli.pd_proxy import url
from ucm.logger import in_units
from ucm.metrics.names import INFO_GAUGE

#: Seconds in which an engine has to answer.
ANSWER_S = 10.0
#: Counters whose changes are watched.
WATCHED = (
    *("asked_blocks", "hit_blocks", "loaded_blocks", "published_blocks", "evicted_blocks"),
    *("loaded_bytes", "published_bytes"),
)
#: Series of which the least value of several sides counts, not the largest.
LEAST = {"tier_healthy", "tier_writable"}


class Unreachable(click.ClickException):
    """An address has no metrics of ucm."""

    exit_code = 2


@click.command()
@click.option(
    "--url", "address", type=url, help="Address of a vLLM server.  [default: http://127.0.0.1:8000]"
)
@click.option("--root", help="A root or an address of a store instead: records and bytes in it.")
@terminal.of_store
@click.option("--watch", is_flag=True, help="Again and again, with changes a second; Ctrl-C ends.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True)
@click.option("--times", type=click.IntRange(min=1), help="With --watch: end after N rounds.")
@terminal.json_output
def stats(
    address: str | None,
    root: str | None,
    options: Mapping[str, str],
    watch: bool,
    interval: float,
    times: int | None,
    as_json: bool,
) -> None:
    """Show what a live engine hits, misses and why, its tiers and its speeds.

    With --watch and --json it prints one document a round.
    """
    if address and root:
        raise click.UsageError("give --url or --root")
    if times is not None and not watch:
        raise click.UsageError("--times is for --watch")
    read: Callable[[], dict[str, Any]]
    if root is not None:
        where = root
        read, show = (lambda: of_root(where, options)), _show_root
    else:
        base = address or "http://127.0.0.1:8000"
        read, show = (lambda: of_url(base)), _show_engines
    with suppress(KeyboardInterrupt):
        for number, document in enumerate(_rounds(read, interval, times if watch else 1)):
            if number and not as_json:
                click.clear()
            (terminal.document if as_json else show)(document)


def _rounds(
    read: Callable[[], dict[str, Any]], interval: float, times: int | None
) -> Iterator[dict[str, Any]]:
    """Documents with the changes a second since the one before."""
    before: dict[str, float] = {}
    last = 0.0
    while times is None or times > 0:
        document, now = read(), time.monotonic()
        counts = dict(_counts(document))
        if before:
            document["per_second"] = {
                name: round((count - before.get(name, 0)) / (now - last), 3)
                for name, count in counts.items()
            }
        yield document
        before, last = counts, now
        times = None if times is None else times - 1
        if times != 0:
            time.sleep(interval)


def _counts(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Counters of a document by name, those of several engines added up."""
    for key in ("records", "used_bytes") if "root" in document else WATCHED:
        yield key, sum(one.get(key, 0) for one in document.get("engines", (document,)))


# A live engine
# --------------------------------------------------------------------------------------------------


def of_url(base: str) -> dict[str, Any]:
    """The document of a server's engines."""
    where = base if base.endswith("/metrics") else f"{base}/metrics"
    try:
        with urllib.request.urlopen(where, timeout=ANSWER_S) as answer:  # noqa: S310 - http, https
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise Unreachable(f"{where} cannot be read: {why}") from None
    if not (engines := engines_of(text)):
        raise Unreachable(
            f"{where} has no metrics of ucm: it is not configured there, or metrics are off"
            " (metrics.enabled, --disable-log-stats)"
        )
    return {"command": "stats", "url": base, "engines": engines}


def engines_of(text: str) -> list[dict[str, Any]]:
    """The series of each engine, by names without prefix and ``_total``: values by their label, one
    of all sides, and means of histograms."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError:
        raise Unreachable("ucm stats needs pip install 'ucm-kv[metrics]'") from None
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if not name.startswith("ucm_") or "engine" not in labels:
                continue
            key = labels.pop("model_name", ""), labels.pop("engine")
            engine = found.setdefault(key, {"model": key[0], "engine": key[1]})
            short = name.removeprefix("ucm_").removesuffix("_total")
            if name == INFO_GAUGE.name:
                engine.update({"store": labels} if value else {})
            elif not name.endswith(("_bucket", "_created")):
                _add(engine, short, labels, int(value) if float(value).is_integer() else value)
    for engine in found.values():
        for short in [name.removesuffix("_count") for name in engine if name.endswith("_count")]:
            _mean(engine, short)
    return [found[key] for key in sorted(found)]


def _add(engine: dict[str, Any], short: str, labels: dict[str, str], value: float) -> None:
    labels.pop("side", None)
    if not labels:
        engine[short] = value
        return
    (label,) = labels.values()
    values = engine.setdefault(short, {})
    known = values.get(label, value)
    values[label] = min(known, value) if short in LEAST else max(known, value)


def _mean(engine: dict[str, Any], short: str) -> None:
    """Replace a histogram's sum and count by the mean, or by the mean of each label."""
    total, count = engine.pop(f"{short}_sum"), engine.pop(f"{short}_count")
    if isinstance(count, dict):
        engine[short] = {label: total[label] / count[label] for label in count if count[label]}
    else:
        engine[short] = total / count if count else None


def _show_engines(document: dict[str, Any]) -> None:
    for engine in document["engines"]:
        store = engine.get("store", {})
        what = " ".join(filter(None, (store.get("tiers"), store.get("layout")))) or "no store"
        click.echo(f"engine {engine['engine']} of {engine['model']}: {what}")
        reasons = sorted(engine["missed_blocks"].items(), key=lambda item: -item[1])
        missed = ", ".join(f"{count} {reason}" for reason, count in reasons if count)
        gbps = [f"{way} {speed:.3g} GB/s" for way, speed in engine["io_throughput_gbps"].items()]
        times = {name: engine[f"{name}_seconds"] for name in ("lookup", "load", "dump")}
        means = [f"{name} {1e3 * mean:.1f} ms" for name, mean in times.items() if mean is not None]
        asked, hit = engine["asked_blocks"], engine["hit_blocks"]
        requests = engine["requests"]
        terminal.pairs(
            [
                ("identity", store.get("identity") or "-"),
                ("mode", store.get("mode") or "-"),
                ("asked", f"{asked} blocks, {hit} hit" + (f", {hit / asked:.0%}" if asked else "")),
                ("loaded", f"{engine['loaded_blocks']} blocks, {in_units(engine['loaded_bytes'])}"),
                ("missed", missed or "none"),
                ("stored", f"{engine['published_blocks']} blocks"),
                ("saved", f"{engine['saved_prefill_seconds']:.1f} s of computing"),
                ("requests", f"{requests['success']} success, {requests['error']} error"),
                ("speeds", ", ".join(gbps)),
                ("means", ", ".join(means) or "-"),
            ]
        )
        terminal.table(
            ("tier", "state", "used", "of", "hits", "read", "written", "failed", "refused"),
            [_tier(engine, tier) for tier in engine.get("tier_healthy", ())],
        )
    _show_rates(document)


def _tier(engine: Mapping[str, Any], tier: str) -> tuple[object, ...]:
    def of(name: str) -> int:
        return int(engine.get(f"tier_{name}", {}).get(tier, 0))

    state = "off" if not of("healthy") else "in use" if of("writable") else "only read"
    names = ("used_bytes", "capacity_bytes", "read_bytes", "written_bytes")
    used, limit, read, written = (in_units(of(name)) for name in names)
    faults = of("failed_operations"), of("refused_blocks")
    return (tier, state, used, limit, of("hit_blocks"), read, written, *faults)


def _show_rates(document: Mapping[str, Any]) -> None:
    if rates := document.get("per_second"):
        shown = (
            f"{key} {in_units(rate) if key.endswith('_bytes') else rate}"
            for key, rate in rates.items()
            if rate
        )
        click.echo(f"a second: {', '.join(shown) or 'no change'}")


# A root
# --------------------------------------------------------------------------------------------------

#: Of what ``ucm inspect`` finds.
KEYS = ("root", "storage_capacity", "used_bytes", "used_share", "segments")


def of_root(path: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The document of a root."""
    from ucm.cli.inspect import describe
    from ucm.cli.roots import open_root

    with open_root(path, options) as root:
        found = describe(root)
    keys = ("namespace", "records", "bytes", "newest_use")
    spaces = [{key: space[key] for key in keys} for space in found["namespaces"]]
    return {
        "command": "stats",
        **{key: found[key] for key in KEYS},
        "records": sum(space["records"] for space in spaces),
        "namespaces": spaces,
    }


def _show_root(document: dict[str, Any]) -> None:
    used, limit = in_units(document["used_bytes"]), in_units(document["storage_capacity"])
    records = terminal.many(document["records"], "record")
    click.echo(f"{document['root']}: {records}, {used} of {limit}")
    terminal.table(
        ("namespace", "records", "bytes", "newest use"),
        [
            (
                space["namespace"],
                space["records"],
                in_units(space["bytes"]),
                terminal.ago(space["newest_use"]),
            )
            for space in document["namespaces"]
        ],
    )
    _show_rates(document)
