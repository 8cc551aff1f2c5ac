"""What a request may decide by ``kv_transfer_params``, and what vLLM reports of hits and of stored
blocks to others, with the warm engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from cases import STORED, Case
from checks import assert_reused, assert_same, assert_stored
from harness import CALL_DEADLINE, Engine, wait_until
from lives import Life, store_under_test
from specs import BLOCK, Result, prompt
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

pytestmark = pytest.mark.one_runner

#: Which no other test sends.
NEW = Case(prompt(170, 5 * BLOCK + 3))


def ask(engine: Engine, case: Case, **keys: Any) -> Result:
    """One request with these keys of ucm; nothing of it is under way after that."""
    result = engine.generate(case.ask(extra_args={"kv_transfer_params": {"ucm": keys}}))[0]
    engine.wait_idle()
    return result


def test_a_request_that_is_not_stored_and_one_that_is(warm: Engine, cold: Life) -> None:
    warm.wait_idle()
    before = len(cold.disk.files())
    unstored = ask(warm, NEW, dump=False)
    assert unstored.cached == 0
    assert_same(ask(warm, NEW, skip_save=True), unstored)
    assert len(cold.disk.files()) == before
    warm.reset()
    assert_same(ask(warm, NEW), unstored)
    assert_stored(cold.disk, before, (len(NEW.tokens) + NEW.max_tokens - 1) // BLOCK)


def test_a_request_that_loads_less(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    case, right = STORED["long"], reference["long"]
    for keys, blocks in (({"load": False}, 0), ({"max_load_tokens": 3 * BLOCK + 1}, 3)):
        answer = ask(warm, case, **keys)
        assert_same(answer, right)
        assert answer.cached_blocks == blocks
        warm.reset()
    answer = ask(warm, case)
    assert_same(answer, right)
    assert_reused(answer, case)


def test_unknown_keys_cost_the_cache_and_not_the_request(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    case, right = STORED["middle"], reference["middle"]
    for _ in range(2):
        answer = ask(warm, case, max_load_token=1)
        assert_same(answer, right)
        assert answer.cached == 0
        warm.reset()
    assert warm.log_text().count("ucm.max_load_token is not known") == 1


@pytest.mark.skipif(store_under_test() != "posix", reason="the other store names no media")
def test_hits_are_counted_by_source(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    name, case = "vllm:prompt_tokens_cached_by_source_total", STORED["middle"]
    before = warm.metrics()
    answer = ask(warm, case)
    assert_same(answer, reference["middle"])
    assert_reused(answer, case)

    def counted() -> bool:
        after = warm.metrics()
        return after[f"{name}:disk"] - before[f"{name}:disk"] == answer.cached

    wait_until(counted, "the tokens of the hit count for the disk")
    unspecified = f"{name}:external_unspecified"
    assert warm.metrics()[unspecified] == before[unspecified]


class Router:
    """Reads the events of an engine."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.stored: dict[str | None, set[Any]] = {MEDIUM_GPU: set(), MEDIUM_STORAGE: set()}
        self.removed: set[Any] = set()  # of the stored ones
        self.newest: list[int] = []  # tokens of the last stored blocks

    def read(self) -> bool:
        """Process the next message; False if there is none."""
        try:
            *_, payload = self._socket.recv_multipart()
        except zmq.Again:
            return False
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                self.stored[event.medium].update(event.block_hashes)
                if event.medium == MEDIUM_STORAGE:
                    self.newest = list(event.token_ids)
            elif isinstance(event, BlockRemoved) and event.medium == MEDIUM_STORAGE:
                assert event.group_idx == 0
                self.stored[MEDIUM_STORAGE].difference_update(event.block_hashes)
                self.removed.update(event.block_hashes)
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def router(warm: Engine, cold: Life) -> Iterator[Router]:
    """A router that gets every event from now on, and has read all of before."""
    router, seeds = Router(cold.events), itertools.count(700)

    def connected() -> bool:
        """The event of a stored block comes with the steps of :meth:`Engine.wait_idle`; none is
        behind it."""
        tokens = prompt(next(seeds), BLOCK + 1)
        ask(warm, Case(tokens, 1))
        while router.read():
            pass
        return router.newest == tokens[:BLOCK]

    wait_until(connected, "an event of the last prompt arrives", CALL_DEADLINE)
    yield router
    router.close()


def test_a_router_learns_what_is_stored_and_what_is_not_any_more(
    warm: Engine, cold: Life, router: Router
) -> None:
    case = Case(prompt(171, 5 * BLOCK + 3), 1)
    for on_device in router.stored.values():
        on_device.clear()
    before = set(cold.disk.files())
    ask(warm, case)
    files = set(cold.disk.files()) - before
    assert len(files) == 5

    def settled() -> bool:
        """Results of dumps are read with the next steps."""
        warm.generate(Case(prompt(72, 3), 1).ask())
        router.read()
        return len(router.stored[MEDIUM_STORAGE]) == 5

    wait_until(settled, "the stored blocks are reported")
    hashes = set(router.stored[MEDIUM_STORAGE])
    assert hashes == router.stored[MEDIUM_GPU], "the same hashes as vLLM's own"

    for path in files:
        path.unlink()
    ask(warm, case, dump=False)  # its lookup finds nothing

    def gone() -> bool:
        router.read()
        return router.removed >= hashes

    wait_until(gone, "the removed blocks are reported")
    assert not router.stored[MEDIUM_STORAGE] & hashes
