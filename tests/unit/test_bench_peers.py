"""The report of ``make bench-peers``, from invented figures, without peers and stores."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benches" / "peers"
OURS, SEGMENTS, FAST, SLOW = "ucm, files", "ucm, segments", "a fast peer", "a slow peer"
SLOT = "ucm, files, to the slot"
NAMES = [OURS, SEGMENTS, SLOT, FAST, SLOW]
QUARTER = 256 << 10


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_peers_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return imported("results")


def one(
    dump: float, load: float = 1.0, present: float | None = 2.0, absent: float | None = 1.0
) -> dict[str, Any]:
    return {"dump": dump, "load": load, "lookup_present": present, "lookup_absent": absent}


@pytest.fixture
def rounds() -> dict[Any, Any]:
    case = (QUARTER, "buffered")
    return {
        (case, OURS): [one(2.0), one(4.0), one(3.0)],
        (case, FAST): [one(1.0, present=None, absent=None), one(1.0, present=None, absent=None)]
        * 2,
        (case, SLOW): [one(0.5, present=4.0), one(0.5, present=4.0), one(0.5, present=4.0)],
    }


def find(rows: Any, operation: str, arm: str) -> Any:
    return next(row for row in rows if (row.operation, row.arm) == (operation, arm))


def test_ratios_are_taken_round_by_round(results: ModuleType, rounds: dict[Any, Any]) -> None:
    rows = results.rows(rounds, [OURS, SEGMENTS], NAMES)
    ours = find(rows, "dump", OURS)
    assert (ours.median, ours.rounds) == (3.0, [2.0, 4.0, 3.0])
    assert (ours.to_ours, ours.to_best, ours.best) == (1.0, 3.0, FAST)
    slow = find(rows, "dump", SLOW)
    assert slow.to_best == 0.5
    assert slow.to_ours == pytest.approx(0.5 / 3)


def test_a_lookup_that_takes_less_is_faster(results: ModuleType, rounds: dict[Any, Any]) -> None:
    rows = results.rows(rounds, [OURS, SEGMENTS], NAMES)
    ours = find(rows, "lookup_present", OURS)
    assert ours.best == SLOW, "a peer without lookup is no peer here"
    assert ours.to_best == 2.0
    assert not [row for row in rows if row.operation == "lookup_present" and row.arm == FAST]


def test_an_arm_that_missed_a_round_has_no_figure(
    results: ModuleType, rounds: dict[Any, Any]
) -> None:
    rounds[((QUARTER, "buffered"), SLOW)][1]["dump"] = None
    rows = results.rows(rounds, [OURS, SEGMENTS], NAMES)
    assert not [row for row in rows if row.operation == "dump" and row.arm == SLOW]


def test_ratios_without_a_peer_or_without_ucm(results: ModuleType) -> None:
    case = (QUARTER, "direct")
    (alone, *_) = results.rows({(case, OURS): [one(2.0)]}, [OURS, SEGMENTS], NAMES)
    assert (alone.to_best, alone.best, alone.to_ours) == (None, None, 1.0)
    (peer, *_) = results.rows({(case, FAST): [one(2.0)]}, [OURS, SEGMENTS], NAMES)
    assert (peer.to_best, peer.to_ours) == (1.0, None)


def test_goals_say_what_could_not_be_measured(results: ModuleType, rounds: dict[Any, Any]) -> None:
    rows = results.rows(rounds, [OURS, SEGMENTS], NAMES)
    judged = {(goal.text, goal.case): goal for goal in results.goals(rows, OURS, SEGMENTS, [SLOT])}
    case = "256 KiB buffered"
    files = judged[(f"dump not below the best peer ({OURS})", case)]
    assert (files.value, files.met) == (3.0, True)
    segments = judged[(f"dump not below the best peer ({SEGMENTS})", case)]
    assert (segments.value, segments.met) == (None, None)


def test_loads_are_judged_where_those_of_the_peers_end(
    results: ModuleType, rounds: dict[Any, Any]
) -> None:
    case = (QUARTER, "buffered")
    rounds[(case, SLOT)] = [
        {"dump": None, "load": load, "lookup_present": None, "lookup_absent": None}
        for load in (2.0, 5.0)
    ]
    rows = results.rows(rounds, [OURS, SEGMENTS, SLOT], NAMES)
    assert {row.operation for row in rows if row.arm == SLOT} == {"load"}
    assert find(rows, "load", SLOT).to_ours == 3.5, "to the slot beside to memory"
    loads = [
        goal for goal in results.goals(rows, OURS, SEGMENTS, [SLOT]) if goal.text.startswith("load")
    ]
    assert [(goal.text, goal.value, goal.met) for goal in loads] == [
        (f"load not below the best peer ({SLOT})", 3.5, True)
    ]


def test_the_whole_report(results: ModuleType, rounds: dict[Any, Any]) -> None:
    rows = results.rows(rounds, [OURS, SEGMENTS], NAMES)
    head = {
        "arms": [
            {"name": OURS, "version": "1", "threads": "4", "state": "measured"},
            {"name": SEGMENTS, "version": "", "threads": "", "state": "not built: no key 'layout'"},
        ],
        "notes": ["a slow peer: its process ended (2 MiB direct)"],
    }
    text = results.markdown("Here.", head, rows, results.goals(rows, OURS, SEGMENTS, [SLOT]))
    assert text.startswith("Here.")
    assert "| buffered | 256 KiB | **a fast peer** | 1.00 (1.00 to 1.00) | 0.33 | 1.00 |" in text
    assert "not built: no key 'layout'" in text
    assert "its process ended (2 MiB direct)" in text
    assert "Lookup, none present:" in text


def test_the_report_names_no_host_and_no_path(results: ModuleType) -> None:
    machine = imported("machine").describe(FOLDER)
    assert set(machine) == {
        "cores",
        "processor",
        "memory_gib",
        "kernel",
        "file_system",
        "load_before",
    }
    assert machine["cores"] >= 1


@pytest.mark.parametrize(
    ("module", "kind", "reason"),
    [
        ("peer_of_nobody", "Nobody", "not installed: No module named 'peer_of_nobody'"),
        ("peer", "Peer", "TypeError"),
    ],
)
def test_an_arm_that_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, kind: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    process = imported("arm_process")
    arm = process.ArmProcess(
        imported("arms").Arm("somebody", module, kind), sys.executable, dict(os.environ), tmp_path
    )
    try:
        arm.greet()
        assert reason in arm.reason
        assert arm.round({}, 60.0) == {"unavailable": arm.reason}
    finally:
        arm.stop()


def test_an_arm_without_its_interpreter_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    arm = imported("arm_process").ArmProcess(
        imported("arms").ARMS[-1], str(tmp_path / "python"), {}, tmp_path
    )
    arm.greet()
    assert "PYTHON312" in arm.reason


def test_every_arm_has_a_module_and_one_of_ucms_own_comes_first() -> None:
    arms = imported("arms").ARMS
    assert [arm.kind for arm in arms if arm.own] == ["Ucm", "Ucm", "UcmToSlot", "UcmToSlot"]
    assert arms[0].own
    for arm in arms:
        assert f"class {arm.kind}(" in (FOLDER / f"{arm.module}.py").read_text()
    assert len({arm.name for arm in arms}) == len(arms)
