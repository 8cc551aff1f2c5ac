"""Time of a decode step, dense and sparse, in vLLM on a CPU: ``python benches/python/sparse.py``.

The prompt of each case is loaded from a store with generated KV (``planted.py``), so a step over
128 K tokens is measured without computing such a prompt. A step is the time from one token to the
next, the median over the tokens of all rounds, and its ratio is to the dense step of the same
round. ``dense`` is ucm without sparse attention: vLLM's own kernel over the whole KV. Engines of
all methods run at the same time and take turns, request by request, if their KV fits in memory;
else they are started one after the other in each round.

*selection* is its share of a whole decode step: the representations of new keys, the codes of the
queries, scores and selection of every layer, by the engine's clock. The goal is 15 %. Prints
tables; ``--json`` writes the figures.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planted import BLOCK, LAYERS, PAGE, VOCAB, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from harness import Engine, machine_lock
from specs import Ask, EngineSpec, StoreSpec, prompt

from ucm.sparse.retrieval import instruction_sets

Case = tuple[int, int]

#: Tokens of a prompt, concurrent requests: groups of cases for engines of one size.
GROUPS: tuple[tuple[Case, ...], ...] = (
    ((4096, 1), (8192, 1), (16384, 1), (32768, 1)),
    ((32768, 4), (65536, 1), (131072, 1)),
)
#: The configuration of each.
METHODS: Mapping[str, dict[str, Any]] = {
    "dense": {},
    "hash-128": {"ucm_sparse_config": {"GSAOnDevice": {"topk_tokens": 4096}}},
    "mean-K": {"ucm_sparse_config": {"ESA": {"topk_tokens": 4096, "stride": 1}}},
}
#: A prompt ends this number of tokens before a whole block, so only a part of a block is computed.
SHORT_OF = 70
#: The engines of a group run at the same time if their KV takes at most this share of the free
#: memory.
SIDE_BY_SIDE = 0.6
#: Most share of a step for selection.
SELECTION_GOAL = 0.15


def pool_blocks(cases: Sequence[Case]) -> int:
    """Device blocks for the largest of these cases, plus those of a step."""
    return max(tokens * rows for tokens, rows in cases) // BLOCK + 64


def pool_bytes(cases: Sequence[Case]) -> int:
    """Bytes of KV of an engine for these cases."""
    return (pool_blocks(cases) + 2) * PAGE * LAYERS


def free_bytes() -> int:
    """Available memory of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024


def spec(method: str, model: Path, root: Path, cases: Sequence[Case], steps: int) -> EngineSpec:
    """An engine with space for the largest case."""
    return EngineSpec(
        model,
        store=StoreSpec(root, "PlantedStore", module_path="planted"),
        blocks=pool_blocks(cases),
        budget=2048,
        extra_config=METHODS[method],
        args={
            "max_model_len": max(tokens for tokens, _ in cases) + steps,
            "block_size": BLOCK,
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": pool_bytes(cases),
        },
        env={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        pythonpath=(str(Path(__file__).parent),),
        label=method,
        fork=False,
    )


def measured(engine: Engine, tokens: int, rows: int, steps: int) -> tuple[float, float | None]:
    """Milliseconds from one token to the next for a case, and those of selection; None in an engine
    without selection."""
    asks = [
        Ask([token % VOCAB for token in prompt(row, tokens - SHORT_OF)], steps)
        for row in range(rows)
    ]
    before = selection_s(engine)
    began = time.perf_counter()
    answers = engine.generate(*asks)
    took = time.perf_counter() - began
    spent = selection_s(engine)
    firsts = [answer.first for answer in answers if answer.first is not None]
    if (
        len(firsts) < rows
        or min(answer.cached for answer in answers) < (tokens // BLOCK - 1) * BLOCK
    ):
        raise RuntimeError(
            f"{tokens} tokens were not loaded: {[answer.cached for answer in answers]}"
        )
    if any(len(answer.tokens) != steps for answer in answers):
        raise RuntimeError(
            f"{steps} tokens were to be decoded, not {[len(answer.tokens) for answer in answers]}"
        )
    engine.wait_idle()
    engine.reset()
    chose = None if spent is None or before is None else (spent - before) / (steps - 1) * 1e3
    return (took - max(firsts)) / (steps - 1) * 1e3, chose


def selection_s(engine: Engine) -> float | None:
    """Seconds of selection of an engine's worker so far; None without selection."""
    stats = ast.literal_eval(engine.rpc("probe_worker_eval", "connector.stats().get('sparse')")[0])
    return None if stats is None else float(stats.get("selection_s", 0.0))


class Group:
    """Cases for engines of one size."""

    def __init__(
        self, cases: Sequence[Case], methods: Sequence[str], work: Path, model: Path, steps: int
    ) -> None:
        self.cases, self.methods, self._work, self._model, self._steps = (
            cases,
            methods,
            work,
            model,
            steps,
        )
        self._logs = itertools.count()

    def measure(self, rounds: int) -> Iterator[tuple[str, Case, float, float | None]]:
        """Method, case, milliseconds of a step and of its selection, for each round."""
        with contextlib.ExitStack() as stack:
            kept: dict[str, Engine] = {}
            if len(self.methods) * pool_bytes(self.cases) <= SIDE_BY_SIDE * free_bytes():
                kept = {
                    method: stack.enter_context(self._engine(method)) for method in self.methods
                }
            for number in range(rounds):
                print(f"round {number + 1} of {', '.join(map(named, self.cases))}", flush=True)
                if kept:
                    for case, method in itertools.product(self.cases, self.methods):
                        yield method, case, *measured(kept[method], *case, self._steps)
                    continue
                for method in self.methods:
                    with self._engine(method) as engine:
                        for case in self.cases:
                            yield method, case, *measured(engine, *case, self._steps)

    def _engine(self, method: str) -> Engine:
        """A warm engine: the first request also measures the length from which selection is
        faster."""
        log = self._work / f"{method}-{len(self.cases)}-{next(self._logs)}.log"
        engine = Engine(
            spec(method, self._model, self._work / "blocks", self.cases, self._steps), log
        )
        try:
            for _ in range(2):
                measured(engine, min(tokens for tokens, _ in self.cases), 1, self._steps)
        except BaseException:
            engine.kill()
            raise
        return engine


def named(case: Case) -> str:
    """A case in words."""
    return f"{case[1]} x {case[0]}"


def main() -> None:
    """Measures and prints."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    arguments.add_argument("--tokens", nargs="+", type=int, help="only cases of these lengths")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=48, help="tokens that each request decodes")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    groups = [
        [case for case in group if chosen.tokens is None or case[0] in chosen.tokens]
        for group in GROUPS
    ]
    rows: dict[tuple[str, Case], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sparse-") as folder, machine_lock():
        os.environ["UCM_TEST_ENGINE_LOCK"] = (
            "0"  # the lock is held, for all engines of this process
        )
        work = Path(folder)
        longest = max(tokens for group in groups for tokens, _ in group)
        model = write_model(work / "model", longest + chosen.steps)
        for cases in filter(None, groups):
            for method, case, step_ms, selection_ms in Group(
                cases, chosen.method, work, model, chosen.steps
            ).measure(chosen.rounds):
                new = {"method": method, "tokens": case[0], "requests": case[1]}
                new |= {"step_ms": [], "selection_ms": []}
                row = rows.setdefault((method, case), new)
                row["step_ms"].append(step_ms)
                if selection_ms is not None:
                    row["selection_ms"].append(selection_ms)
    cases = [case for group in groups for case in group]
    print(f"{instruction_sets()[-1]}, {len(os.sched_getaffinity(0))} threads")
    print(table(list(rows.values()), cases, chosen.method))
    print("\n".join(selections(list(rows.values()))))
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"isa": instruction_sets()[-1], "threads": len(os.sched_getaffinity(0))}
        chosen.json.write_text(
            json.dumps({"machine": about, "rows": list(rows.values())}, indent=1) + "\n"
        )


def table(rows: Sequence[Mapping[str, Any]], cases: Sequence[Case], methods: Sequence[str]) -> str:
    """In Markdown: medians, and the median of the ratios to the dense step of the same round."""
    known = {(row["method"], (row["tokens"], row["requests"])): row["step_ms"] for row in rows}
    lines = ["| tokens | requests | " + " | ".join(f"{method}, ms" for method in methods) + " |"]
    lines.append("|---|---|" + "---|" * len(methods))
    for case in cases:
        cells = []
        for method in methods:
            times = known[method, case]
            cell = f"{statistics.median(times):.1f}"
            if method != "dense" and "dense" in methods:
                pairs = zip(times, known["dense", case], strict=True)
                cell += f" ({statistics.median(mine / dense for mine, dense in pairs):.2f})"
            cells.append(cell)
        lines.append(f"| {case[0]} | {case[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def selections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Share of selection in a whole decode step, a line for each length and selector."""
    lines = []
    for row in rows:
        if row["selection_ms"]:
            share = statistics.median(row["selection_ms"]) / statistics.median(row["step_ms"])
            verdict = "within" if share <= SELECTION_GOAL else "ABOVE"
            lines.append(
                f"selection: {100 * share:4.1f} % of a step of {row['requests']} x {row['tokens']}"
                f" tokens, {row['method']} ({verdict} the goal of {100 * SELECTION_GOAL:.0f} %)"
            )
    return lines


if __name__ == "__main__":
    main()
