"""Which end-to-end tests run: by stage, feature and platform."""

from __future__ import annotations

import pytest


def stages(text: str) -> range:
    """``2``, ``0-2`` or ``1+``. Raises :class:`pytest.UsageError`."""
    first, dash, last = text.removesuffix("+").partition("-")
    try:
        low = int(first)
        high = 99 if text.endswith("+") else int(last) if dash else low
    except ValueError:
        raise pytest.UsageError(f"--stage {text}: write 2, 0-2 or 1+") from None
    return range(low, high + 1)


def why_not(
    item: pytest.Item, wanted: range | None, features: list[str], platform: str
) -> str | None:
    """The reason not to run a test, or None. A test without ``platform`` runs on each."""
    stage, feature = item.get_closest_marker("stage"), item.get_closest_marker("feature")
    if wanted is not None and (stage is None or stage.args[0] not in wanted):
        return "another stage"
    if features and (feature is None or not set(feature.args) & set(features)):
        return "another feature"
    on = item.get_closest_marker("platform")
    return None if on is None or platform in on.args else f"only on {', '.join(on.args)}"
