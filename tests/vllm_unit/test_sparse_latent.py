"""Latent attention behind vLLM's backends: what their kernels are given, and what a user's hooks
may change.

Triton and FlashMLA do not run on a CPU, AMX_MLA not on every one: vLLM's implementations of them
run here with torch in the place of their kernels. The latent attention of vLLM's CPU backend runs
with its own kernel.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_parts import HEADS, NAME, SIZE, context_of, windows
from torch import Tensor

from ucm.config.sparse import keys_of
from ucm.integration.vllm.attention.backends import derive_impl
from ucm.integration.vllm.attention.host import SparseHost, set_active_host
from ucm.integration.vllm.attention.plan import SparsePlan
from ucm.integration.vllm.attention.representations import key_reader
from ucm.sparse.base import SparseRow, UcmSparseBase, UcmSparseRole
from ucm.sparse.gsa_on_device.gsa_on_device import GSAOnDevice
from ucm.sparse.method import method_for
from ucm.sparse.selector import Geometry

Windows = method_for("Windows")
GsaOnDeviceConfig = keys_of("GSAOnDevice")
WindowsConfig = keys_of("Windows")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _no_host() -> Iterator[None]:
    yield
    set_active_host(None)


RANK, ROPE = 512, 64
LATENT_BLOCK = 16


class LatentRows:
    """Sequences of latent keys; the last token of each is computed."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.keys = [
            torch.randn(length, RANK + ROPE, generator=generator) / 4 for length in lengths
        ]
        self.query = torch.randn(len(lengths), HEADS, RANK + ROPE, generator=generator)
        blocks = [-(-length // LATENT_BLOCK) for length in lengths]
        ids = (1 + torch.randperm(sum(blocks), generator=generator)).int().split(blocks)
        self.table = torch.stack(
            [torch.nn.functional.pad(row, (0, max(blocks) - len(row))) for row in ids]
        )
        self.blocks = sum(blocks) + 1

    def slots(self, row: int) -> Tensor:
        """Where the tokens of a row are."""
        places = torch.arange(self.lengths[row])
        return self.table[row].long()[places // LATENT_BLOCK] * LATENT_BLOCK + places % LATENT_BLOCK

    def attended(self, kept: list[list[int] | None], scale: float) -> Tensor:
        """What the queries get from the blocks that their rows keep."""
        outputs = []
        for keys, query, blocks in zip(self.keys, self.query, kept, strict=True):
            if blocks is not None:
                keys = keys[
                    torch.isin(torch.arange(len(keys)) // LATENT_BLOCK, torch.tensor(blocks))
                ]
            outputs.append(torch.softmax(query @ keys.T * scale, dim=-1) @ keys[:, :RANK])
        return torch.stack(outputs)


def latent_kernel(
    query: Tensor, pages: Tensor, table: Tensor, lens: Tensor, scale: float
) -> Tensor:
    """Latent attention of one token a row, by torch; ``pages [blocks, b, rank and rope]``."""
    outputs = []
    for row, length in enumerate(lens.tolist()):
        keys = pages[table[row].long()].flatten(0, 1)[:length]
        outputs.append(torch.softmax(query[row] @ keys.T * scale, dim=-1) @ keys[:, :RANK])
    return torch.stack(outputs)


LATENT = ["CPU_MLA", "AMX_MLA", "TRITON_MLA", "FLASHMLA"]
PROMPT = (
    5  # tokens of a prompt behind the rows of one token, in block 0, which no other request has
)


class LatentRig:
    """vLLM's implementation of a latent backend with torch in the place of its kernels, and a step
    of these rows."""

    def __init__(
        self, name: str, rows: LatentRows, prompt: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.attention.backends.mla import amx_mla, cpu_mla, flashmla, triton_mla

        self.name, self.rows, self.prompt = name, rows, prompt
        self.scale = (RANK + ROPE) ** -0.5
        self.base = {
            "CPU_MLA": cpu_mla.CPUMLAImpl,
            "AMX_MLA": amx_mla.AMXMLAImpl,
            "TRITON_MLA": triton_mla.TritonMLAImpl,
            "FLASHMLA": flashmla.FlashMLAImpl,
        }[name]
        kind = derive_impl(self.base, latent=True)
        self.impl = kind.__new__(kind)
        vars(self.impl).update(
            num_heads=HEADS,
            head_size=RANK + ROPE,
            kv_lora_rank=RANK,
            scale=self.scale,
            kv_cache_dtype="auto",
            dcp_world_size=1,
            _sm_count=1,
        )
        self.planned: list[Tensor] = []  # by FlashMLA, again
        self.prompts: list[Any] = []  # what was asked of forward_mha
        self._put_torch_in_place(monkeypatch)
        if name != "CPU_MLA":
            monkeypatch.setattr(
                self.base, "do_kv_cache_update", cpu_mla.CPUMLAImpl.do_kv_cache_update
            )
        self.metadata = self._metadata()
        self.cache = torch.zeros(rows.blocks, LATENT_BLOCK, RANK + ROPE)
        self.layer: Any = SimpleNamespace(
            layer_name=NAME, impl=self.impl, _k_scale=torch.ones(()), kv_lora_rank=RANK
        )
        self.layer.dtype = torch.float32

    def _put_torch_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.attention.backends.mla import amx_mla, flashmla, triton_mla
        from vllm.v1.attention.ops import flashmla as flashmla_ops

        scale, planned = self.scale, self.planned

        def mha(
            impl: Any,
            q: Tensor,
            latent: Tensor,
            rope: Tensor,
            cache: Tensor,
            metadata: Any,
            k_scale: Tensor,
            output: Tensor,
        ) -> None:
            self.prompts.append((q.clone(), latent.clone(), rope.clone(), metadata))
            output.copy_(q.flatten(1)[:, : output.shape[1]])

        def decode(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            lse: Tensor,
            table: Tensor,
            lens: Tensor,
            *rest: Any,
            **named: Any,
        ) -> None:
            out.copy_(latent_kernel(q, k[:, :, 0], table, lens, scale))

        def amx(q: Tensor, cache: Tensor, _v: Tensor, out: Tensor, *rest: Any) -> None:
            slots, rows, lens = rest[4:7]
            assert rows.tolist() == list(range(len(slots)))
            out.copy_(latent_kernel(q, cache, slots, lens, scale))

        def plan(lens: Tensor, heads: int, kv_heads: int, *, is_fp8_kvcache: bool) -> Any:
            planned.append(lens)
            return SimpleNamespace(lens=lens, heads=heads), None

        def flash(
            q: Tensor,
            k_cache: Tensor,
            block_table: Tensor,
            cache_seqlens: Tensor,
            tile_scheduler_metadata: Any,
            **rest: Any,
        ) -> Any:
            assert torch.equal(tile_scheduler_metadata.lens, cache_seqlens)
            assert tile_scheduler_metadata.heads == HEADS
            return (
                latent_kernel(q[:, 0], k_cache[:, :, 0], block_table, cache_seqlens, scale)[
                    :, None
                ],
                None,
            )

        monkeypatch.setattr(self.base, "forward_mha", mha)
        monkeypatch.setattr(triton_mla, "decode_attention_fwd", decode)
        monkeypatch.setattr(triton_mla, "_compute_num_kv_splits", lambda *_: 1)
        monkeypatch.setattr(amx_mla.ops, "cpu_mla_decode", amx, raising=False)
        monkeypatch.setattr(flashmla_ops, "get_mla_metadata", plan, raising=False)
        monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", flash, raising=False)

    def _metadata(self) -> Any:
        from vllm.model_executor.layers.attention.mla_attention import (
            MLACommonDecodeMetadata,
            MLACommonMetadata,
            MLACommonPrefillMetadata,
        )
        from vllm.v1.attention.backends.mla import amx_mla, flashmla

        rows, count = self.rows, len(self.rows.lengths)
        lens = torch.tensor(rows.lengths, dtype=torch.int32)
        kind: type = MLACommonDecodeMetadata
        fields: dict[str, Any] = {}
        if self.name == "FLASHMLA":
            kind = flashmla.FlashMLADecodeMetadata
            fields = {"scheduler_metadata": SimpleNamespace(lens=lens, heads=HEADS)}
        decode = kind(block_table=rows.table, seq_lens=lens, dcp_tot_seq_lens=None, **fields)
        if self.name == "AMX_MLA":  # as its builder does
            decode.req_to_token = amx_mla._expand_block_table(rows.table, LATENT_BLOCK)  # type: ignore[attr-defined]
            decode.seq_lens_i64 = lens.long()  # type: ignore[attr-defined]
            decode.req_pool_indices = torch.arange(count)  # type: ignore[attr-defined]
            decode.num_kv_splits = 1  # type: ignore[attr-defined]
        else:
            decode.noted = "what an implementation noted down of these lengths"  # type: ignore[attr-defined]
        table = torch.zeros(1, 1, dtype=torch.int32)
        self.prefill = MLACommonPrefillMetadata(table, torch.tensor([0, self.prompt]), self.prompt)
        last = [rows.slots(row)[-1] for row in range(count)]
        starts = [*range(count + 1), *([count + self.prompt] if self.prompt else [])]
        return MLACommonMetadata(
            num_reqs=len(starts) - 1,
            max_query_len=max(1, self.prompt),
            max_seq_len=max(rows.lengths),
            num_actual_tokens=starts[-1],
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=torch.cat([torch.stack(last), torch.arange(self.prompt)]),
            num_decodes=count,
            num_decode_tokens=count,
            num_prefills=int(self.prompt > 0),
            decode=decode,
            prefill=self.prefill if self.prompt else None,
        )

    def host(self, method: Any) -> SparseHost:
        """The host of a method, active, with everything before the step in the cache."""
        host, rows = SparseHost(method, {NAME: self.layer}), self.rows
        set_active_host(host)
        slots, keys = (
            torch.cat([rows.slots(row) for row in range(len(rows.lengths))]),
            torch.cat(rows.keys),
        )
        host.begin_step(SparsePlan(LATENT_BLOCK, 0), self.context())
        self.write(keys, slots)
        host.end_step()
        return host

    def context(self) -> Any:
        return context_of({NAME: self.layer}, self.metadata)

    def plan(self) -> SparsePlan:
        plan, rows = SparsePlan(LATENT_BLOCK, 0), self.rows
        for row, tokens in enumerate(rows.lengths):
            plan.rows.append(SparseRow(f"r{row}", tokens, tokens - 1, tokens - 1))
            plan.last_blocks.append(int(rows.table[row, (tokens - 1) // LATENT_BLOCK]))
        if self.prompt:
            plan.rows.append(SparseRow("p", self.prompt, self.prompt, self.prompt, self.prompt))
            plan.last_blocks.append(0)
        return plan

    def write(self, keys: Tensor, slots: Tensor) -> None:
        """As vLLM's layer does before attention; ``keys`` are not written to."""
        latent, rope = keys[:, :RANK].clone(), keys[:, None, RANK:].clone()
        self.impl.do_kv_cache_update(latent, rope, self.cache, slots, "auto", self.layer._k_scale)
        self.step_keys = latent, rope

    def decode(self) -> Tensor:
        """The rows of one token."""
        asked = (self.rows.query[..., :RANK].clone(), self.rows.query[..., RANK:].clone())
        found: Tensor = self.impl.forward_mqa(asked, self.cache, self.metadata, self.layer)[0]
        return found.view(-1, HEADS, RANK)


@pytest.mark.shows("DeepSeek", "sparse")
@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_latent_kernels_are_given_the_kept_blocks(
    name: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows of one token, which come first and have metadata of their own; also with a prompt
    behind."""
    rows = LatentRows([150, 20, 90])
    rig = LatentRig(name, rows, prompt, monkeypatch)
    host = rig.host(windows(Geometry(LATENT_BLOCK, 1, RANK + ROPE, ROPE), rows.blocks))
    decode = rig.metadata.decode
    before = dict(vars(decode))
    assert host.blocks.store.ready(rows.table[0, :9])  # type: ignore[union-attr]
    read = key_reader(rig.layer, name, rig.cache, LATENT_BLOCK)
    assert torch.equal(
        read(rig.cache, rows.table[0, :9].long()).flatten(0, 2), rows.keys[0][: 9 * LATENT_BLOCK]
    )
    assert torch.allclose(rig.decode(), rows.attended([None] * 3, rig.scale), atol=1e-4)
    host.begin_step(rig.plan(), rig.context())
    found = rig.decode()
    host.end_step()
    assert torch.allclose(found, rows.attended([[0, 8, 9], None, [0, 4, 5]], rig.scale), atol=1e-4)
    assert rig.metadata.decode is decode
    assert all(value is before[field] for field, value in vars(decode).items())
    assert len(rig.planned) == (name == "FLASHMLA")


class ChangesLatent(UcmSparseBase):
    """A user's method that changes all that it is handed, some of it in place, and notes what that
    was."""

    def __init__(self) -> None:
        super().__init__(None, UcmSparseRole.WORKER)
        self.given: dict[str, Any] = {}
        self.finished: dict[str, Any] = {}
        self.out: dict[str, Tensor] = {}

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
        self.given[phase] = (
            [tuple(each.shape) for each in (query, key, value, output)],
            kwargs["k_hash"],
        )
        metadata = forward_context.attn_metadata[layer_name]
        if phase == "decode":
            table = metadata.decode.block_table
            table[0, :2] = table[0, 8:10].clone()
            metadata.decode.seq_lens[0] -= 8 * LATENT_BLOCK
            kwargs["decode_q_pe"].mul_(-1)
        else:
            metadata.prefill.block_table += 7
        value.mul_(-2)
        self.out[phase] = torch.full_like(output, torch.nan)
        return 2 * query, 3 * key, value, self.out[phase]

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
        self.finished[phase] = query, key, value, attn_output


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_a_users_changes_take_effect_with_latent_attention(
    name: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query, keys, values, output and the copy of the metadata, of rows of one token and of
    prompts."""
    rows = LatentRows([150, 20, 90])
    rig = LatentRig(name, rows, prompt, monkeypatch)
    method = ChangesLatent()
    host = rig.host(method)
    keys = torch.cat([*(keys[-1:] for keys in rows.keys), torch.randn(prompt, RANK + ROPE) / 4])
    host.begin_step(rig.plan(), rig.context())
    rig.write(keys, rig.metadata.slot_mapping)
    latent, rope = rig.step_keys
    if prompt:
        asked, output = torch.randn(prompt, HEADS, 24), torch.zeros(prompt, HEADS * 16)
        tensors = asked.clone(), latent[3:], rope[3:], rig.cache, rig.metadata, rig.layer._k_scale
        rig.impl.forward_mha(*tensors, output=output)
        ((q, k, v, metadata),) = rig.prompts
        assert torch.equal(q, 2 * asked)
        assert torch.equal(k, 3 * keys[3:, :RANK])
        assert torch.equal(v[:, 0], -2 * keys[3:, RANK:])
        assert metadata.prefill.block_table.tolist() == [[7]]
        assert rig.prefill.block_table.tolist() == [[0]]
        assert torch.equal(output, 2 * asked.flatten(1)[:, : HEADS * 16])
        assert torch.equal(output, method.out["prefill"])
        assert method.given["prefill"] == (
            [(prompt, HEADS, 24), (prompt, RANK), (prompt, 1, ROPE), (prompt, HEADS * 16)],
            None,
        )
    before = dict(vars(rig.metadata.decode))
    lens, table = rows.lengths, rows.table.clone()
    found = rig.decode()
    host.end_step()
    assert rig.metadata.decode.seq_lens.tolist() == lens
    assert torch.equal(rig.metadata.decode.block_table, table)
    assert all(value is before[field] for field, value in vars(rig.metadata.decode).items())
    changed = keys * torch.tensor([3.0] * RANK + [-2.0] * ROPE)
    written = rig.cache.view(-1, RANK + ROPE)[rig.metadata.slot_mapping]
    assert torch.equal(written, changed), "later steps read what the hook made of the keys"
    for row, key in zip(rows.keys, changed, strict=False):
        row[-1] = key
    rows.query = rows.query * torch.tensor([2.0] * RANK + [-2.0] * ROPE)
    assert torch.allclose(found, rows.attended([[8, 9], None, None], rig.scale), atol=1e-4)
    assert found.data_ptr() == method.out["decode"].data_ptr()
    assert method.given["decode"] == (
        [(3, HEADS, RANK + ROPE), (3, RANK), (3, 1, ROPE), (3, HEADS, RANK)],
        None,
    )
    query, key, value, attended = method.finished["decode"]
    assert torch.equal(query, rows.query)
    assert torch.equal(key, changed[:3, :RANK])
    assert torch.equal(value[:, 0], changed[:3, RANK:])
    assert attended.data_ptr() == found.data_ptr()


def test_codes_follow_latent_keys_that_a_hook_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of a method of ours is handed the codes of a layer, and chooses among what the
    cache holds."""

    class Method(GSAOnDevice):
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
            self.codes = kwargs["k_hash"]
            found = super().attention_begin(
                query, key, value, layer_name, forward_context, output, phase, **kwargs
            )
            return found[0], -key, found[2], found[3]

    rows = LatentRows([160, 20, 90])
    rig = LatentRig("CPU_MLA", rows, PROMPT, monkeypatch)
    settings = GsaOnDeviceConfig(min_tokens=0, topk_tokens=64, init_tokens=16, local_tokens=32)
    method = Method(None, UcmSparseRole.WORKER, settings)
    method.setup(Geometry(LATENT_BLOCK, 1, RANK + ROPE, ROPE), [NAME], rows.blocks)
    host = rig.host(method)
    keys = torch.cat([*(keys[-1:] for keys in rows.keys), torch.randn(PROMPT, RANK + ROPE)])
    host.begin_step(rig.plan(), rig.context())
    rig.write(keys, rig.metadata.slot_mapping)
    latent, rope = rig.step_keys
    output = torch.zeros(PROMPT, HEADS * 16)
    asked = torch.randn(PROMPT, HEADS, 24)
    rig.impl.forward_mha(
        asked, latent[3:], rope[3:], rig.cache, rig.metadata, rig.layer._k_scale, output=output
    )
    assert len(rig.prompts) == 1, "a prompt has no blocks to choose from"
    assert torch.equal(rig.prompts[0][1], -keys[3:, :RANK]), "and the hook is used all the same"
    rig.decode()
    host.end_step()
    assert method.codes is not None and method.codes.dtype == torch.uint8
    assert len(method.codes) == rows.blocks
    expected = method.selector.encode(
        0, (keys * torch.tensor([-1.0] * RANK + [1.0] * ROPE))[:, None, None]
    )[:, 0]
    assert torch.equal(method.codes.flatten(0, 1)[rig.metadata.slot_mapping], expected)
    assert host.blocks is method and method.store.ready(rows.table[0, :10])


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("how", ["raises", "table", "heads", "lens", "returns"])
def test_what_a_hook_leaves_that_no_latent_kernel_can_read_changes_nothing(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
            decode = forward_context.attn_metadata[layer_name].decode
            if how == "table":
                decode.block_table = decode.block_table[:1]
            elif how == "heads":
                decode.block_table = decode.block_table[:, None]
            elif how == "lens":
                decode.seq_lens = [1, 1, 1]
            else:
                decode.seq_lens[:] = 1
            if how == "raises":
                raise RuntimeError("half done")
            return (2 * query, key) if how == "returns" else (query, key, value, output)

    rows = LatentRows([150, 20, 90])
    rig = LatentRig(name, rows, 0, monkeypatch)
    logging.getLogger("ucm").propagate = True
    host = rig.host(Wrong(None, UcmSparseRole.WORKER))
    host.begin_step(rig.plan(), rig.context())
    rig.write(torch.cat([keys[-1:] for keys in rows.keys]), rig.metadata.slot_mapping)
    assert torch.allclose(rig.decode(), rows.attended([None] * 3, rig.scale), atol=1e-4)
    host.end_step()
    said = {"raises": "half done", "returns": "did not return query"}
    assert said.get(how, "could not be used") in caplog.text


def test_prompts_of_latent_attention_are_left_to_vllm_unless_a_method_asks() -> None:
    """The hook of a user's method sees prompts, too; ours has nothing to choose there."""
    seen: list[Any] = []

    class Base:
        def forward_mha(
            self,
            q: Tensor,
            latent: Tensor,
            rope: Tensor,
            cache: Tensor,
            metadata: Any,
            scale: Tensor,
            output: Tensor,
        ) -> None:
            output.copy_(q * 2)

    class Method(Windows):
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
            seen.append(
                (layer_name, phase, forward_context.attn_metadata[layer_name] is not metadata)
            )
            return query + 1, key, value, output

    impl = derive_impl(Base, latent=True)()
    layer: Any = SimpleNamespace(layer_name=NAME, impl=impl)
    metadata = types.SimpleNamespace(
        decode=None, query_start_loc=torch.tensor([0, 1]), slot_mapping=torch.zeros(1)
    )
    metadata.num_decode_tokens = 0
    query, cache = torch.ones(1, HEADS, SIZE), torch.zeros(1)
    outputs = []
    for kind in (Windows, Method):
        method = kind(None, UcmSparseRole.WORKER, WindowsConfig(min_tokens=0))
        method.setup(Geometry(LATENT_BLOCK, 1, RANK + ROPE, ROPE), [NAME], 4)
        host = SparseHost(method, {NAME: layer})
        set_active_host(host)
        host.begin_step(SparsePlan(LATENT_BLOCK, 0), context_of({NAME: layer}, metadata))
        output = torch.zeros_like(query)
        impl.forward_mha(query, cache, cache, cache, metadata, cache, output)
        outputs.append(float(output[0, 0, 0]))
    assert outputs == [2.0, 4.0]
    assert seen == [(NAME, "prefill", True)]
