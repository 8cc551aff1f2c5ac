"""Time of a decode step, dense and sparse, in vLLM on a CPU: ``python benches/python/sparse.py``.

The prompt of each case is loaded from a store that makes its KV up (``planted.py``), so a step over 128 K tokens is
measured without computing a prompt of 128 K. Engines take turns, one for each method and round; a step is the time from
one token to the next, the median over the tokens of all rounds, and its ratio is to the dense step of the same round.
``dense`` is ucm without sparse attention: vLLM's own kernel over the whole KV. Prints a table; ``--json`` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planted import BLOCK, LAYERS, PAGE, VOCAB, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from harness import Engine
from specs import Ask, EngineSpec, StoreSpec, prompt

#: Tokens of a prompt, requests beside each other.
CASES = ((4096, 1), (32768, 1), (32768, 4), (131072, 1))
#: What stands in the configuration for each.
METHODS: Mapping[str, dict[str, Any]] = {
    "dense": {},
    "hash-128": {"ucm_sparse_config": {"GSAOnDevice": {"topk_tokens": 4096}}},
    "mean-K": {"ucm_sparse_config": {"ESA": {"topk_tokens": 4096, "stride": 1}}},
}
#: A prompt ends so many tokens before the whole block: what is computed is a part of a block.
SHORT_OF = 70


def spec(method: str, model: Path, root: Path, cases: list[tuple[int, int]]) -> EngineSpec:
    """An engine with room for the largest case."""
    blocks = max(tokens * rows for tokens, rows in cases) // BLOCK + 64  # vLLM wants room for a step besides
    longest = max(tokens for tokens, _ in cases)
    return EngineSpec(
        model,
        store=StoreSpec(root, "PlantedStore", module_path="planted"),
        blocks=blocks,
        budget=2048,
        extra_config=METHODS[method],
        args={
            "max_model_len": longest,
            "block_size": BLOCK,
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": (blocks + 2) * PAGE * LAYERS,
        },
        env={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        pythonpath=(str(Path(__file__).parent),),
        label=method,
        fork=False,
    )


def step_ms(engine: Engine, tokens: int, rows: int, steps: int) -> float:
    """Milliseconds from one token to the next, with so many requests of so many tokens."""
    asks = [Ask([token % VOCAB for token in prompt(row, tokens - SHORT_OF)], steps) for row in range(rows)]
    began = time.perf_counter()
    answers = engine.generate(*asks)
    took = time.perf_counter() - began
    firsts = [answer.first for answer in answers if answer.first is not None]
    if len(firsts) < rows or min(answer.cached for answer in answers) < (tokens // BLOCK - 1) * BLOCK:
        raise RuntimeError(f"{tokens} tokens were not loaded: {[answer.cached for answer in answers]}")
    return (took - max(firsts)) / (steps - 1) * 1e3


def main() -> None:
    """Measures and prints."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    arguments.add_argument("--tokens", nargs="+", type=int, help="only cases of these lengths")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=32, help="tokens that each request decodes")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    cases = [case for case in CASES if chosen.tokens is None or case[0] in chosen.tokens]
    steps: dict[str, dict[tuple[int, int], list[float]]] = {
        method: {case: [] for case in cases} for method in chosen.method
    }
    with tempfile.TemporaryDirectory(prefix="sparse-") as folder:
        work = Path(folder)
        model = write_model(work / "model", max(tokens for tokens, _ in cases))
        for number in range(chosen.rounds):
            for method in chosen.method:
                print(f"round {number + 1}, {method}", flush=True)
                log = work / f"{method}-{number}.log"
                with Engine(spec(method, model, work / "blocks", cases), log) as engine:
                    step_ms(engine, min(tokens for tokens, _ in cases), 1, chosen.steps)  # the first request warms up
                    engine.reset()
                    for tokens, rows in cases:
                        steps[method][tokens, rows].append(step_ms(engine, tokens, rows, chosen.steps))
                        engine.wait_idle()
                        engine.reset()
            print(table(steps), flush=True)
    if chosen.json:
        figures = [
            {"method": method, "tokens": tokens, "requests": rows, "step_ms": times}
            for method, of_cases in steps.items()
            for (tokens, rows), times in of_cases.items()
        ]
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


def table(steps: Mapping[str, Mapping[tuple[int, int], list[float]]]) -> str:
    """In Markdown: medians, and the median of the ratios to the dense step of the same round."""
    lines = ["| tokens | requests | " + " | ".join(f"{method}, ms" for method in steps) + " |"]
    lines.append("|---|---|" + "---|" * len(steps))
    for tokens, rows in next(iter(steps.values())):
        cells = []
        for method, of_cases in steps.items():
            times = of_cases[tokens, rows]
            cell = f"{statistics.median(times):.1f}"
            if method != "dense" and "dense" in steps:
                pairs = zip(times, steps["dense"][tokens, rows], strict=True)
                cell += f" ({statistics.median(mine / dense for mine, dense in pairs):.2f})"
            cells.append(cell)
        lines.append(f"| {tokens} | {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
