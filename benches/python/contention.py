"""Two servers of one root that share too few processors: ``python benches/python/contention.py
--json c.json``.

Two pairs of servers are up at the same time, one with ucm and one without. Rounds of the same chats
go to the one and to the other in turn, so that whatever else the machine does falls on both. Each
client sends its whole history with every turn, to the one server of the pair and to the other in
turn. First new chats (with ucm, blocks of the other server are loaded), then the same ones again,
nearly all of which vLLM's own cache has. By round: the ratio with to without of median, 90th
percentile and sum of the answers' times, and of the processor time of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from variants import BLOCK, OURS  # isort: split

from chat import words
from chat_server import Server, one_of_several, write_tokenizer
from harness import machine_lock

import model as demo_model

#: What is told of a round.
FIGURES = ("median_s", "p90_s", "total_s", "processor_s")


def processor_seconds(servers: list[Server]) -> float:
    """What all processes of these servers have used so far."""
    ticks = sum(server.ticks() for server in servers)
    return ticks / os.sysconf("SC_CLK_TCK")


def one_round(
    servers: list[Server], chats: int, chosen: argparse.Namespace, said: dict[Any, str]
) -> dict[str, float]:
    """All chats, each to its end; the answers are those of the first time."""
    times: list[float] = []

    def talk(client: int) -> None:
        history: list[dict[str, str]] = [
            {"role": "user", "content": words(chats, 0, chosen.shared)}
        ]
        for turn in range(chosen.turns):
            history.append(
                {"role": "user", "content": words(chats + client + 1, turn, chosen.words)}
            )
            began = time.monotonic()
            answer = servers[(client + turn) % len(servers)].ask(history, chosen.answer)
            times.append(time.monotonic() - began)
            text = said.setdefault((chats, client, turn), answer.text)
            if text != answer.text:
                raise SystemExit(f"client {client}, turn {turn}: another answer than before")
            history.append({"role": "assistant", "content": text})

    before, began = processor_seconds(servers), time.monotonic()
    with ThreadPoolExecutor(chosen.clients) as pool:
        list(pool.map(talk, range(chosen.clients)))
    total = time.monotonic() - began
    used = processor_seconds(servers) - before
    p90 = sorted(times)[int(len(times) * 0.9)]
    return dict(zip(FIGURES, (statistics.median(times), p90, total, used), strict=True))


#: With a connector vLLM keeps another number of processors free than without one: both keep one.
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}


@contextlib.contextmanager
def pairs(variant: str, work: Path, blocks: int, length: int) -> Iterator[dict[str, list[Server]]]:
    """Both pairs of servers, up."""
    with machine_lock(), contextlib.ExitStack() as stack:
        up: dict[str, list[Server]] = {}
        for name in ("none", variant):
            root = work / f"blocks-{name}"
            root.mkdir()
            up[name] = [
                stack.enter_context(
                    one_of_several(
                        name,
                        work / "model",
                        root,
                        blocks,
                        length,
                        work / f"{name}-{n}.log",
                        THREADS,
                    )
                )
                for n in range(2)
            ]
        yield up


def main() -> None:
    """Talks, prints, writes."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--variant", choices=[name for name in OURS if name != "none"], default="segment"
    )
    arguments.add_argument("--clients", type=int, default=6)
    arguments.add_argument("--turns", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=5, help="of each kind")
    arguments.add_argument(
        "--shared", type=int, default=300, help="words that all chats of a round begin with"
    )
    arguments.add_argument("--words", type=int, default=60, help="a client says in a turn")
    arguments.add_argument("--answer", type=int, default=12, help="words of an answer")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    history = chosen.shared + chosen.turns * (chosen.words + chosen.answer)
    length = (history * 6 // 5 // BLOCK + 2) * BLOCK
    if length > demo_model.MAX_TOKENS:
        arguments.error(
            f"the model reads {demo_model.MAX_TOKENS} tokens, these chats need {length}"
        )
    blocks = 2 * chosen.clients * (history // BLOCK + 2)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="contention-") as folder:
        work = Path(folder)
        demo_model.write(work / "model")
        write_tokenizer(work / "model", demo_model.VOCABULARY)
        with pairs(chosen.variant, work, blocks, length) as up:
            said: dict[Any, str] = {}
            # the first compiles kernels and measures speeds, and is not told
            for number in range(-1, chosen.rounds):
                for kind in ("new", "again"):
                    order = sorted(up, reverse=number % 2 == 0)
                    figures = {
                        name: one_round(up[name], 1000 * (number + 2), chosen, said)
                        for name in order
                    }
                    if number < 0:
                        continue
                    ratio = {
                        key: figures[chosen.variant][key] / figures["none"][key] for key in FIGURES
                    }
                    rounds.append({"kind": kind, "ratio": ratio, **figures})
                    print(
                        f"{kind}: "
                        + ", ".join(f"{key} {value:.2f}" for key, value in ratio.items()),
                        flush=True,
                    )
    for kind in ("new", "again"):
        some = [one["ratio"] for one in rounds if one["kind"] == kind]
        middle = {key: statistics.median(ratio[key] for ratio in some) for key in FIGURES}
        print(
            f"{chosen.variant} / none, {kind}: "
            + ", ".join(f"{key} {value:.3f}" for key, value in middle.items())
        )
    if chosen.json:
        settings = {
            key: getattr(chosen, key)
            for key in ("variant", "clients", "turns", "shared", "words", "answer")
        }
        date = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
        chosen.json.write_text(
            json.dumps({"date": date, "settings": settings, "rounds": rounds}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
