"""The command line: ``ucm inspect``, ``ucm verify``, ``ucm gc``, ``ucm export`` and ``ucm import``
on roots of every store, live ones too; ``doctor`` and ``plan`` before an engine starts, ``mode``
and ``trace`` while it runs, ``vllm-args``, ``pd-proxy`` and ``bench``.

Records are read and verified by the compiled core; vLLM is not needed. What a user can mend (a
wrong path, a root without marker, missing rights) is one sentence and exit status 2, never a
traceback.
"""

from __future__ import annotations

from typing import Any

import click

from ucm import __version__
from ucm.cli.bench import bench as _bench
from ucm.cli.doctor import doctor as _doctor
from ucm.cli.gc import gc as _gc
from ucm.cli.inspect import inspect as _inspect
from ucm.cli.running import dashboard, mode, stats, trace
from ucm.cli.start import pd_proxy, plan, vllm_args
from ucm.cli.transfer import export, import_
from ucm.cli.verify import verify as _verify
from ucm.errors import UcmError

__all__ = ["main"]


class _Failure(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    """Turns errors that are the user's to mend into a sentence."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except UcmError as error:
            raise _Failure(error.message) from None
        except BrokenPipeError:
            raise  # click's to handle: the reader of our output has exited
        except OSError as error:
            where = f"{error.filename}: " if isinstance(error.filename, str) else ""
            raise _Failure(f"{where}{error.strerror or error}") from None


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.version_option(__version__, prog_name="ucm")
def main() -> None:
    """Check a machine; look into, check, clean and copy roots, the directories of storage_backends;
    serve over prefill and decode servers; measure servers, stores and devices; trace blocks.

    Engines may use roots at the same time. docs/tools.md explains every command and its JSON,
    docs/pd-proxy.md the proxy.
    """


for _command in (
    *(_doctor, plan, vllm_args, _inspect, _verify, _gc, export, import_),
    *(stats, mode, dashboard, trace, _bench, pd_proxy),
):
    main.add_command(_command)
