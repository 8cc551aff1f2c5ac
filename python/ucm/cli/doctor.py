"""``ucm doctor``: whether an engine with this configuration will use the cache on this machine, and
what to do where it will not.

Every check yields findings; the exit status is the worst of them. It changes nothing: speed is
measured with a file that has no name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ucm.cli import checks, terminal
from ucm.cli.checks import Arguments, Finding, error, note, ok, warning
from ucm.cli.records import read_manifest
from ucm.cli.roots import MARKER, open_root
from ucm.errors import UcmError

if TYPE_CHECKING:
    from ucm.config import UcmConfig

#: Colours of the levels.
_COLOURS = {"ok": "green", "note": "dim", "warning": "yellow", "error": "red"}
#: Identities, by the name of their namespace.
Identities = dict[str, dict[str, Any]]
#: Keys that two engines must agree in, and what happens where they do not.
_SHARED = {
    "hash_method": "the keys of all blocks differ",
    "block_size": "the keys of all blocks differ",
    "identity.weights": "the identities differ",
    "tenant_key_file": "blocks of requests with a salt have other tags",
    "encryption_key_file": "one cannot read the blocks of the other",
    "storage_backends": "they keep blocks in different places",
    "sparse.type": "side shards differ",
}
#: Seconds that a file system or a server has to answer.
ANSWER_S = 10.0

#: The table of the seeds, and questions of users: symptom, likely cause, where it is seen, remedy.
SYMPTOMS: tuple[tuple[str, str, str, str], ...] = (
    (
        "TTFT is high",
        "loads take longer than computing, or the store is new and empty",
        "ucm_load_seconds, ucm_load_bytes_per_second, ucm_prefill_tokens_per_second",
        "a faster store, or Cache above it (Cache|Posix); `ucm plan` names the slowest that pays",
    ),
    (
        "few or no hits",
        "another build of vLLM, weights, dtype, parallelism, block size or salt; evicted blocks",
        "missed blocks by reason; `ucm inspect ROOT`",
        "`ucm doctor --config F -- MODEL ...` names what differs; a larger storage_capacity",
    ),
    (
        "out of memory",
        "buffers and vLLM's KV are larger than the machine or container",
        "`ucm doctor`: limits",
        "a smaller cache_size or --gpu-memory-utilization, or sparse attention (docs/sparse.md)",
    ),
    (
        "the store is the bottleneck",
        "the medium is slower than the engine writes",
        "ucm_tier_written_bytes_total, ucm_unpublished_blocks_total; `ucm doctor`: store",
        "several tiers (Cache|Posix), several directories (storage_backends), or dump: prompt",
    ),
    (
        "a version does not fit",
        "vLLM is older than those that ucm serves, or torch is another than vLLM requires",
        "`ucm doctor`: software",
        "update vLLM; install the torch that it requires",
    ),
    (
        "nothing is stored",
        "no room, no permission, a store that failed, or the mode is read-only",
        "ucm_tier_writable, ucm_tier_refused_blocks_total, ucm_tier_healthy; `ucm mode`",
        "`ucm gc ROOT`, a larger storage_capacity, `ucm mode [--root ROOT] read-write`",
    ),
    (
        "answers are doubted",
        "any cache is a suspect",
        "`ucm verify ROOT`, docs/trust.md",
        "`ucm mode off` computes everything without a restart; compare the answers",
    ),
)
#: The seeds' checklist: what doctor checked, by area, and what only a run can show.
_CHECKED = (
    ("device", "processors and accelerators"),
    ("software", "versions of vLLM, torch and ucm"),
    ("configuration", "configuration, log and metrics"),
    ("store", "every place of blocks"),
    ("limits", "memory and limits of the process"),
)
_TO_RUN = (
    ("40 GB or more of device memory; its driver fits torch's CUDA", "nvidia-smi"),
    ("1 TB or more of NVMe disk; a fast network between hosts", "`ucm plan MODEL ...`"),
    ("the newest version of ucm", "CHANGELOG.md, `ucm --version`"),
    ("a prompt is loaded after a restart", "send a long prompt, restart, send it again"),
    ("a baseline of the performance", "`ucm bench vllm --url U --scenario prefix_sharing`"),
    ("full load", "`ucm bench vllm --url U --scenario short_high_concurrency`"),
)


@click.command()
@click.option("--config", "file", metavar="FILE", help="The configuration file of ucm.")
@click.option("--root", "place", metavar="ROOT", help="A directory or an address of blocks.")
@click.option("--peer", metavar="FILE", help="Configuration of another engine that shares blocks.")
@click.option("--production", is_flag=True, help="Add the checklist before production.")
@click.option("--symptoms", is_flag=True, help="Print what to do about troubles of an engine.")
@terminal.json_output
@click.argument("vllm", metavar="[-- vllm serve MODEL ...]", nargs=-1, type=click.UNPROCESSED)
def doctor(
    file: str | None,
    place: str | None,
    peer: str | None,
    production: bool,
    symptoms: bool,
    as_json: bool,
    vllm: Sequence[str],
) -> None:
    """Check this machine, a configuration, its stores, and the arguments of an engine.

    Exit status: 0 good, 1 warnings, 2 the cache will not work.
    """
    if file and place:
        raise click.UsageError("--config and --root exclude each other: the file names roots")
    if symptoms:
        _show_symptoms(as_json)
        return
    given = {"ucm_config_path": file} if file else {"storage_backends": [place]} if place else {}
    findings, config = examine(given, peer, production, vllm)
    status = _exit_status(findings)
    if as_json:
        lines = config.describe() if config else []
        found = [asdict(finding) for finding in findings]
        document = {"status": status, "findings": found, "configuration": lines}
        terminal.document({"command": "doctor", **document})
    else:
        _show(findings, config, status)
    raise SystemExit(status)


def examine(
    given: dict[str, Any], peer: str | None, production: bool, words: Sequence[str]
) -> tuple[list[Finding], UcmConfig | None]:
    """All findings, and the configuration if it could be read. ``given``: keys beside those in the
    arguments of vLLM; ``words``: these arguments."""
    findings = _of_area("software", checks.software())
    arguments = Arguments()
    try:
        arguments = Arguments.read(words)
    except UcmError as failure:
        findings += _of_area("engine", [error(failure.message, "`ucm vllm-args` prints it")])
    extra = {**arguments.extra(), **given}
    config, found = _configuration(extra, bool(words))
    if config is not None and production:
        found += _for_production(config)
    findings += _of_area("configuration", found)
    findings += _of_area("device", checks.devices(config.platform if config else None))
    findings += _of_area("limits", checks.limits(_buffers(config, arguments)))
    identities: Identities = {}
    for one in (config, *config.alternatives) if config else ():
        findings += _of_area("store", _stores(one, identities, production))
    if words:
        findings += _of_area("engine", checks.transfer(arguments))
    if words and config is not None:
        findings += _of_area("engine", _engine(config, arguments, extra, identities))
    elif identities:
        findings += _of_area("identity", checks.among(identities))
    if peer and config is not None:
        findings += _of_area("peer", _beside(config, peer))
    if production:
        findings += _of_area("checklist", _checklist(findings))
    return findings, config


def _of_area(area: str, findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one area."""
    return [replace(finding, area=area) for finding in findings]


def _exit_status(findings: Iterable[Finding]) -> int:
    """2 with an error, 1 with a warning, else 0."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if "warning" in levels else 0


def _in_time(what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check that may hang on a file system or a server; an error if it does not
    end in time. Its thread is then left behind."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(check())
        except Exception as failure:
            found.append(error(f"{what}: {failure}"))

    thread = threading.Thread(target=run, name="ucm-doctor", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not thread.is_alive():
        return found
    text = f"{what} does not answer within {ANSWER_S:.0f} seconds"
    return [*found, error(text, "check its server and the network to it")]


def _checklist(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The seeds' checklist before production."""
    found = {(finding.area, finding.level in ("warning", "error")) for finding in findings}
    for area, text in _CHECKED:
        if (area, True) in found:
            yield note(f"{text}: see {area} above")
        else:
            yield ok(f"{text}: good") if (area, False) in found else note(f"{text}: not checked")
    for text, command in _TO_RUN:
        yield note(f"not checked here: {text}", command)


def _configuration(extra: dict[str, Any], engine: bool) -> tuple[UcmConfig | None, list[Finding]]:
    from ucm.config import parse
    from ucm.config.words import CONFIG_FILE_VARIABLE, ENVIRONMENT

    if not (extra or engine or any(map(os.environ.get, (*ENVIRONMENT, CONFIG_FILE_VARIABLE)))):
        text = "no configuration is given: paths, servers and sizes are not checked"
        return None, [note(text, "ucm doctor --config FILE, or: ucm doctor -- vllm serve ...")]
    try:
        config = parse(extra)
    except UcmError as failure:
        return None, [error(failure.message, "docs/configuration.md names the page of every key")]
    found = [warning(text) for text in config.warnings]
    found += [error(text) for text in config.problems]
    if not config.enabled:
        text = f"the cache is switched off by {config.origin('enabled')}"
        found.append(error(text, "write true, or unset it"))
    return config, found or [ok(f"it can run ({config.ucm_connector_name})")]


def _for_production(config: UcmConfig) -> Iterator[Finding]:
    """The seeds' checklist: log and metrics."""
    directory = os.path.dirname(os.path.abspath(config.log.file or "."))
    if config.debug or config.log.level == "DEBUG":
        yield warning("the log has level DEBUG", "log.level: INFO")
    elif config.log.file and not os.access(directory, os.W_OK):
        yield warning(f"log.file: {directory} cannot be written", "make it, for the engine's user")
    else:
        yield ok(f"the log goes to {config.log.file or 'stderr'}")
    if not config.metrics.enabled:
        yield warning("metrics are switched off", "metrics.enabled: true")


def _buffers(config: UcmConfig | None, arguments: Arguments) -> dict[str, int]:
    """Bytes that the configuration takes of this host's memory, by key."""
    from ucm.config.fields import parse_capacity
    from ucm.config.words import STORES

    if config is None or config.user_store:
        return {}
    ranks, needed = arguments.ranks(), dict[str, int]()
    if config.staging_capacity:
        needed["staging_capacity"] = config.staging_capacity * ranks
    parts: list[tuple[str, Any]] = [(stage.store, stage) for stage in config.store_pipeline]
    for store, settings in parts or [(config.ucm_connector_name, config)]:
        size = settings.options.get("cache_size")
        if store in STORES and STORES[store].kind.memory and size is not None:
            given = parse_capacity(size)
            share = int(checks.memory().total * (given.percent or 0) / 100)
            needed["cache_size"] = share if given.bytes is None else given.bytes * ranks
    return needed


def _places(config: UcmConfig) -> Iterator[tuple[str, list[str], Any]]:
    """The stores of a configuration that keep blocks at places: class, places, and the function
    that returns a setting."""
    from ucm.config.rules import with_roots

    if config.user_store or config.problems:
        return

    def setting(settings: Any, key: str) -> Any:
        if key in settings.options:
            return settings.options[key]
        written = settings is config or key in settings.model_fields_set
        return getattr(settings if written else config, key)

    stages = with_roots(config.store_pipeline, config.storage_backends)
    parts: list[tuple[str, Any]] = [(stage.store, stage) for stage in stages]
    for store, settings in parts or [(config.ucm_connector_name, config)]:
        yield store, list(settings.storage_backends), partial(setting, settings)


def _stores(config: UcmConfig, identities: Identities, production: bool) -> Iterator[Finding]:
    for store, places, setting in _places(config):
        for path in (place for place in places if not terminal.scheme_of(place)):
            direct, limit = bool(setting("io_direct")), setting("storage_capacity")
            size = getattr(limit, "bytes", 0)
            yield from _in_time(path, partial(checks.root, path, direct, size, production))
            yield from _in_time(path, partial(_collect, path, identities))
        addresses = [place for place in places if terminal.scheme_of(place)]
        if addresses:
            check = partial(_server, store, addresses, setting, production)
            yield from _in_time(addresses[0], check)


def _collect(path: str, identities: Identities) -> Sequence[Finding]:
    """Adds the identities of a root."""
    if os.path.exists(os.path.join(path, MARKER)):
        with open_root(path, {}) as root:
            found = {name: read_manifest(root, name).identity for name in root.namespaces()}
            identities.update({name: identity for name, identity in found.items() if identity})
    return ()


def _server(store: str, addresses: list[str], setting: Any, production: bool) -> Iterator[Finding]:
    """A server or a bucket: whether it answers with these settings."""
    from ucm._core import Place
    from ucm.config.fields import for_core, without_login
    from ucm.config.words import STORES

    shown = without_login(addresses[0])
    described = STORES[store].described(
        lambda key: addresses if key == "storage_backends" else setting(key)
    )
    try:
        Place(described.pop("kind"), for_core(described)).room()
    except UcmError as failure:
        remedy = "check address, network, certificate and login (docs/store-servers.md)"
        yield error(f"{shown}: {failure.message}", remedy)
        return
    yield ok(f"{shown} answers")
    endpoint = str(described.get("object_endpoint") or addresses[0])
    if production and terminal.scheme_of(endpoint) in ("redis", "http"):
        remedy = "use rediss:// or https://, or a network that only the engines can reach"
        yield warning(f"{without_login(endpoint)} is not encrypted", remedy)


def _engine(
    config: UcmConfig, arguments: Arguments, extra: dict[str, Any], identities: Identities
) -> Iterator[Finding]:
    """What vLLM says of the arguments."""
    click.echo("vLLM makes its configuration, which takes some 20 seconds", err=True)
    found = checks.ask(arguments, extra)
    if "error" in found:
        given = arguments.value("--block-size") or ""
        if given.isdigit() and int(given):
            yield from checks.block_size(config.block_size, int(given))
        remedy = "fix the arguments, or run doctor where vLLM is installed"
        yield warning(f"vLLM: {found['error']}", remedy)
        return
    yield from checks.block_size(config.block_size, found["block_tokens"])
    if found["why_off"]:
        yield error(found["why_off"])
    yield from checks.beside(found["identity"], identities)


def _beside(config: UcmConfig, peer: str) -> Iterator[Finding]:
    """Keys of two configurations that must agree where engines share blocks."""
    from ucm.config import parse

    try:
        other = parse({"ucm_config_path": peer})
    except UcmError as failure:
        yield error(failure.message)
        return
    differing = [key for key in _SHARED if _shared(config, key) != _shared(other, key)]
    for key in differing:
        text = f"{key} differs from {peer}: {_SHARED[key]}"
        yield error(text, f"write the same {key} in both")
    if not differing:
        yield ok(f"blocks can be shared with {peer}")


def _shared(config: UcmConfig, key: str) -> Any:
    """The value of a key; of a file, its content."""
    if key == "storage_backends":
        return sorted({place for _, places, _ in _places(config) for place in places})
    section, _, name = key.rpartition(".")
    value = getattr(getattr(config, section) if section else config, name)
    if value and key.endswith("_file"):
        try:
            with open(os.path.expanduser(value), "rb") as file:
                return file.read(1 << 20)
        except OSError:
            return value
    return value


def _show(findings: list[Finding], config: UcmConfig | None, status: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for area in dict.fromkeys(finding.area for finding in findings):
        table = Table(title=area, title_justify="left", title_style="bold", box=None, expand=True)
        table.show_header = False
        table.add_column(width=8)
        table.add_column(ratio=1, overflow="fold")
        for finding in (one for one in findings if one.area == area):
            text = finding.text + (f"\n→ {finding.remedy}" if finding.remedy else "")
            table.add_row(Text(finding.level, style=_COLOURS[finding.level]), Text(text))
        console.print(table)
    for line in config.describe() if config is not None else ():
        if not line.endswith("(default)"):
            console.print(f"  {line}", markup=False)
    end = ("the cache will work", "the cache will work, with warnings", "the cache will not work")
    counts = {level: sum(one.level == level for one in findings) for level in ("error", "warning")}
    words = ", ".join(terminal.many(count, level) for level, count in counts.items())
    console.print(f"{end[status]}: {words}. Troubles of running engines: ucm doctor --symptoms")


def _show_symptoms(as_json: bool) -> None:
    header = ("symptom", "likely cause", "where it is seen", "what to do")
    if as_json:
        rows = [dict(zip(header, row, strict=True)) for row in SYMPTOMS]
        terminal.document({"command": "doctor", "symptoms": rows})
        return
    for symptom, *rest in SYMPTOMS:
        click.echo(symptom)
        terminal.pairs(list(zip(header[1:], rest, strict=True)))
