"""docs/metrics.md lists the series of :mod:`ucm.metrics.names`, each once."""

from __future__ import annotations

from collections import Counter

import metric_names

from ucm.metrics.names import rows


def test_the_page_is_what_the_names_are() -> None:
    text = metric_names.PAGE.read_text()
    assert metric_names.written(text) == text, "run: python tools/metric_names.py"


def test_every_name_stands_once() -> None:
    names = Counter(row.name for _, found in rows() for row in found)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_text_is_sentences() -> None:
    for _, found in rows():
        for row in found:
            assert row.text.endswith("."), row.name
            assert row.text[0].isupper() or row.text.startswith(("ucm_", "1 ")), row.name
