"""Real vLLM servers for tests: a process that serves HTTP, and a tokenizer for the tiny models."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
from ends_with_us import Group
from models import MAX_LEN, VOCAB
from ports import free_port
from specs import BLOCK, EngineSpec

#: Seconds to end hangs.
PATIENCE = 600.0
NAME = "tiny"


def write_tokenizer(directory: Path) -> None:
    """Token ``n`` is the word ``wn``, and a chat is the words of its messages."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


class Server:
    """A process that serves HTTP on this machine, and a client of it. It ends with pytest."""

    def __init__(self, command: list[str], environment: dict[str, str], port: int, log: Path):
        self.log = log
        with log.open("wb") as out:
            words = [sys.executable, "-m", *command]
            self._group = Group(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
        self.process = self._group.process
        self.at = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.at, trust_env=False, timeout=PATIENCE)

    def started(self) -> bool:
        """True if it answers; fails if it has ended."""
        assert self.process.poll() is None, self.log.read_text()[-5000:]
        with suppress(httpx.TransportError):
            return self.client.get("/health").status_code == 200
        return False

    def kill(self) -> None:
        """Ends all its processes at once."""
        self._group.kill()

    def metric(self, name: str, **labels: str) -> float:
        """A value of ``/metrics``, summed over other labels."""
        found = re.findall(
            rf"^{name}(?:\{{(.*)\}})? (\S+)$", self.client.get("/metrics").text, re.M
        )
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for given, value in found if all(one in given for one in wanted))

    def close(self) -> None:
        """Ends it as an operator does, then its processes that are left."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.kill()


def vllm_server(spec: EngineSpec, log: Path, *more: str, length: int = MAX_LEN) -> Server:
    """A vLLM server of this engine, with more arguments."""
    port = free_port()
    command = ["serve_vllm", "serve", f"--model={spec.model}", f"--port={port}"]
    command += ["--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--max-num-seqs=16"]
    command += [
        f"--block-size={BLOCK}",
        f"--max-model-len={length}",
        f"--served-model-name={NAME}",
    ]
    command += [f"--num-gpu-blocks-override={spec.blocks}", "--kv-cache-memory-bytes=67108864"]
    command += ["--seed=0", "--max-num-batched-tokens=256", *more]
    command += ["--kv-transfer-config", json.dumps(spec.kv_transfer())]
    return Server(command, spec.environment(), port, log)
