"""The loads that vLLM waits for on one rank: each is reported exactly once, also when methods fail.

vLLM frees no block of a load and computes no token of its request before every rank has reported
it. So this record is kept outside of the code that may fail: a load enters it with the step's
metadata, before anything else reads them, and leaves it with its report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ucm.integration.vllm.connector.metadata import Load


class PendingLoads:
    """Loads that were sent to this rank and not reported to vLLM."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._lost: set[str] = set()  # of these, failed without an answer of the store
        self.reported: list[Load] = []  # by the last report
        # of these, the lost ones: none of their blocks counts as filled
        self.unfilled: list[Load] = []

    def sent(self, loads: Iterable[Load]) -> None:
        """A step's metadata have arrived."""
        self._loads.update((load.request, load) for load in loads)

    def lost(self, loads: Iterable[Load]) -> None:
        """Loads that are never begun."""
        self._lost.update(load.request for load in loads)

    def lost_but(self, under_way: Collection[str]) -> None:
        """After a failure: all but these requests, of whose loads something may still write."""
        self._lost.update(self._loads.keys() - set(under_way))

    def report(self, ended: Iterable[str]) -> set[str]:
        """Requests that are reported to vLLM now: those whose load ended, and the lost ones."""
        names = (self._lost | set(ended)) & self._loads.keys()
        self.unfilled = [self._loads[name] for name in self._lost & names]
        self.reported = [self._loads.pop(name) for name in names]
        self._lost.clear()
        return names

    def __len__(self) -> int:
        return len(self._loads)
