"""Every kernel computes the same as a few lines of torch."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from ucm.errors import InvalidInputError  # noqa: E402
from ucm.sparse.kernels import distance, gpu  # noqa: E402
from ucm.sparse.retrieval import Kept  # noqa: E402

LOWEST = -(2**31)
HIGHEST = 2**31 - 1


def bits_of(products: Tensor) -> Tensor:
    """Signs, packed little-endian."""
    signs = (products > 0).unflatten(-1, (-1, 8)).int()
    return (signs << torch.arange(8)).sum(-1).to(torch.uint8)


def pool(seed: int, rows: list[int], size: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Block tables of rows with ``rows`` tokens, out of a pool, and the tokens."""
    generator = torch.Generator().manual_seed(seed)
    most = max(-(-tokens // size) for tokens in rows)
    table = torch.stack([torch.randperm(blocks, generator=generator)[:most] for _ in rows]).int()
    return table, torch.tensor(rows, dtype=torch.int32)


def framed(
    scores: Tensor, table: Tensor, blocks: Tensor, init: int, local: int, most: float, least: float
) -> Tensor:
    """Scores ``[r, h, N]`` with the markers of windows, absent blocks and places behind the last
    block."""
    place = torch.arange(scores.shape[2])
    last = blocks.long()[:, None, None]
    end = (last - local).clamp(min=0)
    scores = torch.where((place < init) | (place >= end), torch.full_like(scores, most), scores)
    return torch.where(
        (place >= last) | (table[:, None] < 0), torch.full_like(scores, least), scores
    )


# Codes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "size", "bits"), [(2, 64, 128), (1, 96, 40), (1, 160, 192)])
def test_codes_are_the_signs_of_the_products(
    dtype: torch.dtype, heads: int, size: int, bits: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(70, heads, size, generator=generator).to(dtype)
    weights = torch.randn(size, bits, generator=generator)
    found = gpu.hash_encode(x, weights)
    products = x.double() @ weights.double()
    # no product is as small as the rounding of single precision
    assert (products.abs() > 1e-4).all()
    assert torch.equal(found, bits_of(products))


def test_codes_are_as_exact_as_single_precision() -> None:
    """Products that bf16, or two numbers of bf16, would get wrong."""
    x = torch.zeros(2, 1, 32)
    x[0, 0, :2], x[1, 0, :2] = torch.tensor([1.0, 1.0]), torch.tensor([1.0 + 2**-20, -1.0])
    weights = torch.zeros(32, 8)
    weights[0], weights[1] = 1.0, -1.0 + 2**-22
    weights[1, 1] = -1.0 - 2**-22
    # 2^-22 and -2^-22; in the second row 2 and 2.
    assert gpu.hash_encode(x, weights)[:, 0, 0].tolist() == [0b11111101, 0b11111111]


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_codes_go_to_their_slots(order: str) -> None:
    x, weights = torch.randn(9, 2, 32).bfloat16(), torch.randn(32, 64)
    codes = torch.zeros((4, 5, 2, 12) if order == "NHD" else (4, 2, 5, 12), dtype=torch.uint8)
    seen = codes if order == "NHD" else codes.transpose(1, 2)
    slots = torch.tensor([7, -1, 0, 19, 20, 3, 4, 11, 99])  # of 20
    part = seen[..., 4:]  # behind another part of the code, as with latent attention
    assert gpu.hash_encode(x, weights, part, slots) is part
    expected = torch.zeros(20, 2, 12, dtype=torch.uint8)
    there = (slots >= 0) & (slots < 20)
    expected[slots[there], :, 4:] = gpu.hash_encode(x, weights)[there]
    assert torch.equal(seen.reshape(20, 2, 12), expected)


def test_codes_of_queries_are_those_of_the_mean() -> None:
    query, weights = torch.randn(3, 8, 64).bfloat16(), torch.randn(64, 128)
    mean = query.double().view(3, 2, 4, 64).mean(2)
    assert torch.equal(gpu.hash_encode_query(query, weights, 2), bits_of(mean @ weights.double()))


def test_a_code_does_not_depend_on_the_batch() -> None:
    x, weights = torch.randn(40, 1, 64), torch.randn(64, 64)
    together = gpu.hash_encode(x, weights)
    assert torch.equal(together[33:34], gpu.hash_encode(x[33:34], weights))


def test_made_codes_are_copied_to_their_slots() -> None:
    codes = torch.randint(1, 256, (6, 3, 5), dtype=torch.uint8)
    cache = torch.zeros(2, 4, 3, 5, dtype=torch.uint8)
    slots = torch.tensor([7, -1, 8, 2, 0, 5])
    gpu.scatter_codes(codes, slots, cache)
    expected = torch.zeros(8, 3, 5, dtype=torch.uint8)
    expected[[7, 2, 0, 5]] = codes[[0, 3, 4, 5]]
    assert torch.equal(cache.view(8, 3, 5), expected)


# Hamming scores
# --------------------------------------------------------------------------------------------------


def hamming_oracle(
    queries: Tensor, codes: Tensor, table: Tensor, tokens: Tensor, apart: bool
) -> Tensor:
    """``[r, h or 1, N]`` without windows: minus the least distance, of several queries in a head
    added up."""
    places, size = table.shape[1], codes.shape[1]
    own = codes[table.long().clamp(min=0)]  # [r, N, b, h, bytes]
    if queries.dim() == 3:
        queries = queries[:, :, None]
    far = sum(distance(own, queries[:, None, None, :, one]) for one in range(queries.shape[2]))
    slot = torch.arange(places * size).view(places, size)
    far = torch.where((slot < tokens[:, None, None])[..., None], far, HIGHEST)
    near = far.amin(2)  # [r, N, h]
    return -(near if apart else near.amin(2, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "width", "order"),
    [(2, 16, 16, "NHD"), (2, 16, 16, "HND"), (3, 24, 9, "NHD"), (8, 128, 16, "NHD")],
)
def test_hamming_scores(apart: bool, heads: int, size: int, width: int, order: str) -> None:
    table, tokens = pool(heads, [5 * size + 3, size, 3 * size - 1], size, 12)
    table[0, 2] = -1
    codes = torch.randint(0, 256, (12, size, heads, width), dtype=torch.uint8)
    if order == "HND":
        codes = codes.transpose(1, 2).contiguous().transpose(1, 2)
    queries = torch.randint(0, 256, (3, heads, width), dtype=torch.uint8)
    for init, local in ((0, 0), (1, 2)):
        found = gpu.hamming_scores(
            queries, codes, table, tokens, heads_apart=apart, init=init, local=local
        )
        expected = hamming_oracle(queries, codes, table, tokens, apart)
        blocks = -(-tokens // size)
        assert torch.equal(
            found, framed(expected, table, blocks, init, local, HIGHEST, LOWEST).int()
        )


def test_hash_scores_are_those_of_the_codes_of_queries() -> None:
    table, tokens = pool(2, [83, 16, 47], 16, 12)
    codes = torch.randint(0, 256, (12, 16, 2, 8), dtype=torch.uint8)
    query, weights, blocks = torch.randn(3, 4, 64).bfloat16(), torch.randn(64, 64), -(-tokens // 16)
    asked = gpu.hash_encode_query(query, weights, 2)
    for apart in (False, True):
        found = gpu.hash_scores(
            query, weights, codes, table, blocks, heads_apart=apart, init=1, local=2
        )
        expected = gpu.hamming_scores(
            asked, codes, table, blocks * 16, heads_apart=apart, init=1, local=2
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [2, 128])
def test_distances_of_latent_heads_are_added_up_as_integers(count: int) -> None:
    """72 bytes a code; of 128 heads the sum passes 36,864, where fp16 counts in steps of 32."""
    table, tokens = pool(count, [70, 33], 16, 8)
    codes = torch.randint(0, 256, (8, 16, 1, 72), dtype=torch.uint8)
    codes[table[0, 1], 3] = 0
    queries = torch.randint(0, 256, (2, 1, count, 72), dtype=torch.uint8)
    queries[0, 0, 1:] = 255
    found = gpu.hamming_scores(queries, codes, table, tokens)
    expected = hamming_oracle(queries, codes, table, tokens, False)
    assert torch.equal(
        found, framed(expected, table, -(-tokens // 16), 0, 0, HIGHEST, LOWEST).int()
    )
    assert int(found[0, 0].min()) != LOWEST


# Vectors
# --------------------------------------------------------------------------------------------------

OVER = {
    "max": lambda values, dim: values.amax(dim),
    "mean": lambda values, dim: values.mean(dim),
    "sum": lambda values, dim: values.sum(dim),
}


def means(query: Tensor, heads: int) -> Tensor:
    return query.double().unflatten(1, (heads, -1)).mean(2)


def joined(each: Tensor, over_heads: str) -> Tensor:
    """``[r, N, h]`` as ``[r, h or 1, N]``."""
    return (
        (each if over_heads == "apart" else OVER[over_heads](each, 2)[..., None])
        .transpose(1, 2)
        .float()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_products_and_distances(dtype: torch.dtype, metric: str) -> None:
    ways = [("sum", "max", 1), ("mean", "mean", 3), ("max", "sum", 2), ("apart", "max", 3)]
    for number, (over_heads, over_reps, count) in enumerate(ways):
        heads = 3
        table, blocks = pool(number, [9, 1, 12], 1, 20)
        table[2, 4] = -1
        reps, scales = torch.randn(20, count, heads, 40), None
        if dtype == torch.int8:
            scales = reps.abs().amax(-1) / 127
            reps = (reps / scales[..., None]).round()
        reps, query = reps.to(dtype), torch.randn(3, 6, 40).bfloat16()
        found = gpu.dot_scores(
            query,
            reps,
            table,
            blocks,
            scales=scales,
            metric=metric,
            over_reps=over_reps,
            over_heads=over_heads,
            init=1,
            local=2,
        )
        own = (reps.double() if scales is None else reps.double() * scales[..., None])[
            table.long().clamp(min=0)
        ]
        q = means(query, heads)[:, None, None]
        each = (q * own).sum(-1) if metric == "dot" else -(q - own).norm(dim=-1)
        expected = joined(OVER[over_reps](each, 2), over_heads)
        expected = framed(expected, table, blocks, 1, 2, torch.inf, -torch.inf)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("over_heads", ["sum", "mean", "max", "apart"])
def test_bounds_of_quest(over_heads: str) -> None:
    table, blocks = pool(4, [20, 7], 1, 24)
    keys = torch.randn(24, 16, 2, 32)
    wide = torch.stack([keys.amin(1), keys.amax(1), keys.mean(1)], dim=1).bfloat16()
    bounds = wide[:, :2]  # with gaps between blocks
    query = torch.randn(2, 8, 32).bfloat16()
    found = gpu.quest_scores(query, bounds, table, blocks, over_heads=over_heads, init=2, local=1)
    low, high = bounds.double()[table.long()].unbind(2)
    q = means(query, 2)[:, None]
    expected = joined(torch.maximum(q * low, q * high).sum(-1), over_heads)
    expected = framed(expected, table, blocks, 2, 1, torch.inf, -torch.inf)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_score_does_not_depend_on_the_batch() -> None:
    table, blocks = pool(5, [40, 33], 1, 64)
    reps, query = torch.randn(64, 4, 64).bfloat16(), torch.randn(2, 8, 64).bfloat16()
    together = gpu.dot_scores(query, reps, table, blocks)
    alone = gpu.dot_scores(query[1:], reps, table[1:, 7:21].contiguous(), blocks[1:] * 0 + 14)
    assert torch.equal(together[1, :, 7:21], alone[0])


# Choosing
# --------------------------------------------------------------------------------------------------


def kept_oracle(
    scores: Tensor, table: Tensor, n: int, budget: int, init: int, local: int
) -> list[int]:
    """Places that one row and head keep."""
    never = LOWEST if scores.dtype == torch.int32 else -torch.inf
    end = n - min(local, n)
    middle = list(range(min(init, end), end))
    if budget < len(middle):
        able = [place for place in middle if scores[place] > never]  # not NaN either
        middle = sorted(able, key=lambda place: (-scores[place].item(), place))[:budget]
    kept = sorted({*range(min(init, end)), *middle, *range(end, n)})
    return [place for place in kept if table[place] >= 0]


def check_kept(
    scores: Tensor,
    table: Tensor,
    tokens: Tensor,
    size: int,
    budgets: list[int],
    init: int,
    local: int,
    more: int = 0,
) -> None:
    width = min(table.shape[1], init + local + max(budgets)) + more
    (room,) = Kept.rooms(1, *scores.shape[:2], width)
    # as a step has them on a GPU
    there = torch.tensor(budgets, dtype=torch.int32) if more else budgets
    kept = gpu.select_blocks(scores, table, tokens, size, there, init=init, local=local, into=room)
    for row, head in itertools.product(range(len(tokens)), range(scores.shape[1])):
        length = int(tokens[row])
        n = -(-length // size)
        places = kept_oracle(scores[row, head], table[row], n, budgets[row], init, local)
        count = int(kept.counts[row, head])
        assert kept.logical[row, head].tolist() == places + [-1] * (width - count)
        ids = table[row, places].tolist()
        assert kept.table[row, head].tolist() == ids + [ids[-1] if ids else 0] * (width - count)
        assert int(kept.tokens[row, head]) == (
            (count - 1) * size + (length - 1) % size + 1 if n else 0
        )


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_best_blocks_and_their_table(integers: bool, heads: int) -> None:
    size, rows = 16, [160, 31, 500, 0, 333]
    table, tokens = pool(heads, rows, size, 90)
    # Few distinct scores, so that many are equal; both zeros among the floats.
    few = torch.randint(-3, 3, (5, heads, table.shape[1]), dtype=torch.int32)
    floats = few.float() / 2
    floats[few == 0] *= -1
    for budgets in ([3, 1, 7, 2, 30], [0, 0, 1, 0, 13]):
        check_kept(few if integers else floats, table, tokens, size, budgets, 1, 2)


@pytest.mark.parametrize("spread", [1, 100, 30_000, 2**30])
def test_any_integers(spread: int) -> None:
    """One to four histograms, and more blocks than a program looks at together."""
    table, tokens = pool(1, [2300 * 4 - 1, 41], 4, 2400)
    scores = torch.randint(-spread, spread, (2, 1, 2300), dtype=torch.int32)
    scores[0, 0, 5] = HIGHEST if spread == 2**30 else spread
    check_kept(scores, table, tokens, 4, [700, 3], 2, 3, more=5)


def test_any_floats() -> None:
    table, tokens = pool(2, [300, 40, 40, 40], 1, 400)
    scores = torch.randn(4, 1, 300) * torch.logspace(-30, 30, 300)
    scores[1, 0, ::3] = torch.nan
    scores[2, 0, 1:] = -torch.inf
    scores[3, 0, ::2] = torch.inf
    check_kept(scores, table, tokens, 1, [37, 30, 20, 30], 1, 1)


def test_blocks_that_are_not_there_are_never_kept() -> None:
    table, tokens = pool(3, [32, 32], 2, 40)
    table[:, [0, 4, 5]] = -1
    scores = torch.randint(-9, 0, (2, 1, 16), dtype=torch.int32)
    scores[:, :, [0, 4, 5]] = LOWEST
    check_kept(scores, table, tokens, 2, [16, 12], 1, 2)


def test_what_does_not_fit_is_said() -> None:
    table, tokens = pool(6, [32, 16], 2, 40)
    scores = torch.zeros(2, 1, 16)
    with pytest.raises(InvalidInputError, match="more blocks than there are places"):
        gpu.select_blocks(
            scores, table, tokens, 2, [4, 4], init=1, local=1, into=Kept.rooms(1, 2, 1, 5)[0]
        )
    with pytest.raises(InvalidInputError, match="none was given"):
        gpu.select_blocks(scores, table, tokens, 2, torch.tensor([4, 4], dtype=torch.int32))
    with pytest.raises(InvalidInputError, match="float32 or int32"):
        gpu.select_blocks(scores.double(), table, tokens, 2, [4, 4])
    with pytest.raises(InvalidInputError, match="do not fit each other"):
        gpu.dot_scores(torch.zeros(2, 4, 8), torch.zeros(9, 3, 8), table, tokens)
    with pytest.raises(InvalidInputError, match="do not fit each other"):
        gpu.hamming_scores(
            torch.zeros(2, 2, 8, dtype=torch.uint8),
            torch.zeros(9, 4, 1, 8, dtype=torch.uint8),
            table,
            tokens,
        )
    with pytest.raises(InvalidInputError, match="directions do not fit"):
        gpu.hash_encode(torch.zeros(2, 1, 8), torch.zeros(9, 8))


def test_the_trial_passes_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks on a GPU before its kernels are used."""
    gpu.try_all(torch.device("cpu"))
    monkeypatch.setattr(
        gpu, "hamming_scores", lambda *_, **__: torch.zeros(1, 1, 12, dtype=torch.int32)
    )
    with pytest.raises(Exception, match="something else than torch"):
        gpu.try_all(torch.device("cpu"))
