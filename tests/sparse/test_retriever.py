"""When blocks are chosen and when a choice is used, counted in steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.sparse.base import SparseStats
from ucm.sparse.policy import Policy
from ucm.sparse.retriever import PATIENCE, Choice, Middle, Retriever, Rows, Slot, make_retriever

FEW = settings(max_examples=30, deadline=None)


def rows_of(step: int, names: list[str], blocks: int = 10) -> Rows:
    """A query says which step it is of."""
    asked = torch.full((len(names), 1, 1, 1), float(step))
    return Rows(
        names,
        [step] * len(names),
        [blocks] * len(names),
        asked,
        [1] * len(names),
        torch.zeros(len(names), 1),
    )


def echo(layer: int, rows: Rows) -> list[Middle]:
    """Chooses the block whose number is the step of the query, so that a choice says where it is
    from."""
    return [[torch.tensor([int(q[-1])])] for q in rows.query]


class Later(Executor):
    """Runs its jobs on request."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        for task in self.waiting:
            task()
        self.waiting.clear()


class AtOnce(Later):
    """Has done a job before its result is read, like a fast thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


def sources(retriever: Retriever, steps: int, first: int = 1) -> list[int]:
    """The step of the query that each step's choice is from."""
    found = []
    for step in range(first, first + steps):
        retriever.begin_step()
        (choice,) = retriever.step(0, rows_of(step, ["a"]))
        assert choice is not None
        assert choice.middle[0].tolist() == [choice.step]
        found.append(choice.step)
    return found


@FEW
@given(st.integers(1, 6), st.integers(0, 9))
def test_choices_follow_stride_and_lag(stride: int, lag: int) -> None:
    """A choice of the query of step s is used from step s + lag on; the first one at once."""
    for executor in (None, AtOnce()) if lag == 0 else (AtOnce(),):
        retriever = Retriever(
            Policy(stride=stride, lag=lag), echo, SparseStats(), executor=executor
        )
        for step, source in enumerate(sources(retriever, 25), 1):
            asked = [s for s in range(1, step + 1) if (s - 1) % stride == 0 and s + lag <= step]
            assert source == (asked[-1] if asked else 1)


@pytest.mark.parametrize(
    ("stride", "lag", "expected"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (2, 0, [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]),
        (1, 1, [1, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (5, 4, [1, 1, 1, 1, 1, 1, 1, 1, 1, 6]),
        (3, 7, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 7]),
    ],
)
def test_choices_of_known_strides_and_lags(stride: int, lag: int, expected: list[int]) -> None:
    """Among them strides 1 and 2, where the original never chose, and waited for what it never
    asked."""
    retriever = Retriever(Policy(stride=stride, lag=lag), echo, SparseStats(), executor=AtOnce())
    assert sources(retriever, len(expected)) == expected


def test_results_with_and_without_threads_are_equal() -> None:
    policy = Policy(stride=2, lag=3)
    retriever = make_retriever(policy, echo, SparseStats(), threads=3, bound_s=60)
    assert sources(retriever, 30) == sources(
        Retriever(policy, echo, SparseStats(), executor=AtOnce()), 30
    )
    retriever.close()


def test_a_request_that_comes_later_or_comes_back_chooses_at_once() -> None:
    retriever = Retriever(Policy(stride=4), echo, SparseStats())
    assert sources(retriever, 3) == [1, 1, 1]
    retriever.forget("a")
    assert sources(retriever, 4, first=7) == [7, 7, 9, 9]


def test_rows_of_a_batch_share_one_retrieval_and_not_their_choices() -> None:
    asked: list[list[str]] = []

    def find(layer: int, rows: Rows) -> list[Middle]:
        asked.append(list(rows.request_ids))
        return echo(layer, rows)

    retriever = Retriever(Policy(stride=3), find, SparseStats())
    retriever.step(0, rows_of(1, ["a", "b"]))
    retriever.step(
        0,
        Rows(
            ["b", "c"],
            [2, 1],
            [10, 10],
            torch.tensor([2.0, 1.0]).view(2, 1, 1, 1),
            [1, 1],
            torch.zeros(2, 1),
        ),
    )
    retriever.step(0, rows_of(4, ["a", "b", "c"]))
    assert asked == [["a", "b"], ["c"], ["a", "b", "c"]]


def test_layers_have_choices_of_their_own() -> None:
    retriever = Retriever(Policy(stride=3), echo, SparseStats())
    retriever.step(0, rows_of(1, ["a"]))
    (choice,) = retriever.step(1, rows_of(2, ["a"]))
    assert choice is not None and choice.step == 2


def test_a_query_that_the_engine_writes_over_is_not_what_is_scored() -> None:
    later = Later()
    retriever = Retriever(Policy(lag=1), echo, SparseStats(), executor=later, bound_s=0)
    rows = rows_of(1, ["a"])
    retriever.step(0, rows)
    rows.query.fill_(99)
    later.run()
    (choice,) = retriever.step(0, rows_of(2, ["a"]))
    assert choice is not None and choice.middle[0].tolist() == [1]


def test_a_late_choice_is_counted_and_used_in_a_later_step() -> None:
    later, stats = Later(), SparseStats()
    retriever = Retriever(Policy(lag=2), echo, stats, executor=later, bound_s=0)
    assert retriever.step(0, rows_of(1, ["a"])) == [None]
    later.run()
    assert [choice and choice.step for choice in retriever.step(0, rows_of(2, ["a"]))] == [1]
    for step in (3, 4):
        retriever.step(0, rows_of(step, ["a"]))
    assert stats.snapshot()["late"] == 2  # steps 1 and 4: the choices of 1 and 2 were not there
    later.run()
    (choice,) = retriever.step(0, rows_of(5, ["a"]))
    assert choice is not None and choice == Choice(choice.middle, 10, 3)


def test_the_waits_of_a_step_share_one_bound() -> None:
    """However many layers there are, a step waits once."""
    later = Later()
    retriever = Retriever(Policy(lag=1), echo, SparseStats(), executor=later, bound_s=0.05)
    waited = []
    written = Slot.written
    try:
        Slot.written = lambda self, seconds: waited.append(seconds) or written(self, seconds)  # type: ignore[method-assign]
        retriever.begin_step()
        for layer in range(4):
            assert retriever.step(layer, rows_of(1, ["a"])) == [None]
    finally:
        Slot.written = written  # type: ignore[method-assign]
    assert waited[0] <= 0.05 and all(seconds <= 0 for seconds in waited[1:])


def test_a_failed_request_is_dense_counted_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    broken = [True]

    def find(layer: int, rows: Rows) -> list[Middle]:
        if broken[0]:
            raise RuntimeError("no memory")
        return echo(layer, rows)

    stats = SparseStats()
    retriever = Retriever(Policy(stride=100), find, stats)
    assert retriever.step(0, rows_of(1, ["a"])) == [None]
    assert retriever.step(0, rows_of(2, ["a"])) == [None]
    broken[0] = False
    assert [choice and choice.step for choice in retriever.step(0, rows_of(3, ["a"]))] == [3]
    assert stats.snapshot()["failed"] == 2
    assert caplog.text.count("choosing blocks failed") == 1


def test_results_are_read_whole_while_threads_write_them() -> None:
    """A slot is written once and read without a lock: what is there is there whole."""
    slots = [Slot() for _ in range(2000)]
    with ThreadPoolExecutor(4) as pool:
        for number, slot in enumerate(slots):
            pool.submit(slot.write, [[torch.tensor([number])]])
        for number, slot in enumerate(slots):
            assert slot.written(60)
            assert slot.value is not None and slot.value[0][0].tolist() == [number]


def test_closing_waits_for_nothing() -> None:
    release = threading.Event()

    def find(layer: int, rows: Rows) -> list[Middle]:
        release.wait(60)
        return echo(layer, rows)

    retriever = make_retriever(Policy(lag=1), find, SparseStats(), threads=1, bound_s=0)
    assert retriever.step(0, rows_of(1, ["a"])) == [None]
    retriever.close()
    release.set()


def test_lag_and_turnover_are_counted() -> None:
    stats = SparseStats()
    sources(Retriever(Policy(stride=3), echo, stats), 6)
    found = stats.snapshot()
    assert found["lag"] == pytest.approx((0 + 1 + 2) / 3)
    assert found["turnover"] == 1.0  # every choice is another block
    still = SparseStats()
    retriever = Retriever(
        Policy(), lambda layer, rows: [[torch.tensor([3, 4])] for _ in rows.blocks], still
    )
    for step in range(1, 4):
        retriever.step(0, rows_of(step, ["a"]))
    assert still.snapshot()["turnover"] == 0.0


@pytest.mark.parametrize(("stride", "lag"), [(1, 1), (1, 3), (2, 3), (4, 1)])
def test_a_slow_thread_gets_no_more_work_and_is_not_waited_for(
    stride: int, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it brings at last is used again, in the rhythm of before."""
    waits: list[float] = []
    real = Slot.written
    monkeypatch.setattr(
        Slot, "written", lambda slot, seconds: waits.append(seconds) or real(slot, min(seconds, 0))
    )
    executor = Later()
    retriever = Retriever(
        Policy(stride=stride, lag=lag), echo, SparseStats(), executor=executor, bound_s=60.0
    )
    for step in range(1, 101):
        retriever.begin_step()
        assert retriever.step(0, rows_of(step, ["a"])) == [None]
    assert len(executor.waiting) <= -(-lag // stride) + 1
    assert sum(seconds > 0 for seconds in waits) == PATIENCE
    executor.run()
    executor.submit = AtOnce().submit  # type: ignore[method-assign]
    found = [retriever.step(0, rows_of(step, ["a"]))[0] for step in range(101, 131)]
    assert found[0] is not None
    assert found[-1] is not None and found[-1].step > 100


def test_hanging_threads_get_no_more_work_and_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many requests come and go; once they go on, so does everything else."""
    waits: list[float] = []
    real = Slot.written
    monkeypatch.setattr(
        Slot, "written", lambda slot, seconds: waits.append(seconds) or real(slot, min(seconds, 0))
    )
    executor, stats = Later(), SparseStats()
    retriever = Retriever(Policy(lag=1), echo, stats, executor=executor, bound_s=60.0)
    for number in range(100):
        retriever.begin_step()
        assert retriever.step(0, rows_of(1, [f"r{number}"])) == [None]
        retriever.forget(f"r{number}")
    assert len(executor.waiting) == sum(seconds > 0 for seconds in waits) == PATIENCE
    assert stats.snapshot()["late"] == 100
    executor.run()
    executor.submit = AtOnce().submit  # type: ignore[method-assign]
    retriever.begin_step()
    (choice,) = retriever.step(0, rows_of(1, ["next"]))
    assert choice is not None and choice.step == 1


class Streams:
    """A device's module, whose streams write down what happens in them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names = ["step"]
        self.Event, self.Stream = lambda: Happening(self), lambda **_: Flow(self, "beside")

    def current_stream(self, _device: Any) -> Flow:
        return Flow(self, self.names[-1])

    @contextlib.contextmanager
    def stream(self, flow: Flow) -> Iterator[None]:
        self.names.append(flow.name)
        yield
        self.names.pop()


class Flow:
    """A stream."""

    def __init__(self, module: Streams, name: str) -> None:
        self.module, self.name = module, name

    def wait_event(self, event: Happening) -> None:
        assert event.recorded == "step"
        self.module.log.append(f"{self.name} waits")

    def synchronize(self) -> None:
        self.module.log.append(f"{self.name} has run")


class Happening:
    """An event."""

    def __init__(self, module: Streams) -> None:
        self.module, self.recorded = module, ""

    def record(self, flow: Flow) -> None:
        self.recorded = flow.name
        self.module.log.append(f"recorded in {flow.name}")


def test_choices_beside_a_step_of_a_device_wait_for_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they would read queries that have not been computed."""
    module = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)

    def find(layer: int, rows: Rows) -> list[Middle]:
        module.log.append(f"chosen in {module.names[-1]}")
        return [[torch.tensor([3])]]

    retriever = Retriever(Policy(lag=1), find, SparseStats(), executor=AtOnce())
    rows = Rows(
        ["a"],
        [1],
        [10],
        torch.zeros(1, 1, 1, 1, device="meta"),
        [1],
        torch.zeros(1, 1, device="meta"),
    )
    retriever.begin_step()
    (choice,) = retriever.step(0, rows)
    assert choice is not None
    assert choice.middle[0].tolist() == [3]
    assert module.log == ["recorded in step", "beside waits", "chosen in beside", "beside has run"]
