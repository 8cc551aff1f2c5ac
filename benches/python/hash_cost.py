"""What hashing a prompt costs from Python: ns a token, from a list and from a ``uint32`` array.

Run: ``python benches/python/hash_cost.py``. The yardstick, measured in the same run, is what the
array costs: the difference is what reading Python integers costs. The core's own bench (``cargo
bench -- hash``) compares the array's cost with bare compressions.
"""

from __future__ import annotations

import random
import time

import numpy as np

from ucm.store import BlockHasher

TOKENS = 32_768
ROUNDS = 30


def best_ns(work: object, *args: object) -> float:
    """Best time of one call, in ns a token."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        keys = work(*args)  # type: ignore[operator]
        best = min(best, time.perf_counter_ns() - start)
        del keys  # letting go of them is not part of computing them
    return best / TOKENS


def main() -> None:
    """Prints one table."""
    tokens = [random.randrange(150_000) for _ in range(TOKENS)]
    array = np.array(tokens, dtype=np.uint32)
    print(f"{TOKENS} tokens, best of {ROUNDS}, ns a token")
    print(f"{'method':8} {'block':>6} {'array':>7} {'list':>7} {'list/array':>11}")
    for method in ("sha256", "blake3", "md5"):
        for block in (16, 32, 64, 128):
            hasher = BlockHasher(b"identity", block, method)
            from_array, from_list = (
                best_ns(hasher.hash_blocks, array),
                best_ns(hasher.hash_blocks, tokens),
            )
            print(
                f"{method:8} {block:6} {from_array:7.2f} {from_list:7.2f}"
                f" {from_list / from_array:11.2f}"
            )


if __name__ == "__main__":
    main()
