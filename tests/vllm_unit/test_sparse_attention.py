"""Layers of attention under a method, over vLLM's own CPU kernel: what is kept is attended to, and
nothing of vLLM's is changed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sparse_parts import BLOCK, HEADS, KV_HEADS, NAMES, SIZE, Packing, Rig, Rows, context_of
from torch import Tensor

from ucm.config.sparse import keys_of
from ucm.errors import UnsupportedError
from ucm.integration.vllm.attention import setup, tables
from ucm.integration.vllm.attention.host import EagerHooks, active_host, set_active_host
from ucm.integration.vllm.attention.plan import SparsePlan, in_order
from ucm.integration.vllm.attention.representations import Representations, key_reader
from ucm.integration.vllm.attention.setup import ask_for_tiles, measure
from ucm.integration.vllm.connector.worker.sparse import SparseWorker
from ucm.sparse import retrieval
from ucm.sparse.base import UcmSparseBase, UcmSparseRole
from ucm.sparse.method import BlockSparse, method_for
from ucm.store.ucmstore_v1 import SidesTask, Task, UcmKVStoreBaseV1

Quest = method_for("Quest")
Windows = method_for("Windows")
QuestConfig = keys_of("Quest")
WindowsConfig = keys_of("Windows")

pytestmark = pytest.mark.timeout(300)


class PlainBase(UcmKVStoreBaseV1):
    """A store of which only side shards are read."""

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [False] * len(block_ids)

    def load_data(self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: Any) -> Task:
        raise AssertionError

    def dump_data(
        self, block_ids: Any, shard_index: Any, addrs: Any, prerequisite_handle: int = 0
    ) -> Task:
        raise AssertionError

    def wait(self, task: Any, timeout: float | None = None, until: Any = "published") -> None:
        pass

    def check(self, task: Any, until: Any = "published") -> bool:
        return True


@pytest.fixture(scope="module")
def config(engines: Any, tiny: Path) -> Any:
    """vLLM's configuration, which an implementation wants while it is made."""
    return engines.engine_config(tiny)


@pytest.fixture(autouse=True)
def _no_host() -> Iterator[None]:
    yield
    set_active_host(None)


def windows(**keys: Any) -> Windows:
    """The first block and the last two."""
    return Windows(None, UcmSparseRole.WORKER, WindowsConfig(min_tokens=0, **keys))


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-5)


def test_without_a_selection_vllms_bytes_come_out(config: Any) -> None:
    """No host, a row that is short, a ratio of 1, a prompt: the same bits."""
    rows = Rows.of([300, 40, 200], [1, 1, 7])
    dense = Rig(config, None, rows).attend()
    assert close(dense, rows.attended([None] * 3))
    for settings in (QuestConfig(ratio=1.0, min_tokens=0), QuestConfig(ratio=0.2, min_tokens=301)):
        rig = Rig(config, Quest(None, UcmSparseRole.WORKER, settings), rows)
        assert torch.equal(rig.attend(), dense)
    rig = Rig(config, windows(), rows)
    assert torch.equal(rig.attend(rig.plan(prefilled=[400, 400, 400])), dense)
    assert torch.equal(rig.attend(SparsePlan(BLOCK, 0)), dense)


@pytest.mark.parametrize("kernel", ["auto", "vllm"])
def test_rows_that_decode_keep_their_blocks_beside_others(config: Any, kernel: str) -> None:
    """Sparse, short, and a chunk of a prompt in one call; the plan names them in another order."""
    rows = Rows.of([300, 40, 200, 161], [1, 1, 7, 1])
    rig = Rig(config, windows(attention_kernel=kernel), rows)
    assert rig.host is not None
    assert rig.host.uses_own_kernel == (kernel == "auto")
    found = rig.attend()
    assert close(found, rows.attended([[0, 8, 9], None, None, [0, 4, 5]]))
    assert torch.equal(found, rig.attend(name=NAMES[1]))


def test_which_kernel_computes_a_row_does_not_depend_on_its_neighbours(config: Any) -> None:
    """Rows that choose by ucm's, the same bits as alone; the others by vLLM's, the same bits as
    without a method."""
    together = Rig(config, windows(), Rows.of([300, 40, 200, 161], [1, 1, 7, 1])).attend()
    rows = Rows.of([300, 40, 200, 161], [1, 1, 7, 1])

    def some(places: list[int]) -> Rows:
        lists = ([each[i] for i in places] for each in (rows.keys, rows.values, rows.queries))
        return Rows(*lists, rows.table[places])

    dense = Rig(config, None, some([1, 2])).attend()
    assert torch.equal(together[1:9], dense)
    for place, token in ((0, 0), (3, 9)):
        assert torch.equal(
            together[token : token + 1], Rig(config, windows(), some([place])).attend()
        )


def test_a_failure_of_ucms_kernel_leaves_the_layer_to_vllms(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows.of([300, 40], [1, 1])
    rig = Rig(config, windows(), rows)
    monkeypatch.setattr(retrieval, "paged_attention", lambda *_: 1 / 0)
    logging.getLogger("ucm").propagate = True
    with caplog.at_level(logging.WARNING):
        assert close(rig.attend(), rows.attended([[0, 8, 9], None]))
    assert "vLLM's computes from here on" in caplog.text
    assert rig.host is not None
    assert not rig.host.uses_own_kernel


@pytest.mark.parametrize("kernel", ["auto", "vllm"])
def test_nothing_of_vllms_metadata_is_written_to(config: Any, kernel: str) -> None:
    rig = Rig(config, windows(attention_kernel=kernel), Rows.of([300, 161], [1, 1]))
    before = {
        name: value.clone()
        for name, value in vars(rig.metadata).items()
        if isinstance(value, Tensor)
    }
    objects = dict(vars(rig.metadata))
    rig.attend()
    for name, value in vars(rig.metadata).items():
        assert value is objects[name]
        assert not isinstance(value, Tensor) or torch.equal(value, before[name])


@pytest.mark.parametrize(("kernel", "lengths"), [("vllm", [300, 161]), ("auto", [300, 40])])
def test_layers_that_keep_as_many_blocks_share_what_is_planned(
    config: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, lengths: list[int]
) -> None:
    """For vLLM's kernel, which with ucm's beside it computes the rows that keep all."""
    from vllm import _custom_ops as ops

    planned: list[Any] = []
    real = ops.cpu_attn_get_scheduler_metadata
    rig = Rig(config, windows(attention_kernel=kernel), Rows.of(lengths, [1, 1]))
    monkeypatch.setattr(
        ops, "cpu_attn_get_scheduler_metadata", lambda **kw: planned.append(kw) or real(**kw)
    )
    query, keys, values, _ = rig.rows.step()
    assert rig.host is not None
    for _ in range(2):
        rig.host.begin_step(rig.plan(), context_of(rig.layers, rig.metadata))
        for layer in rig.layers.values():
            layer.impl.forward(
                layer, query, keys, values, layer.kv_cache, rig.metadata, torch.zeros_like(query)
            )
        rig.host.end_step()
    assert len(planned) == 2


@pytest.mark.parametrize("kernel", ["auto", "vllm"])
def test_a_choice_for_each_kv_head(config: Any, kernel: str) -> None:
    """Each KV head attends to blocks of its own, beside a prompt and a short row."""
    rows = Rows.of([300, 40, 200, 260], [1, 1, 7, 1], seed=3)
    settings = QuestConfig(ratio=0.3, min_tokens=0, heads="kv", attention_kernel=kernel)
    rig = Rig(config, Quest(None, UcmSparseRole.WORKER, settings), rows)
    chosen: list[Any] = []
    method = rig.host.method  # type: ignore[union-attr]
    real = method.select_rows  # type: ignore[attr-defined]
    method.select_rows = lambda *args: chosen.append(real(*args)) or chosen[-1]  # type: ignore[attr-defined]
    found = rig.attend().view(-1, KV_HEADS, HEADS // KV_HEADS, SIZE)
    selection = chosen[0]
    places = {int(row): number for number, row in enumerate(selection.rows)}
    assert sorted(places) == [0, 3]
    assert not torch.equal(selection.kept(0, 0), selection.kept(0, 1))
    for head in range(KV_HEADS):
        blocks = [
            selection.kept(places[row], head).tolist() if row in places else None
            for row in range(4)
        ]
        expected = rows.attended(blocks, slice(head, head + 1))
        assert close(found[:, head], expected)


def test_rows_are_distinguished_by_the_block_they_write_to(config: Any) -> None:
    rig = Rig(config, windows(), Rows.of([300, 40, 200], [1, 1, 7]))
    rows = in_order(rig.plan(), rig.metadata)
    assert rows is not None
    assert [row.request_id for row in rows] == ["r0", "r1", "r2"]
    plan = rig.plan()
    plan.last_blocks[1] = 10_000
    assert in_order(plan, rig.metadata) is None
    dense = Rig(config, None, rig.rows).attend()
    set_active_host(rig.host)
    assert torch.equal(rig.attend(plan), dense), "rows that nobody knows are dense"


class Blocked(UcmSparseBase):
    """A user's method: writes into what it is handed, of which all is its own copy."""

    def __init__(self) -> None:
        super().__init__(None, UcmSparseRole.WORKER)
        self.phases: list[Any] = []
        self.finished: list[Any] = []

    def attention_begin(
        self,
        query: Any,
        key: Any,
        value: Any,
        layer_name: Any,
        forward_context: Any,
        output: Any = None,
        phase: Any = None,
        **kwargs: Any,
    ) -> Any:
        self.phases.append(phase)
        metadata = forward_context.attn_metadata[layer_name]
        metadata.block_table[0, :2] = metadata.block_table[0, 8:10].clone()
        metadata.seq_lens[0] -= 8 * BLOCK
        return query, key, value, output

    def attention_finished(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_output: Any,
        layer_name: Any,
        forward_context: Any,
        phase: Any = None,
    ) -> None:
        self.finished.append((layer_name, attn_output.clone()))


def test_a_users_changes_of_its_copy_take_effect(config: Any) -> None:
    rows = Rows.of([300, 40], [1, 1])
    method = Blocked()
    rig = Rig(config, method, rows)
    table = rig.metadata.block_table.clone()
    found = rig.attend()
    assert close(found, rows.attended([[8, 9], None]))
    assert torch.equal(rig.metadata.block_table, table)
    assert method.phases == ["decode"]
    assert method.finished[0][0] == NAMES[0]
    assert torch.equal(method.finished[0][1], found)
    mixed = Rig(config, method, Rows.of([300, 40], [1, 3]))
    mixed.attend()
    mixed = Rig(config, method, Rows.of([300, 40], [2, 3]))
    mixed.attend()
    assert method.phases[1:] == [None, "prefill"]


class Scaled(UcmSparseBase):
    """Changes the query, the value in place, and where the output goes."""

    def attention_begin(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        self.out = torch.full_like(query, torch.nan)
        value *= 3
        return 2 * query, key, value, self.out


def test_changed_query_value_and_output_take_effect(config: Any) -> None:
    rows = Rows.of([70, 40], [1, 4])
    rig = Rig(config, Scaled(None, UcmSparseRole.WORKER), rows)
    found = rig.attend()
    changed = Rows(
        rows.keys,
        [torch.cat([v[:-n], 3 * v[-n:]]) for v, n in zip(rows.values, rows.counts, strict=True)],
        [2 * query for query in rows.queries],
        rows.table,
    )
    assert close(found, changed.attended([None, None]))


class Negated(Quest):
    """A subclass of a method of ours that changes keys, in one layer where they lie and in the
    other one anew."""

    def attention_begin(
        self,
        query: Any,
        key: Any,
        value: Any,
        layer_name: Any,
        forward_context: Any,
        output: Any = None,
        phase: Any = None,
        **kwargs: Any,
    ) -> Any:
        q, k, v, out = super().attention_begin(
            query, key, value, layer_name, forward_context, output, phase, **kwargs
        )
        return (q, k.neg_(), v, out) if layer_name == NAMES[0] else (q, -k, v, out)


def write(rig: Rig, keys: Tensor, slots: Tensor) -> None:
    """A step of prompts alone."""
    assert rig.host is not None
    rig.host.begin_step(SparsePlan(BLOCK, 0), context_of(rig.layers, rig.metadata))
    for layer in rig.layers.values():
        layer.impl.do_kv_cache_update(layer, keys, keys, layer.kv_cache, slots)
    rig.host.end_step()


def test_representations_follow_keys_that_a_hook_has_changed(config: Any) -> None:
    """Also of a block that is full with them, and of one that is not full yet."""
    rows = Rows.of([2 * BLOCK, 40], [1, 1])
    method = Negated(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows)
    host = rig.host
    assert host is not None
    before, slots = (
        torch.cat([keys[:-1] for keys in rows.keys]),
        torch.cat([rows.slots(row)[:-1] for row in range(2)]),
    )
    method.store.invalidate(range(rows.blocks))
    write(rig, before, slots)
    query, keys, values, slots = rows.step()
    host.begin_step(rig.plan(), context_of(rig.layers, rig.metadata))
    for layer in rig.layers.values():
        given = keys.clone()
        layer.impl.do_kv_cache_update(layer, given, values, layer.kv_cache, slots)
        layer.impl.forward(
            layer, query, given, values, layer.kv_cache, rig.metadata, torch.zeros_like(query)
        )
    host.end_step()
    for each in rows.keys:
        each[-1] *= -1
    full, begun = rows.table[0, 1], rows.table[1, 1]
    assert method.store.ready([full]) and not method.store.ready([begun])
    for number in range(2):
        expected = method.selector.encode(number, rows.keys[0][None, BLOCK:])
        assert torch.equal(method.store.get(number, [int(full)]), expected)
    more = torch.randn(2 * BLOCK - 40, KV_HEADS, SIZE)
    write(rig, more, int(begun) * BLOCK + torch.arange(8, BLOCK))
    for number in range(2):
        expected = method.selector.encode(number, torch.cat([rows.keys[1][BLOCK:], more])[None])
        assert torch.equal(method.store.get(number, [int(begun)]), expected)


class Measured(Quest):
    """A user's subclass with an ``attention_begin`` of its own, and no ``min_tokens``."""

    def attention_begin(self, *args: Any, **kwargs: Any) -> Any:
        return super().attention_begin(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Quest, {}),
        (Measured, {}),
        (Quest, {"shared_selection": True}),
        (Quest, {"min_concurrency": 2}),
    ],
)
def test_measuring_leaves_the_cache_as_it_is(
    config: Any,
    kind: type[Quest],
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Its blocks hold the KV of requests that run. A user's own hook, ranks that wait for each
    other and a method that chooses for several requests at once are not measured: there it is
    arithmetic."""
    rows = Rows.of([1200], [1])
    method = kind(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, **settings))
    rig = Rig(config, method, rows, packing=Packing.of(dtype))
    before = [layer.kv_cache.clone() for layer in rig.layers.values()]
    found = measured(rig)
    assert all(
        torch.equal(layer.kv_cache, was)
        for layer, was in zip(rig.layers.values(), before, strict=True)
    )
    if kind is Measured or settings:
        policy = method.policy
        assert found == 4 * (policy.windows + policy.budget(1024 // BLOCK)) * BLOCK


def measured(rig: Rig) -> int:
    """What a rank measures after the step of a rig."""
    assert rig.host is not None
    step = dict.fromkeys(rig.layers, rig.metadata)
    sizes = {"block_tokens": BLOCK, "num_blocks": rig.rows.blocks, "max_tokens": 1024}
    return measure(rig.host, rig.layers, step, **sizes)


def test_a_measurement_first_runs_the_layer_as_vllm_did(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel on metadata that nothing else made can end the process. So the system is asked for
    the tiles of AMX, then the layer is computed with the metadata of vLLM's own step, then with
    rows of other lengths in a copy of it: their instruction set is the one that vLLM packed the
    pages for, whichever another builder would choose."""
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2))
    rig = Rig(config, method, Rows.of([1200, 300], [1, 2]), packing=Packing.of(torch.bfloat16))
    calls: list[Any] = []
    for layer in rig.layers.values():
        forward = layer.impl.forward

        def computed(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            calls.append(args[5])
            return _forward(*args, **kwargs)

        monkeypatch.setattr(layer.impl, "forward", computed)
    monkeypatch.setattr(setup, "ask_for_tiles", lambda: calls.append("tiles"))
    chosen: list[str] = []
    plan = tables.cpu_plan

    def planned(impl: Any, layer: Any, *args: Any) -> Any:
        chosen.append(layer.isa)
        return plan(impl, layer, *args)

    monkeypatch.setattr(tables, "cpu_plan", planned)
    before = vars(rig.metadata).copy()
    measured(rig)
    assert calls[:2] == ["tiles", rig.metadata]
    made = calls[2:]
    assert len(made) > 2
    assert all(type(each) is type(rig.metadata) and each is not rig.metadata for each in made)
    assert {int(each.num_actual_tokens) for each in made} == {1}
    assert set(chosen) == {rig.packing.isa}
    assert all(vars(rig.metadata)[name] is value for name, value in before.items()), (
        "vLLM's object was changed"
    )


def test_tiles_that_the_system_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, granted in ((False, False), (True, True), (True, False)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has: has)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda granted=granted: granted)
        if has and not granted:
            with pytest.raises(UnsupportedError, match="tiles of AMX"):
                ask_for_tiles()
        else:
            ask_for_tiles()


def measured_layers(config: Any, lag: int) -> tuple[BlockSparse, setup._Bench]:
    """A method, and what is measured of its layers."""
    rows = Rows.of([1200], [1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, lag=lag))
    rig = Rig(config, method, rows)
    assert rig.host is not None
    layers = {"layers": 2, "selecting": 2, "block_tokens": BLOCK, "blocks": rows.blocks}
    layer = rig.layers[NAMES[0]]
    return method, setup._Bench(rig.host, method, NAMES[0], layer, rig.metadata, **layers)


def test_measuring_counts_what_choosing_takes_beside_the_model(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lag the first call of a layer waits for its choice; the second one goes on with that,
    choosing nothing."""
    method, bench = measured_layers(config, lag=1)
    seconds = itertools.cycle([1.0, 5.0, 1.0])
    monkeypatch.setattr(setup, "_timed", lambda work, device: next(seconds))
    dense, sparse = bench._times(600)
    assert dense == bench.layers * 1.0
    assert sparse >= 5.0
    method.close()


def test_other_load_for_a_while_does_not_end_selection(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, bench = measured_layers(config, lag=0)
    now, calls = 0.0, itertools.count()

    def timed(work: Any, device: Any) -> float:
        """Dense, then sparse twice; for longer than a few turns take there is no processor for what
        is sparse."""
        nonlocal now
        is_dense = next(calls) % 3 == 0
        took = 0.001 if is_dense else 0.002 if now < 0.028 else 0.0001
        now += took
        return took

    monkeypatch.setattr(setup, "_timed", timed)
    monkeypatch.setattr(setup, "time", SimpleNamespace(perf_counter=lambda: now))
    assert bench.pays(600)
    method.close()


class Broken(UcmSparseBase):
    """Raises in every hook."""

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "attention_begin",
            "attention_finished",
            "bind_sparse_metadata",
            "execute_begin",
        ):
            raise RuntimeError(f"{name} is broken")
        return super().__getattribute__(name)

    def attention_begin(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    def execute_finished(self, logits_indices: Any = None) -> Any:
        return [1, 2]


def test_hooks_that_raise_leave_a_layer_dense(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows.of([300, 40], [1, 1])
    dense = Rig(config, None, rows).attend()
    logging.getLogger("ucm").propagate = True
    with caplog.at_level(logging.WARNING):
        found = Rig(config, Broken(None, UcmSparseRole.WORKER), rows).attend()
    assert torch.equal(found, dense)
    assert "attention_begin of Broken failed" in caplog.text
    assert "vLLM has no use for" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        lambda given: given[:3],
        lambda _given: None,
        lambda given: (given[0][:, :1], *given[1:]),
        lambda given: (given[0].double(), *given[1:]),
        lambda given: (*given[:3], None),
    ],
)
def test_an_unusable_result_of_a_hook_leaves_a_layer_dense(config: Any, wrong: Any) -> None:
    class Wrong(UcmSparseBase):
        def attention_begin(
            self,
            query: Any,
            key: Any,
            value: Any,
            layer_name: Any,
            forward_context: Any,
            output: Any = None,
            phase: Any = None,
            **kwargs: Any,
        ) -> Any:
            return wrong((query, key, value, output))

    rows = Rows.of([300, 40], [1, 1])
    dense = Rig(config, None, rows).attend()
    assert torch.equal(Rig(config, Wrong(None, UcmSparseRole.WORKER), rows).attend(), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_read_back_from_packed_pages(config: Any, dtype: torch.dtype) -> None:
    rows = Rows.of([300, 64], [1, 1])
    rig = Rig(config, None, rows)
    layer = rig.layers[NAMES[0]]
    layer.kv_cache = torch.zeros_like(layer.kv_cache, dtype=dtype)
    keys, values = torch.cat(rows.keys).to(dtype), torch.cat(rows.values).to(dtype)
    slots = torch.cat([rows.slots(row) for row in range(2)])
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
    read = key_reader(layer, "CPU_ATTN", layer.kv_cache, BLOCK)
    found = read(layer.kv_cache, rows.table[0, :9].long())
    assert torch.equal(found.flatten(0, 1), rows.keys[0][: 9 * BLOCK].to(dtype))


def test_loaded_blocks_get_what_computed_ones_have(config: Any) -> None:
    """In pieces, between steps; until all layers are done the blocks are not selected from."""
    rows = Rows.of([300, 40], [1, 1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows)
    computed = rig.attend()
    blocks = rows.table[0, :9].long().numpy()
    before = {layer: method.store.get(layer, blocks) for layer in method.store.layers}
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    caches = {method.layer_number(name): layer.kv_cache for name, layer in rig.layers.items()}
    read = key_reader(rig.layers[NAMES[0]], "CPU_ATTN", rig.layers[NAMES[0]].kv_cache, BLOCK)
    work = Representations(method, caches, read, clock)
    store = Beside(work.sides)
    work.begin_load("r0", IDS[:9], blocks, store)
    for layer in method.store.layers:
        method.store.put(layer, blocks, torch.zeros_like(before[layer]))
    assert torch.equal(rig.attend(), Rig(config, None, rows).attend()), (
        "blocks without representation are dense"
    )
    set_active_host(rig.host)
    assert not work.arrived("r0", blocks)
    done: list[str] = []
    rounds = 0
    while not done:
        assert not method.store.ready(blocks)
        done, rounds = work.work(), rounds + 1
    assert done == ["r0"]
    assert rounds > 1
    assert all(torch.equal(method.store.get(layer, blocks), before[layer]) for layer in before)
    assert torch.equal(rig.attend(), computed)
    assert [sorted(ids) for ids, _ in store.stored] == [sorted(IDS[:9])], (
        "what was made from keys is stored once"
    )
    # Another process, or the same one later: they come from the store, of the blocks that it has
    # them of.
    for layer in method.store.layers:
        method.store.put(layer, blocks, torch.zeros_like(before[layer]))
    store.kept.pop(IDS[4])
    work = Representations(method, caches, read)
    work.begin_load("r1", IDS[:9], blocks, store)
    assert not work.arrived("r1", blocks)
    assert work.work() == ["r1"]
    assert (work.loaded, work.rebuilt) == (8, 1)
    assert all(torch.equal(method.store.get(layer, blocks), before[layer]) for layer in before)
    assert [ids for ids, _ in store.stored][1:] == [[IDS[4]]]
    assert list(work.beside(blocks, store) or {}) == [work.name]
    assert work.beside(blocks, Beside({})) is None


@pytest.mark.parametrize("reads_later", [False, True])
def test_nothing_is_made_of_the_blocks_of_a_load_that_is_given_up(
    config: Any, reads_later: bool
) -> None:
    rows = Rows.of([300, 40], [1, 1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows)
    rig.attend()
    blocks = rows.table[0, :9].long().numpy()
    caches = {method.layer_number(name): layer.kv_cache for name, layer in rig.layers.items()}
    read = key_reader(rig.layers[NAMES[0]], "CPU_ATTN", rig.layers[NAMES[0]].kv_cache, BLOCK)
    work = Representations(method, caches, None if reads_later else read, reads_later=reads_later)
    work.begin_load("r0", IDS[:9], blocks, Beside({}))
    assert work.arrived("r0", blocks) == reads_later
    work.forget("r0")
    work.read_by(read)
    assert work.work() == []
    assert not method.store.ready(blocks)


@pytest.mark.parametrize("others", ["none", "written", "given", "unknown"])
def test_reads_after_the_first_step_skip_blocks_that_were_given_to_others(
    config: Any, others: str
) -> None:
    """The request of the load was aborted, and its blocks are those of others by then."""
    rows = Rows.of([300, 40], [1, 1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows)
    rig.attend()
    blocks = rows.table[0, :9].long().numpy()
    worker = SparseWorker.__new__(SparseWorker)
    worker.host, worker.method, worker._writer, worker._measures = rig.host, method, True, False
    caches = {name: layer.kv_cache for name, layer in rig.layers.items()}
    worker.representations = worker._prepare_representations(
        method, rig.layers, "CPU_ATTN", caches, BLOCK
    )
    worker.representations.begin_load("r0", IDS[:9], blocks, Beside({}))
    assert worker.representations.arrived("r0", blocks)
    given = blocks[2:3] if others == "given" else blocks[:0]
    worker.begin_step(SparsePlan(BLOCK, 0, given=given), SimpleNamespace(attn_metadata=None))
    slot = int(blocks[2] if others == "written" else rows.table[1, 0]) * BLOCK + 5
    metadata = (
        None if others == "unknown" else SimpleNamespace(slot_mapping=torch.tensor([slot, -1]))
    )
    worker._after_first_steps(rig.host, {NAMES[0]: metadata})
    assert method.store.ready(blocks) == (others == "none")


@pytest.mark.parametrize("kept", [None, 0, 4], ids=["no side shards", "none stored", "some stored"])
@pytest.mark.parametrize("then", ["read", "unreadable", "loaded anew"])
def test_blocks_loaded_before_the_first_step_are_read_after_it(
    config: Any,
    kept: int | None,
    then: str,
) -> None:
    """How pages are packed is not known before. The load is over, so nothing waits for a step that
    may not come."""
    rows = Rows.of([300, 40], [1, 1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows)
    rig.attend()
    blocks = rows.table[0, :9].long().numpy()
    before = {layer: method.store.get(layer, blocks) for layer in method.store.layers}
    caches = {method.layer_number(name): layer.kv_cache for name, layer in rig.layers.items()}
    read = key_reader(rig.layers[NAMES[0]], "CPU_ATTN", rig.layers[NAMES[0]].kv_cache, BLOCK)
    work = Representations(method, caches, None, reads_later=True)
    store = Beside({} if kept is None else work.sides)
    if kept:
        store.kept = dict(zip(IDS[:kept], work._bytes(blocks)[:kept], strict=True))
    work.begin_load("r0", IDS[:9], blocks, store)
    assert work.arrived("r0", blocks) or work.work() == ["r0"]
    assert not method.store.ready(blocks)
    for layer in method.store.layers:
        method.store.put(layer, blocks[kept or 0 :], torch.zeros_like(before[layer][kept or 0 :]))
    if then == "loaded anew":
        work.begin_load("r1", IDS[:9], blocks, Beside({}))
    work.read_by(None if then == "unreadable" else read)
    assert method.store.ready(blocks) == (then == "read")
    assert work.work() == [], "the load was over"
    if then == "read":
        assert all(torch.equal(method.store.get(layer, blocks), before[layer]) for layer in before)
        assert [ids for ids, _ in store.stored] == ([] if kept is None else [IDS[kept:9]])
    assert Representations(method, {}, None).arrived("r2", blocks)


def test_blocks_that_another_connector_fills_have_no_representation(config: Any) -> None:
    """Theirs is that of what lay there before: they are not selected from, and nothing of it is
    stored beside them."""
    rows = Rows.of([300, 40], [1, 1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows, spare=4)
    blocks = rows.table[0, :9].long().numpy()
    work = Representations(method, {}, None)
    assert work.beside(blocks, Beside(work.sides)) is not None
    plan = rig.plan()
    plan.given = blocks
    assert torch.equal(rig.attend(plan), Rig(config, None, rows).attend())
    assert work.beside(blocks, Beside(work.sides)) is None


IDS = [bytes([number]) * 16 for number in range(16)]


class Beside(PlainBase):
    """A store that keeps side shards in a dictionary."""

    def __init__(self, sides: dict[str, int]) -> None:
        super().__init__({})
        self.side_sizes = sides
        self.kept: dict[bytes, Any] = {}
        self.stored: list[Any] = []

    def load_sides(
        self, block_ids: Sequence[bytes], name: str, timeout: float | None = None
    ) -> SidesTask:
        found = np.array([block in self.kept for block in block_ids])
        data = np.zeros((len(block_ids), self.side_sizes[name]), dtype=np.uint8)
        for row, block in enumerate(block_ids):
            if found[row]:
                data[row] = self.kept[block]
        return SidesTask(None, None, (data, found))

    def dump_sides(self, block_ids: Sequence[bytes], sides: Any) -> Task:
        ((_, rows),) = sides.items()
        self.stored.append((list(block_ids), rows))
        self.kept.update(zip(block_ids, rows, strict=True))
        return Task()


@pytest.mark.parametrize("lacks", ["nothing", "one", "all", "the request"])
def test_blocks_that_are_not_read_need_their_representations(config: Any, lacks: str) -> None:
    """They cannot be made from keys, so the load has failed without them, and its blocks are loaded
    whole."""
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, Rows.of([300], [1]), spare=7)
    blocks = rig.rows.table[0, :9].long().numpy()
    work = Representations(
        method, {0: torch.zeros(1), 1: torch.zeros(1)}, lambda *_: torch.zeros(0)
    )
    store = Beside({} if lacks == "all" else work.sides)
    store.kept = dict(zip(IDS[:9], work._bytes(blocks), strict=True))
    before = {layer: method.store.get(layer, blocks[2:]) for layer in method.store.layers}
    if lacks == "one":
        del store.kept[IDS[5]]
    places = method.store.reserve(7)
    work.rows_of = lambda request: () if lacks == "the request" else places
    work.begin_load("r0", IDS[:2], blocks[:2], store, None, IDS[2:9])
    if not work.arrived("r0", blocks[:2]):
        assert work.work() == ["r0"]
    assert work.selectable("r0") == method.store.ready(places) == (lacks == "nothing")
    if lacks == "nothing":
        assert all(torch.equal(method.store.get(layer, places), before[layer]) for layer in before)
        assert method.store.ready(blocks[:2])


def test_every_shard_of_a_block_brings_an_equal_share_of_what_is_kept_beside(config: Any) -> None:
    """Three layers that bring a shard each, of which two have representations: what is kept beside
    is filled up."""
    rows = Rows.of([300], [1])
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, rows)
    rig.attend()
    blocks = rows.table[0, :9].long().numpy()
    before = {layer: method.store.get(layer, blocks) for layer in method.store.layers}
    plain, work = Representations(method, {}, None), Representations(method, {}, None, shards=3)
    assert plain.size % 3 and work.size % 3 == 0
    assert (
        plain.name != work.name and plain.name == Representations(method, {}, None, shards=2).name
    )
    found = (work.beside(blocks, Beside(work.sides)) or {})[work.name]
    assert found.shape == (9, work.size)
    for layer in before:
        method.store.put(layer, blocks, torch.zeros_like(before[layer]))
    work._put(blocks, found)
    assert all(torch.equal(method.store.get(layer, blocks), before[layer]) for layer in before)


def test_blocks_that_cannot_be_encoded_are_reported_all_the_same(config: Any) -> None:
    method = Quest(None, UcmSparseRole.WORKER, QuestConfig(ratio=0.2, min_tokens=0))
    rig = Rig(config, method, Rows.of([300], [1]))

    def unreadable(_pages: Tensor, _ids: Tensor) -> Tensor:
        raise RuntimeError("no such pages")

    work = Representations(method, {0: torch.zeros(1), 1: torch.zeros(1)}, unreadable)
    blocks = rig.rows.table[0, :9].long().numpy()
    work.begin_load("r0", IDS[:9], blocks, Beside({}))
    assert not work.arrived("r0", blocks)
    assert work.work() == ["r0"]
    assert not method.store.ready(blocks)
    assert Representations(method, {}, None).arrived("r1", blocks)


# Layers and feed-forward parts
# ---------------------------------------------------------------------------------------


class Decoder(torch.nn.Module):
    """A layer of the usual form."""

    def __init__(self) -> None:
        super().__init__()
        self.post_attention_layernorm = _Norm()
        self.mlp = torch.nn.Identity()

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Adds up, as a layer does."""
        residual = hidden_states if residual is None else residual + hidden_states
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states) + positions, residual


class _Norm(torch.nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, residual


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Decoder(), Decoder()])

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """What comes out at the end."""
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden


class Layered(UcmSparseBase):
    """Counts, and changes what it can."""

    def __init__(self) -> None:
        super().__init__(None, UcmSparseRole.WORKER)
        self.calls: list[str] = []

    def layer_begin(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        self.calls.append("layer_begin")
        return positions, hidden_states + 1, residual

    def layer_finished(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        self.calls.append("layer_finished")
        return positions, hidden_states * 10, residual

    def ffn_begin(self, hidden_states: Any, residual: Any) -> Any:
        self.calls.append("ffn_begin")
        return hidden_states + 100, residual

    def ffn_finished(self, hidden_states: Any, residual: Any) -> Any:
        self.calls.append("ffn_finished")
        return hidden_states + 1000, residual


def test_layer_and_feed_forward_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model, method = Model(), Layered()
    positions, hidden = torch.tensor([5.0]), torch.tensor([2.0])
    plain = float(model(positions, hidden))
    logging.getLogger("ucm").propagate = True
    with caplog.at_level(logging.INFO):
        hooks = EagerHooks(method, eager=True)
    assert (
        "layer_begin, layer_finished, ffn_begin, ffn_finished of Layered are called" in caplog.text
    )
    once = (2 + 1 + 100 + 5 + 1000) * 10
    assert float(model(positions, hidden)) == (once + 1 + 100 + 5 + 1000) * 10
    assert method.calls == 2 * ["layer_begin", "ffn_begin", "ffn_finished", "layer_finished"]
    hooks.remove()
    assert float(model(positions, hidden)) == plain
    with caplog.at_level(logging.WARNING):
        EagerHooks(method, eager=False)
    assert "in eager mode only" in caplog.text
    assert float(model(positions, hidden)) == plain


@pytest.mark.parametrize("result", [None, (), torch.zeros(3), (torch.zeros(3),) * 7])
def test_layer_hooks_whose_results_nothing_can_use_change_nothing(result: Any) -> None:
    class Wrong(UcmSparseBase):
        def layer_begin(self, *given: Any) -> Any:
            return result

        layer_finished = ffn_begin = ffn_finished = layer_begin

    model, positions, hidden = Model(), torch.tensor([5.0]), torch.tensor([2.0])
    plain = float(model(positions, hidden))
    hooks = EagerHooks(Wrong(None, UcmSparseRole.WORKER), eager=True)
    assert float(model(positions, hidden)) == plain
    hooks.remove()


def test_a_method_without_these_hooks_hangs_none() -> None:
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    EagerHooks(Blocked(), eager=True)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before


def test_the_active_host_is_the_last_one_until_it_is_closed(config: Any) -> None:
    rig = Rig(config, Blocked(), Rows.of([70], [1]))
    assert active_host() is rig.host
    assert rig.host is not None
    rig.host.close()
    assert active_host() is None
    assert rig.host.name_of(SimpleNamespace()) is None
