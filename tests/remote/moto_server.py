"""moto's S3 server, in Python, with one bucket; it loses its data when it ends.

Servers are forked from a process that has imported moto, because the import is nearly all of a
start; on a busy machine one start took 75 s.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from servers import BUCKET, Server

#: Each process imports the main module of its parent, which is pytest's, so that is imported
#: before, too.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    ["pytest.__main__", "moto.server", "moto.s3.responses", "moto.s3.urls"]
)


class MotoServer(Server):
    """Such a server; behind TLS with ``tls``, the files of a certificate and of its key."""

    def __init__(self, directory: Path, tls: tuple[Path, Path] | None = None) -> None:
        self._tls = tls
        self._forked: ForkServerProcess | None = None
        super().__init__(lambda port: ["moto", str(port)], directory)

    def kill(self) -> None:
        """Ends it at once."""
        if self._forked is None:
            return
        self._forked.kill()
        self._forked.join()
        self._forked.close()
        self._forked = None

    def _begin(self) -> int:
        self._forked = _FORKED.Process(
            target=_serve, args=(self.port, self._tls), name="moto", daemon=True
        )
        self._forked.start()
        assert self._forked.pid is not None
        return self._forked.pid


def _serve(port: int, tls: tuple[Path, Path] | None) -> None:
    """The work of the process, until it is killed or its parent ends."""
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple
    from werkzeug.test import Client

    threading.Thread(target=_end_with_parent, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    app = DomainDispatcherApplication(create_backend_app)
    answer = Client(app).put(f"http://127.0.0.1:{port}/{BUCKET}")
    assert answer.status_code == 200, answer.text
    files = (str(tls[0]), str(tls[1])) if tls else None
    run_simple(
        "127.0.0.1", port, app, threaded=True, ssl_context=files, request_handler=MotoRequestHandler
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)
