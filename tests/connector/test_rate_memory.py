"""Speeds that outlive the process: what is kept, for whom, when it is written, and what garbage
does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from parts import BLOCK, Clock, Later, Rig

from ucm.integration.vllm.connector.admission.admission import (
    MEMORY_LIMIT,
    MEMORY_NAME,
    RARELY_S,
    SOON_S,
    TIERS,
    Admission,
    Cut,
    RateMemory,
    Verdict,
    machine_name,
)
from ucm.integration.vllm.connector.admission.rates import ComputeRate, ComputeSpeed, LoadSpeed
from ucm.integration.vllm.connector.guard import Background
from ucm.integration.vllm.connector.identity.engine_identity import FIELDS, LiveIdentity, lasting
from ucm.integration.vllm.connector.identity.weights import WeightSource
from ucm.integration.vllm.connector.metadata import RankReport
from ucm.integration.vllm.connector.stores import ROOT_MARKER

COMPUTING = ComputeSpeed(0.5, 0.001, 1000)
LOADING = {0: LoadSpeed(0.25, 1e-6, 100, 10_000, 0.0), 1: LoadSpeed(0.75, 1e-3, 100, 100, 0.5)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store's root."""
    (tmp_path / ROOT_MARKER).write_text("{}")
    return tmp_path


class Life:
    """An engine's memory in one process."""

    def __init__(
        self, root: Path | None, identity: str = "i", machine: str = "m", store: str = "s"
    ) -> None:
        self.later, self.clock = Later(), Clock()
        self.admission = Admission("measured", 0.8, ComputeRate(0.2, 30.0), self.clock)
        where = None if root is None else str(root)
        self.memory = RateMemory(where, self.admission, self.later, lambda: machine, self.clock)
        self.later.run()
        self.memory.open(identity, store)

    def known(self) -> tuple[ComputeSpeed | None, dict[int, LoadSpeed]]:
        """What this process knows."""
        return self.admission.known()

    def learns(
        self,
        computing: ComputeSpeed | None = COMPUTING,
        loading: dict[int, LoadSpeed] | None = None,
    ) -> Life:
        """As if it had measured this, and written it."""
        self.admission.recall(computing, LOADING if loading is None else loading)
        self.memory.keep(self.clock.now)
        self.later.run()
        return self


def same(known: tuple[ComputeSpeed | None, dict[int, LoadSpeed]]) -> None:
    """It is what was learnt, up to the digits that are kept."""
    computing, loading = known
    assert computing == pytest.approx(COMPUTING, rel=0.01)
    assert {tier: pytest.approx(rate, rel=0.01) for tier, rate in loading.items()} == LOADING


def test_speeds_are_restored_in_the_next_process(root: Path) -> None:
    Life(root).learns()
    assert (root / MEMORY_NAME).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in root.iterdir()} == {MEMORY_NAME, ROOT_MARKER}
    same(Life(root).known())


@pytest.mark.parametrize("other", [{"identity": "other"}, {"machine": "other"}])
def test_speeds_are_not_restored_for_another_identity_or_machine(
    root: Path, other: dict[str, str]
) -> None:
    Life(root).learns()
    assert Life(root, **other).known() == (None, {})
    Life(root, **other).learns(ComputeSpeed(0.1, 0.1, 100), {})
    same(Life(root).known())


def test_a_reset_that_forgets_blocks_forgets_no_speed(root: Path) -> None:
    """What is measured after it is known to the next process, and no entry is added for it."""
    own = dict.fromkeys(FIELDS, "")
    live = LiveIdentity(own, WeightSource(str(root)), "declared:weights", None)
    life = Life(root, identity=live.text() or "").learns()
    for _ in range(3):
        live.forget()
        life.memory.open(live.text() or "", "s")
        life.learns(None, {2: LOADING[1]})
    later = LiveIdentity(own, WeightSource(str(root)), "declared:weights", None)
    assert sorted(Life(root, identity=later.text() or "").known()[1]) == [0, 1, 2]
    assert len(json.loads((root / MEMORY_NAME).read_text())["rates"]) == 1


def test_random_parts_of_an_identity_are_left_out_of_the_key() -> None:
    word = "0123456789abcdef" * 2
    assert lasting(f'{{"weights":"sha256:ab reset:{word}"}}') == '{"weights":"sha256:ab"}'
    assert lasting(f'{{"weights":"private:{word} reset:{word}"}}') == '{"weights":"private:"}'


def test_another_identity_of_one_process_is_written_too(root: Path) -> None:
    """After other weights were loaded, nothing is known to be in the file of the new identity."""
    life = Life(root).learns()
    life.memory.open("other weights", "s")
    life.learns()
    same(Life(root, identity="other weights").known())


def hit(tokens: int, tier: int = 0) -> Cut:
    """A hit in one tier, of which each token is a byte."""
    return Cut(tokens, {tier: tokens})


#: Another identity on the same machine: it computes faster, and loads more slowly from tier 0.
FASTER = ComputeSpeed(0.1, 0.0005, 1000)
SLOWER = {0: LoadSpeed(0.5, 1e-5, 100, 10_000, 0.0), 2: LoadSpeed(0.1, 1e-6, 100, 100, 0.0)}


def test_first_loads_have_deadlines_by_the_best_speed_that_the_machine_showed(root: Path) -> None:
    Life(root).learns()
    Life(root, identity="faster").learns(FASTER, SLOWER)
    Life(root, identity="elsewhere", machine="other").learns(ComputeSpeed(0.0, 1e-6, 1000), {})
    life = Life(root, identity="new")
    # Twice what FASTER takes for them, whatever this engine is called.
    assert life.admission.began("r", hit(1000), 1) == pytest.approx(2 * 0.5)


def test_load_speeds_of_others_decline_nothing_once_this_engine_computes(root: Path) -> None:
    """Another store may have been slower, or others may have used it at the time."""
    Life(root).learns(COMPUTING, {0: LoadSpeed(50.0, 1e-3, 100, 10_000, 0.9)})
    life = Life(root, identity="new")
    for _ in range(2):
        life.admission.compute_rate.planned({"r": 1000}, 1000, life.clock.now)
        life.clock.now += 1.0
        life.admission.step_ended()
    assert life.admission.compute_rate.seconds(1000) is not None
    assert life.admission.decide([hit(1000)], 1)[1] == Verdict.LOAD
    life.admission.began("r", hit(1000), 1)
    life.clock.now += 0.1
    life.admission.step_ended()
    life.admission.ended("r")
    measured = life.admission._tier(0).rate
    assert measured.seconds(1000) == pytest.approx(0.1)  # by this load alone
    assert measured.given_up == 0.0


def test_speeds_of_other_engines_decline_no_hit_and_are_not_saved_as_own_ones(root: Path) -> None:
    """A stored prompt is not computed to find out how fast this engine is."""
    Life(root).learns(ComputeSpeed(0.0, 1e-6, 1000))
    life = Life(root, identity="new")
    for tier in range(3):
        assert life.admission.decide([hit(1000, tier)], 1)[1] == Verdict.LOAD
    assert life.admission.rates() == {}
    life.memory.keep(life.clock.now)
    assert life.later.jobs == []
    assert life.known() == (None, {})


def test_own_measurements_replace_the_speeds_of_other_engines(root: Path) -> None:
    Life(root).learns()
    life = Life(root, identity="new")
    life.admission.began("r", hit(1000), 1)
    life.clock.now += 0.25
    life.admission.step_ended()
    life.admission.ended("r")
    assert list(life.known()[1]) == [0]
    for _ in range(2):
        life.admission.compute_rate.planned({"r": 1000}, 1000, life.clock.now)
        life.clock.now += 10.0
        life.admission.step_ended()
    assert life.admission.began("r", hit(1000), 1) == pytest.approx(20.0)
    assert life.known()[0] is not None


def test_only_the_speed_of_computing_is_restored_for_another_store(root: Path) -> None:
    Life(root).learns()
    computing, loading = Life(root, store="other").known()
    assert computing == pytest.approx(COMPUTING)
    assert loading == {}


def test_an_unknown_speed_does_not_overwrite_the_saved_one(root: Path) -> None:
    Life(root).learns()
    late = Life(root, identity="other")
    late.memory._key = Life(root).memory._key  # as when the file could not be read in time
    late.learns(None)
    same(Life(root).known())


def test_without_a_root_of_the_store_nothing_is_remembered(tmp_path: Path) -> None:
    life = Life(None)
    assert life.memory.due == float("inf")
    life.learns()
    life.memory.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_below_a_root_without_a_marker(root: Path) -> None:
    (root / ROOT_MARKER).unlink()
    life = Life(root).learns()
    assert list(root.iterdir()) == []
    (root / ROOT_MARKER).write_text("{}")
    life.learns()  # it is no news to the engine, but was not written yet
    same(Life(root).known())


def test_the_file_is_written_on_its_own_thread_after_a_change(
    root: Path,
) -> None:
    life = Life(root)
    assert life.memory.due == life.clock.now + SOON_S
    life.admission.recall(COMPUTING, {})
    pauses = []
    for _ in range(10):
        life.memory.keep(life.memory.due)
        assert not (root / MEMORY_NAME).exists()  # not by the calling thread
        pauses.append(life.memory.due - life.clock.now)
        life.clock.now = life.memory.due
    assert pauses[-1] == RARELY_S
    life.later.run()
    assert (root / MEMORY_NAME).exists()
    life.memory.keep(life.clock.now)
    assert life.later.jobs == []
    assert Life(root).later.jobs == []
    again = Life(root)
    again.memory.keep(0.0)
    assert again.later.jobs == []  # it was remembered so


@pytest.mark.parametrize(
    "entry",
    [
        '{"version":1,"rates":{"KEY":',
        '{"version":2,"rates":{"KEY":{"computing":GOOD}}}',
        '{"version":1,"rates":[]}',
        '{"version":1,"rates":{"KEY":7}}',
        '{"version":1,"rates":{"KEY":{"computing":7,"store":"s","loading":[1]}}}',
        '{"version":1,"rates":{"KEY":{"computing":{"overhead":0.1,"cost":NaN,"tokens":100}}}}',
        '{"version":1,"rates":{"KEY":{"computing":{"overhead":0.1,"cost":1e999,"tokens":100}}}}',
        '{"version":1,"rates":{"KEY":{"computing":{"overhead":-1,"cost":0.1,"tokens":100}}}}',
        '{"version":1,"rates":{"KEY":{"computing":{"overhead":0.1,"cost":0.1}}}}',
        '{"version":1,"rates":{"KEY":{"computing":{"overhead":0.1,"cost":0,"tokens":100}}}}',
        '{"version":1,"rates":{"KEY":{"computing":{"overhead":"1","cost":0.1,"tokens":100}}}}',
        '{"version":1,"rates":{"KEY":{"store":"s","loading":{"0":{"fixed":1},"x":GOOD,"99":GOOD}}}}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_counts_as_empty(root: Path, entry: str) -> None:
    key = Life(root).memory._key
    text = entry.replace("KEY", key).replace("GOOD", json.dumps(COMPUTING._asdict()))
    (root / MEMORY_NAME).write_text(text, encoding="latin-1")
    assert Life(root).known() == (None, {})
    Life(root).learns()
    same(Life(root).known())


def test_the_file_keeps_the_last_entries(root: Path) -> None:
    entries = {f"{number}": {"computing": COMPUTING._asdict()} for number in range(MEMORY_LIMIT)}
    (root / MEMORY_NAME).write_text(json.dumps({"version": 1, "rates": entries}))
    Life(root).learns(loading=dict.fromkeys(range(TIERS), LOADING[0]))
    kept = json.loads((root / MEMORY_NAME).read_text())["rates"]
    assert len(kept) == MEMORY_LIMIT
    assert "0" not in kept
    assert list(kept)[-1] == Life(root).memory._key


def test_the_end_waits_for_the_last_writing_but_not_for_a_root_that_hangs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, background = (
        Admission("measured", 0.8, ComputeRate(0.2, 30.0)),
        Background("test", threads=2),
    )
    memory = RateMemory(str(root), admission, background, lambda: "m")
    memory.open("i", "s")
    admission.recall(COMPUTING, LOADING)
    monkeypatch.setattr("ucm.integration.vllm.connector.admission.admission.CLOSE_S", 60.0)
    memory.close()
    assert (root / MEMORY_NAME).exists()
    go = threading.Event()
    monkeypatch.setattr(memory._file, "marked", lambda: go.wait(60))
    monkeypatch.setattr("ucm.integration.vllm.connector.admission.admission.CLOSE_S", 0.01)
    admission._tier(2).rate.recall(LOADING[0])
    memory.close()
    go.set()
    background.close()


def test_the_name_of_a_machine_describes_its_hardware() -> None:
    assert machine_name() == machine_name()
    assert " cores" in machine_name()


# In the scheduler side
# ----------------------------------------------------------------------------------------


def served(rig: Rig, name: str, blocks: int, step: Callable[[], Any]) -> int:
    """A request of which the store has every full block; the tokens loaded of it, in next to no
    time."""
    request = rig.request(name, blocks * BLOCK + 1, seed=len(name) + blocks)
    rig.stored(request, blocks)
    rig.later.run()
    tokens, _ = rig.scheduler.get_num_new_matched_tokens(request, 0)
    assert tokens is not None
    rig.scheduler.update_state_after_alloc(
        request, rig.tables.allocate(request, blocks + 1), tokens
    )
    step()
    rig.report(RankReport(0, ready=True), recved={name} if tokens else None)
    request.num_computed_tokens = request.num_tokens
    rig.scheduler.request_finished(request)
    rig.tables.free(request)
    return tokens


def test_a_restarted_engine_knows_its_speed_and_loads_what_is_stored(root: Path) -> None:
    before = Rig(root=str(root))
    for number in range(3):
        request = before.request(f"computed {number}", 20 * BLOCK, seed=number)
        before.admit(request)
        plan = before.step(request)
        before.clock.now += 0.08
        before.scheduler.step_ended()
        before.report(before.ended(plan))
        before.scheduler.request_finished(request)
        before.tables.free(request)
    before.clock.now += SOON_S
    before.step()  # the speed is written on the way
    before.later.run()
    assert (root / MEMORY_NAME).exists()

    after = Rig(root=str(root))
    assert after.admission.compute_rate.seconds(20 * BLOCK) == pytest.approx(0.08)

    def step() -> None:
        after.step()
        after.clock.now += 0.001
        after.scheduler.step_ended()

    for blocks in (18, 2, 9, 18):
        assert served(after, f"r{blocks}", blocks, step) == blocks * BLOCK
    assert after.scheduler.miss_stats.total.missed == {}


@pytest.mark.parametrize("order", [(18, 17, 16, 18), (16, 18, 17, 16)])
def test_a_fresh_engine_without_memory_loads_every_stored_prompt(order: tuple[int, ...]) -> None:
    rig = Rig()

    def step() -> None:
        rig.step()
        rig.clock.now += 0.1
        rig.scheduler.step_ended()

    for turn in range(5):
        for blocks in order:
            assert served(rig, f"r{turn}", blocks, step) == blocks * BLOCK
    assert rig.scheduler.miss_stats.total.missed == {}
