"""Choosing blocks on a GPU: how near kernels come to the memory's speed, and what a sparse step
takes.

Run: ``python benches/python/gpu_sparse.py`` on a machine with a GPU, torch with Triton, and the
wheel of ucm. Where there is no GPU it says so and ends with 0. ``--json FILE`` keeps the figures.

32 query and 8 KV heads of 128 in bfloat16, blocks of 128 tokens that lie anywhere, so many layers
in turn that nothing comes from the GPU's cache that the call before left it in (but with 4096
tokens: they are too few for that). The first table says of every kernel the bytes that it must
read, by its time, as a share of what a copy on the GPU moves (``of memory``); its launches are
recorded in a CUDA graph and replayed, so that the host does not count. The second one says in
microseconds a layer what dense attention takes (torch's, over K and V without gaps; vLLM is not
needed), attention over as many tokens as are kept, and choosing them by hash codes: by the GPU's
clock, and as the host launches it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from places import MissingError, place

HEADS, KV_HEADS, DIM, BLOCK, BITS = 32, 8, 128, 128, 128
#: Tokens of a request, requests, tokens that are kept.
CASES = ((4096, 1, 4096), (32768, 1, 3584), (32768, 16, 3584), (131072, 1, 4096), (131072, 8, 4096))
#: What a layer's bytes, times the layers, must pass: no cache of a GPU holds them.
COLD_BYTES = 512 << 20

#: What one layer's turn is.
Work = Callable[[int], object]


def microseconds(run: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Of a call, by the GPU's events around ``run``, which makes so many; median of the rounds."""
    import torch

    taken = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(taken[1:]))


def replayed(work: Work, layers: int) -> float:
    """Microseconds of a layer, without the host."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in range(layers):
            work(layer)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            work(layer)
    return microseconds(graph.replay, layers)


def launched(work: Work, layers: int) -> float:
    """Microseconds of a layer, as the host calls it."""
    calls = [layer % layers for layer in range(max(layers, 64))]
    return microseconds(lambda: [work(layer) for layer in calls], len(calls))


def copied_gb_s() -> float:
    """Bytes read and written by a copy on the GPU, a second."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    size = int(source.numel())
    return 2 * size / microseconds(lambda: target.copy_(source), 1) / 1e3


class Case:
    """Requests of some length in several layers."""

    def __init__(self, tokens: int, rows: int, kept: int) -> None:
        import torch

        torch.manual_seed(0)
        torch.cuda.empty_cache()
        self.tokens, self.rows, self.kept = tokens, rows, kept
        blocks = tokens // BLOCK
        pool = rows * blocks
        self.code_bytes = pool * BLOCK * KV_HEADS * BITS // 8
        self.mean_bytes = pool * KV_HEADS * DIM * 2
        self.layers = max(4, min(64, COLD_BYTES // self.code_bytes))
        with torch.device("cuda"):
            self.table = torch.randperm(pool).view(rows, blocks).int()
            self.lengths = torch.full((rows,), tokens - 5, dtype=torch.int32)
            self.blocks = torch.full((rows,), blocks, dtype=torch.int32)
            self.query = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16)
            self.weights = torch.randn(DIM, BITS)
            self.codes = [
                torch.randint(0, 256, (pool, BLOCK, KV_HEADS, BITS // 8), dtype=torch.uint8)
                for _ in range(self.layers)
            ]
            self.means = [
                torch.randn(pool, 1, KV_HEADS, DIM, dtype=torch.bfloat16)
                for _ in range(min(512, COLD_BYTES // self.mean_bytes))
            ]
            self.bounds = [
                torch.randn(pool, 2, KV_HEADS, DIM, dtype=torch.bfloat16)
                for _ in range(min(512, COLD_BYTES // self.mean_bytes // 2))
            ]

    def kernels(self) -> list[tuple[str, float, int]]:
        """Name, microseconds and bytes to be read."""
        from ucm.sparse.kernels import gpu

        asked = gpu.hash_encode_query(self.query, self.weights, KV_HEADS)
        window: dict[str, Any] = {"init": 1, "local": 2}

        def hamming(layer: int) -> object:
            return gpu.hamming_scores(asked, self.codes[layer], self.table, self.lengths, **window)

        def dot(layer: int) -> object:
            return gpu.dot_scores(self.query, self.means[layer], self.table, self.blocks, **window)

        def quest(layer: int) -> object:
            return gpu.quest_scores(
                self.query, self.bounds[layer], self.table, self.blocks, **window
            )

        return [
            ("hamming_scores", replayed(hamming, self.layers), self.code_bytes),
            ("dot_scores", replayed(dot, len(self.means)), self.mean_bytes),
            ("quest_scores", replayed(quest, len(self.bounds)), 2 * self.mean_bytes),
        ]

    def step(self) -> dict[str, float]:
        """Microseconds a layer of what a step does."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attend

        from ucm.sparse.kernels import gpu
        from ucm.sparse.retrieval import Kept

        each = [self.kept // BLOCK - 3] * self.rows
        rooms = Kept.rooms(
            self.layers, self.rows, 1, Kept.width(self.table.shape[1], each, 1, 2), "cuda"
        )
        budgets = torch.tensor(each, dtype=torch.int32, device="cuda")  # once a step

        def choose(layer: int) -> object:
            codes, table, into = self.codes[layer], self.table, rooms[layer]
            return gpu.hash_select(
                self.query,
                self.weights,
                codes,
                table,
                table,
                self.lengths,
                budgets,
                init=1,
                local=2,
                into=into,
            )

        choose(0)  # compiles
        found = {"choose, launched": launched(choose, self.layers), "choose": self.traced(choose)}
        query = self.query.view(self.rows, HEADS, 1, DIM)
        for name, tokens in (("dense", self.tokens), ("kept", min(self.kept, self.tokens))):
            size = self.rows * KV_HEADS * tokens * DIM * 4
            pairs = [
                torch.randn(
                    2, self.rows, KV_HEADS, tokens, DIM, dtype=torch.bfloat16, device="cuda"
                )
                for _ in range(max(2, min(32, COLD_BYTES // size)))
            ]

            def attention(layer: int, pairs: list[Any] = pairs) -> object:
                return attend(query, *pairs[layer], enable_gqa=True)

            found[name] = replayed(attention, len(pairs))
            del pairs
        return found

    def traced(self, work: Work) -> float:
        """Microseconds of a layer that the GPU spends in kernels, by torch's profiler."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for layer in range(self.layers):
                work(layer)
            torch.cuda.synchronize()
        return (
            float(sum(event.self_device_time_total for event in trace.key_averages())) / self.layers
        )


def main() -> int:
    """Prints two tables."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    given = words.parse_args()
    try:
        place("cuda")
    except MissingError as missing:
        print(f"skipped, all of it: {missing}")
        return 0
    import torch

    moved = copied_gb_s()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_s": moved}
    print(
        f"{about['device']}, torch {torch.__version__}; a copy on the GPU moves {moved:.0f} GB/s,"
        " read and written"
    )
    kernels: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for tokens, rows, kept in CASES:
        case = Case(tokens, rows, kept)
        same = {"tokens": tokens, "requests": rows, "kept": kept}
        for name, took, size in case.kernels():
            share = size / took / 1e3 / moved
            figures = f"{took:8.1f} us {size / 1e6:8.1f} MB {share:6.2f} of memory"
            print(f"{tokens:7} {rows:4} {name:15} {figures}", flush=True)
            kernels.append(same | {"kernel": name, "us": took, "bytes": size, "of_memory": share})
        step = case.step()
        ratio = (step["choose"] + step["kept"]) / step["dense"]
        figures = "  ".join(f"{name} {took:.1f}" for name, took in step.items())
        print(f"{tokens:7} {rows:4} {figures}  sparse/dense {ratio:.3f}", flush=True)
        steps.append(same | {"us": step})
        del case
    if given.json is not None:
        given.json.write_text(
            json.dumps({"machine": about, "kernels": kernels, "steps": steps}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
