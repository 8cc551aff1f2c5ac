"""Attention by ReRoPE on a CPU beside vLLM's kernel of plain attention over the same pages.

Run: ``python benches/python/rerope.py [--threads N] [--rounds N]`` where vLLM for CPUs is
installed. One layer of 32 query and 8 KV heads of 128, window 512, scattered blocks of 128 tokens;
two layers in turns. A *step* is one query over all tokens; a *prompt* is all of its queries. The
last column is the median ratio of a round, plain to ReRoPE; above 1 ReRoPE is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from retrieval import BLOCK, DIM, HEADS, KV_HEADS, vllms, with_openmp_in_front

WINDOW, LAYERS = 512, 2
#: Tokens, queries.
CASES = ((8192, 1), (32768, 1), (2048, 2048), (4096, 4096))


class Case:
    """A prompt in scattered blocks, its last ``count`` queries, and both kernels."""

    def __init__(self, tokens: int, count: int, dtype: Any) -> None:
        import torch

        from ucm.sparse.rerope.rule import RotationTable, Rule

        torch.manual_seed(0)
        blocks = tokens // BLOCK
        shape = (blocks, KV_HEADS, BLOCK, 2 * DIM)
        self.caches = [torch.randn(shape, dtype=dtype) for _ in range(LAYERS)]
        self.table = torch.randperm(blocks).view(1, blocks).int()
        self.tokens = torch.tensor([tokens], dtype=torch.int32)
        self.starts = torch.tensor([0, count], dtype=torch.int32)
        self.query = torch.randn(count, HEADS, DIM, dtype=dtype)
        self.out = torch.empty_like(self.query)
        angles = torch.arange(2)[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.rotation = RotationTable.like(torch.cat([angles.cos(), angles.sin()], -1), tokens)
        self.rule = Rule(WINDOW, tokens)

    def plain(self, cache: Any) -> None:
        """vLLM's attention."""
        vllms(self.query, cache, self.table, self.starts, self.tokens, self.out)

    def by_rule(self, cache: Any) -> None:
        """ReRoPE's attention."""
        from ucm.sparse.rerope.rule import paged_attention

        rows = (self.table, self.starts, self.tokens)
        paged_attention(self.query, cache, *rows, self.rotation, self.rule, DIM**-0.5, self.out)

    def seconds(self) -> tuple[float, float]:
        """Of both over all layers, one after the other."""
        begin = time.perf_counter()
        for cache in self.caches:
            self.plain(cache)
        middle = time.perf_counter()
        for cache in self.caches:
            self.by_rule(cache)
        return middle - begin, time.perf_counter() - middle


def main() -> None:
    """Print one table."""
    import torch

    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    words.add_argument("--rounds", type=int, default=15)
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    print("| tokens | queries | type | plain, ms a layer | ReRoPE, ms a layer | ratio |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, count in CASES:
            case = Case(tokens, count, dtype)
            case.seconds()
            times = [case.seconds() for _ in range(given.rounds if count == 1 else 3)]
            plain, ours = (
                1e3 * statistics.median(side) / LAYERS for side in zip(*times, strict=True)
            )
            ratio = statistics.median(a / b for a, b in times)
            name = str(dtype).removeprefix("torch.")
            print(f"| {tokens} | {count} | {name} | {plain:.2f} | {ours:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    with_openmp_in_front()
    main()
