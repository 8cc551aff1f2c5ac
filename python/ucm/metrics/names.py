"""Every series of ``/metrics``: its name and its definition. The connector registers them,
``docs/metrics.md`` lists them, and the dashboard's expressions are tested against them.

A key is the name under which a side of the connector reports a value. A name is the one in
Prometheus, where a counter's ends with ``_total`` besides. This module needs no package, so that
tools and documents can read it without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Series(NamedTuple):
    """One name in Prometheus."""

    name: str
    #: What it counts or measures, in one sentence.
    text: str


#: Prefixes of keys that end with a label's value, or with two.
MISSED, UNSTORED, TIER_PREFIX, TIER_NOW = "missed.", "unstored.", "tier.", "tier_now."
SPARSE_PREFIX, REQUESTS, MEMORY_NOW, INFO = "sparse.", "requests.", "memory_now.", "info."
#: When a report was made, in seconds since 1970.
AT = "at"

# Requests and their blocks
# --------------------------------------------------------------------------------------------------

ASKED, HIT, LOADED, PUBLISHED, UNPUBLISHED = "asked", "hit", "loaded", "published", "unpublished"
EVICTED = "evicted"
#: Counts admissions, not blocks.
ASKED_REQUESTS, HIT_REQUESTS = "asked_requests", "hit_requests"
#: Counts tokens, not blocks.
DECLINED_TOKENS = "declined_tokens"
#: Estimated by the measured speed.
SAVED_SECONDS = "saved_prefill_seconds"
#: Counts of Blend, in tokens.
BLEND_HIT, BLEND_COMPUTED, BLEND_MISSED = "blend_hit", "blend_computed", "blend_missed"
#: Counters of the worker sides, in bytes on their rank.
LOADED_BYTES, PUBLISHED_BYTES = "loaded_bytes", "published_bytes"

COUNTERS = {
    ASKED: Series(
        "ucm_asked_blocks", "Full blocks of admitted requests that vLLM's own cache did not hold."
    ),
    HIT: Series("ucm_hit_blocks", "Blocks found in the store and claimed."),
    LOADED: Series("ucm_loaded_blocks", "Blocks loaded by every rank instead of being computed."),
    ASKED_REQUESTS: Series(
        "ucm_asked_requests", "Admissions of requests with at least one asked block."
    ),
    HIT_REQUESTS: Series(
        "ucm_hit_requests", "Admissions of requests with at least one block of a hit."
    ),
    EVICTED: Series(
        "ucm_evicted_blocks",
        "Asked blocks that this engine knew to be stored and that had been evicted for want of"
        " space.",
    ),
    PUBLISHED: Series("ucm_published_blocks", "Blocks stored by every rank."),
    UNPUBLISHED: Series("ucm_unpublished_blocks", "Blocks that some rank failed to store."),
    LOADED_BYTES: Series("ucm_loaded_bytes", "Bytes of KV loaded from the store, of all ranks."),
    PUBLISHED_BYTES: Series("ucm_published_bytes", "Bytes of KV stored, of all ranks."),
    DECLINED_TOKENS: Series(
        "ucm_declined_tokens",
        "Tokens of hits that were computed because loading them would be slower.",
    ),
    SAVED_SECONDS: Series(
        "ucm_saved_prefill_seconds",
        "Seconds of computing that loaded blocks replaced: their tokens by the measured speed of"
        " prefill. Blocks that were loaded before it was measured do not count.",
    ),
    BLEND_HIT: Series("ucm_blend_hit_tokens", "Blend: loaded tokens of chunks."),
    BLEND_COMPUTED: Series("ucm_blend_computed_tokens", "Of these, computed again."),
    BLEND_MISSED: Series("ucm_blend_missed_tokens", "Blend: tokens between chunks."),
}
MISSED_BLOCKS = Series("ucm_missed_blocks", "Asked blocks that were computed, by reason.")
#: Busy: a rank had no free slot, they are offered again. Ended: they had left their request before
#: a slot became free. Overwritten: they had left it, and vLLM reused their device blocks.
UNSTORED_BLOCKS = Series(
    "ucm_unstored_blocks",
    "Blocks without a free staging slot. busy: a rank had none, and they are offered again; ended:"
    " their request had ended, or went on without them (windows, states), and no slot was free"
    " within deadlines.dump_s; overwritten: the same, and vLLM reused their device blocks first. If"
    " ended or overwritten grow, raise staging_capacity.",
)
BUSY, ENDED, OVERWRITTEN = "busy", "ended", "overwritten"
REQUESTS_TOTAL = Series(
    "ucm_requests",
    "Requests that have ended. error: the cache failed for at least one of their blocks (damage, a"
    " deadline, a failed or unhealthy store), which was computed; success: all others.",
)
SUCCESS, ERROR = "success", "error"

# Speeds, shares and sizes
# --------------------------------------------------------------------------------------------------

#: Speeds as the scheduler side knows them.
GAUGES = {
    "prefill_tokens_per_second": Series(
        "ucm_prefill_tokens_per_second", "Prompt tokens computed a second, in full steps."
    ),
    "load_bytes_per_second": Series(
        "ucm_load_bytes_per_second", "Bytes loaded a second from the tier of the last load."
    ),
    "load_fixed_seconds": Series(
        "ucm_load_fixed_seconds", "Fixed cost of a load from the tier of the last load."
    ),
}
CACHE_HIT_RATE = Series(
    "ucm_cache_hit_rate",
    "Share of hits since the engine's start. block: ucm_hit_blocks by ucm_asked_blocks; prefix:"
    " ucm_hit_requests by ucm_asked_requests.",
)
KV_CACHE_HIT_RATE = Series("ucm_kv_cache_hit_rate", "ucm_cache_hit_rate of blocks.")
IO_THROUGHPUT = Series(
    "ucm_io_throughput_gbps",
    "GB (10^9 bytes) a second of one rank since its start: bytes by the sum of ucm_load_seconds or"
    " ucm_dump_seconds.",
)
#: Key -> (series, label, value of the label).
SHARES = {
    "block_hit_rate": (CACHE_HIT_RATE, "cache_type", "block"),
    "prefix_hit_rate": (CACHE_HIT_RATE, "cache_type", "prefix"),
    "load_gbps": (IO_THROUGHPUT, "operation", "load"),
    "dump_gbps": (IO_THROUGHPUT, "operation", "dump"),
}
MEMORY_USAGE = Series(
    "ucm_memory_usage_bytes",
    "Bytes of KV. gpu: of blocks that requests hold on the device, of all ranks; cpu: in the"
    " memory tier of a rank; external: below it, as the first rank counts them.",
)
INFO_GAUGE = Series(
    "ucm_info", "1 for the store in use: digest of the engine's identity, layout, tiers, mode."
)
INFO_LABELS = ("version", "identity", "layout", "tiers", "mode")

#: What tiers did and what they are now.
TIER_COUNTERS = {
    "hits": Series("ucm_tier_hit_blocks", "Blocks found by lookups, by the tier that had them."),
    "blocks_read": Series("ucm_tier_read_blocks", "Blocks read, by tier."),
    "bytes_read": Series("ucm_tier_read_bytes", "Bytes read, by tier."),
    "blocks_written": Series(
        "ucm_tier_written_blocks", "Blocks written, by tier; promoted ones too."
    ),
    "bytes_written": Series("ucm_tier_written_bytes", "Bytes written, by tier."),
    "failures": Series(
        "ucm_tier_failed_operations", "Operations that a tier failed, or ended after the deadline."
    ),
    "copies_refused": Series("ucm_tier_refused_blocks", "Copies that failed verification."),
    "promotions": Series(
        "ucm_tier_promoted_blocks", "Blocks copied to this tier from one below it."
    ),
    "demotions": Series(
        "ucm_tier_demoted_blocks", "Blocks copied to this tier because the one above evicted them."
    ),
    "copies_dropped": Series(
        "ucm_tier_dropped_blocks", "Copies not made because the tier was busy or unhealthy."
    ),
    "quota_removed": Series(
        "ucm_tier_quota_removed_blocks", "Blocks removed above their tenant's tenant_quota."
    ),
}
TIER_GAUGES = {
    "used_bytes": Series("ucm_tier_used_bytes", "Bytes that a tier holds."),
    "capacity_bytes": Series("ucm_tier_capacity_bytes", "Bytes that a tier may hold."),
    "healthy": Series("ucm_tier_healthy", "1 while a tier is used, 0 while its breaker is open."),
    "writable": Series("ucm_tier_writable", "1 while a tier takes blocks, 0 while it only reads."),
}

# Times
# --------------------------------------------------------------------------------------------------

LOOKUP_SECONDS, WAIT_SECONDS = "lookup_seconds", "pd_wait_seconds"
LOAD_SECONDS, DUMP_SECONDS = "load_seconds", "dump_seconds"
HISTOGRAMS = {
    LOOKUP_SECONDS: Series(
        "ucm_lookup_seconds",
        "From a request's arrival to the store's answer, with hashing, without late lookups.",
    ),
    WAIT_SECONDS: Series(
        "ucm_pd_wait_seconds",
        "On a decode server: from vLLM's first call for a request until the blocks of its prefill"
        " server were found, or it went on without them.",
    ),
    LOAD_SECONDS: Series(
        "ucm_load_seconds",
        "From the begin of a load to the step that reported its end, on each rank; failed ones"
        " too.",
    ),
    DUMP_SECONDS: Series(
        "ucm_dump_seconds",
        "From the begin of a dump to the step that reported its end, on each rank.",
    ),
}
#: The same times under other names, by operation.
LATENCIES = {
    LOAD_SECONDS: (Series("ucm_load_latency_seconds", "ucm_load_seconds, fewer buckets."), "load"),
    DUMP_SECONDS: (Series("ucm_dump_latency_seconds", "ucm_dump_seconds, fewer buckets."), "dump"),
}
IO_LATENCY = Series(
    "ucm_io_latency_seconds", "ucm_load_seconds and ucm_dump_seconds, fewer buckets."
)
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

# Sparse attention: only where it is on
# --------------------------------------------------------------------------------------------------

SPARSE_COUNTERS = {
    "rows_sparse": Series("ucm_sparse_rows", "Rows of decoding requests that selected, by layer."),
    "rows_unready": Series("ucm_sparse_unready_rows", "Dense rows: a block had no representation."),
    "late": Series("ucm_sparse_late_rows", "Rows whose selection was late."),
    "blocks_seen": Series("ucm_sparse_seen_blocks", "Blocks of the rows that selected."),
    "blocks_kept": Series("ucm_sparse_kept_blocks", "Of these, blocks that were attended to."),
    "blocks_chosen": Series(
        "ucm_sparse_chosen_blocks", "Blocks of selections compared with the one before."
    ),
    "blocks_new": Series("ucm_sparse_new_blocks", "Of these, newly selected ones: the turnover."),
    "blocks_asked": Series(
        "ucm_sparse_asked_blocks", "With offload: selected blocks that may have been foreseen."
    ),
    "blocks_predicted": Series("ucm_sparse_foreseen_blocks", "Of these, foreseen ones."),
    "blocks_loaded": Series(
        "ucm_sparse_loaded_blocks", "With offload: selected blocks of one layer, loaded."
    ),
    "blocks_absent": Series(
        "ucm_sparse_absent_blocks", "With offload: selected blocks that were late and left out."
    ),
    "blocks_prefetched": Series(
        "ucm_sparse_prefetched_blocks", "With offload: foreseen blocks that were promoted."
    ),
    "selection_s": Series(
        "ucm_sparse_selection_seconds", "Time of steps for representations and selection."
    ),
}
SPARSE_RATIO = Series(
    "ucm_sparse_ratio", "ucm_sparse_kept_blocks by ucm_sparse_seen_blocks of one rank since start."
)
#: Its key.
RATIO = "sparse_ratio"


# The list of all
# --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A series as ``/metrics`` shows it."""

    name: str
    kind: str
    #: Labels beside those of vLLM.
    labels: tuple[str, ...]
    text: str


def rows() -> Iterator[tuple[str, list[Row]]]:
    """All series, by the topic under which the documents list them."""

    def of(kind: str, table: Mapping[str, Series], *labels: str) -> list[Row]:
        end = "_total" if kind == "counter" else ""
        return [Row(one.name + end, kind, labels, one.text) for one in table.values()]

    yield (
        "requests",
        of("counter", COUNTERS)
        + of("counter", {"": MISSED_BLOCKS, "0": UNSTORED_BLOCKS}, "reason")
        + of("counter", {"": REQUESTS_TOTAL}, "status")
        + of("gauge", {"": CACHE_HIT_RATE}, "cache_type")
        + of("gauge", {"": KV_CACHE_HIT_RATE}),
    )
    yield (
        "times and speeds",
        of("histogram", HISTOGRAMS)
        + of("histogram", {"": IO_LATENCY}, "operation")
        + of("histogram", {key: one for key, (one, _) in LATENCIES.items()})
        + of("gauge", {"": IO_THROUGHPUT}, "operation")
        + of("gauge", GAUGES),
    )
    yield (
        "stores",
        of("gauge", {"": INFO_GAUGE}, *INFO_LABELS)
        + of("gauge", {"": MEMORY_USAGE}, "location", "side")
        + of("counter", TIER_COUNTERS, "tier")
        + of("gauge", TIER_GAUGES, "tier", "side"),
    )
    yield "sparse", of("counter", SPARSE_COUNTERS) + of("gauge", {"": SPARSE_RATIO})
