"""Each algorithm against its formula, and what holds for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import BLOCK, DIM, GEOMETRY, GROUP, HEADS, keys, query
from torch import Tensor

from ucm.config import UcmConfig, load
from ucm.config.fields import Count
from ucm.config.sparse import AlgorithmConfig, keys_of
from ucm.errors import ConfigError
from ucm.sparse.factory import UcmSparseFactory
from ucm.sparse.method import BlockSparse
from ucm.sparse.policy import settings_of
from ucm.sparse.selector import BlockSelector, Geometry, rep_bytes
from ucm.sparse.selectors import make_selector, register_selector
from ucm.sparse.selectors.infllm import InfLLM
from ucm.sparse.selectors.kvstar import KVStar
from ucm.sparse.selectors.mean_k import MeanK
from ucm.sparse.selectors.oracle import Oracle
from ucm.sparse.selectors.periodic import Periodic, Random
from ucm.sparse.selectors.quest import Quest

ALGORITHMS = [
    ("ESA", {}),
    ("ESA", {"pool": "max", "score": "dot_max"}),
    ("ESA", {"pool": "norm", "rep_dtype": "fp16"}),
    ("GSA", {"score": "l2"}),
    ("GSA", {"score": "key_max", "rep_dtype": "int8"}),
    ("GSAOnDevice", {}),
    ("KVStarMultiStep", {"merge": 2}),
    ("KVStarMultiStep", {"merge": 1, "prune_ratio": 1.0, "group": 3}),
    ("Quest", {}),
    ("InfLLM", {"rep_tokens": 2}),
    ("Periodic", {}),
    ("Random", {}),
    ("Oracle", {}),
]
#: Those that look at the keys.
LOOKING = [case for case in ALGORITHMS if case[0] not in ("Periodic", "Random")]


def selector_of(
    algorithm: str, given: dict[str, Any], geometry: Geometry = GEOMETRY
) -> BlockSelector:
    return make_selector(settings_of(algorithm, given), geometry)


@pytest.fixture(
    params=ALGORITHMS, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}"
)
def selector(request: pytest.FixtureRequest) -> BlockSelector:
    return selector_of(*request.param)


def shared(scores: Tensor, selector: BlockSelector) -> Tensor:
    return scores.amax(dim=0) if selector.combine == "max" else scores.double().sum(dim=0)


# What holds for all
# --------------------------------------------------------------------------------------------------


def test_shapes_and_types_are_those_announced(selector: BlockSelector) -> None:
    shape, dtype = selector.rep_shape()
    reps = selector.encode(0, keys(6))
    assert (tuple(reps.shape), reps.dtype) == ((6, *shape), dtype)
    assert reps.nbytes == 6 * rep_bytes(selector)
    assert shape[0] == BLOCK or not selector.token_wise
    scores = selector.score(0, query(count=3), reps)
    assert scores.shape == (HEADS, 6)
    assert scores.dtype == (torch.int32 if selector.exact else torch.float32)
    weights = selector.weights(scores)
    assert (
        weights.dtype == torch.float64
        and bool((weights >= 0).all())
        and bool(weights.isfinite().all())
    )


def test_a_block_is_encoded_the_same_alone_and_among_others(selector: BlockSelector) -> None:
    together = selector.encode(3, keys(9))
    for i in range(9):
        assert torch.equal(selector.encode(3, keys(9)[i : i + 1])[0], together[i])


def test_a_token_is_encoded_the_same_alone_where_the_selector_says_so(
    selector: BlockSelector,
) -> None:
    if selector.token_wise:
        tokens = keys(2).flatten(0, 1)[:, None]
        assert torch.equal(
            selector.encode(1, tokens)[:, 0], selector.encode(1, keys(2)).flatten(0, 1)
        )


def test_a_selector_keeps_no_state_of_requests(selector: BlockSelector) -> None:
    reps = selector.encode(0, keys(6))
    before = selector.score(0, query(1), reps)
    selector.score(0, query(7), selector.encode(0, keys(6, seed=9)))
    assert torch.equal(selector.score(0, query(1), reps), before)


@pytest.mark.parametrize(("algorithm", "given"), LOOKING)
def test_equal_blocks_get_equal_scores_wherever_they_stand(
    algorithm: str, given: dict[str, Any]
) -> None:
    selector = selector_of(algorithm, given)
    for count in (2, 5, 17, 64, 65):
        same = keys(1).expand(count, -1, -1, -1)
        scores = shared(selector.score(0, query(), selector.encode(0, same)), selector)
        assert bool((scores == scores[0]).all())


@pytest.mark.parametrize(("algorithm", "given"), LOOKING)
def test_the_order_of_blocks_does_not_change_a_score(algorithm: str, given: dict[str, Any]) -> None:
    """A block's score (its order, where scores are attention mass) is its own; what is around it
    does not matter."""
    selector = selector_of(algorithm, given)
    k = keys(12)
    scores = shared(selector.score(0, query(), selector.encode(0, k)), selector)
    for order in (torch.arange(11, -1, -1), torch.randperm(12)):
        again = shared(selector.score(0, query(), selector.encode(0, k[order])), selector)
        torch.testing.assert_close(again, scores[order])


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [case for case in ALGORITHMS if case[0] in ("ESA", "GSAOnDevice", "Quest")],
)
def test_the_length_of_a_query_does_not_change_the_order(
    algorithm: str, given: dict[str, Any]
) -> None:
    selector = selector_of(algorithm, given)
    reps = selector.encode(0, keys(40))
    orders = [
        torch.sort(shared(selector.score(0, query() * factor, reps), selector), stable=True).indices
        for factor in (1, 8, 0.25)  # powers of two: no rounding
    ]
    assert torch.equal(orders[0], orders[1]) and torch.equal(orders[0], orders[2])


def test_different_representations_have_different_signatures() -> None:
    signatures = [
        selector_of(*case).signature()
        for case in ALGORITHMS
        if case[0] not in ("Periodic", "Random", "Oracle", "GSA")
    ]
    assert len(set(signatures)) == len(signatures)
    wide = Geometry(block_size=BLOCK, kv_heads=HEADS, head_dim=2 * DIM)
    assert selector_of("Quest", {}).signature() != selector_of("Quest", {}, wide).signature()
    # the same representations
    assert selector_of("ESA", {}).signature() == selector_of("GSA", {}).signature()


def test_a_query_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 heads of size 8"):
        MeanK(GEOMETRY).score(0, torch.zeros(1, 3, DIM), MeanK(GEOMETRY).encode(0, keys(2)))


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((0, 1, 8, 0), "block_size"),
        ((4, 0, 8, 0), "kv_heads"),
        ((4, 1, 8, 8), "rope_dim"),
        ((4, 2, 8, 4), "one KV head"),
    ],
)
def test_an_impossible_geometry_is_refused(shape: tuple[int, int, int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Geometry(*shape)


# Means
# --------------------------------------------------------------------------------------------------


def test_mean_k_is_the_formula() -> None:
    """s = einsum('bhd,nhd->bn', q.view(B, Hk, g, D).mean(2), K.mean(1))."""
    k, q = keys(20), query(count=1)
    selector = MeanK(GEOMETRY, rep_dtype="fp16")
    expected = torch.einsum(
        "bhd,nhd->bn", q.view(1, HEADS, GROUP, DIM).mean(2), k.mean(1).half().float()
    )[0]
    torch.testing.assert_close(
        shared(selector.score(0, q, selector.encode(0, k)), selector).float(), expected
    )


@pytest.mark.parametrize(
    ("pool", "formula"),
    [
        ("mean", lambda k: k.mean(1)),
        ("max", lambda k: k.amax(1)),
        ("norm", lambda k: (k / k.norm(dim=-1, keepdim=True)).mean(1)),
    ],
)
@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-8), ("fp16", 2**-11), ("int8", 1 / 254)])
def test_pools_and_types(
    pool: str, formula: Callable[[Tensor], Tensor], dtype: str, error: float
) -> None:
    """The documented bound of each type: half a step, of the largest channel for int8 and of each
    value else."""
    selector, k = MeanK(GEOMETRY, pool=pool, rep_dtype=dtype), keys(30)
    wide, exact = selector._wide(selector.encode(0, k)), formula(k)
    bound = exact.abs().amax(dim=-1, keepdim=True) if dtype == "int8" else exact.abs()
    assert bool(((wide - exact).abs() <= bound * error * 1.001 + 1e-6).all())


def test_int8_of_zero_is_zero() -> None:
    selector = MeanK(GEOMETRY, rep_dtype="int8")
    assert bool((selector._wide(selector.encode(0, torch.zeros(2, BLOCK, HEADS, DIM))) == 0).all())


def test_scores_of_means() -> None:
    k, q = keys(15), query()
    q_heads, q_mean = q[0].view(HEADS, GROUP, DIM), q[0].view(HEADS, GROUP, DIM).mean(1)
    r = k.mean(1).bfloat16().float()
    cases = {
        "dot_mean": torch.einsum("hd,nhd->hn", q_mean, r),
        "dot_max": torch.einsum("hgd,nhd->hgn", q_heads, r).amax(1),
        "l2": -(q_mean[None] - r).norm(dim=-1).T,
        "key_max": torch.einsum("hd,nbhd->hbn", q_mean, k.bfloat16().float()).amax(1),
    }
    for how, expected in cases.items():
        selector = MeanK(GEOMETRY, score=how)
        torch.testing.assert_close(selector.score(0, q, selector.encode(0, k)), expected)


# KVStar
# --------------------------------------------------------------------------------------------------


def attention_mass(q: Tensor, k: Tensor) -> Tensor:
    """Attention mass of each block over these blocks alone, for each KV head, added up over its
    query heads."""
    n = k.shape[0]
    logits = torch.einsum("hgd,thd->hgt", q.view(HEADS, GROUP, DIM), k.flatten(0, 1)) * DIM**-0.5
    return torch.softmax(logits, dim=-1).view(HEADS, GROUP, n, BLOCK).sum(dim=(1, 3))


def test_kvstar_without_savings_is_the_true_attention_mass() -> None:
    k, q = keys(25).half().float(), query()
    kvstar, oracle = KVStar(GEOMETRY, prune_ratio=1.0, merge=1), Oracle(GEOMETRY)
    expected = attention_mass(q[0], k)
    torch.testing.assert_close(kvstar.score(0, q, kvstar.encode(0, k)), expected)
    torch.testing.assert_close(oracle.score(0, q, oracle.encode(0, k)), expected)


@pytest.mark.parametrize(
    ("prune", "merge", "group"), [(0.25, 2, 1), (0.5, 4, 3), (1.0, 1, 5), (0.98, 2, 2)]
)
def test_the_mass_of_kvstar_adds_up_to_queries_times_heads(
    prune: float, merge: int, group: int
) -> None:
    selector = KVStar(GEOMETRY, prune_ratio=prune, merge=merge, group=group)
    scores = selector.score(0, query(count=group), selector.encode(0, keys(11)))
    assert float(scores.sum()) == pytest.approx(group * HEADS * GROUP, rel=1e-5)


def test_the_order_of_the_queries_of_a_group_does_not_matter() -> None:
    selector, q = KVStar(GEOMETRY, merge=2, group=4), query(count=4)
    reps = selector.encode(0, keys(11))
    torch.testing.assert_close(selector.score(0, q, reps), selector.score(0, q[[2, 0, 3, 1]], reps))


def test_kvstar_is_the_formula_of_the_book() -> None:
    """Channels by mean |K| of the block, neighbours merged, softmax over all of it."""
    k, q, d = keys(7), query(), DIM // 2
    selector = KVStar(GEOMETRY, prune_ratio=0.5, merge=2)
    index = k.abs().mean(1).topk(d, dim=-1).indices  # [n, h, d]
    pruned = (
        k.gather(3, index[:, None].expand(-1, BLOCK, -1, -1))
        .view(7, BLOCK // 2, 2, HEADS, d)
        .mean(2)
        .half()
        .float()
    )
    # [h, g, n, d]
    seen = torch.stack([q[0].view(HEADS, GROUP, DIM)[h][:, index[:, h]] for h in range(HEADS)])
    logits = torch.einsum("hgnd,njhd->hgnj", seen, pruned) * d**-0.5
    expected = torch.softmax(logits.flatten(2), dim=-1).view_as(logits).sum(dim=(1, 3))
    torch.testing.assert_close(selector.score(0, q, selector.encode(0, k)), expected)


def test_kvstar_keeps_the_channels_that_are_large_in_every_block() -> None:
    """Outlier channels are the same in all blocks, so blocks that choose for themselves choose what
    a prompt would."""
    k = keys(12) * 0.1
    k[..., [1, 4, 6]] *= 50
    selector = KVStar(GEOMETRY, prune_ratio=3 / DIM, merge=1)
    assert bool((selector.encode(0, k)[:, -1] == torch.tensor([1.0, 4, 6])).all())


def test_the_savings_of_kvstar() -> None:
    """Half of the channels, four tokens to one: an eighth, and one row of channels."""
    wide = Geometry(block_size=128, kv_heads=8, head_dim=128)
    selector = KVStar(wide, prune_ratio=0.5, merge=4)
    assert selector.rep_shape() == ((33, 8, 64), torch.float16)
    with pytest.raises(ConfigError, match="merge"):
        KVStar(GEOMETRY, merge=3)


def test_the_mean_of_query_heads_is_a_mode_of_its_own() -> None:
    selector = KVStar(GEOMETRY, prune_ratio=1.0, merge=1, average_heads=True)
    mean = (
        query()[0]
        .view(HEADS, GROUP, DIM)
        .mean(1, keepdim=True)
        .expand(-1, GROUP, -1)
        .reshape(1, HEADS * GROUP, DIM)
    )
    scores = selector.score(0, query(), selector.encode(0, keys(9)))
    torch.testing.assert_close(scores, attention_mass(mean[0], keys(9).half().float()) / GROUP)


# Quest, InfLLM
# --------------------------------------------------------------------------------------------------


def test_quest_bounds_every_dot_product_and_is_the_tightest_bound_by_channel() -> None:
    selector = Quest(GEOMETRY)
    for seed in range(20):
        k, q = keys(6, seed), query(seed)
        mean = q[0].view(HEADS, GROUP, DIM).mean(1)
        best = torch.einsum("hd,nbhd->hnb", mean, k).amax(-1)
        scores = selector.score(0, q, selector.encode(0, k))
        assert bool((scores >= best - 1e-5).all())
        lo, hi = k.amin(1).transpose(0, 1), k.amax(1).transpose(0, 1)  # [h, n, d]
        exact = torch.maximum(mean[:, None] * lo, mean[:, None] * hi).sum(-1)
        assert bool((scores - exact <= mean.abs().sum(-1)[:, None] * 4 * 2**-7).all())


def test_the_bounds_of_quest_are_rounded_outwards() -> None:
    k = torch.randn(200, BLOCK, HEADS, DIM, generator=torch.Generator().manual_seed(3)) * 10
    reps = Quest(GEOMETRY).encode(0, k).float()
    assert bool((reps[:, 0] <= k.amin(1)).all()) and bool((reps[:, 1] >= k.amax(1)).all())
    assert bool((reps[:, 1] - k.amax(1) <= k.amax(1).abs() * 2**-7).all())
    exact = k.bfloat16().float()  # what bf16 holds is not moved
    assert torch.equal(Quest(GEOMETRY).encode(0, exact).float()[:, 1], exact.amax(1))


def test_a_block_of_one_token_is_bounded_by_its_dot_product() -> None:
    single = Geometry(block_size=1, kv_heads=HEADS, head_dim=DIM)
    k, q = keys(5, geometry=single).bfloat16().float(), query()
    selector = Quest(single)
    expected = torch.einsum("hd,nhd->hn", q[0].view(HEADS, GROUP, DIM).mean(1), k[:, 0])
    torch.testing.assert_close(selector.score(0, q, selector.encode(0, k)), expected)


def test_infllm_keeps_the_longest_keys_of_each_head() -> None:
    k, q, selector = keys(8).bfloat16().float(), query(), InfLLM(GEOMETRY, rep_tokens=2)
    longest = k.norm(dim=-1).topk(2, dim=1).indices  # [n, 2, h]
    kept = k.gather(1, longest[..., None].expand(-1, -1, -1, DIM))
    expected = torch.einsum("hd,njhd->hn", q[0].view(HEADS, GROUP, DIM).mean(1), kept)
    torch.testing.assert_close(selector.score(0, q, selector.encode(0, k)), expected)


def test_infllm_with_all_keys_is_the_sum_of_all_dot_products() -> None:
    k, q, selector = keys(8).bfloat16().float(), query(), InfLLM(GEOMETRY, rep_tokens=99)
    expected = torch.einsum("hd,nbhd->hn", q[0].view(HEADS, GROUP, DIM).mean(1), k)
    torch.testing.assert_close(selector.score(0, q, selector.encode(0, k)), expected)


# Controls
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "count"), [(16, 1), (16, 4), (20, 5), (33, 8), (100, 13)])
def test_periodic_blocks_are_even(blocks: int, count: int) -> None:
    selector = Periodic(GEOMETRY)
    scores = selector.score(0, query(), selector.encode(0, keys(blocks)))
    order = (
        torch.sort(scores[0], descending=True, stable=True).indices[:count].sort().values.tolist()
    )
    gaps = [b - a for a, b in zip([*order], [*order[1:], blocks], strict=True)]
    assert order[0] == 0
    # a gap is at most one that was not halved yet
    assert max(gaps) <= 2 * (blocks // count + 1) + 1


def test_random_blocks_differ_by_query_layer_and_seed_and_by_nothing_else() -> None:
    selector = Random(GEOMETRY)
    reps = selector.encode(0, keys(50))
    first = selector.score(0, query(1), reps)
    assert torch.equal(first, selector.score(0, query(1), reps))
    for other in (
        selector.score(0, query(2), reps),
        selector.score(1, query(1), reps),
        Random(GEOMETRY, seed=1).score(0, query(1), reps),
    ):
        assert not torch.equal(first, other)
    assert abs(float(first[0].mean()) - 0.5) < 0.2


def test_the_oracle_leaves_out_what_is_beyond_the_last_token() -> None:
    oracle, k, q = Oracle(GEOMETRY), keys(3), query()
    poisoned = k.clone()
    poisoned[2, 1:] = 1e4
    mass = oracle.mass(q, poisoned, 2 * BLOCK + 1)
    logits = (
        torch.einsum("hgd,thd->hgt", q[0].view(HEADS, GROUP, DIM), k.flatten(0, 1)[: 2 * BLOCK + 1])
        * DIM**-0.5
    )
    weights = torch.softmax(logits, dim=-1).sum(1)
    expected = torch.stack(
        [weights[:, :BLOCK].sum(1), weights[:, BLOCK : 2 * BLOCK].sum(1), weights[:, -1]], dim=1
    )
    torch.testing.assert_close(mass, expected)


# A new one
# --------------------------------------------------------------------------------------------------


class FirstKey(BlockSelector):
    """A selector of a user's own: a block is its first key."""

    name = "first_key"

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.geometry.kv_heads, self.geometry.head_dim), torch.float32

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        return keys[:, 0].float()

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        return (reps * self.grouped(query[-1:])[0].mean(dim=1)).sum(dim=-1).T


class NthKey(FirstKey):
    """One with a key of its own, and other defaults."""

    name = "nth_key"

    class Keys(AlgorithmConfig):
        stride: Count = 4
        place: Count = 1

    def __init__(self, geometry: Geometry, *, place: int) -> None:
        super().__init__(geometry)
        self.place = place


def configured(**extra: Any) -> UcmConfig:
    return load({"storage_path": "/d", **extra}, {})


@pytest.mark.usefixtures("registries")
def test_a_selector_is_known_to_the_configuration_once_it_is_registered() -> None:
    with pytest.raises(ConfigError, match=r'unknown key "ucm_sparse_config\.NthKey"'):
        configured(ucm_sparse_config={"NthKey": {}})
    register_selector("NthKey", NthKey, aliases=("nth",))
    config = configured(ucm_sparse_config={"nth": {"place": 3, "topk": 8}})
    settings = config.sparse.settings
    assert isinstance(settings, NthKey.Keys)
    assert (config.sparse.type, settings.place, settings.stride) == ("NthKey", 3, 4)
    assert settings.budget == ("topk_blocks", 8)
    selector = make_selector(settings, GEOMETRY)
    assert isinstance(selector, NthKey) and selector.place == 3
    method = UcmSparseFactory.create_sparse_method("nth_key", config={"place": 2})
    assert isinstance(method, BlockSparse) and isinstance(method.settings, NthKey.Keys)
    assert (method.algorithm, method.settings.place) == ("NthKey", 2)
    assert configured(sparse_type="NthKey").sparse.settings == keys_of("NthKey")()


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"plac": 3}, 'unknown key "ucm_sparse_config.NthKey.plac".* did you mean "place"'),
        ({"place": 0}, '"ucm_sparse_config.NthKey.place".* greater than or equal to 1, got 0'),
        ({"ratio": 2}, '"ucm_sparse_config.NthKey.ratio"'),
    ],
)
def test_a_wrong_key_of_a_registered_selector_is_named(keys: dict[str, Any], sentence: str) -> None:
    register_selector("NthKey", NthKey)
    with pytest.raises(ConfigError, match=sentence):
        configured(ucm_sparse_config={"NthKey": keys})


@pytest.mark.usefixtures("registries")
def test_the_module_that_a_configuration_names_may_register_a_selector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of an engine reads the configuration before anything else of it."""
    source = f"from {__name__} import NthKey, register_selector\n"
    (tmp_path / "ucm_own.py").write_text(source + "register_selector('NthKey', NthKey)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ucm_own", raising=False)
    section = {"NthKey": {"place": 5}}
    config = configured(ucm_sparse_module_path="ucm_own", ucm_sparse_config=section)
    assert isinstance(config.sparse.settings, NthKey.Keys) and config.sparse.settings.place == 5
    with pytest.raises(ConfigError, match=r"unknown key .*NthKez"):
        configured(ucm_sparse_module_path="ucm_own", ucm_sparse_config={"NthKez": {}})
    with pytest.raises(ConfigError, match="ucm_none cannot be imported"):
        configured(ucm_sparse_module_path="ucm_none", ucm_sparse_config={"Other": {}})


@pytest.mark.usefixtures("registries")
def test_without_settings_representations_with_other_keys_are_foreign() -> None:
    class Unnamed(NthKey):
        name = ""

    register_selector("NthKey", NthKey)
    register_selector("Unnamed", Unnamed)
    nth = [selector_of("NthKey", {"place": place, "stride": 2}) for place in (1, 2, 2)]
    unnamed = selector_of("Unnamed", {"place": 2})
    signatures = [each.signature() for each in (*nth, unnamed)]
    assert signatures[0] != signatures[1] == signatures[2] != signatures[3]
    assert "Unnamed" in signatures[3]


@pytest.mark.usefixtures("registries")
def test_a_selector_may_replace_one_of_ours_and_its_name_means_no_other() -> None:
    register_selector("ESA", FirstKey)
    assert isinstance(make_selector(settings_of("ESA", {"pool": "max"}), GEOMETRY), FirstKey)
    assert settings_of("ESA").stride == 16
    register_selector("Quest", NthKey)
    assert isinstance(selector_of("Quest", {"place": 2}), NthKey)
    with pytest.raises(ConfigError, match='"kvstar" means KVStarMultiStep'):
        register_selector("Mine", FirstKey, aliases=("kvstar",))


# What they find
# --------------------------------------------------------------------------------------------------


def planted(seed: int, *, common: float = 0.0, outlier: float = 1.0) -> tuple[Tensor, Tensor, int]:
    """Forty blocks of noise and one key that the query is about; keys may have a mean, or a channel
    that is large."""
    wide = Geometry(block_size=16, kv_heads=HEADS, head_dim=64)
    k, generator = keys(40, seed, wide), torch.Generator().manual_seed(seed + 1)
    q = torch.randn(HEADS, 64, generator=generator)
    where = int(torch.randint(40, (1,), generator=generator))
    k[where, int(torch.randint(16, (1,), generator=generator))] = 2 * q + 0.5 * torch.randn(
        HEADS, 64, generator=generator
    )
    k[..., 3] *= outlier
    q[:, 3] /= outlier
    mean = torch.randn(HEADS, 64, generator=generator)
    return k + common * mean, q[:, None].expand(-1, GROUP, -1).reshape(1, HEADS * GROUP, 64), where


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("GSAOnDevice", {}),
        ("Quest", {}),
        ("KVStarMultiStep", {"merge": 1, "prune_ratio": 1.0}),
        ("KVStarMultiStep", {"merge": 1, "prune_ratio": 0.5}),
        ("ESA", {"score": "key_max"}),
        ("InfLLM", {}),
        ("Oracle", {}),
    ],
)
@pytest.mark.parametrize("trap", [{}, {"common": 0.3}, {"outlier": 8.0}])
def test_the_key_of_the_query_is_found(
    algorithm: str, given: dict[str, Any], trap: dict[str, float]
) -> None:
    """Among the best four of forty blocks, in 30 of 30 prompts, with a common mean and with an
    outlier channel too."""
    wide = Geometry(block_size=16, kv_heads=HEADS, head_dim=64)
    selector = selector_of(algorithm, given, wide)
    for seed in range(30):
        k, q, where = planted(seed, **trap)
        scores = shared(selector.score(0, q, selector.encode(0, k)), selector)
        assert where in torch.sort(scores, descending=True, stable=True).indices[:4].tolist()


def test_the_random_selector_finds_a_key_as_often_as_chance() -> None:
    """The control of the test above: a tenth of the blocks, a tenth of the prompts."""
    wide = Geometry(block_size=16, kv_heads=HEADS, head_dim=64)
    selector, found = selector_of("Random", {}, wide), 0
    for seed in range(100):
        k, q, where = planted(seed)
        scores = shared(selector.score(0, q, selector.encode(0, k)), selector)
        found += where in torch.sort(scores, descending=True, stable=True).indices[:4].tolist()
    assert found <= 25
