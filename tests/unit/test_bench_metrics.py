"""Figures of a benchmark beside those of a baseline."""

from __future__ import annotations

import math

import pytest

import ucm.bench
from ucm.bench import BenchmarkMetrics, check_performance_regression
from ucm.bench.metrics import BETTER, percentile, summary

BASE = BenchmarkMetrics(1.0, 0.9, 2.0, 0.1, 0.1, 0.2, 1000.0, 10.0, 0.8, 0.05, 0.06, 0.3, 0.7)


def changed(name: str, value: float | None) -> BenchmarkMetrics:
    return BenchmarkMetrics(**{**vars(BASE), name: value})


def test_the_same_figures_are_no_regression() -> None:
    assert check_performance_regression(BASE, BASE, 0.0) == {}


@pytest.mark.parametrize("name", BETTER)
def test_a_figure_is_worse_beyond_the_threshold(name: str) -> None:
    value, sign = getattr(BASE, name), 1 if BETTER[name] == "less" else -1
    assert check_performance_regression(changed(name, value * (1 + sign * 0.09)), BASE) == {}
    worse = check_performance_regression(changed(name, value * (1 + sign * 0.2)), BASE)
    assert list(worse) == [name]
    assert worse[name]["regression"] == pytest.approx(0.2)
    assert worse[name]["baseline"] == value
    assert check_performance_regression(changed(name, value * (1 - sign * 0.5)), BASE) == {}
    assert check_performance_regression(changed(name, value * (1 + sign * 0.2)), BASE, 0.3) == {}


def test_what_was_not_measured_is_not_compared() -> None:
    assert check_performance_regression(changed("hit_rate", None), BASE) == {}
    assert check_performance_regression(BASE, changed("load_time_mean", None)) == {}
    assert check_performance_regression(BASE, changed("tpot_mean", 0.0)) == {}


def test_figures_are_read_from_a_document() -> None:
    document = {"metrics": vars(BASE) | {"later": 1}, "scenario": {}}
    assert BenchmarkMetrics.from_json(document) == BASE
    assert BenchmarkMetrics.from_json(vars(BASE)) == BASE
    for wrong in ({}, {"metrics": 3}, {"metrics": {"ttft_mean": 1}}):
        with pytest.raises(ValueError, match="no figures"):
            BenchmarkMetrics.from_json(wrong)


def test_percentiles() -> None:
    values = [float(value) for value in range(100, -1, -1)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [0, 50, 99, 100]
    assert percentile([1.0, 2.0], 75) == 1.75
    assert summary([3.0]) == (3.0, 3.0, 3.0)
    assert math.isnan(percentile([], 50))


def test_the_names_of_the_original_are_there() -> None:
    assert ucm.bench.BenchmarkMetrics is BenchmarkMetrics
    assert ucm.bench.check_performance_regression is check_performance_regression
