"""Keeps wrong blocks out of the store when other connectors of a MultiConnector load into the same
request.

vLLM counts tokens as computed when another connector is about to fill their blocks: an asynchronous
load does so before the request runs, a synchronous one in the very step that computes on them. vLLM
reports after the step which blocks were not filled (``invalid_block_ids``), and what the step
computed from these is wrong as well. So a request offers nothing before it has run since it was
last admitted; with synchronous loads it offers only what was computed in steps whose output has
been seen; and a block reported invalid is never offered, nor any block after it.

Our own loads are asynchronous: without another connector this delays nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.scheduler.request_tracker import FAR, RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput


class OtherConnectors:
    """Follows the requests of one engine from their admission to what of them is known to be
    right."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._waiting: set[str] = set()  # admitted, and no step since had tokens for them
        # device block -> its hash in vLLM's prefix cache when it was reported
        self._invalid: dict[int, Any] = {}
        #: Some step had a synchronous load in it. From then on a step is judged by its output.
        self.load_in_steps = False

    def admitted(self, tracker: RequestTracker, table: Sequence[KVCacheBlock]) -> None:
        """Blocks were given to a request; those found in vLLM's prefix cache may be known to be
        wrong."""
        self._waiting.add(tracker.request.request_id)
        tracker.ran_from = None
        tracker.wrong_from = FAR
        if self._invalid:
            wrong = (at for at, block in enumerate(table) if self._is_invalid(block))
            tracker.wrong_from = next(wrong, FAR)

    def finished(self, request: str) -> None:
        """A request is gone."""
        self._waiting.discard(request)

    def planned(self, output: SchedulerOutput, live: Mapping[str, RequestTracker]) -> None:
        """A step begins."""
        self.load_in_steps = self.load_in_steps or output.has_sync_kv_loads
        for name in self._waiting & output.num_scheduled_tokens.keys():
            self._waiting.discard(name)
            if tracker := live.get(name):
                tracker.ran_from = tracker.request.num_computed_tokens

    @staticmethod
    def computed(tracker: RequestTracker) -> int:
        """Tokens that a request held when the last step ended whose output was seen: none until
        such a step had some of it since it was admitted."""
        request = tracker.request
        seen: int = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        return seen if tracker.ran_from is not None and seen > tracker.ran_from else 0

    def reported(
        self,
        invalid: Collection[int],
        live: Iterable[RequestTracker],
        manager: KVCacheManager | None,
    ) -> None:
        """A step's output names device blocks that a load did not fill.

        Those of an asynchronous load, ours too, are computed before anything is computed from them.
        Of a request that was computed on them, nothing is right from there on: vLLM computes the
        block again, but what the step before and the requests that share the block made of it stays
        in its prefix cache, and its V2 runner computes it in the wrong place (vllm#49250).
        """
        if not (invalid and self.load_in_steps and manager is not None):
            return
        for tracker in live:
            table = manager.get_blocks(tracker.request.request_id).blocks[0]
            held = (
                len(table) if tracker.ran_from is not None else tracker.local // self._block_tokens
            )
            at = next(
                (at for at, block in enumerate(table[:held]) if block.block_id in invalid), None
            )
            if at is None:
                continue
            tracker.wrong_from = min(tracker.wrong_from, at)
            self._invalid |= {
                block.block_id: block.block_hash
                for block in table[at:]
                if block.block_hash is not None
            }
            throttle.warning(
                "others", "another connector's load failed in a step: what it left is not stored"
            )

    def _is_invalid(self, block: KVCacheBlock) -> bool:
        return (
            block.block_hash is not None and self._invalid.get(block.block_id) == block.block_hash
        )
