"""While a rank's store is unhealthy no request is promised a hit, and hits come back without one
having to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from parts import BLOCK, Memory, Rig, configured_store  # noqa: E402
from test_transfers import Worker, dump, load  # noqa: E402

from ucm.errors import BusyError, ClosedError, UnhealthyError  # noqa: E402
from ucm.integration.vllm.connector.metadata import (  # noqa: E402
    RankReport,
    UCMConnectorWorkerMetadata,
)
from ucm.integration.vllm.connector.scheduler.readiness import STALE_S  # noqa: E402
from ucm.integration.vllm.connector.worker.worker import UNUSABLE_S, StoreHealth  # noqa: E402


class Moody(Memory):
    """A store that is as healthy as a test says, and gets well when it is asked for something
    ``asks`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.well, self.asks, self.asked = True, 0, 0

    def lookup(self, block_ids: Any) -> list[bool]:
        self.asked += 1
        if not self.well:
            self.asks -= 1
            self.well = self.asks <= 0
        return super().lookup(block_ids)

    def healthy(self) -> bool:
        return self.well


# The scheduler side
# -------------------------------------------------------------------------------------------


def missed(rig: Rig) -> dict[str, int]:
    return dict(rig.scheduler.miss_stats.total.missed)


def test_no_hits_while_a_rank_reports_unhealthy() -> None:
    rig = Rig(ranks=2)
    request = rig.request("a", 5 * BLOCK + 1)
    rig.stored(request, 4)
    rig.later.run()
    rig.report(RankReport(1, ready=True, healthy=False))
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 6), 0)
    assert missed(rig) == {"unhealthy": 5}
    rig.report(RankReport(0, ready=True))  # the other one says nothing about this one
    second = rig.request("b", 5 * BLOCK + 1)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    rig.report(RankReport(1, ready=True))
    assert rig.scheduler.get_num_new_matched_tokens(second, 0) == (4 * BLOCK, True)


def test_a_cache_that_no_rank_can_use_is_not_logged_as_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store retries by itself, so it counts as opened. Until then the log has one warning."""
    caplog.set_level(logging.INFO, logger="ucm")
    rig = Rig(opened=False)
    rig.shake()
    rig.later.run()
    rig.report(RankReport(0, ready=True, attempt=1, healthy=False))
    rig.step()
    assert "the cache is open" not in caplog.text
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and "rank 0: its store cannot be used" in said[0], said
    assert "every request is computed and nothing is stored" in said[0]
    rig.report(RankReport(0, ready=True, attempt=1))
    rig.step()
    assert "rank 0: its store can be used" in caplog.text
    assert caplog.text.count("the cache is open on 1 rank(s)") == 1


def test_a_cache_without_lookups_is_not_logged_as_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="ucm")
    store = Moody()
    store.well, store.asks = False, 1
    rig = Rig(opened=False, stores=[configured_store("Moody", lambda config: store)])
    rig.open()
    assert "the cache is open" not in caplog.text
    store.lookup([bytes(16)])
    rig.report(RankReport(0, ready=True, attempt=1))
    assert caplog.text.count("the cache is open on 1 rank(s)") == 1


def test_nothing_is_offered_while_a_rank_is_unhealthy_and_all_of_it_afterwards() -> None:
    rig = Rig()
    request = rig.request("a", 3 * BLOCK)
    rig.admit(request)
    rig.report(RankReport(0, ready=True, healthy=False))
    assert rig.step(request).dumps == []
    rig.report(RankReport(0, ready=True))
    assert [len(dump.blocks) for dump in rig.step(request).dumps] == [3]


def test_after_an_idle_time_the_ranks_are_checked_again() -> None:
    rig = Rig()
    rig.report(RankReport(0, ready=True, healthy=False))
    rig.clock.now += STALE_S + 1  # no request, so no step
    request = rig.request("a", 3 * BLOCK + 1)
    rig.stored(request, 3)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        None,
        False,
    )  # a step follows, and with it the rank's word
    rig.report(RankReport(0, ready=True))
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)


@pytest.mark.parametrize("answered", [True, False])
def test_a_rank_that_stays_unhealthy_or_silent_is_not_waited_for(answered: bool) -> None:
    rig = Rig()
    rig.report(RankReport(0, ready=True, healthy=False))
    rig.clock.now += STALE_S + 1
    request = rig.request("a", 3 * BLOCK + 1)
    rig.stored(request, 3)
    rig.later.run()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    if answered:
        rig.report(RankReport(0, ready=True, healthy=False))
    else:
        rig.clock.now += 0.051  # longer than a lookup may take
    for _ in range(2):
        assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    rig.scheduler.update_state_after_alloc(request, rig.tables.allocate(request, 4), 0)
    assert missed(rig) == {"unhealthy": 3}


def test_the_end_and_the_return_of_the_cache_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    with caplog.at_level(logging.INFO, "ucm.vllm"):
        for healthy in (False, False, True, True):
            rig.report(RankReport(0, ready=True, healthy=healthy))
    said = [record.message for record in caplog.records if "rank 0" in record.message]
    assert ["cannot be used" in text for text in said] == [True, False]


# A rank
# --------------------------------------------------------------------------------------------------


class Watches(list[Callable[[], None]]):
    """Watching that begins when a test says so."""

    def __call__(self, work: Callable[[], None]) -> None:
        self.append(work)


def worker_with(watches: Watches) -> tuple[Worker, Any]:
    worker = Worker(health=StoreHealth(pause=0.0, spawn=watches))
    return worker, worker.open()


def word(report: UCMConnectorWorkerMetadata | None) -> bool | None:
    """The health that the rank reports, None without a report."""
    return None if report is None else report.ranks[0].healthy


def refuse(store: Any, healthy: bool) -> None:
    store.refusal = UnhealthyError("the breaker is open")
    store.healthy = lambda: healthy


@pytest.mark.parametrize("plan", [{"loads": [load("r", [1])]}, {"dumps": [dump(1, [1])]}])
def test_a_rank_checks_its_store_after_a_failure_and_reports_until_it_is_healthy(
    plan: dict[str, Any],
) -> None:
    watches = Watches()
    worker, store = worker_with(watches)
    refuse(store, healthy=False)
    assert word(worker.step()[2]) is None  # nothing failed, so no check
    assert word(worker.step(**plan)[2]) is False
    # so that its word is never old
    assert [word(worker.step()[2]) for _ in range(3)] == [False] * 3
    assert len(watches) == 1
    store.refusal, store.healthy = None, lambda: True
    watches[0]()
    assert [word(worker.step()[2]) for _ in range(2)] == [True, None]


@pytest.mark.parametrize(
    ("error", "healthy"),
    [(BusyError("full"), False), (UnhealthyError("of another"), True), (ValueError("bug"), True)],
)
def test_a_failed_dump_alone_does_not_make_a_store_unhealthy(
    error: Exception, healthy: bool
) -> None:
    watches = Watches()
    worker, store = worker_with(watches)
    store.refusal, store.healthy = error, lambda: healthy
    assert word(worker.step(dumps=[dump(1, [1])])[2]) is True
    assert watches == []


def test_a_store_that_opens_unhealthy_is_reported() -> None:
    def unhealthy(config: dict[str, Any]) -> Any:
        store = worker.make(config)
        store.healthy = lambda: False  # type: ignore[method-assign]
        return store

    worker = Worker(
        health=StoreHealth(spawn=Watches()), stores=[configured_store("Unhealthy", unhealthy)]
    )
    assert worker.open() is worker.store
    assert not worker.connector.health.healthy


def test_a_watch_checks_the_store_until_it_is_healthy() -> None:
    watches, store = Watches(), Moody()
    health = StoreHealth(pause=0.0, spawn=watches)
    health.check(store)
    assert (health.healthy, watches, store.asked) == (True, [], 0)
    store.well, store.asks = False, 3
    health.check(store)
    assert (health.healthy, store.asked) == (False, 0)  # without a wait
    watches.pop()()
    assert (health.healthy, store.asked) == (True, 3)
    store.well, store.asks = False, 1
    health.check(store)  # and again
    watches.pop()()
    assert health.healthy


def test_a_root_that_only_its_owner_can_mend_is_logged_once_and_tried_rarely(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    watches, store, pauses = Watches(), Moody(), list[float]()
    (tmp_path / "file").write_text("in the way")
    store.well, store.asks = False, 3
    why = f"off: cannot read [path={tmp_path}/file/root]: Not a directory (os error 20)"
    store.trouble = lambda: why  # type: ignore[method-assign]
    health = StoreHealth(pause=0.0, spawn=watches)
    health._stop.wait = lambda pause: pauses.append(pause)  # type: ignore[method-assign, assignment]
    health.check(store)
    watches.pop()()
    assert pauses == [UNUSABLE_S] * 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith(f"the store is unusable: {tmp_path}/file is a file, not a directory")
    assert "tried again every 60 s" in said[0]


def test_a_watch_ends_with_its_rank() -> None:
    watches, store = Watches(), Moody()
    store.well, store.asks = False, 1 << 30
    health = StoreHealth(pause=3600.0, spawn=watches)
    health.check(store)
    health.close()
    watches.pop()()
    health.check(store)
    assert (watches, store.asked) == ([], 0)


def test_a_watch_that_cannot_begin_begins_later() -> None:
    store, started = Moody(), Watches()
    store.well, store.asks = False, 1

    def spawn(work: Callable[[], None]) -> None:
        if not started:
            started.append(work)
            raise RuntimeError("can't start new thread")
        work()

    health = StoreHealth(pause=0.0, spawn=spawn)
    health.check(store)
    assert not health.healthy
    health.check(store)
    assert health.healthy


def test_a_store_whose_health_check_fails_is_checked_again() -> None:
    watches, store = Watches(), Moody()
    store.well = False
    health = StoreHealth(pause=0.0, spawn=watches)
    health.check(store)
    store.lookup = store.healthy = lambda *ids: (_ for _ in ()).throw(ClosedError("closed"))  # type: ignore[method-assign, assignment]
    watches.pop()()
    assert health.healthy


def test_a_thread_watches_by_itself() -> None:
    worker = Worker(health=StoreHealth(pause=0.0))
    store: Any = worker.open()
    asked = Moody()
    asked.well, asked.asks = False, 2
    store.lookup, store.healthy = asked.lookup, asked.healthy
    store.refusal = UnhealthyError("the breaker is open")
    said = word(worker.step(loads=[load("r", [1])])[2])
    while said is False:
        said = word(worker.step()[2])
    assert asked.asked == 2
    assert worker.connector.health.healthy
    worker.connector.shutdown()


def test_a_store_written_in_python_is_healthy_by_default() -> None:
    assert Memory().healthy()
