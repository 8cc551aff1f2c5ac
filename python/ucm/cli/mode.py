"""``ucm mode``: reads or writes the mode of running engines (:mod:`ucm.mode`)."""

from __future__ import annotations

import os

import click

from ucm.cli import terminal
from ucm.errors import ConfigError

MODES = ("read-write", "read-only", "write-only", "off")


@click.command()
@click.option("--root", metavar="ROOT", help="For every engine that uses this root.")
@click.option(
    "--state-dir", metavar="DIR", help="For engines with this UCM_STATE_DIR; else this user's."
)
@terminal.json_output
@click.argument("wanted", metavar=f"[{'|'.join(MODES)}]", type=click.Choice(MODES), required=False)
def mode(root: str | None, state_dir: str | None, as_json: bool, wanted: str | None) -> None:
    """Switch loading and storing of running engines on or off, or show how it is switched.

    Engines follow within two seconds; loads and writes under way are finished. An engine follows
    its roots and its state directory, and does what all of them allow.
    """
    from ucm.cli.roots import Root
    from ucm.mode import MODE_NAME, Mode, read_mode, state_directory, write_mode

    if root and state_dir:
        raise click.UsageError("--root and --state-dir exclude each other")
    directory = root or state_dir or state_directory()
    if directory is None:
        raise ConfigError("this user has no home; give --root or --state-dir")
    directory = os.path.abspath(directory)
    if root:
        with Root(root):
            pass  # else it is refused in a sentence
    elif wanted or not os.path.isdir(directory):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    if wanted:
        write_mode(directory, Mode(wanted))
    try:
        now = read_mode(directory)
    except ValueError:
        path = os.path.join(directory, MODE_NAME)
        raise ConfigError(f"{path} is damaged, and engines keep their mode; write one") from None
    path = os.path.join(directory, MODE_NAME)
    if as_json:
        terminal.document({"command": "mode", "file": path, "mode": str(now)})
    else:
        click.echo(f"{now}  ({path})")
