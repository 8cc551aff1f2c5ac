"""Pages that vLLM's own CPU operators wrote, read by the attention of ucm's core: the packing is
theirs to choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ucm.sparse import retrieval

ops = pytest.importorskip("vllm._custom_ops")


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    """vLLM's CPU operators are loaded."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not the one for CPUs")


class Batch:
    """Requests of these lengths, whose blocks lie anywhere in pages that vLLM packed for an
    instruction set."""

    def __init__(
        self, lengths: list[int], heads: int, dim: int, block: int, dtype: torch.dtype, isa: str
    ) -> None:
        torch.manual_seed(dim)
        self.heads, self.dim, self.dtype, self.isa = heads, dim, dtype, isa
        most = max(-(-length // block) for length in lengths)
        pool = most * len(lengths) + 3
        self.cache = torch.zeros(pool, heads, block, 2 * dim, dtype=dtype)
        self.keys, self.values = self.cache.view(pool, heads, 2 * block, dim).chunk(2, dim=2)
        self.table = torch.randperm(pool)[: most * len(lengths)].view(len(lengths), most).int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        for row, length in enumerate(lengths):
            at = torch.arange(length)
            slots = self.table[row].long()[at // block] * block + at % block
            new = torch.randn(2, length, heads, dim).to(dtype)
            ops.cpu_attn_reshape_and_cache(new[0], new[1], self.keys, self.values, slots, isa)

    def theirs(self, query: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
        """vLLM's own attention."""
        out = torch.empty_like(query)
        starts = torch.arange(len(query) + 1, dtype=torch.int32)
        same: dict[str, Any] = {"query_start_loc": starts, "seq_lens": tokens, "causal": True}
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(query),
            num_heads=query.shape[1],
            num_kv_heads=self.heads,
            head_dim=self.dim,
            dtype=self.dtype,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
            **same,
        )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.keys,
            value_cache=self.values,
            output=out,
            scale=self.dim**-0.5,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
            **same,
        )
        return out


@pytest.mark.parametrize(
    ("heads", "group", "dim", "block", "dtype", "isa"),
    [
        (8, 4, 128, 128, torch.bfloat16, "vec"),
        (2, 8, 64, 32, torch.float16, "vec"),
        (2, 3, 96, 64, torch.float32, "vec"),
        (2, 3, 80, 16, torch.float32, "vec16"),
        (1, 7, 128, 16, torch.bfloat16, "vec16"),
    ],
)
def test_the_same_as_vllms_own(
    heads: int, group: int, dim: int, block: int, dtype: torch.dtype, isa: str
) -> None:
    assert retrieval.can_attend(isa, dtype, dim, block)
    batch = Batch([1500, 1, 333], heads, dim, block, dtype, isa)
    query = torch.randn(3, heads * group, dim).to(dtype)
    chosen = retrieval.select_blocks(
        torch.randn(3, 1, batch.table.shape[1]),
        batch.table,
        batch.lengths,
        block,
        [4, 4, 4],
        init=1,
        local=1,
    )
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for table, tokens in (
        (batch.table, batch.lengths),
        (chosen.table[:, 0].contiguous(), chosen.tokens[:, 0].contiguous()),
    ):
        theirs = batch.theirs(query, table, tokens)
        for name in retrieval.instruction_sets():
            ours = retrieval.paged_attention(query, batch.cache, table, tokens, dim**-0.5, isa=name)
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_queries_with_gaps_and_a_result_with_gaps() -> None:
    """As vLLM has them: the queries of a fused projection, and the result in a wider buffer."""
    batch = Batch([200, 90], 2, 64, 32, torch.bfloat16, "vec")
    fused = torch.randn(2, 12, 64).bfloat16()
    query = fused[:, :8]
    out = torch.zeros(2, 10, 64).bfloat16()
    retrieval.paged_attention(query, batch.cache, batch.table, batch.lengths, 0.125, out[:, :8])
    assert torch.equal(
        out[:, :8],
        retrieval.paged_attention(
            query.contiguous(), batch.cache, batch.table, batch.lengths, 0.125
        ),
    )
    assert not out[:, 8:].any()


def test_a_table_for_each_head() -> None:
    batch = Batch([300, 500], 2, 64, 32, torch.float32, "vec")
    query = torch.randn(2, 6, 64)
    kept = retrieval.select_blocks(
        torch.randn(2, 2, batch.table.shape[1]),
        batch.table,
        batch.lengths,
        32,
        [3, 5],
        init=1,
        local=2,
    )
    found = retrieval.paged_attention(query, batch.cache, kept.table, kept.tokens, 0.125)
    for head in range(2):
        alone = retrieval.paged_attention(
            query, batch.cache, kept.table[:, head], kept.tokens[:, head], 0.125
        )
        assert torch.equal(found[:, 3 * head : 3 * head + 3], alone[:, 3 * head : 3 * head + 3])


def test_pages_packed_otherwise_are_not_read() -> None:
    assert not retrieval.can_attend("amx", torch.bfloat16, 128, 128)
    assert not retrieval.can_attend("neon", torch.bfloat16, 128, 128)
    assert not retrieval.can_attend("vec", torch.uint8, 128, 128)
    assert not retrieval.can_attend("vec16", torch.float32, 72, 16)
