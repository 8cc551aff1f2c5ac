"""The figures of a benchmark, when they are worse than a baseline, and ratios of pairs of runs.

A *ratio* is computed within a pair, so that other load affects both sides. It is above 1 if the
second side is better, whether more or less is better. The interval of several ratios is that of
the *sign test*: the k-th lowest and the k-th highest ratio, with the largest k for which a fair
coin falls to one side fewer than k times in n throws in at most 5 of 100 cases, both sides
together. It is valid for every distribution; with fewer than six pairs there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

CONFIDENCE = 0.95

Better = Literal["more", "less"]


@dataclass
class BenchmarkMetrics:
    """The figures of one run. Times are seconds; None is a figure that was not measured."""

    #: Time to the first token, as the client sees it.
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    #: Time of each further token of a request.
    tpot_mean: float
    tpot_p50: float
    tpot_p99: float
    #: Tokens of prompts and answers a second.
    throughput: float
    requests_per_second: float
    #: Share of the tokens of prompts that were found in a cache, on the device or in a store.
    hit_rate: float | None = None
    #: Means of the connector's loads and dumps.
    load_time_mean: float | None = None
    dump_time_mean: float | None = None
    #: Share of the blocks that sparse attention read.
    sparse_ratio: float | None = None
    #: Share of the KV that sparse attention keeps away from the device; not measured by ucm.
    memory_saved: float | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """From a document of ``ucm bench vllm --json``, or from its part ``metrics``. Raises
        :class:`ValueError`."""
        part = document.get("metrics", document)
        known = {one.name for one in fields(cls)}
        try:
            return cls(**{name: value for name, value in part.items() if name in known})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"these are no figures of `ucm bench vllm`: {error}") from None


#: For each figure that has one, the direction that is better.
BETTER: Mapping[str, Better] = {
    "ttft_mean": "less",
    "ttft_p50": "less",
    "ttft_p99": "less",
    "tpot_mean": "less",
    "tpot_p50": "less",
    "tpot_p99": "less",
    "throughput": "more",
    "requests_per_second": "more",
    "hit_rate": "more",
    "load_time_mean": "less",
    "dump_time_mean": "less",
    "memory_saved": "more",
}


def check_performance_regression(
    current: BenchmarkMetrics, baseline: BenchmarkMetrics, threshold: float = 0.1
) -> dict[str, dict[str, float]]:
    """The figures that are worse than the baseline by more than this share of it.

    For each of them ``current``, ``baseline`` and ``regression``, the share by which it is worse. A
    figure that either run lacks, or that is 0 in the baseline, is not compared.
    """
    worse = {}
    for name, better in BETTER.items():
        now, before = getattr(current, name), getattr(baseline, name)
        if now is None or not before:
            continue
        change = (now - before if better == "less" else before - now) / before
        if change > threshold:
            worse[name] = {"current": now, "baseline": before, "regression": change}
    return worse


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which this share of the values lies, interpolated; NaN without values."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    if not ordered:
        return math.nan
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, median and 99th percentile; NaN without values."""
    mean = statistics.fmean(values) if values else math.nan
    return mean, percentile(values, 50), percentile(values, 99)


def ratio(old: float, new: float, better: Better) -> float:
    """The ratio of the new one to the old one, above 1 if better; 1 if both are zero."""
    above, below = (new, old) if better == "more" else (old, new)
    if below == 0:
        return 1.0 if above == 0 else math.inf
    return above / below


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The interval of the median with at least that confidence; None with too few values."""
    count = len(values)
    outside, rank = 0.0, 0
    # outside: that at most `rank` of the values lie on one side of the median, and on the other
    while rank < count:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - confidence:
            break
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]
