"""Weights replaced in a running engine, by every method that works on a CPU: right tokens, then
hits again.

Two engines run all of it, one after the other on one disk: first one with scheduler and worker in
separate processes, like a server, then one in the process of its user, like a trainer's, which
steps when it is called. The second one is the new engine that must find only blocks of its own
files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cases import REPLACED, STORED, Case
from checks import assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import new_disk
from specs import EngineSpec, Result

pytestmark = pytest.mark.one_runner

CASE, LATE = STORED["middle"], STORED["shared_b"]
#: Whether the store has ended every dump that the worker has begun.
ENDED = "all(one.store.check(one.task) for one in connector._worker.dumps._running)"


def test_weights_replaced(
    runner: str,
    host: EngineHost,
    model: Path,
    other_model: Path,
    work: Path,
    reference: dict[str, Result],
) -> None:
    store = new_disk(work, f"generations-{runner}").store()
    spec = EngineSpec(model, runner, store, label=f"weights-{runner}")
    server = _Life(host.get(spec), in_process=False)
    assert_same(server.ask(CASE), reference["middle"])
    server.replaced(model, other_model, reference)
    host.stop()

    forgetful = spec.but(extra_config={"on_reset": "forget"}, label=f"forgets-{runner}")
    _Life(host.get(forgetful), in_process=False).forgets(reference["middle"])
    host.stop()

    trainer = _Life(host.get(spec.but(in_process=True, label=f"trainer-{runner}")), in_process=True)
    trainer.hits(CASE, reference["middle"])  # blocks of these files from the other engine
    # sent there with other files, and with unidentified weights, but never with these
    late = trainer.ask(LATE)
    assert_same(late, reference["shared_b"])
    assert late.cached == 0
    trainer.replaced(model, other_model, reference)
    host.stop()


class _Life:
    """An engine and its mode."""

    def __init__(self, engine: Engine, in_process: bool) -> None:
        self.engine, self.in_process = engine, in_process

    def ask(self, case: Case) -> Result:
        """One answer; an engine in its user's process is not stepped afterwards."""
        answer = self.engine.generate(case.ask())[0]
        if not self.in_process:
            self.engine.wait_idle()
        return answer

    def stored(self) -> None:
        """The store has what was dumped; no step is needed for that."""
        ended = partial(self.engine.rpc, "probe_worker_eval", ENDED)
        wait_until(lambda: ended() == ["True"], "the store has the blocks")

    def empty(self) -> None:
        """Empties vLLM's cache at once: no block is held."""
        assert self.engine.call("reset_prefix_cache")

    def hits(self, case: Case, right: Result) -> None:
        """The answer is right, and its prompt was not computed."""
        answer = self.ask(case)
        assert_same(answer, right)
        assert_reused(answer, case)

    def resets(self) -> Iterator[str]:
        """Every method to reset vLLM's caches together with the connector's, one after the
        other."""
        assert self.engine.call("reset_prefix_cache", reset_connector=True) is True
        yield "reset_prefix_cache"
        if not self.in_process:  # a server's
            self.engine.call("pause_generation", clear_cache=True)
            self.engine.call("resume_generation")
            yield "pause_generation"
        self.engine.call("sleep", level=1)
        self.engine.call("wake_up")
        yield "sleep"

    def forgets(self, right: Result) -> None:
        """``on_reset: forget``: blocks from before a reset are never hits again, later ones are.
        The next engine finds the blocks of the first one."""
        self.hits(CASE, right)
        for how in self.resets():
            answer = self.ask(CASE)
            assert_same(answer, right)
            assert answer.cached == 0, f"{how} forgot nothing"
            self.empty()
            self.hits(CASE, right)
        assert "what this engine stored is forgotten" in self.engine.log_text()

    def replaced(self, model: Path, other_model: Path, reference: dict[str, Result]) -> None:
        """All of it. ``CASE`` was sent before."""
        engine, right, others = self.engine, reference["middle"], reference[REPLACED["middle"]]
        self.empty()
        self.hits(CASE, right)  # nothing was replaced
        for _ in self.resets():
            self.hits(CASE, right)
        assert "stored blocks stay; the weights are checked" in engine.log_text()

        engine.rpc("reload_weights", weights_path=str(other_model))
        self.empty()
        first = self.ask(CASE)
        assert_same(first, others)
        if self.in_process:
            assert_reused(first, CASE)  # the previous engine has computed it from these files
        else:
            assert first.cached == 0
            assert_same(self.ask(LATE), reference[REPLACED["shared_b"]])
        self.empty()
        self.hits(CASE, others)

        engine.rpc("reload_weights", weights_path=str(model))
        self.empty()
        self.hits(CASE, right)
        for level in (1, 2):
            engine.call("sleep", level=level)
            engine.call("wake_up")
            self.hits(CASE, right)

        self.interrupted(STORED["turn"], reference["turn"])

        engine.rpc("probe_scale_weights", 1.25)  # as a trainer's extension writes them
        self.empty()
        written = self.ask(CASE)
        assert written.tokens != right.tokens
        assert written.cached == 0
        self.ask(LATE)
        self.stored()
        self.empty()
        self.hits(CASE, written)
        assert "their KV is kept for this process alone" in engine.log_text()

        # A reload of the same files cannot be distinguished from another write.
        for path, answer in ((other_model, others), (model, right)):
            engine.rpc("reload_weights", weights_path=str(path))
            self.empty()
            self.hits(CASE, answer)

    def interrupted(self, case: Case, right: Result) -> None:
        """vLLM's cache is emptied during requests, whose answers stay right."""
        ids = self.engine.submit(case.ask(), STORED["long"].ask())

        def run() -> bool:  # vLLM cannot empty its cache while a load is under way
            if self.in_process:
                self.engine.step(1)
            return all(produced for produced, _ in self.engine.progress(*ids))

        wait_until(run, "the first tokens of both")
        assert self.engine.call("reset_prefix_cache", reset_running_requests=True)
        assert self.engine.collect(ids)[0].tokens == right.tokens
