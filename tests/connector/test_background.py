"""Background threads: urgent work is never behind idle work, what hangs is seen, what is too much
is refused."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("vllm")

from parts import Clock, eventually

from ucm.integration.vllm.connector.guard import IDLE, STUCK_S, Background


def test_idle_work_leaves_a_thread_for_urgent_work() -> None:
    background, gate, done = Background("test", threads=2), threading.Event(), threading.Event()

    def hold() -> None:
        gate.wait(30)

    for _ in range(4):
        assert background.submit(hold, IDLE)
    assert background.submit(done.set)
    assert done.wait(30)
    gate.set()
    background.close()


def test_threads_start_when_there_is_work_for_them() -> None:
    background = Background("lazy", threads=3)

    def threads() -> list[str]:
        return sorted(
            thread.name for thread in threading.enumerate() if thread.name.startswith("lazy-")
        )

    def end(done: threading.Event) -> None:
        assert done.wait(30)
        eventually("the thread is free", lambda: len(background._free) == len(threads()))

    assert threads() == []
    for _ in range(3):  # always the same one
        done = threading.Event()
        assert background.submit(done.set, IDLE)
        end(done)
        assert threads() == ["lazy-1"]
    gate, done = threading.Event(), threading.Event()
    for _ in range(2):
        assert background.submit(lambda: gate.wait(30) and None, IDLE)
    assert background.submit(done.set)
    assert done.wait(30)
    assert threads() == ["lazy-0", "lazy-1", "lazy-2"]
    gate.set()
    background.close()


def test_a_full_queue_refuses_and_a_failing_job_affects_no_other() -> None:
    background, gate, running, done = (
        Background("test", threads=1, capacity=1),
        *(threading.Event() for _ in "abc"),
    )

    def hold() -> None:
        running.set()
        gate.wait(30)
        raise ValueError("of the job's own")

    assert background.submit(hold)
    assert running.wait(30)
    assert background.submit(done.set)
    assert not background.submit(done.set)
    gate.set()
    assert done.wait(30)
    background.close()
    assert not background.submit(done.set)


def test_stalled_when_every_thread_hangs() -> None:
    clock, gate, running = Clock(), threading.Event(), threading.Event()
    background = Background("test", threads=1, clock=clock)

    def hang() -> None:
        running.set()
        gate.wait(30)

    assert not background.stalled()
    background.submit(hang)
    assert running.wait(30)
    assert not background.stalled()
    clock.now += STUCK_S * 2
    assert background.stalled()
    gate.set()
    background.close()
