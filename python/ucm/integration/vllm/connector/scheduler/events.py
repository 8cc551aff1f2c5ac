"""Events of stored blocks for routers that follow vLLM's: they index blocks by vLLM's own hashes.

An engine reports the blocks that it stored, and those that a lookup of it found, since its start.
A block is reported as removed when a later lookup does not find it, when its record was refused,
when vLLM emptied its caches, and when it is the oldest of the largest number of reported blocks.
Other engines' blocks, and the eviction of a block that no request looks up, are not seen here.

Of a model with several KV groups each group's blocks have events of their own, with the number and
the block size that vLLM has for the group.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ucm.integration.vllm.connector.groups import ABSENT, UNKNOWN, Group
from ucm.integration.vllm.connector.guard import logger
from ucm.reasons import MissReason
from ucm.store import record_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ucm.integration.vllm.connector.scheduler.lookup import Lookup

#: Most blocks that are reported as stored, least recently found first out.
REPORTED_LIMIT = 1 << 17
#: Most lookups whose answer is waited for.
LOOKUPS_LIMIT = 1 << 12
#: Hash algorithms of vLLM whose hashes do not depend on the process.
FIXED_HASHES = ("sha256", "sha256_cbor")
#: Reasons of a lookup that mean that the blocks from there on are no hits any more.
_GONE = (MissReason.ABSENT, MissReason.OTHER_RANK, MissReason.REFUSED)


class BlockEvents:
    """The events of one engine's blocks, until vLLM takes them."""

    def __init__(
        self,
        groups: Sequence[Group],
        clock: Callable[[], float],
        described: Mapping[int, Mapping[str, Any]] | None = None,
        limit: int = REPORTED_LIMIT,
        *,
        enabled: bool = True,
    ) -> None:
        """``groups``: those of the model; ``clock``: that of the lookups; ``described``: the fields
        of an event that describe one of vLLM's groups; ``enabled``: False makes no events."""
        self._enabled = enabled
        self._groups, self._clock, self._limit = tuple(groups), clock, limit
        self._described = described or {}
        self._hash_tokens = 0  # of each of vLLM's hashes; 0: as many as a block has
        self._medium = MEDIUM_STORAGE
        # block key -> vLLM's hash, its group, and when the block was last known to be stored
        self._reported: dict[bytes, tuple[Any, int, float]] = {}
        self._lookups: deque[tuple[Request, Lookup]] = deque(maxlen=LOOKUPS_LIMIT)
        self._events: list[KVCacheEvent] = []

    def bind(self, pool: BlockPool) -> None:
        """vLLM's pool, which has the tokens of a hash: they may be fewer than those of a block."""
        self._hash_tokens = pool.hash_block_size

    def open(self, media: Iterable[str]) -> None:
        """The store is open, with tiers on these media."""
        self._medium = MEDIUM_CPU if set(media) == {"host"} else MEDIUM_STORAGE

    def follow(self, request: Request, lookup: Lookup) -> None:
        """A lookup for a request began; its answer is read when it is there."""
        if self._enabled:
            self._lookups.append((request, lookup))

    def stored(
        self, request: Request, group: Group, blocks: Mapping[int, bytes], at: float | None = None
    ) -> None:
        """These blocks of a request in one group, keys by ordinal, are in the store; ``at``: when
        that was so, None for now."""
        if not self._enabled:
            return
        known, when = self._reported, self._clock() if at is None else at
        new = []  # ordinals of vLLM's blocks
        for ordinal, key in blocks.items():
            vllms = ordinal * group.ratio + group.at
            if (before := known.pop(key, None)) is not None:
                known[key] = *before[:2], max(before[2], when)
            elif (found := self._hash(request, group, vllms)) is not None:
                known[key] = found, group.table, when
                new.append(vllms)
        for _, run in itertools.groupby(enumerate(new), lambda pair: pair[1] - pair[0]):
            ordinals = [ordinal for _, ordinal in run]
            event = self._stored_event(request, group, ordinals[0], ordinals[-1] + 1)
            self._events.append(event)
        self.removed(list(itertools.islice(known, max(len(known) - self._limit, 0))))

    def removed(self, keys: Iterable[bytes], before: float = float("inf")) -> None:
        """These blocks are no hits any more; those that were stored since ``before`` are."""
        known, hashes = self._reported, dict[int, list[Any]]()
        for key in dict.fromkeys(keys):
            if key in known and known[key][2] < before:
                found, group, _ = known.pop(key)
                external = kv_cache_utils.maybe_convert_block_hash(found)
                hashes.setdefault(group, []).append(external)
        for group, gone in hashes.items():
            self._events.append(BlockRemoved(gone, self._medium, group_idx=group))

    def forget(self) -> None:
        """No block that was reported is a hit until it is found again."""
        self._lookups.clear()
        self.removed(list(self._reported))

    def take(self, refused: Callable[[Sequence[bytes]], Sequence[int]]) -> list[KVCacheEvent]:
        """The events since the last call; ``refused`` returns which keys of a list may not be
        claimed."""
        for _ in range(len(self._lookups)):
            request, lookup = self._lookups.popleft()
            if not lookup.done:
                self._lookups.append((request, lookup))
            elif lookup.answered:
                self._answered(request, lookup, refused)
        events, self._events = self._events, []
        return events

    def _answered(
        self, request: Request, lookup: Lookup, refused: Callable[[Sequence[bytes]], Sequence[int]]
    ) -> None:
        """A lookup found these blocks of a request, and others not."""
        behind = ABSENT if lookup.reason in _GONE else UNKNOWN
        blocks = lookup.keys or []
        prefix = lookup.tiers[: lookup.hits].ljust(len(blocks), bytes((behind,)))
        for group, tiers in zip(self._groups, lookup.tables or (prefix,), strict=False):
            keys = record_ids(blocks, group.mask) if group.mask else blocks
            bad = refused(keys)
            # Of a whole prefix the blocks behind a refused one are no hits.
            end = len(tiers) if group.frees_early else min(bad, default=len(tiers))
            there = (at for at in range(end) if tiers[at] < UNKNOWN and at not in bad)
            self.stored(request, group, {at: keys[at] for at in there}, lookup.began)
            gone = (key for key, tier in zip(keys, tiers, strict=True) if tier == ABSENT)
            self.removed(gone, lookup.began)

    def _hash(self, request: Request, group: Group, ordinal: int) -> Any:
        """vLLM's hash of one of its blocks, which is that of all tokens up to its end; None if
        unknown."""
        hashes_per_block = max(group.tokens // (self._hash_tokens or group.tokens), 1)
        at = (ordinal + 1) * hashes_per_block - 1
        return request.block_hashes[at] if at < len(request.block_hashes) else None

    def _stored_event(self, request: Request, group: Group, first: int, end: int) -> BlockStored:
        """The event of vLLM's blocks of a group from ``first`` to ``end``."""
        size, adapter = group.tokens, request.lora_request
        hashes = [self._hash(request, group, ordinal) for ordinal in range(max(first - 1, 0), end)]
        external = list(map(kv_cache_utils.maybe_convert_block_hash, hashes))
        parent = external.pop(0) if first else None
        extra = [
            kv_cache_utils.generate_block_hash_extra_keys(request, at * size, at * size + size, 0)[
                0
            ]
            for at in range(first, end)
        ]
        published = getattr(kv_cache_utils, "to_event_extra_keys", list)  # older: as they are
        return BlockStored(
            block_hashes=external,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[first * size : end * size]),
            block_size=size,
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            medium=self._medium,
            extra_keys=published(extra),
            group_idx=group.table,
            **self._described.get(group.table, {}),
        )


def block_events(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: Sequence[Group],
    clock: Callable[[], float],
) -> BlockEvents | None:
    """The events of an engine with these groups; None where it publishes none."""
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events:
        return None
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in FIXED_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        logger.warning(
            "no events of stored blocks are published: hashes of %s differ in every process, so"
            " they name no stored block after a restart; use --prefix-caching-hash-algo sha256",
            algorithm,
        )
        return None
    described = {}
    for group in groups:
        spec = kv_cache_config.kv_cache_groups[group.table].kv_cache_spec
        described[group.table] = {
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
        }
    return BlockEvents(groups, clock, described)
