"""Sparse retrieval on a CPU, every instruction set of this machine beside a few lines of torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ucm import _core  # noqa: E402
from ucm.errors import InvalidInputError  # noqa: E402
from ucm.sparse import retrieval  # noqa: E402

ISAS = retrieval.instruction_sets()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def batch(seed: int, *, block: int, lengths: list[int], pool: int) -> tuple[Tensor, Tensor]:
    """Tables whose rows have their blocks anywhere in the pool, and their lengths in tokens."""
    torch.manual_seed(seed)
    most = max(-(-tokens // block) for tokens in lengths)
    table = torch.stack([torch.randperm(pool)[:most] for _ in lengths]).int()
    return table, torch.tensor(lengths, dtype=torch.int32)


def grouped(query: Tensor, heads: int) -> Tensor:
    rows, query_heads, dim = query.shape
    return query.float().view(rows, heads, query_heads // heads, dim).mean(2)


def framed(
    scores: Tensor, blocks: Tensor, init: int, local: int, most: float, least: float
) -> Tensor:
    """What a call says of the blocks that need no score, around the scores ``[r, h, N]`` of the
    others."""
    places = torch.arange(scores.shape[2])
    last = blocks.long()[:, None, None]
    scores = torch.where(
        (places < init) | (places >= last - local), torch.full_like(scores, most), scores
    )
    return torch.where(places >= last, torch.full_like(scores, least), scores)


OVER: dict[str, Callable[[Tensor, int], Tensor]] = {
    "max": lambda values, dim: values.amax(dim),
    "mean": lambda values, dim: values.mean(dim),
    "sum": lambda values, dim: values.sum(dim),
}


def dot_oracle(
    query: Tensor, reps: Tensor, table: Tensor, metric: str, over_reps: str, over_heads: str
) -> Tensor:
    """``[r, h or 1, N]``: one line for each step."""
    own = reps.double()[table.long()]  # [r, N, j, h, d]
    q = grouped(query, reps.shape[2]).double()[:, None, None]
    each = (q * own).sum(-1) if metric == "dot" else -(q - own).norm(dim=-1)
    of_heads = OVER[over_reps](each, 2)  # [r, N, h]
    if over_heads != "apart":
        of_heads = OVER[over_heads](of_heads, 2)[..., None]
    return of_heads.permute(0, 2, 1).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("over_heads", ["sum", "mean", "max", "apart"])
def test_dot_scores(isa: str, dtype: torch.dtype, metric: str, over_heads: str) -> None:
    for j, over_reps in ((1, "max"), (3, "max"), (3, "mean"), (3, "sum")):
        table, blocks = batch(j, block=1, lengths=[9, 1, 17, 0], pool=40)
        reps = torch.randn(40, j, 4, 48).to(dtype)
        query = torch.randn(4, 12, 48).to(dtype)
        found = retrieval.dot_scores(
            query,
            reps,
            table,
            blocks,
            metric=metric,
            over_reps=over_reps,
            over_heads=over_heads,
            isa=isa,
        )
        expected = dot_oracle(query, reps, table, metric, over_reps, over_heads)
        expected = framed(expected, blocks, 0, 0, torch.inf, -torch.inf)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_dot_scores_of_int8_with_scales(isa: str) -> None:
    table, blocks = batch(0, block=1, lengths=[11, 6], pool=20)
    keys = torch.randn(20, 2, 3, 40)
    scales = keys.abs().amax(-1) / 127
    reps = (keys / scales[..., None]).round().to(torch.int8)
    query = torch.randn(2, 6, 40)
    for metric in ("dot", "l2"):
        found = retrieval.dot_scores(
            query, reps, table, blocks, scales=scales, metric=metric, isa=isa
        )
        expected = dot_oracle(query, reps * scales[..., None], table, metric, "max", "sum")
        expected = framed(expected, blocks, 0, 0, torch.inf, -torch.inf)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("over_heads", ["sum", "max", "apart"])
@pytest.mark.parametrize("gaps", [False, True])
def test_quest_scores(isa: str, over_heads: str, gaps: bool) -> None:
    table, blocks = batch(1, block=1, lengths=[5, 30], pool=64)
    keys = torch.randn(64, 16, 2, 32)
    bounds = torch.stack([keys.amin(1), keys.amax(1)], dim=1).bfloat16()
    if gaps:
        bounds = torch.cat([bounds, torch.full_like(bounds, 9.0)], dim=2)[:, :, :2]
    query = torch.randn(2, 8, 32).bfloat16()
    found = retrieval.quest_scores(
        query, bounds, table, blocks, over_heads=over_heads, init=1, local=2, isa=isa
    )
    own = bounds.double()[table.long()]
    q = grouped(query, 2).double()[:, None]
    of_heads = torch.maximum(q * own[:, :, 0], q * own[:, :, 1]).sum(-1)  # [r, N, h]
    if over_heads != "apart":
        of_heads = OVER[over_heads](of_heads, 2)[..., None]
    expected = framed(of_heads.permute(0, 2, 1).float(), blocks, 1, 2, torch.inf, -torch.inf)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_scores_do_not_depend_on_batch_threads_place_or_vector_set() -> None:
    table, blocks = batch(2, block=1, lengths=[200, 33, 150], pool=600)
    reps = torch.randn(600, 8, 128).bfloat16()
    query = torch.randn(3, 32, 128).bfloat16()
    together = retrieval.dot_scores(query, reps, table, blocks, threads=2)
    for isa in ISAS[1:]:
        assert torch.equal(
            retrieval.dot_scores(query, reps, table, blocks, threads=1, isa=isa), together
        )
    for row in range(3):
        n = int(blocks[row])
        part = slice(row, row + 1)
        alone = retrieval.dot_scores(query[part], reps, table[part, :n], blocks[part], threads=1)
        assert torch.equal(alone[0], together[row, :, :n])
    moved = torch.randperm(600)
    elsewhere = torch.empty_like(reps)
    elsewhere[moved] = reps
    assert torch.equal(
        retrieval.dot_scores(query, elsewhere, moved[table.long()], blocks), together
    )


def bits_of(products: Tensor) -> Tensor:
    """Signs as bytes, the first one lowest."""
    signs = (products > 0).view(*products.shape[:-1], -1, 8).to(torch.uint8)
    return (signs << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "bits"), [(8, 128, 128), (2, 32, 64), (3, 40, 24), (1, 512, 512), (5, 16, 136)]
)
@pytest.mark.parametrize("own", [False, True])
def test_hash_encode(
    isa: str, dtype: torch.dtype, heads: int, dim: int, bits: int, own: bool
) -> None:
    torch.manual_seed(bits)
    vectors = torch.randn(7, heads, dim).to(dtype)
    weights = torch.randn(heads, dim, bits) if own else torch.randn(dim, bits)
    found = retrieval.hash_encode(vectors, weights, isa=isa)
    wide = weights.double() if own else weights.double().expand(heads, dim, bits)
    products = torch.einsum("thd,hdb->thb", vectors.double(), wide)
    differ = torch.bitwise_xor(found, bits_of(products))
    near = bits_of((products.abs() < 1e-3).double())
    assert not torch.bitwise_and(differ, ~near).any()
    assert torch.equal(found, retrieval.hash_encode(vectors, weights)), "the same bits on every set"


def test_hash_encode_by_slot(isa: str) -> None:
    torch.manual_seed(3)
    vectors, weights = torch.randn(9, 2, 64).bfloat16(), torch.randn(64, 128)
    plain = retrieval.hash_encode(vectors, weights, isa=isa)
    for dtype in (torch.int32, torch.int64):
        codes = torch.zeros(4, 8, 2, 16, dtype=torch.uint8)
        slots = torch.tensor([31, 0, 7, -1, 8, 12, 13, 14, -1], dtype=dtype)
        assert retrieval.hash_encode(vectors, weights, codes, slots, isa=isa) is codes
        flat = codes.view(32, 2, 16)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(flat[slot], plain[token])
        assert int(flat.any(-1).any(-1).sum()) == 7


def test_hash_encode_query_is_that_of_the_mean(isa: str) -> None:
    torch.manual_seed(4)
    query, weights = torch.randn(3, 12, 64).bfloat16(), torch.randn(64, 64)
    found = retrieval.hash_encode_query(query, weights, 4, isa=isa)
    assert torch.equal(found, retrieval.hash_encode(grouped(query, 4), weights))


def popcount(codes: Tensor) -> Tensor:
    return sum(((codes >> bit) & 1).int() for bit in range(8)).sum(-1)  # type: ignore[return-value]


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize(
    ("heads", "queries", "size"),
    [
        (8, 1, 16),
        (4, 1, 16),
        (2, 1, 16),
        (1, 1, 16),
        (8, 1, 8),
        (8, 1, 32),
        (3, 1, 16),
        (2, 1, 4),
        (1, 1, 72),
        (1, 20, 72),
        (2, 3, 16),
        (6, 1, 64),
        (1, 64, 5),
    ],
)
def test_hamming_scores(isa: str, heads: int, queries: int, size: int, heads_apart: bool) -> None:
    block = 16
    table, tokens = batch(heads * size, block=block, lengths=[100, 7, 161, 0, 16], pool=50)
    codes = torch.randint(0, 256, (50, block, heads, size), dtype=torch.uint8)
    asked = torch.randint(0, 256, (5, heads, queries, size), dtype=torch.uint8)
    found = retrieval.hamming_scores(
        asked, codes, table, tokens, heads_apart=heads_apart, isa=isa, init=1, local=1
    )
    own = codes[table.long()][:, :, :, :, None]  # [r, N, b, h, 1, bytes]
    distance = popcount(own ^ asked[:, None, None]).sum(-1)  # [r, N, b, h]
    place = torch.arange(table.shape[1])[:, None] * block + torch.arange(block)
    distance = torch.where((place < tokens[:, None, None])[..., None], distance, 1 << 20)
    least = distance.amin(2).permute(0, 2, 1)
    if not heads_apart:
        least = least.amin(1, keepdim=True)
    blocks = (tokens + block - 1) // block
    expected = framed(-least.int(), blocks, 1, 1, 2**31 - 1, -(2**31))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_hash_scores_are_those_of_the_codes_of_queries(isa: str, heads_apart: bool) -> None:
    block, heads = 16, 4
    table, tokens = batch(9, block=block, lengths=[100, 7, 161, 0, 16], pool=50)
    codes = torch.randint(0, 256, (50, block, heads, 8), dtype=torch.uint8)
    query, weights = torch.randn(5, 12, 64).bfloat16(), torch.randn(64, 64)
    how = {"heads_apart": heads_apart, "init": 1, "local": 1, "isa": isa}
    blocks = (tokens + block - 1) // block
    asked = retrieval.hash_encode_query(query, weights, heads, isa=isa)
    expected = retrieval.hamming_scores(asked, codes, table, blocks * block, **how)
    assert torch.equal(retrieval.hash_scores(query, weights, codes, table, blocks, **how), expected)
    with pytest.raises(InvalidInputError, match="do not fit"):
        retrieval.hash_scores(query[:4], weights, codes, table, blocks, **how)
    with pytest.raises(InvalidInputError, match="codes of another length"):
        retrieval.hash_scores(query, torch.randn(64, 32), codes, table, blocks, **how)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_hash_select_chooses_by_hash_scores(isa: str, heads_apart: bool) -> None:
    """Codes lie elsewhere than the KV."""
    block, heads = 16, 4
    code_table, tokens = batch(6, block=block, lengths=[160, 31, 500, 1, 333], pool=90)
    table = (code_table + 7) % 90
    codes = torch.randint(0, 256, (90, block, heads, 8), dtype=torch.uint8)
    query, weights = torch.randn(5, 12, 64).bfloat16(), torch.randn(64, 64)
    how = {"heads_apart": heads_apart, "init": 1, "local": 2, "isa": isa}
    budgets = [3, 1, 7, 2, 30]
    scores = retrieval.hash_scores(
        query, weights, codes, code_table, (tokens + block - 1) // block, **how
    )
    expected = retrieval.select_blocks(scores, table, tokens, block, budgets, init=1, local=2)
    given = (query, weights, codes, code_table, table, tokens, budgets)
    (room,) = retrieval.Kept.rooms(1, *expected.table.shape)
    for found in (
        retrieval.hash_select(*given, **how),
        retrieval.hash_select(*given, into=room, **how),
    ):
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    with pytest.raises(InvalidInputError, match="another number of rows"):
        retrieval.hash_select(query, weights, codes, code_table, table[:4], tokens, budgets, **how)
    with pytest.raises(InvalidInputError, match="do not fit"):
        retrieval.hash_select(query[:4], weights, codes, code_table, table, tokens, budgets, **how)
    with pytest.raises(InvalidInputError, match="every row has one budget"):
        retrieval.hash_select(query, weights, codes, code_table, table, tokens, budgets[:4], **how)


def test_absent_blocks_are_never_chosen(isa: str) -> None:
    table = torch.tensor([[3, -1, 1, 0, -1, 2]], dtype=torch.int32)
    blocks = torch.tensor([6])
    reps = torch.arange(8, dtype=torch.float32).view(4, 1, 2)
    query = torch.ones(1, 1, 2)
    scores = retrieval.dot_scores(query, reps, table, blocks, isa=isa)
    assert scores[0, 0].tolist() == [13.0, -torch.inf, 5.0, 1.0, -torch.inf, 9.0]
    codes = torch.zeros(4, 2, 1, 8, dtype=torch.uint8)
    found = retrieval.hamming_scores(
        torch.zeros(1, 1, 8, dtype=torch.uint8), codes, table, blocks * 2, isa=isa
    )
    assert found[0, 0].tolist() == [0, -(2**31), 0, 0, -(2**31), 0]
    kept = retrieval.select_blocks(scores, table, blocks * 2, 2, [5], init=0, local=1)
    assert kept.logical[0, 0].tolist() == [0, 2, 3, 5, -1, -1]
    assert kept.table[0, 0].tolist() == [3, 1, 0, 2, 2, 2]
    assert (int(kept.counts), int(kept.tokens)) == (4, 8)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_select_blocks(integers: bool, heads: int) -> None:
    block, init, local = 16, 1, 2
    lengths = [160, 31, 500, 0, 333]
    table, tokens = batch(heads, block=block, lengths=lengths, pool=90)
    # Few distinct scores, so that many are equal.
    scores = torch.randint(-3, 3, (5, heads, table.shape[1]), dtype=torch.int32)
    given = scores if integers else scores.float() / 2
    budgets = [3, 1, 7, 2, 30]
    kept = retrieval.select_blocks(given, table, tokens, block, budgets, init=init, local=local)
    for row, length in enumerate(lengths):
        n = -(-length // block)
        for head in range(heads):
            middle = range(init, n - local)
            best = sorted(middle, key=lambda place: (-int(scores[row, head, place]), place))[
                : budgets[row]
            ]
            places = sorted({*range(min(init, n)), *best, *range(max(0, n - local), n)})
            count = int(kept.counts[row, head])
            assert kept.logical[row, head, :count].tolist() == places
            assert (kept.logical[row, head, count:] == -1).all()
            assert kept.table[row, head, :count].tolist() == table[row, places].tolist()
            expected = (len(places) - 1) * block + (length - 1) % block + 1 if n else 0
            assert int(kept.tokens[row, head]) == expected


def test_an_openmp_runtime_is_used_where_torch_brings_one() -> None:
    """And the answers are the same on threads that are started for a call."""
    script = "import torch, ucm._core as c; torch.set_num_threads(2); print(c.retrieval_openmp())"
    said = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=100
    )
    assert said.stdout.strip() in ("True", "False")
    with open("/proc/self/maps") as maps:
        loaded = any("libgomp" in line or "libiomp5" in line or "libomp." in line for line in maps)
    if loaded:
        assert _core.retrieval_openmp()


def test_wrong_arguments_say_what_and_where() -> None:
    table, blocks = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([4, 2])
    reps, query = torch.randn(3, 2, 8), torch.randn(2, 4, 8)

    def refused(match: str, **more: object) -> None:
        arguments = {"query": query, "reps": reps, "table": table, "blocks": blocks, **more}
        with pytest.raises(InvalidInputError, match=match):
            retrieval.dot_scores(**arguments)  # type: ignore[arg-type]

    refused("beyond the last", table=torch.full((2, 4), 3))
    refused("no room for its tokens", blocks=torch.tensor([5, 1]))
    refused("no room for its tokens", blocks=torch.tensor([-1, 1]))
    refused("same number of query heads", query=torch.randn(2, 3, 8))
    refused("queries do not fit", query=torch.randn(1, 4, 8))
    refused("another dtype", blocks=torch.tensor([4.0, 2.0]))
    refused("elements are", reps=reps.double())
    refused("need their scales", reps=reps.to(torch.int8))
    refused("have gaps", reps=reps.transpose(1, 2), query=torch.randn(2, 8, 2))
    refused("metric is", metric="cosine")
    refused("at least one thread", threads=0)
    refused("instruction set", isa="mmx")
    refused("tensors of the host", query=query.to("meta"))
    codes = torch.zeros(1, 4, 1, 8, dtype=torch.uint8)
    with pytest.raises(InvalidInputError, match="beyond the last block"):
        retrieval.hash_encode(torch.randn(1, 1, 8), torch.randn(8, 64), codes, torch.tensor([4]))
    narrow, lacking = retrieval.Kept.rooms(1, 2, 1, 2)[0], retrieval.Kept.rooms(1, 1, 1, 4)[0]
    with pytest.raises(InvalidInputError, match="more blocks than there are places"):
        retrieval.select_blocks(torch.zeros(2, 1, 4), table, blocks, 1, [2, 2], into=narrow)
    with pytest.raises(InvalidInputError, match="the kept blocks has the wrong size"):
        retrieval.select_blocks(torch.zeros(2, 1, 4), table, blocks, 1, [2, 2], into=lacking)
