"""The connector's counters, in vLLM's log line and Prometheus registry, through vLLM's hooks for
statistics.

:class:`MissStats` counts the requested blocks, each once, per request and per
process. A request *asked* for the full blocks that vLLM's own cache does not hold, when it is
admitted and again after a preemption. Each is either part of the *hit* that was claimed or *missed*
for one reason. A block of the hit is later *loaded*, or missed for the reason of its failed load.
So once no load is under way::

    asked = loaded + missed        asked = hit + what was missed without a load

Each side passes its news to vLLM as one flat dictionary: counts are whole numbers, times are short
lists of seconds (:mod:`ucm.metrics.names` has the names). The counters of tiers are named
``tier.<counter>.<tier>``, their sizes and health ``tier_now.<gauge>.<tier>.<side>``, the counters
of sparse attention, added up over all ranks, ``sparse.<counter>``. vLLM adds up ranks and sides and
carries the result to the process that logs and exports. With several API servers each result goes
to one of them. So a share or a size is computed here, where its counters are whole, and the newest
value counts. Nothing here raises into vLLM.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client import Histogram as PrometheusHistogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ucm.integration.vllm.connector.guard import harmless, logger
from ucm.logger import in_units
from ucm.metrics import names
from ucm.reasons import FAULTS, MissReason
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
        self._admitted, self._admitted_hits = 0, 0
        self._news: defaultdict[str, float] = defaultdict(int)  # since the last take()
        self._recent: Counter[str] = Counter()  # since the last summary
        self._times: dict[str, list[float]] = {}  # by name, since the last take()
        self.next_summary = now + SUMMARY_S
        self._unlogged = {"offered", names.LOADED, names.PUBLISHED}  # what has not happened yet
        self._bypassed: dict[str, MissReason] = {}  # by request, until it is admitted

    # What happened
    # ------------------------------------------------------------------------------------------

    def asked(self, tally: Tally, hit: int, missed: Mapping[MissReason, int]) -> None:
        """A request was admitted, with ``hit`` blocks to be loaded."""
        blocks = hit + sum(missed.values())
        for each in (tally, self.total):
            each.asked += blocks
            each.hit += hit
        self._count(names.ASKED, blocks)
        self._count(names.HIT, hit)
        self._admitted += bool(blocks)
        self._admitted_hits += bool(hit)
        self._count(names.ASKED_REQUESTS, int(blocks > 0))
        self._count(names.HIT_REQUESTS, int(hit > 0))
        for reason, count in missed.items():
            self.missed(tally, reason, count)

    def missed(self, tally: Tally, reason: MissReason, blocks: int) -> None:
        """``blocks`` of a request are absent, or were not loaded."""
        name = str(reason)
        if blocks > 0:
            tally.missed[name] += blocks
            self.total.missed[name] += blocks
            self._count(names.MISSED + name, blocks)

    def declined(self, blocks: int) -> None:
        """``blocks`` of those missed belong to hits that were declined."""
        if blocks > 0:
            self._news[names.DECLINED_TOKENS] += blocks * self._block_tokens

    def loaded(self, tally: Tally, blocks: int) -> None:
        """``blocks`` of a hit were loaded on every rank."""
        tally.loaded += blocks
        self.total.loaded += blocks
        self._count(names.LOADED, blocks)
        speed = self._rates().get("prefill_tokens_per_second") if blocks else None
        if speed:
            self._news[names.SAVED_SECONDS] += blocks * self._block_tokens / speed
        text = "the first load: %d blocks, %d tokens were not computed"
        self._log_first(names.LOADED, blocks, text)

    def blended(self, reused: int, computed: int, missed: int) -> None:
        """The workers put chunks of other prompts into a request, in tokens."""
        self._news[names.BLEND_HIT] += reused + computed
        self._news[names.BLEND_COMPUTED] += computed
        self._news[names.BLEND_MISSED] += missed

    def looked_up(self, seconds: float) -> None:
        """The store answered a lookup after ``seconds``."""
        self._timed(names.LOOKUP_SECONDS, seconds)

    def waited(self, seconds: float) -> None:
        """A request waited for its producer's blocks."""
        self._timed(names.WAIT_SECONDS, seconds)

    def _timed(self, name: str, seconds: float) -> None:
        times = self._times.setdefault(name, [])
        if len(times) < TIMES:
            times.append(seconds)

    def bypassed(self, request: Request, reason: MissReason) -> None:
        """A request is neither looked up nor stored; it is counted when it is admitted."""
        self._bypassed[request.request_id] = reason

    @harmless(None)
    def admitted(self, request: Request, local: int) -> None:
        """A request was admitted with ``local`` tokens on the device, or ended before."""
        if (reason := self._bypassed.pop(request.request_id, None)) is not None:
            tally, size = Tally(), self._block_tokens
            blocks = request.num_tokens // size - local // size
            self.asked(tally, 0, {reason: blocks} if blocks > 0 else {})
            self.ended(request, tally)

    def ended(self, request: Request, tally: Tally) -> None:
        """A request ended: it is counted, and has a line in the log."""
        failed = any(reason in FAULTS for reason in tally.missed)
        self._news[names.REQUESTS + (names.ERROR if failed else names.SUCCESS)] += 1
        logger.debug(
            "request %s: %d prompt tokens, %s", request.request_id, request.num_prompt_tokens, tally
        )

    def offered(self, tally: Tally, blocks: int) -> None:
        """``blocks`` of a request are being dumped."""
        tally.offered += blocks
        self.total.offered += blocks
        self._log_first("offered", blocks, "the first blocks go to the store: %d blocks, %d tokens")

    def dumped(self, published: int, failed: int) -> None:
        """Blocks that every rank published, and blocks that some rank did not."""
        self._count(names.PUBLISHED, published)
        text = "the first blocks are stored: %d blocks, %d tokens can be loaded now"
        self._log_first(names.PUBLISHED, published, text)
        self._count(names.UNPUBLISHED, failed)

    def _log_first(self, name: str, blocks: int, text: str) -> None:
        """One line in an engine's life, so that its user sees that it works."""
        if blocks > 0 and name in self._unlogged:
            self._unlogged.discard(name)
            logger.info(text, blocks, blocks * self._block_tokens)

    def unstored(self, reason: str, blocks: int) -> None:
        """These blocks were not stored for want of staging."""
        self._count(names.UNSTORED + reason, blocks)

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
        if self.total.asked:
            news["block_hit_rate"] = self.total.hit / self.total.asked
            news["prefix_hit_rate"] = self._admitted_hits / self._admitted
        self._news, self._times = defaultdict(int), {}
        return news

    def summary(self, now: float, block_bytes: int) -> None:
        """Log what was counted since the last summary; ``block_bytes`` is a block of all ranks."""
        self.next_summary = now + SUMMARY_S
        recent, self._recent = self._recent, Counter()
        if not recent:
            return
        missed = {
            name[len(names.MISSED) :]: n
            for name, n in recent.items()
            if name.startswith(names.MISSED)
        }
        loaded, published = recent[names.LOADED], recent[names.PUBLISHED]
        logger.info(
            "%d blocks looked up, %d hit, %d loaded (%s); missed: %s; %d published (%s), %d not",
            recent[names.ASKED],
            recent[names.HIT],
            loaded,
            in_units(loaded * block_bytes),
            format_counts(missed) if missed else "none",
            published,
            in_units(published * block_bytes),
            recent[names.UNPUBLISHED],
        )


# Tiers of a store
# --------------------------------------------------------------------------------------------------

#: The side that is no rank.
SCHEDULER = "scheduler"
#: Seconds between two readings of a store's counters: a step is shorter.
EVERY = 1.0


class TierCounts:
    """What is new of one store's tiers."""

    def __init__(self, clock: Callable[[], float], side: str) -> None:
        """``side`` that counts: :data:`SCHEDULER` or the number of the rank."""
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
        return {name: value for tier in tiers for name, value in self._news(tier)} | dict(
            self._memory(tiers)
        )

    def _news(self, tier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for counter in names.TIER_COUNTERS:
            name, count = f"{names.TIER_PREFIX}{counter}.{tier['name']}", int(tier[counter])
            before = self._reported.get(name, 0)
            self._reported[name] = count
            if count > before:
                yield name, count - before
        for gauge in names.TIER_GAUGES:
            if self._side == SCHEDULER and gauge.endswith("_bytes"):
                continue  # its store is for lookups alone and counts no bytes
            name, value = f"{names.TIER_NOW}{gauge}.{tier['name']}.{self._side}", int(tier[gauge])
            if self._reported.get(name) != value:
                self._reported[name] = value
                yield name, value

    def _memory(self, tiers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
        """The bytes of this rank's memory tier; the first rank counts what is below it too."""
        held = {True: 0, False: 0}
        for tier in tiers:
            held[bool(tier.get("memory"))] += int(tier["used_bytes"])
        kept = {"cpu": self._side != SCHEDULER, "external": self._side == "0"}
        for location, counts in kept.items():
            name, value = f"{names.MEMORY_NOW}{location}.{self._side}", held[location == "cpu"]
            if counts and self._reported.get(name) != value:
                self._reported[name] = value
                yield name, value


class StoreInfo:
    """Whether the text about the store in use has changed."""

    def __init__(self) -> None:
        self._reported = ""

    def take(self, text: str) -> dict[str, int]:
        """1 for a new text and 0 for the one before, once."""
        before, self._reported = self._reported, text
        if text == before:
            return {}
        return {names.INFO + one: value for one, value in ((before, 0), (text, 1)) if one}


# Sparse attention
# --------------------------------------------------------------------------------------------------


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
        news = {
            name: found.get(name, 0) - self._reported.get(name, 0) for name in names.SPARSE_COUNTERS
        }
        self._reported = found
        # Counters only grow; what was measured before the first request is taken back.
        grown = {
            names.SPARSE_PREFIX + name: round(count, 6) for name, count in news.items() if count > 0
        }
        if grown and (seen := found.get("blocks_seen")):
            grown[names.RATIO] = found.get("blocks_kept", 0) / seen
        return grown


# vLLM's log line and Prometheus
# --------------------------------------------------------------------------------------------------

_SPARSE = {names.SPARSE_PREFIX + key: series for key, series in names.SPARSE_COUNTERS.items()}
#: Times of each kind kept between two of vLLM's log lines.
_LOGGED = 4 * TIMES


#: What takes the values of one name.
Sinks: TypeAlias = tuple[Callable[[Any], None], ...]


def _is_newest(name: str) -> bool:
    """Whether the newest value of a name counts; others are added up."""
    if name in names.GAUGES or name in names.SHARES or name in (names.RATIO, names.AT):
        return True
    return name.startswith((names.TIER_NOW, names.MEMORY_NOW, names.INFO))


class UcmStats(KVConnectorStats):
    """Counts and times of one interval and the speeds at its end, by name."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    @harmless(None)
    def _add(self, other: Mapping[str, Any]) -> None:
        for name, news in other.items():
            if name in names.HISTOGRAMS:
                self.data[name] = [*self.data.get(name, ()), *news][:_LOGGED]
            elif _is_newest(name):
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
        named = {*names.COUNTERS, *_SPARSE, *names.HISTOGRAMS}
        rest = (name for name in self.data if name not in named and not _is_newest(name))
        order = [*names.COUNTERS, *_SPARSE, *sorted(rest)]
        shown = {
            f"ucm {name.replace('.', ' ')}": round(self.data[name], 3)
            for name in order
            if self.data.get(name)
        }
        for name in names.HISTOGRAMS:
            if times := self.data.get(name):
                shown[f"ucm mean {name}"] = round(sum(times) / len(times), 4)
        for name in names.GAUGES:
            if name in self.data:
                shown[f"ucm {name}"] = float(f"{self.data[name]:.4g}")
        return shown

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        found = (name for name, value in self.data.items() if value or _is_newest(name))
        return all(name == names.AT for name in found)


class UcmPromMetrics(KVConnectorPromMetrics):
    """The series in Prometheus, by vLLM's own labels. What a label's values are before the first
    request is there from the start, at 0."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        sparse: bool = True,
    ) -> None:
        """``sparse``: whether the series of sparse attention are of use."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = tuple(labelnames)
        self._counter = functools.partial(_metric, metric_types[PrometheusCounter])
        self._gauge = functools.partial(
            _metric, metric_types[PrometheusGauge], multiprocess_mode="mostrecent"
        )
        self._histogram = functools.partial(_metric, metric_types[PrometheusHistogram])
        self._values = per_engine_labelvalues
        self._sparse, self._at = sparse, 0.0
        #: By engine and name: what takes a value.
        self._sinks = {
            engine: dict(self._known(values)) for engine, values in per_engine_labelvalues.items()
        }

    def _made(self, kind: Any, series: names.Series, values: list[object], **more: str) -> Any:
        """The child of a metric for these values of vLLM's labels and of its own."""
        return kind(*series, (*self._labels, *more)).labels(*values, *more.values())

    def _latest(self, series: names.Series, values: list[object], **more: str) -> Any:
        """Sets a gauge as of its report's time: of the API servers that share its file the one with
        the newest report counts, whichever reads its report last."""
        gauge = self._made(self._gauge, series, values, **more)
        value = getattr(gauge, "_value", None)
        if value is None:  # not prometheus_client's
            return gauge.set
        return lambda number: value.set(float(number), timestamp=self._at)

    def _known(
        self, values: list[object]
    ) -> Iterator[tuple[str, tuple[Callable[[Any], None], ...]]]:
        """The series whose labels' values are known."""
        made, counter, latest = self._made, self._counter, self._latest
        for key, series in (names.COUNTERS | (_SPARSE if self._sparse else {})).items():
            yield key, (made(counter, series, values).inc,)
        for reason in MissReason:
            missed = made(counter, names.MISSED_BLOCKS, values, reason=str(reason))
            yield names.MISSED + reason, (missed.inc,)
        for why in (names.BUSY, names.ENDED, names.OVERWRITTEN):
            unstored = made(counter, names.UNSTORED_BLOCKS, values, reason=why)
            yield names.UNSTORED + why, (unstored.inc,)
        for status in (names.SUCCESS, names.ERROR):
            ended = made(counter, names.REQUESTS_TOTAL, values, status=status)
            yield names.REQUESTS + status, (ended.inc,)
        for key, series in names.GAUGES.items():
            yield key, (latest(series, values),)
        for key, (series, label, value) in names.SHARES.items():
            sinks = [latest(series, values, **{label: value})]
            if key == "block_hit_rate":
                sinks.append(latest(names.KV_CACHE_HIT_RATE, values))
            yield key, tuple(sinks)
        if self._sparse:
            yield names.RATIO, (latest(names.SPARSE_RATIO, values),)
        fewer = functools.partial(self._histogram, buckets=names.LATENCY_BUCKETS)
        every = functools.partial(self._histogram, buckets=names.BUCKETS)
        for key, series in names.HISTOGRAMS.items():
            kinds = [made(every, series, values)]
            if key in names.LATENCIES:
                same, operation = names.LATENCIES[key]
                kinds.append(made(fewer, same, values))
                kinds.append(made(fewer, names.IO_LATENCY, values, operation=operation))
            yield key, tuple(_each(kind.observe) for kind in kinds)

    def _late(self, name: str, values: list[object]) -> Sinks:
        """The series of a tier or a side, which a report names first."""
        if name.startswith(names.TIER_PREFIX):
            key, _, tier = name.removeprefix(names.TIER_PREFIX).partition(".")
            if key in names.TIER_COUNTERS:
                series = names.TIER_COUNTERS[key]
                return (self._made(self._counter, series, values, tier=tier).inc,)
        elif name.startswith(names.TIER_NOW):
            key, _, rest = name.removeprefix(names.TIER_NOW).partition(".")
            tier, _, side = rest.rpartition(".")
            if key in names.TIER_GAUGES:
                for counted in names.TIER_COUNTERS.values():  # from 0, so that a first one is seen
                    self._made(self._counter, counted, values, tier=tier)
                series = names.TIER_GAUGES[key]
                return (self._latest(series, values, tier=tier, side=side),)
        elif name.startswith(names.MEMORY_NOW):
            location, _, side = name.removeprefix(names.MEMORY_NOW).partition(".")
            labels = {"location": location, "side": side}
            return (self._latest(names.MEMORY_USAGE, values, **labels),)
        elif name.startswith(names.INFO):
            texts = name.removeprefix(names.INFO).split("|")
            labels = dict(zip(names.INFO_LABELS, texts, strict=True))
            return (self._latest(names.INFO_GAUGE, values, **labels),)
        return ()

    @harmless(None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine counted and measured."""
        if engine_idx not in self._values:
            return
        sinks, self._at = self._sinks[engine_idx], transfer_stats_data.get(names.AT) or time.time()
        for name, news in transfer_stats_data.items():
            if name not in sinks:
                sinks[name] = self._late(name, self._values[engine_idx])
            for sink in sinks[name]:
                sink(news)


def _each(observe: Callable[[float], None]) -> Callable[[Sequence[float]], None]:
    """Takes a list of times."""

    def sink(times: Sequence[float]) -> None:
        for seconds in times:
            observe(seconds)

    return sink


@functools.cache
def _metric(kind: Any, name: str, text: str, labels: tuple[str, ...], **more: Any) -> Any:
    """A metric, made once per process: a second engine in it adds to the same ones."""
    return kind(name=name, documentation=text, labelnames=list(labels), **more)
