"""What selection did, in numbers that an operator and a test read: how much was kept, how much
changed, how stale it was."""

from __future__ import annotations

import threading


class SparseStats:
    """Counters since the start; written by the thread of the step and by those that retrieve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Add to counters."""
        with self._lock:  # several times a layer: a Counter's update takes thrice as long
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._sums.clear()

    def snapshot(self) -> dict[str, float]:
        """All counters, and the ratios made from them:

        ``density`` blocks kept / blocks there were, of sparse rows; ``turnover`` chosen blocks that
        were not chosen the time before / blocks chosen; ``lag`` mean decode steps from a query to a
        use of its choice; ``recall`` attention mass on kept blocks / all of it, where it is
        measured; ``hit_rate`` blocks that had been predicted / chosen. ``selection_s`` is no ratio:
        seconds that steps spent on representations of new keys and on choosing.
        """
        with self._lock:
            found = dict(self._sums)
        for name, part, whole in RATIOS:
            if found.get(whole):
                found[name] = found.get(part, 0) / found[whole]
        return found


#: Name of a ratio, and the counters it is made from.
RATIOS: tuple[tuple[str, str, str], ...] = (
    ("density", "blocks_kept", "blocks_seen"),
    ("turnover", "blocks_new", "blocks_chosen"),
    ("lag", "steps_waited", "choices_used"),
    ("recall", "mass_kept", "mass_seen"),
    ("hit_rate", "blocks_predicted", "blocks_asked"),
)
