"""Cost of beginning a load or a dump on the computing thread, in microseconds.

Uses the worker side's own ``Loads`` and ``Dumps`` over a real store, with the KV of a model of 32
layers whose block has 64 pieces of 16 KiB. Prints the median and the tail of the call, by the
number of blocks. Run: ``python benches/python/begin_cost.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ucm.integration.vllm.connector.metadata import Dump, Load, join_keys
from ucm.integration.vllm.connector.worker.transfers import Dumps, GroupStore, Loads
from ucm.store.kv_layout import KVLayout
from ucm.store.posix.connector import UcmPosixStore

LAYERS, PIECE, TOKENS = 32, 16 << 10, 32
MASK = bytes(16)


def caches(blocks: int) -> dict[str, torch.Tensor]:
    """In vLLM's layout: ``[block, head, token, element]``, K and V of a head in two runs."""
    both = {}
    for layer in range(LAYERS):
        whole = torch.empty(2, blocks, PIECE // 2, dtype=torch.bfloat16)
        both[f"layers.{layer}.attn"] = whole.permute(1, 0, 2)
    return both


@contextmanager
def store_of(root: Path, layout: KVLayout, kind: str, blocks: int) -> Iterator[UcmPosixStore]:
    """A store of that layout, with a slot for every block."""
    config = layout.sizes() | {
        "storage_backends": str(root),
        "identity": "{}",
        "dtype": "bfloat16",
        "block_tokens": TOKENS,
        "layout": kind,
        "staging_capacity": 2 * (blocks + 8) * (layout.block_bytes + (1 << 16)),
        "device_id": 0,
    }
    store = UcmPosixStore(config)
    with store:
        store.register_kv(layout)
        yield store


def told(name: str, kind: str, blocks: int, times: list[float]) -> None:
    """One line."""
    spent = sorted(1e6 * seconds for seconds in times)
    middle, most = statistics.median(spent), spent[-1]
    print(
        f"{name:5s} {kind:8s} {blocks:5d} {middle:10.0f} {middle / blocks:10.2f} {most:10.0f}",
        flush=True,
    )


def main() -> None:
    """Measures and prints."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--blocks", type=int, nargs="*", default=[1, 8, 64, 125, 500])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--layouts", nargs="*", default=["segment", "file"])
    chosen = arguments.parse_args()
    most = max(chosen.blocks)
    kv = caches(most)  # the layout has only its addresses
    layout = KVLayout(kv, [])
    print(
        f"{'':5s} {'layout':8s} {'blocks':>5s} {'median us':>10s} {'a block':>10s} {'most us':>10s}"
    )
    for kind in chosen.layouts:
        for blocks in chosen.blocks:
            with (
                tempfile.TemporaryDirectory(prefix="begin-cost-") as folder,
                store_of(Path(folder), layout, kind, most) as store,
            ):
                loads, dumps, own = Loads(), Dumps(), GroupStore(store, MASK, TOKENS)
                begun: dict[str, list[float]] = {"dump": [], "load": []}
                numbers = np.random.default_rng(0).permutation(most)[:blocks].astype(np.int64)
                for job in range(1, chosen.rounds + 1):
                    keys = join_keys([os.urandom(16) for _ in range(blocks)])
                    began = time.perf_counter()
                    dumps.start([Dump(job, "r", 0, b"", keys, numbers)], own, (0, None))
                    begun["dump"].append(time.perf_counter() - began)
                    dumps.flush([job])
                    while len(dumps):
                        store.flush()
                        dumps.poll()
                    began = time.perf_counter()
                    loads.start(Load(str(job), 0, keys, numbers), {0: own})
                    begun["load"].append(time.perf_counter() - began)
                    while len(loads):
                        loads.poll()
                    if failed := dumps.take()[1][0].failed or loads.take_bad_blocks():
                        raise SystemExit(f"blocks were lost: {failed}")
                for name, times in begun.items():
                    told(name, kind, blocks, times)


if __name__ == "__main__":
    main()
