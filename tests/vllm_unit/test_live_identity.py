"""The identity of a running engine when what it stored is to be forgotten."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from toy_engine import BLOCK, ToyEngine

import ucm
from ucm.integration.vllm.compat.versions import installed
from ucm.integration.vllm.connector.identity.engine_identity import LiveIdentity
from ucm.integration.vllm.connector.identity.weights import WeightSource, WeightsReport


def test_forgetting_gives_another_name_until_the_engine_ends(engines: Any, tiny: Path) -> None:
    """A random one: two engines that forget share nothing, and one that is started later has the
    first name again."""
    own = engines.identity_of(tiny)
    unchanged = [WeightsReport(1, True, None, 0)]

    def started() -> LiveIdentity:
        return LiveIdentity(own, WeightSource(str(tiny)), "declared:weights", None)

    engine, other = started(), started()
    before = engine.text()
    assert not engine.update(unchanged)
    names = {before}
    for forgetful in (engine, engine, other):
        forgetful.forget()
        assert forgetful.update(unchanged), "the identity is another one"
        assert not forgetful.update(unchanged), "and stays that"
        names.add(forgetful.text())
    assert len(names) == 4
    assert started().text() == before
    text = json.loads(engine.text() or "")
    assert text.pop("weights").startswith("declared:weights reset:")
    expected = json.loads(before or "")
    expected.pop("weights")
    assert text == expected


def test_other_weights_keep_the_reset_marker_of_the_identity(engines: Any, tiny: Path) -> None:
    engine = LiveIdentity(
        engines.identity_of(tiny), WeightSource(str(tiny)), "declared:weights", None
    )
    engine.forget()
    assert engine.update([WeightsReport(1, False, None, 0)])
    weights = json.loads(engine.text() or "")["weights"]
    assert weights.startswith("private:")
    assert " reset:" in weights


def test_the_log_names_the_versions_and_the_identity(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line each; the identity is that of the namespace on disk."""
    root = tmp_path / "root"
    store = {"storage_backends": str(root), "storage_capacity": "1GiB", "free_space_floor": 0}
    with caplog.at_level(logging.INFO, "ucm"):
        engine = ToyEngine(engines, tiny, monkeypatch, store=store)
        try:
            request = engine.add("a", list(range(2 * BLOCK + 1)), 1)
            engine.until(request.is_finished)
            engine.until(lambda: any(root.glob("*/manifest.json")))
        finally:
            engine.close()
    lines = [record.getMessage() for record in caplog.records]
    begin = f"ucm {ucm.__version__} in vLLM {installed()}: the KV lies on host"
    assert sum(line.startswith(begin) for line in lines) == 1
    named = re.compile("identity of this engine's KV: ([0-9a-f]{64}), weights declared:toy")
    (digest,) = {found[1] for line in lines if (found := named.fullmatch(line))}
    (namespace,) = (path.parent.name for path in root.glob("*/manifest.json"))
    assert digest.startswith(namespace)
