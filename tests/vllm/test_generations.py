"""Weights that are replaced in a running engine, by every route that a CPU has: right tokens, then hits again.

An engine of each kind lives through all of it: scheduler and worker in processes of their own, as servers run them,
and in the process of their user, as trainers do. The second kind begins on the disk that the first one left: it is the
fresh engine that must meet nothing but what its own files computed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import REPLACED, STORED, Case
from checks import assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk
from specs import EngineSpec, Result

CASE, LATE = STORED["middle"], STORED["shared_b"]


@pytest.fixture(scope="session")
def disks(work: Path) -> dict[str, Disk]:
    """One for each runner."""
    return {runner: new_disk(work, f"generations-{runner}") for runner in ("v1", "v2")}


@pytest.mark.parametrize("kind", ["own processes", "one process"])
def test_weights_replaced(
    kind: str,
    runner: str,
    host: EngineHost,
    model: Path,
    other_model: Path,
    disks: dict[str, Disk],
    reference: dict[str, Result],
) -> None:
    in_process = kind == "one process"
    spec = EngineSpec(
        model, runner, disks[runner].store(), label=f"{'inproc' if in_process else 'weights'}-{runner}", fork=False
    )
    engine = host.get(spec.but(in_process=in_process))
    life = _Life(engine, in_process)
    if in_process:  # what the first kind stored under these files
        fresh = life.ask(CASE)
        assert_same(fresh, reference["middle"])
        assert_reused(fresh, CASE)
        # asked of the other files, and of weights without a name, never of these
        late = life.ask(LATE)
        assert_same(late, reference["shared_b"])
        assert late.cached == 0
    else:
        assert_same(life.ask(CASE), reference["middle"])

    life.empty()
    life.hits(CASE, reference["middle"])  # a plain reset

    engine.rpc("reload_weights", weights_path=str(other_model))
    life.empty()
    first = life.ask(CASE)
    assert_same(first, reference[REPLACED["middle"]])
    if in_process:
        assert_reused(first, CASE)  # other engines have computed it from these files
    else:
        assert first.cached == 0
        assert_same(life.ask(LATE), reference[REPLACED["shared_b"]])
    life.empty()
    life.hits(CASE, reference[REPLACED["middle"]])

    engine.rpc("reload_weights", weights_path=str(model))
    life.empty()
    life.hits(CASE, reference["middle"])
    for level in (1, 2):
        engine.call("sleep", level=level)
        engine.call("wake_up")
        life.hits(CASE, reference["middle"])

    life.interrupted(STORED["turn"], reference["turn"])

    engine.rpc("probe_scale_weights", 1.25)  # as a trainer's extension writes them
    life.empty()
    written = life.ask(CASE)
    assert written.tokens != reference["middle"].tokens
    assert written.cached == 0
    life.ask(LATE)
    life.empty()
    life.hits(CASE, written)
    assert "their KV is kept for this process alone" in engine.log_text()

    engine.rpc("reload_weights", weights_path=str(model))
    life.empty()
    life.hits(CASE, reference["middle"])
    host.stop()


class _Life:
    """An engine and how it is driven."""

    def __init__(self, engine: Engine, in_process: bool) -> None:
        self.engine, self.in_process = engine, in_process

    def ask(self, case: Case) -> Result:
        """One answer; then nobody steps an engine that does not step by itself."""
        answer = self.engine.generate(case.ask())[0]
        if not self.in_process:
            self.engine.wait_idle()
        return answer

    def empty(self) -> None:
        """Empties vLLM's cache, at once: no block is held by anybody."""
        assert self.engine.call("reset_prefix_cache")

    def hits(self, case: Case, right: Result) -> None:
        """The answer is right, and its prompt was not computed."""
        answer = self.ask(case)
        assert_same(answer, right)
        assert_reused(answer, case)

    def interrupted(self, case: Case, right: Result) -> None:
        """vLLM's cache is emptied in the middle of requests, whose answers stay right."""
        ids = self.engine.submit(case.ask(), STORED["long"].ask())
        if self.in_process:
            self.engine.step(3)
        else:
            wait_until(lambda: self.engine.progress(ids[0])[0][0] >= 2, "the first tokens")
        assert self.engine.call("reset_prefix_cache", reset_running_requests=True)
        assert self.engine.collect(ids)[0].tokens == right.tokens
