"""Every block of code in the documents is run, parsed as its program parses it, or marked as
``text``: a picture, or output.

``python`` runs, all blocks of a page in one process; ``yaml`` is a configuration, or names servers
for Prometheus; of ``sh`` bash checks the syntax, ``vllm serve`` and ``ucm`` their arguments; ``c``
is compiled.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
import yaml
from test_documents import DOCUMENTS, REPOSITORY

from ucm.cli import main
from ucm.config import load

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
        timeout=110,
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
