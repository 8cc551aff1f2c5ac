"""``ucm mode``: reads or writes the mode of running engines (:mod:`ucm.mode`)."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException

import click

from ucm.cli import terminal
from ucm.cli.pd_proxy import url
from ucm.cli.stats import ANSWER_S, Unreachable
from ucm.errors import ConfigError
from ucm.integration.vllm.plugin import MODE_PATH

MODES = ("read-write", "read-only", "write-only", "off")


@click.command()
@click.option("--root", metavar="ROOT", help="For every engine that uses this root.")
@click.option(
    "--state-dir", metavar="DIR", help="For engines with this UCM_STATE_DIR; else this user's."
)
@click.option(
    "--url", "address", type=url, help="For this vLLM server, by its endpoint plug-in ucm_mode."
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key of the server.")
@terminal.json_output
@click.argument("wanted", metavar=f"[{'|'.join(MODES)}]", type=click.Choice(MODES), required=False)
def mode(wanted: str | None, api_key: str | None, as_json: bool, **ends: str | None) -> None:
    """Switch loading and storing of running engines on or off, or show how it is switched.

    Engines follow within two seconds; loads and writes under way are finished. An engine follows
    its roots and its state directory, and does what all of them allow.
    """
    from ucm.cli.roots import Root
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
