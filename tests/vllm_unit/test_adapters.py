"""Adapters are what their files say, and a change that cannot be placed in time takes their name
away."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from ucm.errors import NotFoundError
from ucm.integration.vllm.connector.identity import keys
from ucm.integration.vllm.connector.identity.keys import AdapterDigests, UnkeyableError
from ucm.integration.vllm.connector.identity.weights import DigestMemory

#: The first import of vLLM takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)

ALWAYS = 1 << 62


class HandClock:
    """Seconds that pass on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_adapter(path: Path, content: bytes = b"adapter", config: str = '{"r": 8}') -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(content)
    (path / "adapter_config.json").write_text(config)
    return path


def adapter_digest(path: str) -> bytes:
    return keys._digest_files(path, DigestMemory(None, time.time_ns), time.time_ns)[0]


def lora(path: Path, number: int = 1, **args: Any) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, str(path), **args)


def settle(digests: AdapterDigests) -> None:
    """Until all jobs of the threads so far are done."""
    for worker in (digests._hashing, digests._looking):
        done = threading.Event()
        worker.submit(done.set)
        assert done.wait(60)


def looked(digests: AdapterDigests, clock: HandClock, asked: LoRARequest) -> bool | None:
    """The answer after a look at the files that begins now."""
    since = clock.now
    clock.now += 0.01
    assert digests.current(asked, since) is not True, "this look has not been taken"
    settle(digests)
    return digests.current(asked, since)


def test_content_counts_and_the_place_does_not(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    before = adapter_digest(str(path))
    assert len(before) == 32
    assert adapter_digest(str(shutil.copytree(path, tmp_path / "b"))) == before
    (path / "README.md").write_text("hello")
    (path / "optimizer.pt").write_bytes(b"state")
    assert adapter_digest(str(path)) == before
    make_adapter(path, content=b"retrain")  # same path, same size
    retrained = adapter_digest(str(path))
    assert retrained != before
    make_adapter(path, content=b"retrain", config='{"r": 9}')
    assert adapter_digest(str(path)) not in (before, retrained)


def test_no_adapter_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        adapter_digest(str(tmp_path / "missing"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NotFoundError):
        adapter_digest(str(tmp_path))


def test_the_payload_is_the_digest_in_every_process(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    payloads = {
        AdapterDigests(since_ns=ALWAYS).payload(lora(path, number)) for number in (1, 2)
    }  # two processes that number adapters differently
    assert payloads == {adapter_digest(str(path))}
    flat, stacked = (
        AdapterDigests(since_ns=ALWAYS).payload(lora(path, is_3d_lora_weight=is3d))
        for is3d in (0, 1)
    )
    assert flat != stacked


def test_an_adapter_retrained_between_two_processes_is_another(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    before = AdapterDigests(since_ns=ALWAYS).payload(lora(path))
    make_adapter(path, content=b"retrain")
    assert AdapterDigests(since_ns=ALWAYS).payload(lora(path)) != before


def test_an_adapter_written_after_the_engine_started_has_no_name(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    digests = AdapterDigests(since_ns=0)
    with pytest.raises(UnkeyableError, match="after the engine started") as refused:
        digests.payload(lora(path))
    assert not refused.value.pending
    assert digests.current(lora(path), -1.0) is False
    trusting = AdapterDigests(since_ns=0, trust_new_files=True)
    assert trusting.payload(lora(path)) == adapter_digest(str(path))


def test_a_change_while_the_engine_runs_takes_the_name_away(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    clock = HandClock()
    digests = AdapterDigests(since_ns=ALWAYS, clock=clock)
    before = digests.payload(lora(path))
    assert looked(digests, clock, lora(path))
    make_adapter(path, content=b"retrain")
    clock.now += keys.RECHECK_S
    assert digests.payload(lora(path)) == before  # starts another check, and does not wait for it
    settle(digests)
    assert digests.current(lora(path), 0.0) is False
    with pytest.raises(UnkeyableError, match="changed while the engine runs"):
        digests.payload(lora(path))
    shutil.rmtree(path)


def test_a_vanished_adapter_counts_as_changed(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    clock = HandClock()
    digests = AdapterDigests(since_ns=ALWAYS, clock=clock)
    digests.payload(lora(path))
    shutil.rmtree(path)
    assert looked(digests, clock, lora(path)) is False


def test_only_a_check_that_began_afterwards_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = make_adapter(tmp_path / "a"), HandClock()
    digests = AdapterDigests(since_ns=ALWAYS, clock=clock)
    digests.payload(lora(path))
    settle(digests)
    begun, go, real = threading.Event(), threading.Event(), keys.os.stat

    def slow(path: str) -> Any:
        begun.set()
        assert go.wait(60)
        return real(path)

    monkeypatch.setattr(keys.os, "stat", slow)
    assert digests.current(lora(path), clock.now) is None
    assert begun.wait(60)
    clock.now += 0.1
    computed = clock.now  # while that look is under way
    clock.now += 0.1
    go.set()
    settle(digests)
    assert digests.current(lora(path), computed) is None
    settle(digests)
    assert digests.current(lora(path), computed)


def test_hashing_one_adapter_does_not_delay_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen for eight seconds: one thread hashed a large adapter, and another one overwritten
    in that time was current."""
    small, large, clock = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b"), HandClock()
    digests = AdapterDigests(since_ns=ALWAYS, clock=clock)
    digests.payload(lora(small))
    settle(digests)
    go, real = threading.Event(), keys._digest_files

    def slow(*args: Any) -> Any:
        assert go.wait(60)
        return real(*args)

    monkeypatch.setattr(keys, "_digest_files", slow)
    monkeypatch.setattr(keys, "FIRST_WAIT_S", 0.0)
    with pytest.raises(UnkeyableError):
        digests.payload(lora(large, 2))
    make_adapter(small, content=b"retrain")
    since = clock.now
    clock.now += 0.01
    assert digests.current(lora(small), since) is None
    done = threading.Event()
    digests._looking.submit(done.set)
    assert done.wait(60)
    assert digests.current(lora(small), since) is False
    go.set()


def test_a_check_that_takes_long_reports_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = make_adapter(tmp_path / "a"), HandClock()
    digests = AdapterDigests(since_ns=ALWAYS, clock=clock)
    before = digests.payload(lora(path))
    settle(digests)
    go, real = threading.Event(), keys.os.stat

    def hangs(path: str) -> Any:
        assert go.wait(60)
        return real(path)

    monkeypatch.setattr(keys.os, "stat", hangs)
    clock.now += keys.RECHECK_S
    assert digests.payload(lora(path)) == before
    clock.now += keys.RECHECK_S
    with pytest.raises(UnkeyableError, match="takes long") as refused:
        digests.payload(lora(path))
    assert refused.value.pending
    assert digests.current(lora(path), clock.now - 0.1) is None
    go.set()
    settle(digests)
    assert digests.payload(lora(path)) == before


def test_one_number_for_two_paths_has_no_name(tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"other")
    digests = AdapterDigests(since_ns=ALWAYS)
    digests.payload(lora(first))
    for path in (second, first):
        with pytest.raises(UnkeyableError, match="two paths"):
            digests.payload(lora(path))


def test_a_hub_name_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(UnkeyableError, match="local path"):
        AdapterDigests(since_ns=ALWAYS).payload(LoRARequest("x", 1, "org/adapter"))


def test_only_the_first_call_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), keys._digest_files

    def slow(*args: Any) -> Any:
        assert go.wait(60)
        return real(*args)

    monkeypatch.setattr(keys, "_digest_files", slow)
    monkeypatch.setattr(keys, "FIRST_WAIT_S", 0.0)
    path = make_adapter(tmp_path / "a")
    digests = AdapterDigests(since_ns=ALWAYS)
    for _ in range(2):
        with pytest.raises(UnkeyableError) as refused:
            digests.payload(lora(path))
        assert refused.value.pending
        assert digests.current(lora(path), 0.0) is None, "it may be known later"
    go.set()
    settle(digests)
    assert digests.payload(lora(path)) == adapter_digest(str(path))
    digests.close()
    digests.close()


def test_the_number_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LIMIT", 1)
    path = make_adapter(tmp_path / "a")
    digests = AdapterDigests(since_ns=ALWAYS)
    digests.payload(lora(path, 1))
    with pytest.raises(UnkeyableError, match="too many"):
        digests.payload(lora(path, 2))
    assert digests.current(lora(path, 2), 0.0) is False
    assert digests.current(lora(path, 1), 0.0) is not False
