"""The drawing of ``tools/panels.py``, on answers that are made up. ``tests/metrics`` has it on
those of a real Prometheus."""

from __future__ import annotations

import re
from typing import Any

import panels
import pytest
from panels import Answers, Series

#: Places of the plot of a panel of half a row, in its own pixels.
LEFT, RIGHT, UPPER, LOWER = 58, 388, 30, 112


def drawn(kind: str, *series: Series, **defaults: Any) -> str:
    """A panel with these series over a minute."""
    panel = {
        "id": 1,
        "type": kind,
        "title": "A < B",
        "description": "Only with C.",
        "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": "short", "custom": {}} | defaults},
    }
    board = {"title": "Board & more", "panels": [panel]}
    return panels.picture(board, Answers(0, 60, {1: series}))


def lines(text: str) -> list[str]:
    """The lines of the series, without those of axes."""
    return re.findall(r'<path d="([^"]+)" fill="none" stroke="#\w+" stroke-width="1.5"', text)


def test_a_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    text = drawn("timeseries", Series("a & b", [(0, 0), (60, 4)]))
    assert lines(text) == [f"M{LEFT} {LOWER}L{RIGHT} {UPPER}"]
    assert "<title>Board &amp; more</title>" in text
    assert ">A &lt; B</text>" in text
    assert ">a &amp; b</text>" in text
    assert re.findall(r'text-anchor="end"[^>]*>([^<]+)', text) == ["0", "1", "2", "3", "4"]
    assert re.findall(r">([^<]+) min<", text) == ["-0.2", "-0.4", "-0.6", "-0.8", "-1"]


def test_the_axis_ends_where_the_panel_says_or_at_a_round_number() -> None:
    series = Series("a", [(0, 0.5), (60, 0.7)])
    (line,) = lines(drawn("timeseries", series, max=1))
    assert line == f"M{LEFT} 71L{RIGHT} 54.6"
    top = re.findall(r'text-anchor="end"[^>]*>([^<]+)', drawn("timeseries", series))[-1]
    assert top == "0.8"
    assert lines(drawn("timeseries", Series("a", [(0, 0), (60, 0)]))) == [
        f"M{LEFT} {LOWER}L{RIGHT} {LOWER}"
    ]


def test_a_missing_value_is_a_gap_and_a_single_one_is_seen() -> None:
    points = [(0, 4), (15, 4), (45, 2), (60, 2)]
    one, two = lines(drawn("timeseries", Series("a", points, step=15)))
    assert (one, two) == (f"M{LEFT} {UPPER}L140 {UPPER}", f"M306 71L{RIGHT} 71")
    assert lines(drawn("timeseries", Series("a", [(60, 4)]))) == [f"M{RIGHT} {UPPER}h1"]


def test_points_between_two_of_the_same_height_are_left_out() -> None:
    points = [(0, 2), (15, 2), (30, 2), (45, 2), (60, 4)]
    assert lines(drawn("timeseries", Series("a", points))) == [f"M{LEFT} 71L306 71L{RIGHT} {UPPER}"]


def test_stacked_series_stand_on_those_before_them() -> None:
    series = [Series("a", [(0, 1), (60, 1)]), Series("b", [(0, 1), (60, 3)])]
    text = drawn("timeseries", *series, custom={"stacking": {"mode": "normal"}})
    above, below = lines(text)
    assert (above, below) == (f"M{LEFT} 71L{RIGHT} {UPPER}", f"M{LEFT} 91.5L{RIGHT} 91.5")
    assert f'd="{above}L{RIGHT} {LOWER}L{LEFT} {LOWER}Z"' in text


def test_a_panel_without_series_says_what_it_is_for() -> None:
    text = drawn("timeseries")
    assert ">No data</text>" in text
    assert ">Only with C.</text>" in text


def test_shares_of_a_pie_are_parts_of_a_circle() -> None:
    text = drawn("piechart", Series("a", [(0, 3)]), Series("b", [(0, 1)]), Series("c", [(0, 0)]))
    first, second = re.findall(r'd="(M[^"]+)Z"', text)
    x, radius = 200, 33  # from the top to the left, then to the top again
    assert first == f"M{x}.0 30.0A33.0 33.0 0 1 1 {x - radius}.0 63.0L200.0 63.0"
    assert second == f"M{x - radius}.0 63.0A33.0 33.0 0 0 1 {x}.0 30.0L200.0 63.0"
    assert re.findall(r'text-anchor="end">([^<]+)', text) == ["3", "1", "0"]
    assert "<circle" in drawn("piechart", Series("a", [(0, 3)]))


def test_a_gauge_ends_at_its_share() -> None:
    half = drawn("gauge", Series("", [(0, 0.5)]), max=1, unit="percentunit")
    end = 'A48.0 48.0 0 0 1 200.0 52.0" fill="none" stroke='
    assert f'{end}"{panels.COLOURS[0]}"' in half
    assert ">50 %</text>" in half


def test_a_table_has_labels_and_shortens_the_longest() -> None:
    text = drawn("table", Series("", [(0, 1)], {"identity": "e" * 99, "tiers": "posix"}))
    assert re.findall(r'<text x="\d+" y="\d+"[^>]*>([^<]+)', text)[1:] == [
        "identity", "tiers", "Value", "e" * 43 + "…", "posix", "1",
    ]  # fmt: skip


def test_values_of_a_stat_have_their_names() -> None:
    series = Series("block", [(0, 0.25)]), Series("prefix", [(0, 1)])
    text = drawn("stat", *series, unit="percentunit")
    assert re.findall(r'middle"[^>]*>([^<]+)', text) == ["block", "25 %", "prefix", "100 %"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1234, "percentunit", "12.3 %"),
        (50, "percent", "50 %"),
        (0, "s", "0 s"),
        (0.00025, "s", "250 µs"),
        (0.0123, "s", "12.3 ms"),
        (90, "s", "90 s"),
        (1536, "bytes", "1.5 KiB"),
        (999.9, "Bps", "1 kB/s"),
        (2_500_000, "Bps", "2.5 MB/s"),
        (0.5, "cps", "0.5 c/s"),
        (1234, "short", "1.23 K"),
        (999, "short", "999"),
        (7, "of another", "7"),
    ],
)
def test_a_value_has_three_digits_and_its_unit(value: float, unit: str, text: str) -> None:
    assert panels.written(value, unit) == text


@pytest.mark.parametrize("colour", [*panels.COLOURS, panels.INK, panels.PALE])
def test_every_colour_is_read_on_the_ground(colour: str) -> None:
    """The contrast that WCAG requires of text, 4.5."""

    def light(text: str) -> float:
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        parts = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    assert (light(panels.GROUND) + 0.05) / (light(colour) + 0.05) >= 4.5
