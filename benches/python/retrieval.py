"""Decode attention on a CPU: vLLM's own kernel, ours over the same blocks, and the cost of
selecting the blocks.

Run: ``python benches/python/retrieval.py [--threads N] [--layers N]`` where vLLM for CPUs is
installed. One layer of 32 query and 8 KV heads of 128 in bfloat16, scattered blocks of 128 tokens,
several layers in turn so that no call finds its data in the cache. ``dense`` is vLLM's kernel over
all tokens, the reference; ``vLLM`` and ``ours`` read the blocks of one selection (4096 tokens, 3584
with 32 K, everything with 4 K); ``choose`` is the codes of the queries, the scores of all blocks
and the selection; ``step`` is selection and our attention together. Fastest of the rounds, in
turns; the last columns are the times of dense to step, and of vLLM to ours. ``--json`` writes the
figures.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, DIM, BLOCK, BITS = 32, 8, 128, 128, 128
#: Tokens of a request, requests, tokens that are kept.
CASES = (
    (4096, 1, 4096),
    (8192, 1, 4096),
    (16384, 1, 4096),
    (32768, 1, 3584),
    (32768, 4, 3584),
    (65536, 1, 4096),
    (131072, 1, 4096),
)


def with_openmp_in_front() -> None:
    """Restart with torch's OpenMP runtime loaded first, as vLLM does; otherwise its operators use
    one core."""
    import torch

    found = glob.glob(str(Path(torch.__file__).parent / "lib" / "libgomp*.so*"))
    if found and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = found[0]
        os.execv(sys.executable, [sys.executable, *sys.argv])


def vllms(query: Any, cache: Any, table: Any, starts: Any, tokens: Any, out: Any) -> None:
    """vLLM's causal attention of the last queries of rows, with the plan that it needs."""
    from vllm import _custom_ops as ops

    keys, values = cache.view(len(cache), KV_HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
    same: dict[str, Any] = {"query_start_loc": starts, "seq_lens": tokens, "causal": True}
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(tokens),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=query.dtype,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
        **same,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=out,
        scale=DIM**-0.5,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0,
        scheduler_metadata=plan,
        s_aux=None,
        **same,
    )


class Case:
    """Requests of some length in several layers."""

    def __init__(self, tokens: int, rows: int, kept: int, layers: int) -> None:
        import torch

        from ucm.sparse.rep_store import zeros

        torch.manual_seed(0)
        self.rows, self.kept = rows, kept
        blocks = tokens // BLOCK
        self.caches = [
            torch.randn(rows * blocks, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        shape = (rows * blocks, BLOCK, KV_HEADS, BITS // 8)
        self.codes = [
            zeros(shape, torch.uint8, torch.device("cpu")).random_(0, 256) for _ in range(layers)
        ]
        self.table = torch.randperm(rows * blocks).view(rows, blocks).int()
        self.lengths = torch.full((rows,), tokens - 5, dtype=torch.int32)
        self.query = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)
        self.weights = torch.randn(DIM, BITS)
        self.starts = torch.arange(rows + 1, dtype=torch.int32)
        self.chosen = [self.choose(codes) for codes in self.codes]

    def choose(self, codes: Any) -> Any:
        """The blocks of a step in one layer."""
        from ucm.sparse import retrieval

        budgets = [self.kept // BLOCK - 3] * self.rows
        table, tokens = self.table, self.lengths
        return retrieval.hash_select(
            self.query, self.weights, codes, table, table, tokens, budgets, init=1, local=2
        )

    def vllms(self, cache: Any, table: Any, tokens: Any) -> None:
        """vLLM's attention over a table."""
        vllms(self.query, cache, table, self.starts, tokens, self.out)

    def ours(self, cache: Any, table: Any, tokens: Any) -> None:
        """Our attention over a table."""
        from ucm.sparse import retrieval

        retrieval.paged_attention(self.query, cache, table, tokens, DIM**-0.5, self.out)

    def work(self) -> dict[str, Callable[[], None]]:
        """The measurements, each over all layers."""
        kept = [
            (chosen.table[:, 0].contiguous(), chosen.tokens[:, 0].contiguous())
            for chosen in self.chosen
        ]

        def dense() -> None:
            for cache in self.caches:
                self.vllms(cache, self.table, self.lengths)

        def vllm() -> None:
            for cache, of_layer in zip(self.caches, kept, strict=True):
                self.vllms(cache, *of_layer)

        def ours() -> None:
            for cache, of_layer in zip(self.caches, kept, strict=True):
                self.ours(cache, *of_layer)

        def choose() -> None:
            for codes in self.codes:
                self.choose(codes)

        def step() -> None:
            for cache, codes in zip(self.caches, self.codes, strict=True):
                chosen = self.choose(codes)
                self.ours(cache, chosen.table[:, 0], chosen.tokens[:, 0])

        return {"dense": dense, "vLLM": vllm, "ours": ours, "choose": choose, "step": step}


def fastest(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def main() -> None:
    """Prints one table."""
    import torch

    from ucm import _core
    from ucm.sparse import retrieval

    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    words.add_argument("--layers", type=int, default=4)
    words.add_argument("--rounds", type=int, default=10)
    words.add_argument("--json", type=Path)
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    runtime = "OpenMP" if _core.retrieval_openmp() else "own threads"
    best_set = retrieval.instruction_sets()[-1]
    print(
        f"{best_set}, {given.threads} threads ({runtime}); ms a layer, fastest of {given.rounds}"
        " rounds"
    )
    columns, rows = ("dense", "vLLM", "ours", "choose", "step"), []
    print(
        f"{'tokens':>7} {'rows':>4} {'kept':>5}",
        *(f"{name:>8}" for name in columns),
        " dense/step  vLLM/ours",
    )
    for tokens, requests, kept in CASES:
        case = Case(tokens, requests, kept, given.layers)
        best = {name: ms / given.layers for name, ms in fastest(case.work(), given.rounds).items()}
        figures = (f"{best[name]:8.2f}" for name in columns)
        ratios = f"{best['dense'] / best['step']:11.1f} {best['vLLM'] / best['ours']:10.2f}"
        print(f"{tokens:7} {requests:4} {kept:5}", *figures, ratios, flush=True)
        rows.append({"tokens": tokens, "requests": requests, "kept": kept, "ms": best})
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"isa": best_set, "threads": given.threads}
        given.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with_openmp_in_front()
    main()
