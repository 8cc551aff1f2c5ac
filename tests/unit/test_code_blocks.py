"""Every block of code in the documents is run, parsed as its program parses it, or marked as
``text``: a picture, or output.

``python`` runs, all blocks of a page in one process; ``yaml`` is a configuration, a metrics file,
or names servers for Prometheus; of ``sh`` bash checks the syntax, ``vllm serve`` and ``ucm`` their
arguments, and commands of ``ucm`` run; ``c`` is compiled.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest
import yaml
from test_documents import DOCUMENTS, REPOSITORY

sys.path += [str(REPOSITORY / "tests" / name) for name in ("cli", "store")]

from cli_roots import Written

from ucm.cli import main
from ucm.config import load
from ucm.metrics.file import MetricsFile

# Programs of the documents import vLLM, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(300)

BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "yaml", "sh", "c", "text"}
#: Blocks by language: page, number of the block on it, text.
FOUND: dict[str, list[tuple[str, int, str]]] = {}
for page, content in sorted(DOCUMENTS.items()):
    for number, (indent, language, body) in enumerate(BLOCK.findall(content)):
        FOUND.setdefault(language, []).append((page, number, textwrap.dedent(indent + body)))


def params(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{page}:{number}") for page, number, text in FOUND.get(language, [])
    ]


#: What the programs of a page suppose, before each: ids of blocks, their data, side shards, files.
SUPPOSED = {
    "docs/tools-bench.md": [
        """
import json, pathlib
times = [f"{time}_{kind}" for time in ("ttft", "tpot") for kind in ("mean", "p50", "p99")]
for name in ("before.json", "now.json"):
    figures = dict.fromkeys([*times, "throughput", "requests_per_second"], 1.0)
    pathlib.Path(name).write_text(json.dumps(figures))
"""
    ],
    "docs/store-api.md": [
        """
import torch
block_id, tensor = bytes(16), torch.zeros(65536, dtype=torch.uint8)
"""
    ],
    "docs/store-sides.md": [
        """
import torch
ids, numbers = [bytes([n]) * 16 for n in range(1, 3)], [0, 1]
config = {"storage_backends": "/data/sides", "identity": "x", "tensor_size": 65536,
          "shard_size": 65536, "block_size": 65536}
kv_caches = {"layer": torch.zeros(4, 65536, dtype=torch.uint8)}
means, codes = (torch.zeros(2, n, dtype=torch.uint8).numpy() for n in (4096, 512))
"""
    ],
    "docs/store-v0.md": [
        """
import torch
ids, offsets = ["00" * 16, "01" * 16], [0, 0]
tensors = [torch.zeros(1 << 20, dtype=torch.uint8)] * 2
"""
    ],
}
NEED_TORCH = {"docs/sparse-own.md", "docs/store-api.md", "docs/store-sides.md"}
NEED_TORCH |= {"docs/store-v0.md", "docs/tenants.md"}


@pytest.mark.parametrize("page", sorted({page for page, _, _ in FOUND["python"]}))
def test_programs_run(page: str, tmp_path: Path) -> None:
    if page in NEED_TORCH:
        pytest.importorskip("torch")
    blocks = [text for name, _, text in FOUND["python"] if name == page]
    before = SUPPOSED.get(page, [""] * len(blocks))
    program = "".join(a + b for a, b in zip(before, blocks, strict=True))
    (tmp_path / "tenant.key").write_bytes(b"0123456789abcdef")
    (tmp_path / "tenant.key").chmod(0o600)
    for place in ("/data/", "/mnt/nfs/", "/etc/ucm/"):
        program = program.replace(place, f"{tmp_path}/")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


#: Keys that choose a store; a block without one is a part of a configuration.
STORE = {"storage_backends", "storage_backend", "store_pipeline", "ucm_connectors"}


@pytest.mark.parametrize("text", params("yaml"))
def test_configurations_are_read(text: str) -> None:
    given = yaml.safe_load(text)
    if "scrape_configs" in given:  # of Prometheus, as tests/metrics/real_prometheus.py runs one
        (job,) = given["scrape_configs"]
        assert job.keys() == {"job_name", "static_configs"}
        assert all(":" in one for targets in job["static_configs"] for one in targets["targets"])
        return
    if "grafana" in given:
        assert all(dashboard.panels for dashboard in MetricsFile(**given).grafana.dashboards)
        return
    if not given.keys() & STORE:
        given["storage_backends"] = "/data/ucm"
    assert load(given, {}).store_config()


def _commands(text: str) -> list[list[str]]:
    """The commands of a block of sh: their words, without comments."""
    joined = re.sub(r"\s*\\\n\s*", " ", re.sub(r"(^|\s)#.*$", "", text, flags=re.MULTILINE))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars="\n;|&")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("\n;|&"):
            found.append([])
        else:
            found[-1].append(word)
    # without redirections
    return [words[: words.index(">")] if ">" in words else words for words in found if words]


@pytest.mark.parametrize("text", params("sh"))
def test_commands_parse(text: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in _commands(text):
        if words[0] == "ucm":
            _check_ucm(words[1:])
        if "--kv-transfer-config" in words:
            given = json.loads(words[words.index("--kv-transfer-config") + 1])
            if given["kv_connector"] == "UCMConnector":
                load(given["kv_connector_extra_config"], {})


#: Commands that do not run here, by their first words, and the reason.
LEFT_OUT = {
    "bench": "it measures for minutes: tests/cli/test_bench.py",
    "doctor --": "vLLM makes its configuration of a model: tests/vllm_unit/test_doctor_probe.py",
    "pd-proxy": "it serves until it is stopped: tests/pd",
}
#: The commands of a block run by this: ``ucm`` is the one of this tree, ``vllm`` prints its words
#: and writes a trace where it is to. Status and words of each ``ucm`` go to a file.
SHELL = """
set -euo pipefail
ucm() {
    case "$* " in LEFT_OUT) echo "left out: $1" >> ran; return ;; esac
    case "$*" in *--watch*) set -- "$@" --times 1 ;; esac
    local status=0
    PYTHON -m ucm "$@" || status=$?
    echo "$status ${*//$'\\n'/ }" >> ran
}
"""
VLLM = """#!/bin/sh
if [ -n "$UCM_BLOCK_TRACE" ]; then
    echo '{"t":1,"blocks":["a","b"]}' > "$UCM_BLOCK_TRACE"
fi
printf '%s\\n' "$@" > served
"""
#: Configuration of the model that the pages name, as far as its KV has a size.
QWEN = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN |= {"head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}
PAGES_OF_UCM = sorted({page for page, _, text in FOUND["sh"] if re.search(r"\bucm [a-z]", text)})


class Metrics(BaseHTTPRequestHandler):
    """Answers as vLLM's server with ucm: ``/metrics``, and the endpoint for the mode."""

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        mode = json.dumps({"file": "/run/ucm/ucm-mode.json", "mode": "off"})
        self.wfile.write((mode if "/v1/ucm/mode" in self.path else SERIES).encode())

    def do_PUT(self) -> None:
        self.do_GET()


def _series() -> str:
    """Every series that ``ucm stats`` shows, as vLLM exports it."""
    of = 'engine="0",model_name="m"'
    labels = 'version="1",identity="i",layout="segment",tiers="posix",mode="read-write"'
    lines = [f"ucm_info{{{of},{labels}}} 1", f'ucm_missed_blocks_total{{{of},reason="absent"}} 2']
    counters = ("asked_blocks", "hit_blocks", "loaded_blocks", "loaded_bytes", "published_blocks")
    lines += [f"ucm_{name}_total{{{of}}} 3" for name in (*counters, "saved_prefill_seconds")]
    lines += [f'ucm_requests_total{{{of},status="{one}"}} 1' for one in ("success", "error")]
    lines += [f'ucm_io_throughput_gbps{{{of},operation="load"}} 2.5']
    for name in ("lookup", "load", "dump"):
        lines += [f"ucm_{name}_seconds_{part}{{{of}}} 1" for part in ("count", "sum")]
    return "\n".join(lines) + "\n"


SERIES = _series()


@pytest.fixture
def server() -> Iterator[str]:
    """``host:port``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory with what the pages suppose, each place below it."""
    for place in ("data/kv", "data/ucm", "mnt/kv"):
        root = Written(tmp_path / place)
        root.path.parent.mkdir(parents=True, exist_ok=True)
        root.fill("one", 3)
    for directory in ("etc/ucm", "run/ucm", "tmp", "backup", "bin", "hub"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "etc/ucm/ucm.yaml").write_text(f"storage_backends: {tmp_path}/data/ucm\n")
    (tmp_path / "etc/ucm/key").touch(0o600)
    (tmp_path / "etc/ucm/key").write_text(f"{7:064x}\n")
    (tmp_path / "bin/vllm").write_text(VLLM)
    (tmp_path / "bin/vllm").chmod(0o755)
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("1")
    (page,) = (text for _, _, text in FOUND["yaml"] if "grafana:" in text)
    (tmp_path / "metrics_configs.yaml").write_text(page)
    return tmp_path


def _translated(text: str, machine: Path, server: str) -> str:
    """The commands with the places and servers of a test."""
    places = ("/data/", "/mnt/", "/etc/ucm/", "/backup/", "/tmp/", "/run/ucm")
    text = re.sub("|".join(map(re.escape, places)), lambda found: f"{machine}{found[0]}", text)
    text = re.sub(r"http://(host|other|localhost):8000", f"http://{server}", text)
    (namespace,) = {path.parent.name for path in machine.glob("mnt/kv/*/manifest.json")}
    return text.replace("--namespace 3f2a", f"--namespace {namespace[:6]}")


def _ran(page: str, machine: Path, server: str) -> list[str]:
    """Status and words of each command of ucm on a page."""
    patterns = "|".join(f'"{words} "*' for words in LEFT_OUT)
    program = SHELL.replace("LEFT_OUT", patterns).replace("PYTHON", sys.executable)
    blocks = [text for name, _, text in FOUND["sh"] if name == page]
    # pip changes an environment
    chosen = [text for text in blocks if re.search(r"\bucm [a-z]", text)]
    lines = re.sub(r"^pip .*$", "", "\n".join(chosen), flags=re.MULTILINE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCM_")}
    done = subprocess.run(
        ["bash"],
        input=program + _translated(lines, machine, server),
        cwd=machine,
        env=kept
        | {"PATH": f"{machine}/bin:{kept['PATH']}", "UCM_STATE_DIR": f"{machine}/state"}
        | {"HF_HUB_CACHE": f"{machine}/hub", "TERM": "xterm-256color"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr, "piped output has no colours"
    return (machine / "ran").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES_OF_UCM)
def test_commands_of_ucm_run(page: str, machine: Path, server: str) -> None:
    ran = _ran(page, machine, server)
    blocks = [text for name, _, text in FOUND["sh"] if name == page]
    written = sum(len(re.findall(r"(?:^|\$\()ucm [a-z]", text, re.MULTILINE)) for text in blocks)
    assert len(ran) == written
    # A machine of tests may have few descriptors or a slow disk, of which doctor warns.
    good = re.compile("left out: |0 |1 doctor ")
    assert [line for line in ran if not good.match(line)] == []


def test_only_what_is_written_is_left_out() -> None:
    written = "\n".join(text for _, _, text in FOUND["sh"])
    assert all(f"ucm {words} " in written for words in LEFT_OUT)


def _check_ucm(words: list[str]) -> None:
    """Fails with click's own message if ``ucm`` would refuse these arguments."""
    command: click.Command | None = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        command = command.get_command(context, words[0])
        assert command is not None, words
        if isinstance(command, click.Group):
            context = click.Context(command, parent=context)
        words = words[1:]
    assert command is not None
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("text", params("c"))
def test_c_compiles(text: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler of C on this machine")
    include = REPOSITORY / "python" / "ucm" / "include"
    options = ["-std=c11", "-Wall", "-Werror", "-fsyntax-only", f"-I{include}", "-xc", "-"]
    done = subprocess.run(
        [compiler, *options], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_block_has_a_language_that_is_tested() -> None:
    assert {language: FOUND[language] for language in set(FOUND) - LANGUAGES} == {}


def test_what_is_wrong_is_found() -> None:
    with pytest.raises(click.UsageError):
        _check_ucm(["gc", "/data/ucm", "--no-such-option"])
    with pytest.raises(ValueError, match="storage_bakends"):
        test_configurations_are_read("storage_bakends: /data/ucm")
    with pytest.raises(ValueError, match="storage_bakends"):
        test_commands_parse(
            """vllm serve M --kv-transfer-config '{"kv_connector": "UCMConnector",
            "kv_connector_extra_config": {"storage_bakends": "/data/ucm"}}'"""
        )
    with pytest.raises(AssertionError):
        test_commands_parse("if true")
