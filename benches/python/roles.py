"""A prefill and a decode server beside one of both roles: ``python benches/python/roles.py``.

All run on this machine over one directory: P and D with a part of the processors each and ``ucm
pd-proxy`` before them, and a server with all processors. They take turns with the same load: chats
of four at a time, prompts of 1000 tokens, answers of 64. Prints the medians of the rounds. Goodput
is requests a second whose first token and whose further tokens took at most twice the median of the
single server. ``--json`` writes every round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "demo"))

import model
import pd
from process import Progress
from ucm.bench.client import Sample, Server, take_turns
from ucm.bench.scenarios import Scenario

LOAD = Scenario("pd", "prompts of 1000 tokens", 1000, 64, 4, 16)


def main() -> None:
    """Measure, and print a table."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--json", type=Path)
    given = words.parse_args()
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="pd-") as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        model.write(work / "model")
        pd.write_tokenizer(work / "model")
        command = pd.vllm_server(work / "model", work / "store")
        shares = {"prefill": 2, "decode": 2, "both roles": 1}
        servers = {name: pd.Server(name, command, work, share) for name, share in shares.items()}
        roles = [f"--{name}={servers[name].at}" for name in ("prefill", "decode")]
        for server in servers.values():
            stack.callback(server.close)
        pd.await_all(list(servers.values()), progress)
        servers["P and D"] = pd.Server("proxy", ["ucm", "pd-proxy", *roles], work)
        stack.callback(servers["P and D"].close)
        pd.await_all([servers["P and D"]], progress)
        names = ("both roles", "P and D")
        asked = [Server(servers[name].at, model="demo") for name in names]
        samples = asyncio.run(take_turns(asked, LOAD, given.rounds, "pd", progress.tick))
    alone = [sample.metrics for sample in samples[0]]
    first = 2 * statistics.median(one.ttft_p50 for one in alone)
    further = 2 * statistics.median(one.tpot_p50 for one in alone)
    print(
        f"\n| | first token, p50 | p99 | further token, p50 | p99 | requests/s | within"
        f" {first:.2f} s and {further * 1000:.0f} ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, rounds in zip(names, samples, strict=True):
        found = [row(sample, first, further) for sample in rounds]
        cells = [statistics.median(column) for column in zip(*found, strict=True)]
        form = "{:.2f} s | {:.2f} s | {:.0f} ms | {:.0f} ms | {:.2f} | {:.2f}/s"
        print(f"| {name} | {form.format(*cells)} |")
    if given.json:
        every = {
            name: [sample.as_json() for sample in rounds]
            for name, rounds in zip(names, samples, strict=True)
        }
        given.json.write_text(json.dumps(every, indent=1) + "\n")


def row(sample: Sample, first: float, further: float) -> tuple[float, ...]:
    """The figures of one round."""
    found, answers = sample.metrics, sample.answers
    good = [one for one in answers if one.ttft <= first and (one.tpot or 0.0) <= further]
    share = len(good) / len(answers)
    times = found.ttft_p50, found.ttft_p99, 1000 * found.tpot_p50, 1000 * found.tpot_p99
    return *times, found.requests_per_second, share * found.requests_per_second


if __name__ == "__main__":
    main()
