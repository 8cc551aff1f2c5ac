"""What other connectors of a MultiConnector do to the blocks of a request, and how far that is known.

vLLM counts tokens as computed when another connector is about to fill their blocks: an asynchronous load does so
before the request runs, a synchronous one in the very step that computes on them. Which of those blocks were not filled
is told after the step (``invalid_block_ids``), and then what the step computed from them is wrong as well. So a request
offers nothing before it has run since it was last admitted; where loads are synchronous it offers only what steps
computed whose output was seen; and a block that was reported invalid, with all behind it, is never offered.

Our own loads are asynchronous: beside no other connector this delays nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.scheduler.request_tracker import FAR, Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput


class Others:
    """Follows the requests of one engine from their admission to what of them is known to be right."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._waiting: set[str] = set()  # admitted, and no step since had tokens for them
        self._invalid: dict[int, Any] = {}  # device block -> its hash in vLLM's prefix cache when it was reported
        #: Some step had a synchronous load in it. From then on a step is judged by its output.
        self.load_in_steps = False

    def admitted(self, tracked: Tracked, table: Sequence[KVCacheBlock]) -> None:
        """Blocks were given to a request; those found in vLLM's prefix cache may be known to be wrong."""
        self._waiting.add(tracked.request.request_id)
        tracked.ran_from = None
        tracked.wrong_from = FAR
        if self._invalid:
            wrong = (at for at, block in enumerate(table) if self._is_invalid(block))
            tracked.wrong_from = next(wrong, FAR)

    def finished(self, request: str) -> None:
        """A request is gone."""
        self._waiting.discard(request)

    def planned(self, output: SchedulerOutput, live: Mapping[str, Tracked]) -> None:
        """A step begins."""
        self.load_in_steps = self.load_in_steps or output.has_sync_kv_loads
        for name in self._waiting & output.num_scheduled_tokens.keys():
            self._waiting.discard(name)
            if tracked := live.get(name):
                tracked.ran_from = tracked.request.num_computed_tokens

    @staticmethod
    def computed(tracked: Tracked) -> int:
        """Tokens that a request held when the last step ended whose output was seen: none until such a step had some of
        it since it was admitted."""
        request = tracked.request
        seen: int = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        return seen if tracked.ran_from is not None and seen > tracked.ran_from else 0

    def reported(self, invalid: Collection[int], live: Iterable[Tracked], manager: KVCacheManager | None) -> None:
        """A step's output names device blocks that a load did not fill.

        Those of an asynchronous load, ours too, are computed before anything is computed from them. Of a request that
        was computed on them, nothing is right from there on: vLLM computes the block again, but what the step before
        and whoever shared the block made of it stays in its prefix cache, and its V2 runner computes it in the wrong
        place (vllm#49250).
        """
        if not (invalid and self.load_in_steps and manager is not None):
            return
        for tracked in live:
            table = manager.get_blocks(tracked.request.request_id).blocks[0]
            held = len(table) if tracked.ran_from is not None else tracked.local // self._block_tokens
            at = next((at for at, block in enumerate(table[:held]) if block.block_id in invalid), None)
            if at is None:
                continue
            tracked.wrong_from = min(tracked.wrong_from, at)
            self._invalid |= {block.block_id: block.block_hash for block in table[at:] if block.block_hash is not None}
            throttle.warning("others", "another connector's load failed in a step: what it left is not stored")

    def _is_invalid(self, block: KVCacheBlock) -> bool:
        return block.block_hash is not None and self._invalid.get(block.block_id) == block.block_hash
