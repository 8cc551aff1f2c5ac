"""Other projects' connectors for vLLM as variants of ``variants.py``, with the servers that they
need.

Each is a context: its servers start before the engine and stop after it, all on this machine's
loopback. If a package or a library is missing, :class:`UnavailableError` names what to install.
``make bench-ttft`` and ``make bench-chat`` set up the environment in which all of them run.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Memory of a server, enough for all blocks of the benches.
POOL_GIB = 4
#: Seconds. They end hangs; importing LMCache takes half a minute from a cold disk.
START, STOP = 180.0, 30.0
LOOPBACK = "127.0.0.1"


class UnavailableError(Exception):
    """A requirement of a variant is missing; the text names what to install."""


@dataclass(frozen=True)
class Given:
    """Settings of an engine: arguments of vLLM's KVTransferConfig, and its environment."""

    transfer: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)


def _package(module: str) -> Path:
    """The directory of an installed package."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            f"{module} is not installed here: make bench-ttft and make bench-chat install it"
        )
    return Path(spec.submodule_search_locations[0])


def _library(name: str) -> bool:
    """True if the dynamic linker finds a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _ports(count: int) -> list[int]:
    """Free ports."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]


def _healthy(port: int, path: str) -> bool:
    """True if a server reports by HTTP that it is ready."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end_with_parent() -> None:
    """Runs in a new process: the kernel ends it when its parent dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextlib.contextmanager
def _server(
    command: Sequence[str], log: Path, port: int, path: str, env: Mapping[str, str]
) -> Iterator[None]:
    """A ready server as a process group of its own; terminated at the end, and killed if it does
    not end."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | dict(env),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            end = time.monotonic() + START
            while not _healthy(port, path):
                if process.poll() is not None or time.monotonic() > end:
                    last = log.read_text(errors="replace").strip().splitlines()[-1:]
                    raise UnavailableError(
                        f"{Path(command[0]).name} did not start: {' '.join(last)[:300]}"
                    )
                time.sleep(0.2)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def example(root: Path) -> Iterator[Given]:
    """vLLM's own example: a directory for each prompt, a file for each layer; it neither verifies
    nor bounds anything.

    It finds whole prompts only, never a part of one, and stores what the first step of a prompt
    computes.
    """
    yield Given(
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(root)},
        }
    )


@contextlib.contextmanager
def lmcache(root: Path) -> Iterator[Given]:
    """LMCache's server: memory above files below ``root``; its connector lies in vLLM."""
    _package("lmcache")
    if importlib.util.find_spec("mooncake") is not None and not _library("libibverbs.so.1"):
        raise UnavailableError(
            "LMCache does not start beside a Mooncake that cannot be loaded: "
            "install libibverbs1 (a package of the system), or remove Mooncake"
        )
    port, http_port = _ports(2)
    shared = f"ucm-bench-{os.getpid()}-{port}"
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--disable-observability"]
    command += [f"--host={LOOPBACK}", f"--port={port}"]
    command += [f"--http-host={LOOPBACK}", f"--http-port={http_port}"]
    # For workers on a CPU; the default is for an accelerator.
    command += ["--supported-transfer-mode", "auto", "--shm-name", shared]
    command += ["--l1-size-gb", str(POOL_GIB), "--eviction-policy", "LRU"]
    command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(root)})]
    env = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    try:
        with _server(
            command, root.with_name(f"{root.name}-server.log"), http_port, "/healthcheck", env
        ):
            yield Given(
                {
                    "kv_connector": "LMCacheMPConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": f"tcp://{LOOPBACK}",
                        "lmcache.mp.port": port,
                    },
                },
                env,
            )
    finally:
        # a killed server leaves its whole memory there
        for left in Path("/dev/shm").glob(f"*{shared}"):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def mooncake(root: Path) -> Iterator[Given]:
    """Mooncake's master and a client that owns the pool, over TCP; its store connector lies in
    vLLM.

    The pool is memory outside of the engine, so that loads come from another process.
    """
    package = _package("mooncake")
    if not _library("libibverbs.so.1"):
        raise UnavailableError(
            "Mooncake needs libibverbs.so.1: install libibverbs1, a package of the system"
        )
    rpc, metrics, metadata, owner, owner_http = _ports(5)
    master = [str(package / "mooncake_master"), "--logtostderr", f"--rpc_address={LOOPBACK}"]
    master += [f"--rpc_port={rpc}", f"--metrics_host={LOOPBACK}", f"--metrics_port={metrics}"]
    master += ["--enable_http_metadata_server=true", f"--http_metadata_server_host={LOOPBACK}"]
    master += [f"--http_metadata_server_port={metadata}"]
    place = {
        "metadata_server": f"http://{LOOPBACK}:{metadata}/metadata",
        "master_server_address": f"{LOOPBACK}:{rpc}",
        "protocol": "tcp",
    }
    client = [str(package / "mooncake_client"), "--logtostderr", f"--host={LOOPBACK}"]
    client += [f"--port={owner}", f"--global_segment_size={POOL_GIB} GB"]
    client += [f"--{name}={value}" for name, value in place.items()]
    client += ["--enable_http_server", f"--http_port={owner_http}"]
    config = root / "mooncake.json"
    config.write_text(
        json.dumps(
            place
            | {"mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "512MB"}
        )
    )
    logs = [root.with_name(f"{root.name}-{name}.log") for name in ("master", "client")]
    with (
        _server(master, logs[0], metrics, "/health", {}),
        _server(client, logs[1], owner_http, "/health", {}),
    ):
        yield Given(
            {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
            {"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": LOOPBACK},
        )


#: Name of a variant -> its context, given an empty directory.
PEERS: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[Given]]] = {
    "example": example,
    "lmcache": lmcache,
    "mooncake": mooncake,
}
#: Those that can store a prompt only if it is computed in one step.
WHOLE_PROMPTS = frozenset({"example"})
