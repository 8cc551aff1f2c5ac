"""With ``debug``, one hit in n is computed and its stored blocks are compared with what was
computed: vLLM's own scheduler, both sides of the connector and a real store."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_engine import BLOCK, BLOCKS, LateStore, Rank, Row, ToyEngine, expected
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from ucm.integration.vllm.connector.scheduler import scheduler
from ucm.integration.vllm.connector.worker import transfers
from ucm.store.kv_layout import KVLayout

#: Full blocks of a prompt.
FULL = 6
PROMPT = [(7 * at) % 400 + 3 for at in range(FULL * BLOCK + 5)]
COUNT = 3
Life = Callable[..., ToyEngine]


@pytest.fixture
def life(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Life]:
    """Makes engines, one after the other over the same store; ``every``: one in this many hits is
    compared."""
    made: list[ToyEngine] = []
    monkeypatch.setattr(LateStore, "blocks", {})
    pipeline = {
        "store_pipeline": "Cache|Posix",
        "storage_backends": str(tmp_path / "blocks"),
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "cache_size": "16MiB",
        "staging_capacity": "16MiB",
    }

    def make(
        every: int = 1, debug: bool = True, kind: type[ToyEngine] = ToyEngine, **args: Any
    ) -> ToyEngine:
        monkeypatch.setattr(scheduler, "COMPARED", every)
        store = args.pop("store", pipeline)
        args.setdefault("max_num_batched_tokens", 256)  # a prompt takes one step
        engine = kind(engines, tiny, monkeypatch, store=store, keys={"debug": debug}, **args)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def ask(engine: ToyEngine, name: str, specs: Any = ()) -> int:
    """Run one request to its end, and its dumps; its tokens are right. Returns the tokens that were
    loaded for it."""
    request = engine.add(name, PROMPT, COUNT)
    engine.until(request.is_finished)
    assert list(request.output_token_ids) == expected(PROMPT, COUNT, specs)
    engine.until(lambda: not engine.connector._scheduler.dumps.under_way)
    return engine.claimed[name]


def counts(engine: ToyEngine) -> dict[str, int]:
    """The blocks compared so far, once no comparison is under way."""
    comparisons = engine.worker._worker.dumps.comparisons
    engine.until(lambda: not comparisons._running)
    return dict(comparisons.counts)


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    """Those about comparisons."""
    texts = (one.getMessage() for one in log.records if one.levelno >= logging.WARNING)
    return [text for text in texts if "stored" in text]


def fill_the_device(engine: ToyEngine) -> None:
    """Other requests take every block of the device, and neither load nor store."""
    for seed in range(1, BLOCKS // FULL + 2):
        tokens = [(11 * at + seed) % 300 for at in range(FULL * BLOCK + 5)]
        request = engine.add(f"other {seed}", tokens, 1, ucm={"load": False, "dump": False})
        engine.until(request.is_finished)
        del engine.claimed[f"other {seed}"]


def test_every_third_hit_is_computed_and_its_blocks_are_equal(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    engine = life(3)
    assert ask(engine, "cold") == 0
    loaded, seen = [], []
    with caplog.at_level(logging.INFO, "ucm"):
        for at in range(7):
            fill_the_device(engine)
            loaded.append(ask(engine, f"warm {at}"))
            seen.append(counts(engine).get("equal", 0))
    whole = FULL * BLOCK
    assert loaded == [whole, whole, 0, whole, whole, 0, whole]
    assert seen == [0, 0, FULL, FULL, FULL, 2 * FULL, 2 * FULL]
    assert counts(engine) == {"equal": 2 * FULL}
    assert f"request warm 5: stored blocks: {FULL} equal; in all: {2 * FULL} equal" in caplog.text
    stats = engine.connector._scheduler.miss_stats.total
    assert stats.missed["not_taken"] == 2 * FULL
    assert engine.connector._scheduler.dumps.published_blocks == FULL, "nothing is stored again"
    assert warnings(caplog) == []


def test_without_debug_every_hit_is_loaded(life: Life) -> None:
    engine = life(1, debug=False)
    ask(engine, "cold")
    fill_the_device(engine)
    assert ask(engine, "warm") == FULL * BLOCK
    assert counts(engine) == {}


class Wrong(ToyEngine):
    """Writes one wrong element into the second layer of the third block, where the model does not
    read it."""

    factor = 1.0

    def _forward(self, rank: Rank, row: Row) -> None:
        super()._forward(rank, row)
        layer = list(rank.caches.values())[1][row.tables[0][2]]
        layer[1, 5, 3] = layer[0, 5, 3] * self.factor


@pytest.mark.parametrize(
    ("factor", "result"), [(1.0, "equal"), (1.001, "close"), (0.5, "different")]
)
def test_a_planted_record_is_reported(
    life: Life, caplog: pytest.LogCaptureFixture, factor: float, result: str
) -> None:
    """An earlier life has stored other KV under the right keys, and its records are sound."""
    writer = life(kind=type("Writer", (Wrong,), {"factor": factor}))
    ask(writer, "cold")
    writer.close()
    engine = life()
    assert ask(engine, "warm") == 0
    found = {"equal": FULL} if result == "equal" else {"equal": FULL - 1, result: 1}
    assert counts(engine) == found
    if result != "different":
        assert warnings(caplog) == []
        return
    (text,) = warnings(caplog)
    size = engine.worker._worker._layout.block_bytes
    assert text.startswith("request warm: block 2 is stored with other KV than was computed: ")
    assert f" of {size} bytes differ, most in layer {list(engine.caches)[1]}, by up to " in text


def test_a_hit_that_is_not_compared_gives_the_stored_kv(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a comparison finds is what a load would have brought."""
    with monkeypatch.context() as patch:
        patch.setattr("toy_engine._state", lambda before, token: (before * 29 + token + 5) % 65521)
        writer = life()
        ask(writer, "cold")
        writer.close()
    engine = life(2)
    wrong = engine.add("loaded", PROMPT, COUNT)
    engine.until(wrong.is_finished)
    assert list(wrong.output_token_ids) != expected(PROMPT, COUNT)
    fill_the_device(engine)
    assert ask(engine, "compared") == 0, "the second hit is computed, and its tokens are right"
    assert counts(engine) == {"different": FULL}


def test_no_step_waits_for_a_comparison(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    held, wait = threading.Event(), LateStore.wait

    def late(self: LateStore, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "ucm-compare":
            held.wait()
        wait(self, *args, **kwargs)

    monkeypatch.setattr(LateStore, "wait", late)
    engine = life(store=None)
    ask(engine, "cold")
    try:
        for at in range(3):
            fill_the_device(engine)
            assert ask(engine, f"warm {at}") == 0
        fill_the_device(engine)
        engine.until(engine.idle)
        assert not engine.worker._worker.dumps.comparisons.counts
    finally:
        held.set()
    assert counts(engine) == {"equal": FULL}, "of the first; others were not compared meanwhile"


def test_blocks_that_cannot_be_loaded_are_not_compared(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = life(store=None)
    ask(engine, "cold")
    fill_the_device(engine)
    load = LateStore.load_data

    def failing(self: LateStore, ids: Any, shards: Any, addresses: Any) -> Any:
        LateStore.blocks.pop(ids[1], None)
        return load(self, ids, shards, addresses)

    monkeypatch.setattr(LateStore, "load_data", failing)
    with caplog.at_level(logging.INFO, "ucm"):
        assert ask(engine, "warm") == 0
        assert counts(engine) == {}
    assert "request warm: stored blocks not compared: " in caplog.text
    assert not engine.off


def test_a_large_hit_is_compared_in_part(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = life()
    ask(engine, "cold")
    fill_the_device(engine)
    size = engine.worker._worker._layout.block_bytes
    monkeypatch.setattr(transfers, "COMPARED_BYTES", 2 * size + 1)
    assert ask(engine, "warm") == 0
    assert counts(engine) == {"equal": 2}


def test_every_kv_group_is_compared(life: Life) -> None:
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((2 * 2 * BLOCK * 32,),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
        mamba_cache_mode="align",
    )
    window = SlidingWindowSpec(block_size=BLOCK, sliding_window=40, **shape)
    specs = [FullAttentionSpec(block_size=BLOCK, **shape), window, state]
    engine = life(specs=specs, blocks=120, store=None)
    ask(engine, "cold", specs)
    engine.until(engine.idle)
    engine.close()
    engine = life(specs=specs, blocks=120, store=None)
    groups: list[int] = []
    begin = engine.worker._worker.dumps.comparisons.begin
    engine.worker._worker.dumps.comparisons.begin = lambda dump, own: (
        groups.append(dump.group),
        begin(dump, own),
    )
    assert ask(engine, "warm", specs) == 0
    found = counts(engine)
    assert set(groups) == {0, 1, 2}
    assert found.keys() == {"equal"} and found["equal"] > FULL


LAYOUTS = {
    "heads first": lambda make: make(5, 2, 4, 8),
    "tokens first": lambda make: make(5, 4, 2, 8).transpose(1, 2),
    "all of K before V": lambda make: make(2, 5, 4, 8).transpose(0, 1),
    "all of a head": lambda make: make(2, 5, 4, 8).transpose(0, 1).transpose(1, 2),
    "kernel blocks": lambda make: make(10, 2, 4, 8),
    "padded": lambda make: make(5, 2, 6, 8)[:, :, :4],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_computed_blocks_have_the_bytes_that_a_store_reads(name: str, dtype: torch.dtype) -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.rand(shape).to(dtype)

    caches: dict[str, Any] = {f"layers.{at}": LAYOUTS[name](make) for at in range(2)}
    rope = make(10 if name == "kernel blocks" else 5, 4, 2)
    caches["layers.2"] = LAYOUTS[name](make), rope
    layout = KVLayout(caches, num_blocks=5)
    sizes = [view.run for layer in layout.layers for view in layer for _ in view.offsets]
    blocks = np.array([3, 0], dtype=np.int64)
    rows = [
        b"".join(ctypes.string_at(int(at), size) for at, size in zip(pieces, sizes, strict=True))
        for pieces in layout.addresses(blocks)
    ]
    computed = transfers.kv_bytes(layout, blocks)
    assert [bytes(row.numpy()) for row in computed] == rows
    other = computed[0].clone()
    other.view(dtype)[-1] = -1
    result, how = transfers.compared(layout, computed[0], other)
    assert (result, "most in layer layers.2" in how) == ("different", True)
