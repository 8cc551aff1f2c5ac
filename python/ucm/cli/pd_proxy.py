"""``ucm pd-proxy``: serves vLLM's endpoints over prefill and decode servers (:mod:`ucm.pd`).

Its options are the fields of :class:`ucm.pd.Settings`. Starlette, uvicorn, httpx and the client of
Prometheus are imported when it starts; the extra ``pd`` of the wheel brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

import click

from ucm.pd import Settings


def url(text: str) -> str:
    """The address of a server; ``http://`` may be left out."""
    whole = (text if "://" in text else f"http://{text}").rstrip("/")
    parts = urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise click.BadParameter(f"{text!r} is no address of a server; write http://host:port")
    if parts.path.endswith("/v1"):
        raise click.BadParameter(f"{text!r}: write it without /v1; paths are passed on whole")
    return whole


def size(text: str) -> int:
    """A number of bytes, ``64MiB``."""
    from ucm.config.fields import parse_size  # with pydantic: not before it is needed

    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class MissingExtra(click.ClickException):
    """A package of the extra is not installed."""

    exit_code = 2

    def __init__(self, name: str | None, command: str, extra: str) -> None:
        super().__init__(f"{command} needs {name}: pip install 'ucm-kv[{extra}]'")


#: Types of options by field, where the default does not say enough.
TYPES: dict[str, Any] = {
    "max_body": size,
    "prefill_from": size,
    "port": click.IntRange(0, 65_535),
    "prefill": url,
    "decode": url,
    "mixed": url,
}


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for one in reversed(fields(Settings)):
        default, kind = one.default, TYPES.get(one.name)
        if kind is None and not isinstance(default, str):
            least = click.IntRange(min=1) if isinstance(default, int) else None
            kind = least or click.FloatRange(min=0, min_open=True)
        many = isinstance(default, tuple)
        text = str(default) if kind is size else default
        command = click.option(
            f"--{one.name.replace('_', '-')}",
            type=kind,
            multiple=many,
            default=None if many else text,
            show_default=not many,
            metavar="BYTES" if kind is size else "SECONDS" if isinstance(default, float) else None,
            help=one.metadata["help"],
        )(command)
    return command


@click.command("pd-proxy")
@_options
def pd_proxy(**options: Any) -> None:
    """Serve vLLM's endpoints over servers that compute prompts and servers that produce tokens.

    All of them use one store (docs/pd.md). With --mixed it shares requests out among servers of
    both roles.
    """
    settings = Settings(**options)
    if settings.mixed and (settings.prefill or settings.decode):
        raise click.UsageError("--mixed replaces --prefill and --decode; give one or the other")
    if bool(settings.prefill) != bool(settings.decode) or not settings.decoders:
        raise click.UsageError(
            "give --prefill and --decode, at least one server of each, or --mixed"
        )
    try:
        from ucm.pd.proxy import run
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name, "ucm pd-proxy", "pd") from None
    run(settings)
