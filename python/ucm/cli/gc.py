"""``ucm gc``: removes what was used longest ago, what is old, a whole namespace, or what dead
writers left; dry run first.

Only files of exactly our names below a marked root are removed, each after one more check: what was
used or replaced since the root was read stays. A live engine computes what it misses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ucm.cli import terminal
from ucm.cli.roots import (
    LOW,
    STALE_NS,
    AnyRoot,
    Contents,
    Found,
    Kind,
    RemoteRoot,
    over_roots,
    uses,
)
from ucm.errors import ConfigError
from ucm.logger import in_units

if TYPE_CHECKING:
    from ucm.config.fields import Capacity

#: Files removed between two checks of the marker.
_BATCH = 256


@click.command()
@terminal.roots
@click.option(
    "--to",
    type=terminal.target,
    metavar="SIZE|PERCENT",
    help=f"Come down to this size, or percentage of the limit; default {LOW:.0%}.",
)
@click.option(
    "--older-than",
    type=terminal.age,
    metavar="AGE",
    help="Remove what was not used for so long: 90s, 30m, 12h, 7d, 2w.",
)
@click.option(
    "--namespace",
    "wanted",
    multiple=True,
    help="Only this namespace (how its name begins); alone: all of it.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="Remove private files of dead writers and old quarantine, untouched for an hour.",
)
@click.option("--yes", is_flag=True, help="Do it; without this nothing is changed.")
@click.option("--list", "listing", is_flag=True, help="Name every file.")
@terminal.of_store
@terminal.json_output
@click.pass_context
def gc(
    ctx: click.Context,
    paths: tuple[str, ...],
    to: Capacity | None,
    older_than: float | None,
    wanted: tuple[str, ...],
    stale: bool,
    yes: bool,
    listing: bool,
    options: Mapping[str, str],
    as_json: bool,
) -> None:
    """Remove records below each ROOT, those used longest ago first. Without --yes: say what would
    be removed.

    Exit status: 0 done, 1 something could not be removed, 2 it could not be done, 130 interrupted.
    """
    if to is not None and older_than is not None:
        raise click.UsageError("--to and --older-than exclude each other; run gc twice")
    wish = Wish(to, older_than, bool(wanted), stale)

    def collect(root: AnyRoot, names: list[str]) -> dict[str, Any]:
        plan = make_plan(root, names, wish)
        return _document(root, plan, carry_out(root, plan) if yes else Outcome(), yes, listing)

    over_roots(ctx, paths, options, wanted, as_json, collect, _show, ("failed",))


@dataclass(frozen=True)
class Wish:
    """What to remove. A namespace alone means all of it, nothing at all the low watermark."""

    to: Capacity | None
    older_than: float | None
    chosen: bool
    stale: bool

    @property
    def whole(self) -> bool:
        """Whether namespaces go whole."""
        return self.chosen and not (self.to or self.older_than is not None or self.stale)

    @property
    def target(self) -> Capacity | None:
        """What to come down to, if that was requested."""
        from ucm.config.fields import Capacity  # with pydantic: not before it is needed

        nothing = self.older_than is None and not (self.chosen or self.stale)
        return Capacity(percent=LOW * 100) if self.to is None and nothing else self.to


@dataclass
class Plan:
    """What would be removed, in order, out of what."""

    used: int
    target: int | None
    removals: list[Found]
    #: Namespaces without recent writes, whose directories may be removed as well.
    quiet: list[str]
    contents: dict[str, Contents]


@dataclass
class Outcome:
    """What became of a plan."""

    removed: list[Found] = field(default_factory=list)
    skipped: int = 0
    failed: int = 0
    failure: str | None = None
    namespaces: list[str] = field(default_factory=list)
    interrupted: bool = False


def make_plan(root: AnyRoot, names: list[str], wish: Wish) -> Plan:
    """What is to be removed of these namespaces."""
    now = terminal.wall_ns()
    contents = {name: root.scan(name) for name in names}
    if not wish.chosen:
        contents[""] = root.beside()
    private = [found for inside in contents.values() for found in inside.private]
    dead = [found for found in private if found.mtime_ns < now - STALE_NS]
    kept = [found for inside in contents.values() for found in (*inside.records, *inside.segments)]
    used = sum(found.size for found in (*kept, *private))
    by_age = wish.older_than is not None or wish.target is not None
    if by_age and isinstance(root, RemoteRoot) and not all(found.mtime_ns for found in kept):
        raise ConfigError(
            f"{root.shown} does not say when something was last used, so nothing is old there; gc"
            " can remove a whole namespace: --namespace NAME"
        )
    if wish.older_than is not None and root.age_needs:
        raise ConfigError(
            f"{root.shown} says how long a record still lives, not when it was used; say how long"
            f" the engines let them live: -o {root.age_needs}=1d"
        )
    removals = list(dead) if wish.stale or wish.whole else []
    target = None
    if wish.whole:
        removals += kept
    elif wish.older_than is not None:
        before = now - int(wish.older_than * 1e9)
        removals += [found for found in kept if found.mtime_ns < before]
    if wish.target is not None:
        if wish.target.bytes is None and not root.limit:
            raise ConfigError(
                f"nothing is known of a limit of {root.shown}; say a size: --to 10GiB"
            )
        target = wish.target.of(root.limit)
        chosen = set(removals)
        surplus = used - target - sum(found.size for found in removals)
        removals += _oldest((found for found in kept if found not in chosen), surplus)
    removals.sort(key=lambda found: (found.mtime_ns, found.path))
    quiet = [name for name in names if root.written_ns(name) < now - STALE_NS] if wish.whole else []
    return Plan(used, target, removals, quiet, contents)


def _oldest(kept: Iterable[Found], surplus: int) -> list[Found]:
    """Those used longest ago, as many as bring down the use by ``surplus`` bytes."""
    taken = []
    for found in sorted(kept, key=lambda found: (found.mtime_ns, found.name)):
        if surplus <= 0:
            break
        taken.append(found)
        surplus -= found.size
    return taken


def carry_out(root: AnyRoot, plan: Plan) -> Outcome:
    """Removes what is planned; raises :class:`~ucm.errors.StoreIOError` if the root vanished."""
    from tqdm import tqdm

    outcome = Outcome()
    bar = tqdm(total=len(plan.removals), unit="file", desc="gc", file=sys.stderr, disable=None)
    with bar:
        try:
            for at, found in enumerate(plan.removals):
                if at % _BATCH == 0:
                    root.check()
                _remove(root, found, outcome)
                bar.update()
            if plan.quiet:
                root.check()
                outcome.namespaces = [name for name in plan.quiet if root.remove_namespace(name)]
        except KeyboardInterrupt:
            outcome.interrupted = True
    return outcome


def _remove(root: AnyRoot, found: Found, outcome: Outcome) -> None:
    try:
        if root.unlink(found):
            outcome.removed.append(found)
        else:
            outcome.skipped += 1
    except OSError as error:
        outcome.failed += 1
        outcome.failure = outcome.failure or f"{root.shown}/{found.path}: {error.strerror or error}"


def _document(
    root: AnyRoot, plan: Plan, outcome: Outcome, done: bool, listing: bool
) -> dict[str, Any]:
    files = outcome.removed if done else plan.removals
    document = {
        "command": "gc",
        "root": root.shown,
        "uuid": root.uuid,
        "dry_run": not done,
        "limit": root.limit,
        "used_bytes": plan.used,
        "target_bytes": plan.target,
        "planned": len(plan.removals),
        "planned_bytes": sum(found.size for found in plan.removals),
        "namespaces": [
            _share(name, inside, plan.removals) for name, inside in plan.contents.items() if name
        ],
        "private_beside": sum(found.namespace == "" for found in plan.removals),
        "removed": len(outcome.removed),
        "removed_bytes": sum(found.size for found in outcome.removed),
        "skipped": outcome.skipped,
        "failed": outcome.failed,
        "failure": outcome.failure,
        "namespaces_removed": outcome.namespaces,
        "interrupted": outcome.interrupted,
    }
    if listing:
        document["files"] = [found.path for found in files]
    return document


def _share(name: str, inside: Contents, removals: list[Found]) -> dict[str, Any]:
    mine = [found for found in removals if found.namespace == name]
    kept = (found for found in mine if found.kind in (Kind.RECORD, Kind.SEGMENT))
    kinds = {kind: sum(found.kind is kind for found in mine) for kind in Kind}
    return {
        "namespace": name,
        "records": kinds[Kind.RECORD],
        "segments": kinds[Kind.SEGMENT],
        "private": kinds[Kind.PRIVATE],
        "bytes": sum(found.size for found in mine),
        **uses(kept),
        "records_left": len(inside.records) - kinds[Kind.RECORD],
        "segments_left": len(inside.segments) - kinds[Kind.SEGMENT],
    }


def _left(space: dict[str, Any]) -> str:
    """Files that remain; the records of a segment are in its footer, which gc does not read."""
    kinds = ("record", "segment")
    found = [terminal.many(n, kind) for kind in kinds if (n := space[f"{kind}s_left"])]
    return ", ".join(found) or "nothing"


def _show(result: dict[str, Any]) -> None:
    limit = f"limit {in_units(result['limit'])}" if result["limit"] else "no limit"
    click.echo(f"root {result['root']}: {in_units(result['used_bytes'])} used, {limit}")
    if result["target_bytes"] is not None:
        click.echo(f"  to come down to {in_units(result['target_bytes'])}")
    if not result["planned"] and not result["namespaces_removed"]:
        click.echo("  nothing to remove")
    terminal.listed(
        (
            "namespace",
            "records",
            "segments",
            "private",
            "bytes",
            "oldest use",
            "newest use",
            "left",
        ),
        (
            {**space, "left": _left(space)}
            for space in result["namespaces"]
            if any(space[kind] for kind in ("bytes", "records", "segments", "private"))
        ),
    )
    for name in result.get("files", ()):
        click.echo(f"  {name}")
    what = terminal.many(result["planned"], "file")
    if result["dry_run"]:
        if result["planned"]:
            size = in_units(result["planned_bytes"])
            click.echo(f"dry run: {what}, {size} would be removed; --yes removes them")
        return
    what = terminal.many(result["removed"], "file")
    click.echo(f"removed {what}, {in_units(result['removed_bytes'])}")
    if result["interrupted"]:
        click.echo("  interrupted: the rest stays")
    if result["skipped"]:
        click.echo(f"  {result['skipped']} stay: used, replaced or removed by others since")
    if result["failed"]:
        click.echo(f"  {result['failed']} could not be removed; the first: {result['failure']}")
