"""Engines that run. ``ucm stats`` shows their hits, misses by reason, tiers and speeds, from
``/metrics``, or how a root grows; ``ucm mode`` reads or writes their mode (:mod:`ucm.mode`);
``ucm dashboard`` prints Grafana's dashboards and Prometheus's rules, for a file each; ``ucm trace``
records which blocks requests ask for, and replays it against stores of other sizes and policies."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click

from ucm.cli import terminal
from ucm.cli.inspect import describe
from ucm.cli.roots import Root, open_root
from ucm.errors import ConfigError
from ucm.integration.vllm.plugin import MODE_PATH
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
    "--url",
    "address",
    type=terminal.url,
    help="Address of a vLLM server.  [default: http://127.0.0.1:8000]",
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
    header = ("namespace", "records", "bytes", "newest use")
    terminal.listed(header, document["namespaces"])
    _show_rates(document)


# The mode
# --------------------------------------------------------------------------------------------------

MODES = ("read-write", "read-only", "write-only", "off")


@click.command()
@click.option("--root", metavar="ROOT", help="For every engine that uses this root.")
@click.option(
    "--state-dir", metavar="DIR", help="For engines with this UCM_STATE_DIR; else this user's."
)
@click.option(
    "--url",
    "address",
    type=terminal.url,
    help="For this vLLM server, by its endpoint plug-in ucm_mode.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key of the server.")
@terminal.json_output
@click.argument("wanted", metavar=f"[{'|'.join(MODES)}]", type=click.Choice(MODES), required=False)
def mode(wanted: str | None, api_key: str | None, as_json: bool, **ends: str | None) -> None:
    """Switch loading and storing of running engines on or off, or show how it is switched.

    Engines follow within two seconds; loads and writes under way are finished. An engine follows
    its roots and its state directory, and does what all of them allow.
    """
    from ucm.mode import Mode, state_directory, switched

    root, state_dir, address = (ends[name] for name in ("root", "state_dir", "address"))
    if sum(map(bool, ends.values())) > 1:
        raise click.UsageError("--root, --state-dir and --url exclude each other")
    if address:
        found = _of_server(address, wanted, api_key)
    else:
        directory = root or state_dir or state_directory()
        if directory is None:
            raise ConfigError("this user has no home; give --root or --state-dir")
        directory = os.path.abspath(directory)
        if root:
            with Root(root):
                pass  # else it is refused in a sentence
        found = switched(directory, Mode(wanted) if wanted else None)
    if as_json:
        terminal.document({"command": "mode", **found})
    else:
        click.echo(f"{found['mode']}  ({found['file']})")


def _of_server(base: str, wanted: str | None, key: str | None) -> dict[str, str]:
    """What a server answers: the mode of its state directory."""
    where = f"{base}{MODE_PATH}"
    whole, method = (f"{where}?mode={wanted}", "PUT") if wanted else (where, "GET")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(whole, headers=headers, method=method)  # noqa: S310 - http
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            found = json.load(answer)
            return {name: str(found[name]) for name in ("file", "mode")}
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise Unreachable(
                f"{base} has no endpoint for the mode: start vLLM, if it has endpoint plug-ins,"
                " with VLLM_PLUGINS=ucm,ucm_mode, or give --root or --state-dir on its machine"
            ) from None
        why = str(error.reason)
        with error, suppress(OSError, HTTPException):  # the connection may end before its page does
            why = error.read(500).decode(errors="replace")
        if error.code == 401:
            why = "its key is wanted: give --api-key"
        raise Unreachable(f"{where} answers {error.code}: {why}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{where} cannot be read: {getattr(error, 'reason', error)}") from None


# Dashboards
# --------------------------------------------------------------------------------------------------


@click.command()
@click.option(
    "--rules", is_flag=True, help="Print the rules of alerts, for Prometheus's rule_files."
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False),
    help="Make the dashboards of a metrics file instead of UCM Overview.",
)
@click.option("--name", help="Which of several dashboards of the metrics file.")
def dashboard(rules: bool, metrics_file: str | None, name: str | None) -> None:
    """Print the dashboard UCM Overview for Grafana, or rules of alerts for Prometheus.

    ucm dashboard > ucm.json, then import the file in Grafana (docs/monitor.md).
    """
    from ucm.metrics import file  # with pydantic and yaml: not before it is needed

    if rules:
        if metrics_file or name:
            raise click.UsageError("--rules has no options")
        click.echo(file.RULES.read_text(), nl=False)
        return
    made = file.read(metrics_file or file.OVERVIEW)
    found = {one.name: one for one in made.grafana.dashboards}
    if not found:
        raise click.ClickException(f"{metrics_file} has no grafana.dashboards")
    if name is None and len(found) > 1:
        raise click.UsageError(f"write --name, one of: {', '.join(found)}")
    if name is not None and name not in found:
        raise click.BadParameter(f"no dashboard is named {name!r}; there are: {', '.join(found)}")
    chosen = found[name] if name is not None else next(iter(found.values()))
    terminal.document(file.dashboard(chosen, made.prometheus.scrape_interval))


# Traces of blocks
# --------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP = 480, 240, 60, 40
_COLOURS = ("#2a6fbb", "#d1495b", "#66a182")


@click.group()
def trace() -> None:
    """Record the blocks that requests ask for, and see what other stores would hit of them."""


@trace.command(context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(file: str, command: tuple[str, ...]) -> None:
    """Run COMMAND, an engine with ucm, with its trace in FILE: ucm trace record FILE vllm serve …

    The same as UCM_BLOCK_TRACE=FILE in its environment, or `block_trace` in its configuration. The
    trace has no tokens and no text; its names of blocks lead back to neither.
    """
    os.environ["UCM_BLOCK_TRACE"] = os.path.abspath(file)
    os.execvp(command[0], command)  # noqa: S606 - the user's own command


@trace.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--capacity", "sizes", multiple=True, type=click.IntRange(1), help="In blocks; repeatable."
)
@click.option("--block-bytes", help="Size of a block, for capacities in bytes (see ucm plan).")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write the curves (SVG) to a file.")
@terminal.json_output
def replay(
    file: str, sizes: tuple[int, ...], block_bytes: str | None, plot: str | None, as_json: bool
) -> None:
    """Show the share of blocks that stores of other sizes and policies would hit of a trace.

    lru evicts what was used longest ago, as ucm does, fifo what was written first; best knows the
    future: no policy hits more.
    """
    from ucm.block_trace import POLICIES, capacities, hit_rate, read_trace
    from ucm.config import parse_size

    with click.open_file(file) as trace:
        requests = read_trace(trace)
    try:
        width = None if block_bytes is None else parse_size(block_bytes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--block-bytes") from None
    points = [
        {
            "blocks": size,
            **({} if width is None else {"bytes": size * width}),
            **{policy: round(hit_rate(requests, size, policy), 6) for policy in POLICIES},
        }
        for size in sorted(sizes) or capacities(requests)
    ]
    asked = sum(map(len, requests))
    document = {"command": "trace replay", "requests": len(requests), "asked": asked}
    document |= {"points": points}
    if plot:
        Path(plot).write_text(_svg(points, POLICIES))
    if as_json:
        terminal.document(document)
        return
    click.echo(f"{terminal.many(len(requests), 'request')}, {terminal.many(asked, 'block')}")
    rows = [
        [point["blocks"], *(f"{100 * point[policy]:.1f} %" for policy in POLICIES)]
        for point in points
    ]
    terminal.table(("blocks", *POLICIES), rows)


def _svg(points: list[dict[str, Any]], policies: tuple[str, ...]) -> str:
    """Share of hits by capacity, each capacity as wide as the next."""
    size = f'width="{_WIDTH + 2 * _LEFT}" height="{_HEIGHT + 3 * _TOP}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20">share of blocks hit, by blocks in the store</text>',
    ]
    step = _WIDTH / max(len(points) - 1, 1)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _TOP + _HEIGHT * (1 - share)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{y + 4:.1f}">{100 * share:.0f} %</text>')
    for at, point in enumerate(points):
        x, y = _LEFT + at * step, _TOP + _HEIGHT + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{point["blocks"]}</text>')
    for number, policy in enumerate(policies):
        line = " ".join(
            f"{_LEFT + at * step:.1f},{_TOP + _HEIGHT * (1 - point[policy]):.1f}"
            for at, point in enumerate(points)
        )
        colour, x = _COLOURS[number], _LEFT + 100 * number
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 40}" fill="{colour}">{policy}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
