"""Which block leaves the device first. Age counts steps, never seconds, so ranks and runs agree.

Source: book 9.4.2.
"""

from __future__ import annotations

from ucm.errors import ConfigError, InvalidInputError


class EvictionPolicy:
    """What was used when, and how much it mattered. A subclass says which goes first."""

    def __init__(self) -> None:
        self._step = 0
        self._uses = 0
        #: Block -> (score of its last use, step of it, number of it).
        self._blocks: dict[int, tuple[float, int, int]] = {}

    def tick(self) -> None:
        """A step has passed."""
        self._step += 1

    def access(self, block_id: int, score: float = 0.0) -> None:
        """A block is used; ``score`` says how much it matters, from 0 to 1."""
        self._uses += 1
        self._blocks[block_id] = (score, self._step, self._uses)

    def forget(self, block_id: int) -> None:
        """A block has left."""
        self._blocks.pop(block_id, None)

    def rank(self, block_id: int) -> float:
        """The block with the lowest rank goes first; one that was never used has the lowest of
        all."""
        entry = self._blocks.get(block_id)
        return float("-inf") if entry is None else self._rank(*entry)

    def evict(self) -> int:
        """The block that goes first, forgotten; of equal ones the higher id.

        Raises :class:`~ucm.errors.InvalidInputError` where there is none.
        """
        if not self._blocks:
            raise InvalidInputError("there is no block to evict")
        block = min(self._blocks, key=lambda known: (self.rank(known), -known))
        del self._blocks[block]
        return block

    def __len__(self) -> int:
        return len(self._blocks)

    def _rank(self, score: float, step: int, use: int) -> float:
        raise NotImplementedError


class LRUEvictionPolicy(EvictionPolicy):
    """The longest unused block goes first."""

    def __init__(self, capacity: int | None = None) -> None:
        """``capacity``: how many blocks are remembered; the longest unused is forgotten beyond it.
        None: all."""
        super().__init__()
        self.capacity = capacity

    def access(self, block_id: int, score: float = 0.0) -> None:
        """A block is used."""
        super().access(block_id, score)
        while self.capacity is not None and len(self) > self.capacity:
            self.evict()

    def _rank(self, score: float, step: int, use: int) -> float:
        del score, step
        return float(use)


class ScoreBasedEvictionPolicy(EvictionPolicy):
    """The block that matters least goes first."""

    def update_score(self, block_id: int, score: float) -> None:
        """A block matters so much now."""
        self.access(block_id, score)

    def _rank(self, score: float, step: int, use: int) -> float:
        del step, use
        return score


class HybridEvictionPolicy(EvictionPolicy):
    """Score and age together: ``0.7 * score + 0.3 / (age + 1)``, the age in steps."""

    def __init__(self, score_weight: float = 0.7, recency_weight: float = 0.3) -> None:
        super().__init__()
        self.score_weight, self.recency_weight = score_weight, recency_weight

    def compute_priority(self, block_id: int) -> float:
        """:meth:`rank`, by the name of the book."""
        return self.rank(block_id)

    def _rank(self, score: float, step: int, use: int) -> float:
        del use
        return self.score_weight * score + self.recency_weight / (self._step - step + 1)


_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRUEvictionPolicy,
    "score": ScoreBasedEvictionPolicy,
    "hybrid": HybridEvictionPolicy,
}


def make_eviction(name: str) -> EvictionPolicy:
    """The policy of that name: lru, score or hybrid."""
    if name not in _POLICIES:
        raise ConfigError(f'eviction is one of {", ".join(_POLICIES)}, got "{name}"')
    return _POLICIES[name]()
