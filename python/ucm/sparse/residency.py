"""Which of a request's blocks lie on the device, when there is room for some of them alone.

:func:`plan_residency` is a pure function of what is there, what is wanted and how much room there
is; :class:`Residency` holds one layer of one request and calls it. A step attends to what has
arrived: a wanted block that has not is left out and counted, and a slot that a load still writes to
is given to no other block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ucm.errors import InvalidInputError
from ucm.sparse.eviction import EvictionPolicy, make_eviction
from ucm.sparse.stats import SparseStats


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """What becomes of the slots."""

    #: Logical block -> slot, of those that stay where they are.
    keep: dict[int, int]
    #: (logical block, slot) to load, the most wanted first.
    load: list[tuple[int, int]]
    #: Wanted blocks for which there is no slot.
    dropped: list[int] = field(default_factory=list)


def plan_residency(
    resident: Mapping[int, int],
    wanted: Sequence[int],
    capacity: int,
    *,
    pinned: Sequence[int] = (),
    rank: Callable[[int], float] | None = None,
) -> ResidencyPlan:
    """What to keep and what to load, so that the most wanted blocks are on the device.

    ``resident`` maps logical blocks to their slots below ``capacity``; ``wanted`` are logical
    blocks, the most wanted first; those of ``pinned`` come before all of them and are never
    evicted. Of the others the one with the lowest ``rank`` goes first, of equal ones the higher id.
    Blocks that are there stay in their slots while there is room.

    No slot is used twice; at most ``capacity`` blocks are kept or loaded; nothing is loaded that is
    there; where all that is wanted is there, nothing changes. Raises
    :class:`~ucm.errors.InvalidInputError` for more pinned blocks than slots.
    """
    slots = set(resident.values())
    if len(slots) != len(resident) or any(not 0 <= slot < capacity for slot in slots):
        raise InvalidInputError(
            "resident blocks have slots of their own, below the capacity",
            context={"capacity": capacity},
        )
    fixed = list(dict.fromkeys(pinned))
    if len(fixed) > capacity:
        raise InvalidInputError(
            f"{len(fixed)} blocks must stay on the device, which has room for {capacity}: "
            "give it more, or shrink the windows"
        )
    ordered = list(dict.fromkeys([*fixed, *wanted]))
    placed, dropped = ordered[:capacity], ordered[capacity:]
    missing = [block for block in placed if block not in resident]
    free = [slot for slot in range(capacity) if slot not in slots]
    stays = set(placed)
    leaving = sorted(
        (b for b in resident if b not in stays), key=lambda b: (rank(b) if rank else 0.0, -b)
    )
    gone = set(leaving[: max(0, len(missing) - len(free))])
    free += [resident[block] for block in leaving if block in gone]
    keep = {block: slot for block, slot in resident.items() if block not in gone}
    return ResidencyPlan(keep, list(zip(missing, sorted(free), strict=False)), dropped)


class Residency:
    """Resident blocks of one request in one layer."""

    def __init__(
        self, capacity: int, *, eviction: str = "hybrid", stats: SparseStats | None = None
    ) -> None:
        """``capacity`` slots; ``eviction`` is lru, score or hybrid."""
        self.capacity = capacity
        self._eviction: EvictionPolicy = make_eviction(eviction)
        self._stats = stats or SparseStats()
        self._there: dict[int, int] = {}
        self._loading: dict[int, int] = {}

    @property
    def resident(self) -> dict[int, int]:
        """Logical block -> slot, of those whose KV is there."""
        return dict(self._there)

    @property
    def loading(self) -> dict[int, int]:
        """Logical block -> slot, of those whose KV is on its way."""
        return dict(self._loading)

    def want(self, wanted: Sequence[int], pinned: Sequence[int] = ()) -> list[tuple[int, int]]:
        """The loads (logical block, slot) with which the device holds what is wanted, the most
        wanted first. They count as on their way until :meth:`arrived` or :meth:`failed`."""
        self._eviction.tick()
        for place, block in enumerate(wanted):
            self._eviction.access(block, 1 - place / len(wanted))
        # A slot that a load still writes to is given to no other block, even if its own is not
        # wanted any more.
        held = list(dict.fromkeys([*pinned, *self._loading]))
        plan = plan_residency(
            {**self._there, **self._loading},
            wanted,
            self.capacity,
            pinned=held,
            rank=self._eviction.rank,
        )
        for block in set(self._there) - set(plan.keep):
            del self._there[block]
            self._eviction.forget(block)
        self._loading.update(plan.load)
        self._stats.add(blocks_loaded=len(plan.load), blocks_without_slot=len(plan.dropped))
        return plan.load

    def arrived(self, block: int) -> None:
        """The KV of a block is in its slot."""
        self._there[block] = self._loading.pop(block)

    def failed(self, block: int) -> None:
        """A load has ended without it; the slot is free."""
        del self._loading[block]
        self._eviction.forget(block)

    def place(self, block: int, slot: int) -> None:
        """A block is in a slot already."""
        self._there[block] = slot

    def usable(self, chosen: Sequence[int]) -> list[int]:
        """Those of the chosen blocks that are there, in their order. The others are counted, and
        never read."""
        found = [block for block in chosen if block in self._there]
        self._stats.add(blocks_absent=len(chosen) - len(found))
        return found
