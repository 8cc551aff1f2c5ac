"""``ucm bench``: figures of a server, of a store and of a device, for people and for programs.

The measuring is :mod:`ucm.bench`; httpx and the client of Prometheus, which ``bench vllm`` needs,
come with the extra ``bench``. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ucm.bench.metrics import (
    BETTER,
    BenchmarkMetrics,
    check_performance_regression,
    interval,
    ratio,
)
from ucm.bench.scenarios import SCENARIOS, Scenario
from ucm.cli import terminal
from ucm.cli.terminal import MissingExtra, document, json_output, of_store, scheme_of, size, table

if TYPE_CHECKING:
    from ucm.bench.client import Sample
    from ucm.bench.local import Row

rounds_option = click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Rounds; below six there is no interval.",
)


@click.group()
def bench() -> None:
    """Measure a server, a store or a device."""


@contextmanager
def _progress(total: int, what: str) -> Iterator[Any]:
    """A function to call after each step; a bar where stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, leave=False, disable=None) as bar:
        yield bar.update


# A store and a device
# --------------------------------------------------------------------------------------------------


@bench.command()
@click.argument("place", metavar="ROOT")
@click.option("--store", "name", help="The store, by its name; else that of the address.")
@of_store
@click.option("--block", default="1MiB", type=size, show_default=True, help="Size of a block.")
@click.option("--blocks", default=64, type=click.IntRange(min=1), show_default=True, help="Blocks.")
@rounds_option
@json_output
def store(
    place: str,
    name: str | None,
    options: Mapping[str, str],
    block: int,
    blocks: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Dump blocks to a store and load them, beside memcpy and plain files.

    ROOT is a directory, in which a root of its own is made and removed, or an address like
    redis://host:port, where the blocks stay in a namespace of their own. Files are read from
    the page cache unless the store's keys say otherwise: -o io_direct=true.
    """
    from ucm.bench.local import bench_store
    from ucm.config.words import DEFAULT_STORE, STORE_OF_SCHEME

    scheme = scheme_of(place)
    if not scheme and not os.path.isdir(place):
        raise click.BadParameter(f"{place!r} is no directory", param_hint="ROOT")
    name = name or STORE_OF_SCHEME.get(scheme, DEFAULT_STORE)
    with _progress(rounds + 1, "rounds") as done:
        rows = bench_store(name, place, options, blocks, block, rounds, done)
    _show_rows(
        {"command": "bench store", "store": name, "root": place}, blocks, block, rows, as_json
    )


@bench.command()
@click.option("--platform", help="Kind of device; else the first one that is here.")
@click.option("--device", "number", default=0, type=click.IntRange(min=0), help="Its number.")
@click.option("--piece", default="32KiB", type=size, show_default=True, help="Size of a piece.")
@click.option(
    "--pieces", default=2048, type=click.IntRange(min=1), show_default=True, help="Pieces."
)
@rounds_option
@json_output
def device(
    platform: str | None, number: int, piece: int, pieces: int, rounds: int, as_json: bool
) -> None:
    """Copy pieces between a device and the host, beside one large copy and memcpy."""
    from ucm.bench.local import bench_device

    with _progress(rounds + 1, "rounds") as done:
        found, rows, missing = bench_device(platform, number, pieces, piece, rounds, done)
    head = {"command": "bench device", "device": found, "missing": missing}
    _show_rows(head, pieces, piece, rows, as_json)


def _show_rows(
    head: Mapping[str, Any], count: int, each: int, rows: Sequence[Row], as_json: bool
) -> None:
    found = [row.as_json() for row in rows]
    if as_json:
        document({**head, "pieces": count, "piece_bytes": each, "rows": found})
        return
    what = head.get("store") or head["device"]
    click.echo(f"{what}: {count} of {each:,} bytes each")
    lines = [
        [
            row["name"],
            _speed(row["bytes_per_second"]),
            row["beside"],
            _speed(row["beside_bytes_per_second"]),
            f"{row['ratio']:.2f}",
            _range(row["interval"]),
        ]
        for row in found
    ]
    table(["", "here", "beside", "", "ratio", "95 % interval"], lines)
    for way, why in head.get("missing", {}).items():
        click.echo(f"  {way}: not here: {why}")


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _range(bounds: tuple[float, float] | None) -> str:
    return f"{bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else "-"


# A server
# --------------------------------------------------------------------------------------------------

#: Options that change a scenario, and the fields of it.
CHANGES = {
    "input": ("prompt_tokens", "Tokens of a prompt."),
    "output": ("output_tokens", "Tokens of an answer."),
    "concurrency": ("concurrency", "Conversations at a time."),
    "requests": ("requests", "Conversations."),
    "turns": ("turns", "Requests of a conversation."),
}


def _changes(command: Any) -> Any:
    for name, (_, text) in reversed(CHANGES.items()):
        help_text = f"{text} Else the scenario's."
        command = click.option(f"--{name}", type=click.IntRange(min=1), help=help_text)(command)
    return command


@bench.command()
@click.option("--url", "at", required=True, type=terminal.url, help="The server.")
@click.option("--compare", type=terminal.url, help="A second server, in turns with the first.")
@click.option(
    "--scenario", "name", type=click.Choice(list(SCENARIOS)), default="hit80", show_default=True
)
@_changes
@click.option(
    "--warm",
    type=click.FloatRange(0, 1),
    help="Share of each prompt that the server computes before the run; 1: all is a hit.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Runs; 1, or 6 with --compare.")
@click.option("--model", help="Name of the model; else the server's first.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key of the servers.")
@click.option("--seed", help="Text that determines the prompts; else random.")
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False),
    help="A document of --save or --json.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Share by which a figure may be worse than the baseline's.",
)
@click.option("--save", type=click.Path(dir_okay=False), help="Write the JSON document to a file.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a plot (SVG) to a file.")
@json_output
def vllm(
    at: str,
    compare: str | None,
    name: str,
    warm: float | None,
    rounds: int | None,
    model: str | None,
    api_key: str | None,
    seed: str | None,
    baseline: str | None,
    threshold: float,
    save: str | None,
    plot: str | None,
    as_json: bool,
    **changes: int | None,
) -> None:
    """Measure a vLLM server with a scenario: time to the first token, time of further tokens,
    throughput, hits.

    With --baseline the status is 1 if a figure is worse than there.
    """
    scenario = _scenario(name, warm, changes)
    before = _baseline(baseline, scenario) if baseline else None
    urls = [at, compare] if compare else [at]
    samples = _measured(urls, scenario, rounds, seed, model, api_key)
    found: dict[str, Any] = {
        "command": "bench vllm",
        "scenario": _figures(scenario),
        "servers": [_server(one, of) for one, of in zip(urls, samples, strict=True)],
    }
    found["metrics"] = found["servers"][0]["metrics"]
    if compare:
        found["ratios"] = _ratios(*samples)
    if before is not None:
        found["worse"] = check_performance_regression(
            BenchmarkMetrics(**found["metrics"]), before, threshold
        )
    if save:
        Path(save).write_text(json.dumps(found, indent=2) + "\n")
    if plot:
        Path(plot).write_text(_plotted(scenario, urls, samples))
    if as_json:
        document(found)
    else:
        _show(found)
    if found.get("worse") or any(server["failed"] for server in found["servers"]):
        raise click.exceptions.Exit(1)


def _scenario(name: str, warm: float | None, changes: Mapping[str, int | None]) -> Scenario:
    given: dict[str, Any] = {
        CHANGES[key][0]: value for key, value in changes.items() if value is not None
    }
    scenario = replace(SCENARIOS[name], **given)
    return scenario if warm is None else replace(scenario, warmed=warm)


def _figures(scenario: Scenario) -> dict[str, Any]:
    return {one.name: getattr(scenario, one.name) for one in fields(scenario)}


def _baseline(path: str, scenario: Scenario) -> BenchmarkMetrics:
    """The figures of a file, if they are of the same scenario."""
    try:
        saved = json.loads(Path(path).read_text())
        metrics = BenchmarkMetrics.from_json(saved)
    except ValueError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--baseline") from None
    other = saved.get("scenario") or {}
    different = [
        f"{key} {other[key]} (now {value})"
        for key, value in _figures(scenario).items()
        if key != "about" and other.get(key, value) != value
    ]
    if different:
        text = f"{path} is of another scenario: {', '.join(different)}"
        raise click.BadParameter(text, param_hint="--baseline")
    return metrics


def _measured(
    urls: Sequence[str],
    scenario: Scenario,
    rounds: int | None,
    seed: str | None,
    model: str | None,
    key: str | None,
) -> list[list[Sample]]:
    try:
        import asyncio

        from ucm.bench.client import Server, take_turns
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name, "ucm bench vllm", "bench") from None
    rounds = rounds or (6 if len(urls) > 1 else 1)
    servers = [Server(one, key, model) for one in urls]
    total = len(urls) * rounds * scenario.requests * scenario.turns
    with _progress(total, "requests") as done:
        return asyncio.run(
            take_turns(servers, scenario, rounds, seed or secrets.token_hex(8), done)
        )


def _server(at: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians of the runs on a server, and each run."""
    runs = [sample.as_json() for sample in samples]
    errors = [answer.error for sample in samples for answer in sample.failed]
    metrics = {
        one.name: _median([getattr(sample.metrics, one.name) for sample in samples])
        for one in fields(BenchmarkMetrics)
    }
    return {
        "url": at,
        "metrics": metrics,
        "failed": len(errors),
        "first_error": next(iter(errors), None),
        "runs": runs,
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratios(first: Sequence[Sample], second: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """For each figure the second server beside the first, above 1 if it is better; None where that
    is no finite number, as beside a server without hits."""
    found = {}
    for name, better in BETTER.items():
        pairs = [
            (getattr(one.metrics, name), getattr(other.metrics, name))
            for one, other in zip(first, second, strict=True)
        ]
        ratios = [ratio(one, other, better) for one, other in pairs if None not in (one, other)]
        if ratios:
            middle, bounds = statistics.median(ratios), interval(ratios)
            found[name] = {
                "ratio": middle if math.isfinite(middle) else None,
                "interval": bounds if bounds and all(map(math.isfinite, bounds)) else None,
            }
    return found


def _plotted(scenario: Scenario, urls: Sequence[str], samples: Sequence[list[Sample]]) -> str:
    from ucm.bench.plot import svg

    answers = {
        one: [answer for sample in of for answer in sample.answers]
        for one, of in zip(urls, samples, strict=True)
    }
    panels = {
        "time to the first token": {
            one: [answer.ttft for answer in of] for one, of in answers.items()
        },
        "time of each further token": {
            one: [answer.tpot for answer in of if answer.tpot is not None]
            for one, of in answers.items()
        },
    }
    return svg(f"ucm bench vllm: {scenario.name}", panels)


def _show(found: Mapping[str, Any]) -> None:
    scenario, servers = found["scenario"], found["servers"]
    click.echo(
        f"{scenario['name']}: {scenario['requests']} conversations, {scenario['concurrency']} at a"
        f" time, {scenario['turns']} requests each, {scenario['prompt_tokens']} tokens in and"
        f" {scenario['output_tokens']} out"
    )
    rows = []
    for one in fields(BenchmarkMetrics):
        values = [_value(one.name, server["metrics"][one.name]) for server in servers]
        row = [one.name, *values]
        if pair := found.get("ratios", {}).get(one.name):
            shown = "-" if pair["ratio"] is None else f"{pair['ratio']:.3f}"
            row += [shown, _range(pair["interval"])]
        rows.append([*row, *[""] * (len(servers) + 1 + (2 if "ratios" in found else 0) - len(row))])
    more = ["ratio", "95 % interval"] if "ratios" in found else []
    table(["", *(server["url"] for server in servers), *more], rows)
    for server in servers:
        if server["failed"]:
            click.echo(f"  {server['url']}: {server['failed']} failed: {server['first_error']}")
        if any(run["device_cache_emptied"] is False for run in server["runs"]):
            click.echo(
                f"  {server['url']} kept its device's cache after the warming; start it with"
                " VLLM_SERVER_DEV_MODE=1 to measure the store alone"
            )
    for name, worse in found.get("worse", {}).items():
        was, now = (_value(name, worse[key]) for key in ("baseline", "current"))
        share = f"{100 * worse['regression']:.0f} %"
        click.echo(f"  {name} is worse than the baseline by {share}: {now}, was {was}")


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith(("ttft", "tpot")) or "time" in name:
        return f"{1000 * value:.2f} ms"
    if name.endswith(("rate", "ratio", "saved")):
        return f"{100 * value:.1f} %"
    return f"{value:,.0f} /s" if value >= 1000 else f"{value:.4g} /s"
