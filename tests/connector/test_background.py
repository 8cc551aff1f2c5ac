"""Background threads: urgent work is never behind idle work, what hangs is seen, what is too much is refused."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("vllm")

from parts import Clock

from ucm.integration.vllm.connector.background import IDLE, STUCK_S, Background


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


def test_a_full_queue_refuses_and_a_failing_job_harms_nobody() -> None:
    background, gate, running, done = Background("test", threads=1, capacity=1), *(threading.Event() for _ in "abc")

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
