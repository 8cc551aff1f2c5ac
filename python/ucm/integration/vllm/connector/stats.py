"""The connector's counters, in vLLM's log line and Prometheus registry, through vLLM's hooks for
statistics.

:class:`MissStats` counts the requested blocks, each once, per request and per
process. A request *asked* for the full blocks that vLLM's own cache does not hold, when it is
admitted and again after a preemption. Each is either part of the *hit* that was claimed or *missed*
for one reason. A block of the hit is later *loaded*, or missed for the reason of its failed load.
So once no load is under way::

    asked = loaded + missed        asked = hit + what was missed without a load

Each side passes its news to vLLM as one flat dictionary: counts are whole numbers, times are short
lists of seconds. The counters of tiers are named ``tier.<counter>.<tier>``, their sizes and health
``tier_now.<gauge>.<tier>.<side>``, the counters of sparse attention, added up over all ranks,
``sparse.<counter>``. vLLM adds up ranks and sides and carries the result to the process that logs
and exports. Nothing here raises into vLLM.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client import Histogram as PrometheusHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ucm.integration.vllm.connector.guard import harmless, logger
from ucm.logger import in_units
from ucm.reasons import MissReason
from ucm.sparse.base import SparseStats
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


# Blocks of requests
# --------------------------------------------------------------------------------------------------

#: Between two summaries in the log, in seconds.
SUMMARY_S = 60.0

#: Times of each kind kept between two calls of vLLM; more are not measured.
TIMES = 1024

#: Names of the counters; that of a missed block ends with its reason.
ASKED, HIT, LOADED, PUBLISHED, UNPUBLISHED = "asked", "hit", "loaded", "published", "unpublished"
MISSED = "missed."
#: Blocks not stored for want of staging; the name ends with the reason. Busy: a rank had no free
#: slot, they are offered again. Ended: their request had ended before a slot became free.
#: Overwritten: it had ended, and vLLM reused their device blocks.
UNSTORED = "unstored."
BUSY, ENDED, OVERWRITTEN = "busy", "ended", "overwritten"
#: Counts tokens, not blocks.
DECLINED_TOKENS = "declined_tokens"
#: Names of the times of lookups, and of waits for a producer's blocks, in seconds.
LOOKUP_SECONDS, WAIT_SECONDS = "lookup_seconds", "pd_wait_seconds"


class Tally:
    """Blocks of one request, or of a whole process."""

    __slots__ = ("asked", "hit", "loaded", "missed", "offered")

    def __init__(self) -> None:
        self.asked = 0
        self.hit = 0  # claimed from the store
        self.loaded = 0
        self.offered = 0  # given to the store to keep
        self.missed: Counter[str] = Counter()

    def __str__(self) -> str:
        missed = format_counts(self.missed) if self.missed else "none"
        return (
            f"{self.asked} blocks looked up, {self.hit} hit, {self.loaded} loaded, missed:"
            f" {missed}; {self.offered} offered"
        )


def format_counts(missed: Mapping[str, int]) -> str:
    """Reasons with their counts, the most frequent first."""
    ordered = sorted(missed.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered)


class MissStats:
    """The counters of one scheduler side: for vLLM's metrics, for the log, and by request."""

    def __init__(
        self, block_tokens: int, now: float, rates: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        """``now``: seconds on the clock of :meth:`summary`; ``rates`` returns measured speeds, by
        name."""
        self.total = Tally()
        self._block_tokens = block_tokens
        self._rates = rates
        self._news: Counter[str] = Counter()  # since the last take()
        self._recent: Counter[str] = Counter()  # since the last summary
        self._times: dict[str, list[float]] = {}  # by name, since the last take()
        self.next_summary = now + SUMMARY_S

    # What happened
    # ------------------------------------------------------------------------------------------

    def asked(self, tally: Tally, hit: int, missed: Mapping[MissReason, int]) -> None:
        """A request was admitted, with ``hit`` blocks to be loaded."""
        blocks = hit + sum(missed.values())
        for each in (tally, self.total):
            each.asked += blocks
            each.hit += hit
        self._count(ASKED, blocks)
        self._count(HIT, hit)
        for reason, count in missed.items():
            self.missed(tally, reason, count)

    def missed(self, tally: Tally, reason: MissReason, blocks: int) -> None:
        """``blocks`` of a request are absent, or were not loaded."""
        name = str(reason)
        if blocks > 0:
            tally.missed[name] += blocks
            self.total.missed[name] += blocks
            self._count(MISSED + name, blocks)

    def declined(self, blocks: int) -> None:
        """``blocks`` of those missed belong to hits that were declined."""
        if blocks > 0:
            self._news[DECLINED_TOKENS] += blocks * self._block_tokens

    def loaded(self, tally: Tally, blocks: int) -> None:
        """``blocks`` of a hit were loaded on every rank."""
        tally.loaded += blocks
        self.total.loaded += blocks
        self._count(LOADED, blocks)

    def looked_up(self, seconds: float) -> None:
        """The store answered a lookup after ``seconds``."""
        self._timed(LOOKUP_SECONDS, seconds)

    def waited(self, seconds: float) -> None:
        """A request waited for its producer's blocks."""
        self._timed(WAIT_SECONDS, seconds)

    def _timed(self, name: str, seconds: float) -> None:
        times = self._times.setdefault(name, [])
        if len(times) < TIMES:
            times.append(seconds)

    def bypassed(self, request: Request, reason: MissReason) -> None:
        """A request is neither looked up nor stored."""
        tally, blocks = Tally(), request.num_tokens // self._block_tokens
        self.asked(tally, 0, {reason: blocks} if blocks else {})
        self.log_request(request, tally)

    @staticmethod
    def log_request(request: Request, tally: Tally) -> None:
        """The line of one request in the log."""
        logger.debug(
            "request %s: %d prompt tokens, %s", request.request_id, request.num_prompt_tokens, tally
        )

    def offered(self, tally: Tally, blocks: int) -> None:
        """``blocks`` of a request are being dumped."""
        tally.offered += blocks
        self.total.offered += blocks

    def dumped(self, published: int, failed: int) -> None:
        """Blocks that every rank published, and blocks that some rank did not."""
        self._count(PUBLISHED, published)
        self._count(UNPUBLISHED, failed)

    def unstored(self, reason: str, blocks: int) -> None:
        """These blocks were not stored for want of staging."""
        self._count(UNSTORED + reason, blocks)

    def _count(self, name: str, blocks: int) -> None:
        if blocks > 0:
            self._news[name] += blocks
            self._recent[name] += blocks

    # What is reported
    # -------------------------------------------------------------------------------------------

    def take(self) -> dict[str, Any] | None:
        """Counters and times since the last call, and the speeds; None when nothing was counted."""
        if not (self._news or self._times):
            return None
        news: dict[str, Any] = {**self._news, **self._rates(), **self._times}
        self._news, self._times = Counter(), {}
        return news

    def summary(self, now: float, block_bytes: int) -> None:
        """Log what was counted since the last summary; ``block_bytes`` is a block of all ranks."""
        self.next_summary = now + SUMMARY_S
        recent, self._recent = self._recent, Counter()
        if not recent:
            return
        missed = {name[len(MISSED) :]: n for name, n in recent.items() if name.startswith(MISSED)}
        loaded, published = recent[LOADED], recent[PUBLISHED]
        logger.info(
            "%d blocks looked up, %d hit, %d loaded (%s); missed: %s; %d published (%s), %d not",
            recent[ASKED],
            recent[HIT],
            loaded,
            in_units(loaded * block_bytes),
            format_counts(missed) if missed else "none",
            published,
            in_units(published * block_bytes),
            recent[UNPUBLISHED],
        )


# Tiers of a store
# --------------------------------------------------------------------------------------------------

TIER_PREFIX, TIER_NOW = "tier.", "tier_now."

#: Counter of a tier -> (name in Prometheus without ``_total``, what it counts).
TIER_COUNTERS = {
    "hits": ("ucm_tier_hit_blocks", "Blocks found by lookups, by the tier that had them."),
    "blocks_read": ("ucm_tier_read_blocks", "Blocks read, by tier."),
    "bytes_read": ("ucm_tier_read_bytes", "Bytes read, by tier."),
    "blocks_written": ("ucm_tier_written_blocks", "Blocks written, by tier; promoted ones too."),
    "bytes_written": ("ucm_tier_written_bytes", "Bytes written, by tier."),
    "failures": ("ucm_tier_failed_operations", "Operations that a tier failed or ended late."),
    "copies_refused": ("ucm_tier_refused_blocks", "Copies that were not sound, by tier."),
    "promotions": ("ucm_tier_promoted_blocks", "Blocks promoted from below, by their new tier."),
    "demotions": ("ucm_tier_demoted_blocks", "Blocks evicted from above, by their new tier."),
    "copies_dropped": ("ucm_tier_dropped_blocks", "Copies not made: the tier was busy or failing."),
    "quota_removed": ("ucm_tier_quota_removed_blocks", "Blocks removed above a tenant's quota."),
}

#: What a tier is now -> (name in Prometheus, what it is).
TIER_GAUGES = {
    "used_bytes": ("ucm_tier_used_bytes", "Bytes that a tier holds, as each side sees it."),
    "capacity_bytes": ("ucm_tier_capacity_bytes", "Bytes that a tier may hold, by side."),
    "healthy": ("ucm_tier_healthy", "Whether a tier is used now (1) or switched off (0), by side."),
    "writable": ("ucm_tier_writable", "Whether a tier takes blocks now (1) or only reads (0)."),
}

#: Seconds between two readings of a store's counters: a step is shorter.
EVERY = 1.0


class TierCounts:
    """What is new of one store's tiers."""

    def __init__(self, clock: Callable[[], float], side: str) -> None:
        """``side`` that counts: ``scheduler`` or the number of the rank."""
        self._clock, self._side = clock, side
        self._next = clock()
        self._reported: dict[str, int] = {}
        self._silent = False

    def take(self, store: UcmKVStoreBaseV1 | None) -> dict[str, Any]:
        """News since the last call that returned some; empty for most calls."""
        now = self._clock()
        if store is None or self._silent or now < self._next:
            return {}
        self._next = now + EVERY
        tiers = store.stats().get("tiers")
        if not isinstance(tiers, list):
            self._silent = True  # a store without tiers has none later
            return {}
        return {name: value for tier in tiers for name, value in self._news(tier)}

    def _news(self, tier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for counter in TIER_COUNTERS:
            name, count = f"{TIER_PREFIX}{counter}.{tier['name']}", int(tier[counter])
            before = self._reported.get(name, 0)
            self._reported[name] = count
            if count > before:
                yield name, count - before
        for gauge in TIER_GAUGES:
            name, value = f"{TIER_NOW}{gauge}.{tier['name']}.{self._side}", int(tier[gauge])
            if self._reported.get(name) != value:
                self._reported[name] = value
                yield name, value


# Sparse attention
# --------------------------------------------------------------------------------------------------

#: Counter of a method -> (name in Prometheus without ``_total``, what it counts).
SPARSE_COUNTERS = {
    "rows_sparse": ("ucm_sparse_rows", "Rows of decoding requests that chose blocks, by layer."),
    "rows_unready": ("ucm_sparse_unready_rows", "Dense rows: a block had no representation."),
    "late": ("ucm_sparse_late_rows", "Rows whose choice was late."),
    "blocks_seen": ("ucm_sparse_seen_blocks", "Blocks of the rows that chose."),
    "blocks_kept": ("ucm_sparse_kept_blocks", "Blocks attended to; by those seen: the density."),
    "blocks_chosen": (
        "ucm_sparse_chosen_blocks",
        "Blocks of choices compared with the one before.",
    ),
    "blocks_new": ("ucm_sparse_new_blocks", "Of these, newly chosen ones: the turnover."),
    "blocks_asked": ("ucm_sparse_asked_blocks", "Chosen blocks that may have been foreseen."),
    "blocks_predicted": ("ucm_sparse_foreseen_blocks", "Of these, those that were foreseen."),
    "blocks_loaded": ("ucm_sparse_loaded_blocks", "Chosen blocks of one layer that were loaded."),
    "blocks_absent": ("ucm_sparse_absent_blocks", "Chosen blocks that were late and left out."),
    "blocks_prefetched": ("ucm_sparse_prefetched_blocks", "Foreseen blocks that were promoted."),
    "selection_s": ("ucm_sparse_selection_seconds", "Seconds of steps for choosing blocks."),
}
SPARSE_PREFIX = "sparse."


class SparseCounts:
    """What is new of one method."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = clock()
        self._reported: dict[str, float] = {}

    def take(self, stats: SparseStats) -> dict[str, float]:
        """News since the last call that returned some; empty for most calls."""
        now = self._clock()
        if now < self._next:
            return {}
        self._next = now + EVERY
        found = stats.snapshot()
        news = {name: found.get(name, 0) - self._reported.get(name, 0) for name in SPARSE_COUNTERS}
        self._reported = found
        # Counters only grow; what was measured before the first request is taken back.
        return {SPARSE_PREFIX + name: round(count, 6) for name, count in news.items() if count > 0}


# vLLM's log line and Prometheus
# --------------------------------------------------------------------------------------------------

#: Counters of the worker sides, in bytes on their rank.
LOADED_BYTES, PUBLISHED_BYTES = "loaded_bytes", "published_bytes"
#: Times of the worker sides, in seconds.
LOAD_SECONDS, DUMP_SECONDS = "load_seconds", "dump_seconds"

#: Counter -> (name in Prometheus without ``_total``, what it counts).
COUNTERS = {
    ASKED: ("ucm_asked_blocks", "Full blocks of admitted requests, not in vLLM's own cache."),
    HIT: ("ucm_hit_blocks", "Blocks found in the store and claimed."),
    LOADED: ("ucm_loaded_blocks", "Blocks loaded by every rank instead of being computed."),
    PUBLISHED: ("ucm_published_blocks", "Blocks stored by every rank."),
    UNPUBLISHED: ("ucm_unpublished_blocks", "Blocks that some rank failed to store."),
    LOADED_BYTES: ("ucm_loaded_bytes", "Bytes of KV loaded from the store, of all ranks."),
    PUBLISHED_BYTES: ("ucm_published_bytes", "Bytes of KV stored, of all ranks."),
    DECLINED_TOKENS: ("ucm_declined_tokens", "Tokens computed because loading would be slower."),
    **{SPARSE_PREFIX + name: texts for name, texts in SPARSE_COUNTERS.items()},
}
MISSED_BLOCKS = ("ucm_missed_blocks", "Requested blocks that were computed after all, by reason.")
UNSTORED_BLOCKS = ("ucm_unstored_blocks", "Blocks not stored for want of staging, by reason.")

#: Speeds as the scheduler side knows them -> (name in Prometheus, what is measured).
GAUGES = {
    "prefill_tokens_per_second": ("ucm_prefill_tokens_per_second", "Prompt tokens computed, /s."),
    "load_bytes_per_second": ("ucm_load_bytes_per_second", "Bytes loaded, /s, of all ranks."),
    "load_fixed_seconds": ("ucm_load_fixed_seconds", "Duration of a load of no bytes."),
}

#: Times -> (name in Prometheus, what is measured).
HISTOGRAMS = {
    LOOKUP_SECONDS: ("ucm_lookup_seconds", "From a request's arrival to its lookup's answer."),
    WAIT_SECONDS: ("ucm_pd_wait_seconds", "What requests waited for a prefill server's blocks."),
    LOAD_SECONDS: ("ucm_load_seconds", "From the beginning of a load to its end, on each rank."),
    DUMP_SECONDS: ("ucm_dump_seconds", "From the beginning of a dump to its end, on each rank."),
}
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Times of each kind kept between two of vLLM's log lines.
_LOGGED = 4 * TIMES


class UcmStats(KVConnectorStats):
    """Counts and times of one interval and the speeds at its end, by name."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    @harmless(None)
    def _add(self, other: Mapping[str, Any]) -> None:
        for name, news in other.items():
            if name in HISTOGRAMS:
                self.data[name] = [*self.data.get(name, ()), *news][:_LOGGED]
            elif name in GAUGES or name.startswith(TIER_NOW):
                self.data[name] = news
            else:
                self.data[name] = self.data.get(name, 0) + news

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These and those of another rank, side or interval."""
        self._add(other.data)
        return self

    @harmless(dict)
    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs: every count that is not zero, missed blocks last; means of times."""
        rest = self.data.keys() - COUNTERS.keys() - HISTOGRAMS.keys() - GAUGES.keys()
        order = [*COUNTERS, *sorted(name for name in rest if not name.startswith(TIER_NOW))]
        shown = {f"ucm {n.replace('.', ' ')}": self.data[n] for n in order if self.data.get(n)}
        for name in HISTOGRAMS:
            if times := self.data.get(name):
                shown[f"ucm mean {name}"] = round(sum(times) / len(times), 4)
        for name in GAUGES:
            if name in self.data:
                shown[f"ucm {name}"] = float(f"{self.data[name]:.4g}")
        return shown

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(value or name.startswith(TIER_NOW) for name, value in self.data.items())


class UcmPromMetrics(KVConnectorPromMetrics):
    """The counters and histograms in Prometheus, by vLLM's own labels; the misses by reason too."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = functools.partial(_metric, metric_types[PrometheusCounter])
        show = functools.partial(
            _metric, metric_types[PrometheusGauge], multiprocess_mode="mostrecent"
        )
        measure = functools.partial(_metric, metric_types[PrometheusHistogram], buckets=BUCKETS)
        labels, by_tier = tuple(labelnames), (*labelnames, "tier")
        missed = make(*MISSED_BLOCKS, (*labels, "reason"))
        unstored = make(*UNSTORED_BLOCKS, (*labels, "reason"))
        self._tier_counters = {key: make(*text, by_tier) for key, text in TIER_COUNTERS.items()}
        self._tier_gauges = {
            key: show(*text, (*by_tier, "half")) for key, text in TIER_GAUGES.items()
        }
        self._values = per_engine_labelvalues
        self._counters: dict[int, dict[str, Any]] = {}
        self._histograms: dict[int, dict[str, Any]] = {}
        self._gauges: dict[int, dict[str, Any]] = {}
        for engine, values in per_engine_labelvalues.items():

            def each(kind: Any, table: Any, values: list[object] = values) -> dict[str, Any]:
                return {key: kind(*text, labels).labels(*values) for key, text in table.items()}

            self._counters[engine] = each(make, COUNTERS)
            for reason in MissReason:
                self._counters[engine][MISSED + reason] = missed.labels(*values, str(reason))
            for why in (BUSY, ENDED, OVERWRITTEN):
                self._counters[engine][UNSTORED + why] = unstored.labels(*values, why)
            self._gauges[engine] = each(show, GAUGES)
            self._histograms[engine] = each(measure, HISTOGRAMS)

    @harmless(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted and measured."""
        counters, gauges, histograms = (
            table.get(engine_idx, {}) for table in (self._counters, self._gauges, self._histograms)
        )
        for name, news in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(news)
            elif name in gauges:
                gauges[name].set(news)
            elif name in histograms:
                for seconds in news:
                    histograms[name].observe(seconds)
            elif engine_idx in self._values:
                self._observe_tier(name, news, self._values[engine_idx])

    def _observe_tier(self, name: str, news: Any, values: list[object]) -> None:
        if name.startswith(TIER_PREFIX):
            key, _, tier = name.removeprefix(TIER_PREFIX).partition(".")
            if key in self._tier_counters:
                self._tier_counters[key].labels(*values, tier).inc(news)
        elif name.startswith(TIER_NOW):
            key, _, rest = name.removeprefix(TIER_NOW).partition(".")
            tier, _, side = rest.rpartition(".")
            if key in self._tier_gauges:
                self._tier_gauges[key].labels(*values, tier, side).set(news)


@functools.cache
def _metric(kind: Any, name: str, text: str, labels: tuple[str, ...], **more: Any) -> Any:
    """A metric, made once per process: a second engine in it adds to the same ones."""
    return kind(name=name, documentation=text, labelnames=list(labels), **more)
