"""The conclusions of ``benches/python/beside.py`` from invented figures."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "benches" / "python" / "paired.py"


@pytest.fixture(scope="module")
def paired() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_paired", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_above_one_where_the_new_one_is_better(paired: ModuleType) -> None:
    assert paired.ratio(2.0, 3.0, "more") == 1.5
    assert paired.ratio(3.0, 2.0, "less") == 1.5
    assert paired.ratio(2.0, 1.0, "more") == 0.5


def test_nothing_beside_nothing_is_as_good(paired: ModuleType) -> None:
    assert paired.ratio(0.0, 0.0, "less") == 1.0
    assert paired.ratio(1.0, 0.0, "less") == math.inf
    assert paired.ratio(0.0, 1.0, "less") == 0.0
    assert paired.ratio(0.0, 1.0, "more") == math.inf


#: The number of values outside on either side, from tables of the sign test, for 95 %.
@pytest.mark.parametrize(
    ("count", "outside"),
    [(6, 0), (7, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (25, 7), (40, 13)],
)
def test_the_interval_is_that_of_the_sign_test(
    paired: ModuleType, count: int, outside: int
) -> None:
    values = [float(value) for value in range(count)]
    random.Random(count).shuffle(values)
    assert paired.interval(values) == (outside, count - 1 - outside)


@pytest.mark.parametrize("count", range(6))
def test_too_few_pairs_have_no_interval(paired: ModuleType, count: int) -> None:
    assert paired.interval([1.0] * count) is None
    if count:
        assert paired.judged([0.1] * count) == "not judged"


def test_the_interval_covers_the_median_as_often_as_it_says(paired: ModuleType) -> None:
    source = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = paired.interval([source.lognormvariate(0.0, 0.3) for _ in range(9)])
        hits += low <= 1.0 <= high
    assert hits / 2000 > 0.95


def test_a_row_fails_when_all_of_its_interval_is_below(paired: ModuleType) -> None:
    assert paired.judged([0.90, 0.91, 0.92, 0.93, 0.94, 0.90, 0.91]) == "fails"


def test_a_row_is_unsure_when_only_its_median_is_below(paired: ModuleType) -> None:
    assert paired.judged([0.90, 0.91, 0.92, 0.93, 0.94, 0.90, 0.96]) == "unsure"
    assert paired.judged([0.90, 0.91, 0.92, 0.93, 0.94, 0.90, 0.95]) == "unsure"


def test_one_bad_pair_of_many_fails_nothing(paired: ModuleType) -> None:
    assert paired.judged([0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == "holds"


def test_more_pairs_say_more(paired: ModuleType) -> None:
    seen = [0.90, 0.91, 0.92, 0.93, 0.94, 0.90, 0.96]
    assert (paired.judged(seen), paired.judged(seen * 3)) == ("unsure", "fails")


def test_a_row_takes_its_ratios_pair_by_pair(paired: ModuleType) -> None:
    row = paired.Row(
        "lookup, absent", "files", "us an id", "less", (1.0, 2.0, 4.0), (1.0, 4.0, 4.0)
    )
    assert row.ratios == [1.0, 0.5, 1.0]
    kept = row.as_json()
    assert (kept["median"], kept["interval"], kept["verdict"]) == (1.0, None, "not judged")
    assert statistics.median(row.old) == 2.0


def test_the_table_shows_what_fails(paired: ModuleType) -> None:
    slow = paired.Row("load", "files, 256 KiB", "GB/s", "more", (2.0,) * 7, (1.0,) * 7)
    fast = paired.Row("idle, wake-ups", "Cache|Posix", "a second", "less", (2.0,) * 7, (1.0,) * 7)
    lines = paired.table([slow, fast]).splitlines()
    assert (
        lines[2] == "| load | files, 256 KiB | 2 | 1 | GB/s | 0.500 | 0.500 to 0.500 | **fails** |"
    )
    assert (
        lines[3]
        == "| idle, wake-ups | Cache\\|Posix | 2 | 1 | a second | 2.000 | 2.000 to 2.000 | holds |"
    )
