"""``make demo PD=1``: one server that computes prompts (P) and one that produces tokens (D), over
one directory, with ``ucm pd-proxy`` before them.

Each prompt is asked twice: of D alone, which computes it, and through the proxy, where P computes
it and D loads its blocks. D decodes the stream of another client at the same time: the computing of
a prompt delays its tokens, a load hardly does. Both servers are on this machine, so P takes
processors from D; on a machine of its own it would not.

Ends with one table, and exit code 0 only if everything was as promised.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

import model
from engine import QUIET
from process import PATIENCE, DemoError, Progress
from servers import free_port

BLOCK = 32
PROMPT_TOKENS = 125 * BLOCK + 5
OUTPUT_TOKENS = 16
PROMPTS = 4
#: Tokens of the other client's stream: more than are decoded in the meantime.
STREAM_TOKENS = 3900
COMPLETIONS = "/v1/completions"
WAITS = "ucm_pd_wait_seconds_sum"
#: A request that neither loads nor stores; with a salt of its own vLLM does not reuse its blocks.
ALONE = {"kv_transfer_params": {"ucm": {"load": False, "dump": False}}, "cache_salt": "alone"}


@dataclass
class Run:
    """Figures of all prompts, asked in one way."""

    title: str
    loaded: int = 0
    at_d: float = 0.0  # mean seconds to the first token at D
    waited: float = 0.0  # of it D's wait for the blocks of P
    whole: float = 0.0  # the same as the client sees it
    pause: float = 0.0  # longest one between two tokens of the other stream
    outputs: list[list[int]] = field(default_factory=list)


class Server:
    """A server of the demo, ended with it."""

    def __init__(self, name: str, command: list[str], out: pathlib.Path, share: int = 2) -> None:
        """``share``: how many servers compute at the same time, each with its part of the
        processors."""
        self.name, self.log, self.port = name, out / f"{name}.log", free_port()
        threads = str(max(1, (os.cpu_count() or 2) // share))
        cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, f"--port={self.port}"],
                env=cpu | os.environ | QUIET,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.at = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.at, trust_env=False, timeout=PATIENCE)

    def started(self) -> bool:
        """Whether it answers."""
        if self.process.poll() is not None:
            raise DemoError(f"{self.name} ended at its start; its log is {self.log}")
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").status_code == 200
        return False

    def metric(self, name: str) -> float:
        """A value of ``/metrics``, summed over its labels."""
        text = self.client.get("/metrics").text
        return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)))

    def close(self) -> None:
        """Ends it, and its processes after some seconds."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("demo-out"), help="where files go"
    )
    out = parser.parse_args().out / "pd"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    progress = Progress()
    try:
        with contextlib.ExitStack() as stack:
            runs = demo(out, progress, stack)
    except (DemoError, httpx.HTTPError) as error:
        print(f"\nThe demo failed: {error}; logs: {out}", file=sys.stderr)
        return 1
    alone, split = runs
    (out / "result.json").write_text(json.dumps([run.__dict__ for run in runs], indent=2) + "\n")
    print(f"\n{table(runs)}\n")
    most = PROMPTS * (PROMPT_TOKENS // BLOCK * BLOCK)
    checks = [
        ("D alone: nothing was loaded", alone.loaded == 0),
        (f"D loaded {split.loaded} of {most} tokens that P computed", split.loaded == most),
        ("D's first token is sooner", split.at_d < alone.at_d),
        ("both gave the same tokens", split.outputs == alone.outputs),
    ]
    for text, kept in checks:
        print(f"  [{'ok' if kept else 'BROKEN'}] {text}")
    print(f"\n  logs and figures: {out}")
    return 0 if all(kept for _, kept in checks) else 1


def demo(out: pathlib.Path, progress: Progress, stack: contextlib.ExitStack) -> list[Run]:
    """Start all, and ask every prompt in both ways."""
    directory = out.parent / "model"
    size = model.write(directory)
    write_tokenizer(directory)
    progress.line("model", f"{size / 1e6:.0f} MB of random weights in {directory}")
    command = vllm_server(directory, out / "store")
    prefill, decode = Server("prefill", command, out), Server("decode", command, out)
    for server in (prefill, decode):
        stack.callback(server.close)
        progress.line(server.name, f"importing vLLM (log: {server.log})")
    await_all([prefill, decode], progress)
    roles = [f"--prefill={prefill.at}", f"--decode={decode.at}"]
    proxy = Server("proxy", ["ucm", "pd-proxy", *roles], out)
    stack.callback(proxy.close)
    await_all([proxy], progress)
    prompts = [[2 + at, *model.prompt(PROMPT_TOKENS - 1)] for at in range(PROMPTS)]
    short = model.prompt(BLOCK // 2)
    for server in (prefill, decode, proxy):  # wakes the threads up and leaves nothing in the store
        ask(server, short, 2)
    alone = run("D alone", decode, decode, prompts, ALONE)
    progress.line("decode", f"first tokens after {alone.at_d:.2f} s, computed")
    seconds = "ucm_pd_prefill_seconds_sum"
    before = proxy.metric(seconds)
    split = run("P and D", proxy, decode, prompts, {})
    split.at_d -= (proxy.metric(seconds) - before) / len(prompts)
    progress.line("proxy", f"first tokens after {split.whole:.2f} s, {split.at_d:.2f} s at D")
    return [alone, split]


def run(
    title: str, server: Server, decode: Server, prompts: list[list[int]], more: dict[str, Any]
) -> Run:
    """Ask the prompts one after the other of this server."""
    hits, made = "vllm:external_prefix_cache_hits_total", Run(title)
    before, waited = decode.metric(hits), decode.metric(WAITS)
    with other_stream(decode) as times:
        for prompt in prompts:
            first, output = ask(server, prompt, OUTPUT_TOKENS, more)
            made.whole += first / len(prompts)
            made.outputs.append(output)
        seen = list(times)
    made.at_d, made.loaded = made.whole, int(decode.metric(hits) - before)
    made.waited = (decode.metric(WAITS) - waited) / len(prompts)
    made.pause = max(b - a for a, b in itertools.pairwise(seen))
    return made


def ask(
    server: Server, prompt: list[int], tokens: int, more: dict[str, Any] | None = None
) -> tuple[float, list[int]]:
    """Seconds to the first token of an answer, and its tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **(more or {})}
    began, first, output = time.monotonic(), 0.0, list[int]()
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        if response.status_code != 200:
            raise DemoError(f"{server.name} answered {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    output += choice.get("token_ids") or []
                    first = first or time.monotonic() - began
    return first, output


@contextlib.contextmanager
def other_stream(server: Server) -> Iterator[list[float]]:
    """Another client's stream at this server, and the times of its tokens."""
    times: list[float] = []
    begun, ended = threading.Event(), threading.Event()
    body = {"model": "demo", "prompt": model.prompt(BLOCK - 1), "max_tokens": STREAM_TOKENS}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0.0, **ALONE}

    def follow() -> None:
        with (
            httpx.Client(base_url=server.at, trust_env=False, timeout=PATIENCE) as client,
            client.stream("POST", COMPLETIONS, json=body) as response,
        ):
            for line in response.iter_lines():
                if line:
                    times.append(time.monotonic())
                    begun.set()
                if ended.is_set():
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    begun.wait(PATIENCE)
    try:
        yield times
    finally:
        ended.set()
        thread.join()


def await_all(servers: list[Server], progress: Progress) -> None:
    """Returns when all of them answer."""
    deadline = time.monotonic() + PATIENCE
    for server in servers:
        while not server.started():
            if time.monotonic() > deadline:
                raise DemoError(f"{server.name} did not start within {PATIENCE:.0f} s")
            progress.tick()
            time.sleep(0.2)
        progress.line(server.name, f"answers at {server.at}")


def vllm_server(directory: pathlib.Path, store: pathlib.Path) -> list[str]:
    """The command line of both servers."""
    transfer = {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"storage_backends": str(store.resolve())},
    }
    return [
        "vllm.entrypoints.openai.api_server",
        f"--model={directory.resolve()}",
        "--served-model-name=demo",
        "--host=127.0.0.1",
        "--dtype=float32",
        "--enforce-eager",
        f"--block-size={BLOCK}",
        f"--max-model-len={model.MAX_TOKENS // 2}",
        "--max-num-batched-tokens=1024",
        "--max-num-seqs=4",
        f"--kv-cache-memory-bytes={512 << 20}",
        "--seed=0",
        f"--kv-transfer-config={json.dumps(transfer)}",
    ]


def write_tokenizer(directory: pathlib.Path) -> None:
    """Token ``n`` is the word ``wn``: vLLM's servers do not start without a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{n}": n for n in range(model.VOCABULARY)}
    Tokenizer(WordLevel(words)).save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def table(runs: list[Run]) -> str:
    """The figures of both ways."""
    rows = [
        ("", [run.title for run in runs]),
        ("prompts", [f"{PROMPTS} of {PROMPT_TOKENS} tokens"] * len(runs)),
        ("tokens loaded by D", [str(run.loaded) for run in runs]),
        ("time to first token at D", [f"{run.at_d:.2f} s" for run in runs]),
        ("  of it the wait for P's blocks", [f"{run.waited:.2f} s" for run in runs]),
        ("the same, from the client's request", [f"{run.whole:.2f} s" for run in runs]),
        ("longest pause of another stream at D", [f"{run.pause:.2f} s" for run in runs]),
    ]
    label = max(len(name) for name, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    lines = [
        f"  {name:<{label}}" + "".join(f"  {c:>{width}}" for c in cells) for name, cells in rows
    ]
    lines.insert(1, "  " + "-" * (len(lines[0]) - 2))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
