"""Statistics of sparse attention for vLLM, as differences. A name in the statistics is
``sparse.<counter>``.

Those of all ranks are added up, each of which chooses for its own heads.
"""

from __future__ import annotations

from collections.abc import Callable

from ucm.integration.vllm.connector.tier_counts import EVERY
from ucm.sparse.base import SparseStats

#: Counter of a method -> (name in Prometheus without ``_total``, what it counts).
SPARSE_COUNTERS = {
    "rows_sparse": (
        "ucm_sparse_rows",
        "Rows of decoding requests that chose blocks, in each layer.",
    ),
    "rows_unready": (
        "ucm_sparse_unready_rows",
        "Rows that were dense because a block had no representation.",
    ),
    "late": ("ucm_sparse_late_rows", "Rows whose choice was not there in time."),
    "blocks_seen": ("ucm_sparse_seen_blocks", "Blocks of the rows that chose."),
    "blocks_kept": (
        "ucm_sparse_kept_blocks",
        "Blocks that they attended to: divided by those seen, the density.",
    ),
    "blocks_chosen": (
        "ucm_sparse_chosen_blocks",
        "Blocks of choices that were compared with the choice before.",
    ),
    "blocks_new": (
        "ucm_sparse_new_blocks",
        "Of these, blocks not chosen before: divided by them, the turnover.",
    ),
    "blocks_asked": ("ucm_sparse_asked_blocks", "Chosen blocks that may have been foreseen."),
    "blocks_predicted": ("ucm_sparse_foreseen_blocks", "Of these, those that had been."),
    "blocks_loaded": (
        "ucm_sparse_loaded_blocks",
        "Blocks of one layer that were loaded because they were chosen.",
    ),
    "blocks_absent": (
        "ucm_sparse_absent_blocks",
        "Chosen blocks that were not there in time, and were left out.",
    ),
    "blocks_prefetched": (
        "ucm_sparse_prefetched_blocks",
        "Blocks brought to upper tiers because they were foreseen.",
    ),
    "selection_s": (
        "ucm_sparse_selection_seconds",
        "What steps spent on representations and on choosing.",
    ),
}
COUNTER = "sparse."


class SparseCounts:
    """Tells what is new of one method."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = clock()
        self._told: dict[str, float] = {}

    def take(self, stats: SparseStats) -> dict[str, float]:
        """What is new since the last call that told something; mostly nothing, as it looks once in
        a while only."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + EVERY
        found = stats.snapshot()
        news = {name: found.get(name, 0) - self._told.get(name, 0) for name in SPARSE_COUNTERS}
        self._told = found
        # Counters only grow; what was measured before the first request is taken back.
        return {COUNTER + name: round(count, 6) for name, count in news.items() if count > 0}
