"""Calls to a rank's store that must not fail a step: the hints it is sent, and what it says about
itself.

Each call notes something down in the store and returns; an exception is logged and the hint is
dropped. Of ranks that hold the same bytes, the one that writes them is told what is used and brings
up what will be: the others read its memory. What they hold in memory of their own they are told
too.
"""

from __future__ import annotations

from ucm.config.fields import MAX_SIZE, Capacity
from ucm.integration.vllm.connector.guard import throttle
from ucm.integration.vllm.connector.metadata import StoreRoom, UCMConnectorMetadata, join_keys
from ucm.store import record_ids
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1


def wants_touches(store: UcmKVStoreBaseV1) -> bool:
    """Whether this rank's store uses hints about blocks in use."""
    try:
        return bool(store.wants_touch_own)
    except Exception as error:
        throttle.warning("wants_touch_own", "the store's wants_touch_own failed: %r", error)
        return False


def prefetch_room(store: UcmKVStoreBaseV1) -> int:
    """Blocks that may be brought up in this rank's memory ahead of need."""
    try:
        return max(int(store.prefetch_room()), 0)
    except Exception as error:
        throttle.warning("prefetch_room", "the store's prefetch_room() failed: %r", error)
        return 0


def store_room(store: UcmKVStoreBaseV1, block_bytes: int) -> StoreRoom | None:
    """How much this rank's store holds, for blocks with ``block_bytes`` of KV; None where it
    reports no limit and has no quota of tenants in bytes. A store for lookups alone does not know
    the limit, so the scheduler side cannot read it from its own."""
    try:
        tiers = store.stats().get("tiers")
        if not isinstance(tiers, list) or not tiers:
            return None
        largest = max(tiers, key=lambda tier: int(tier["capacity_bytes"]))
        quota: Capacity | None = getattr(store, "tenant_quota", None)
        if not tiers[-1]["capacity_bytes"]:
            if quota is None or quota.bytes is None:
                return None
            largest = tiers[-1] | {"capacity_bytes": MAX_SIZE}
        capacity = int(largest["capacity_bytes"])
        return StoreRoom(
            tier=str(largest["name"]),
            capacity=capacity,
            used=int(largest["used_bytes"]),
            record=max(int(getattr(store, "record_len", block_bytes)), 1),
            quota=None if quota is None or largest.get("memory") else quota.of(capacity),
            quota_removed=int(largest.get("quota_removed", 0)),
            expire_after=getattr(store, "expire_after", None),
        )
    except Exception as error:
        throttle.warning("room", "the limit of the store cannot be read: %r", error)
        return None


def pass_hints(
    plan: UCMConnectorMetadata, store: UcmKVStoreBaseV1, mask: bytes, writer: bool
) -> None:
    """Tell the store of this rank, whose part has this mask."""
    try:
        for first, keys in plan.touched if writer or store.has_own_memory else ():
            store.touch_own(record_ids(keys, mask), first)
        if plan.prefetch is None or not writer:
            return
        if plan.prefetch.cancelled:
            store.cancel_prefetch(record_ids(plan.prefetch.cancelled, mask))
        for priority, keys in plan.prefetch.wanted:
            store.prefetch(record_ids(keys, mask), priority)
    except Exception as error:  # closed, or a bug of the store: hints are optional
        throttle.warning("hints", "the store could not be told what will be used: %r", error)


def take_locally_visible(store: UcmKVStoreBaseV1) -> tuple[bytes, bytes]:
    """What a rank's store gained and lost since it was last asked, joined for the report. Never
    raises."""
    try:
        gained, lost = store.early()
    except (
        Exception
    ) as error:  # closed, or a bug of the store: those blocks are hits once they are published
        throttle.warning("early", "the store's early() failed: %r", error)
        return b"", b""
    return join_keys(gained), join_keys(lost)
