"""Which tokens of reused chunks are computed again.

Tokens of misses and of the suffix are always computed. Of the tokens of hits a share ``ratio`` is
computed, chosen by one of four rules:

* ``union``: the first tokens of every chunk that follows other tokens, then those with the most
  attention of the question. The default: it has the smallest error of the four.
* ``query``: those with the most attention of the question.
* ``epic``: the first tokens of every chunk, as many of each as the share has room for.
* ``hkvd``: the highest deviation of a fresh key from the reused one, in one or several check
  layers, each of which filters the tokens that are left.

Scores are means over the heads of a rank in fixed-point numbers. Ranks of tensor parallelism add
them up and choose the same tokens; of equal scores the lower position wins. No choice depends on
the order of sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ucm.errors import ConfigError, InvalidInputError
from ucm.sparse.blend.chunks import Hit
from ucm.sparse.method import layer_index

Select = Literal["union", "hkvd", "epic", "query"]
Criterion = Literal["k_l1", "k_l2", "k+v"]
#: Adds up integer scores over the ranks of tensor parallelism.
Total = Callable[[Tensor], Tensor]

#: Share of the tokens of hits that is computed again, and first tokens of a chunk, by default.
RATIO, HEAD_TOKENS = 0.15, 2
#: Most tokens of a question whose attention counts, the last ones.
QUESTION_TOKENS = 64
#: Factor of a mean before it becomes an integer, and the largest mean.
_FIXED_POINT, _LARGEST = 1 << 40, float(1 << 14)

_log = logging.getLogger("ucm.sparse")


def positions_of(hits: Sequence[Hit]) -> tuple[Tensor, Tensor]:
    """Where the tokens of hits stand in the prompt, ascending, and where they stood when their KV
    was computed: int64 ``[t]`` each."""
    new = [torch.arange(hit.start, hit.end) for hit in hits]
    old = [torch.arange(hit.source, hit.source + hit.tokens) for hit in hits]
    empty = [torch.empty(0, dtype=torch.int64)]
    return torch.cat(empty + new), torch.cat(empty + old)


def budget(hits: Sequence[Hit], ratio: float) -> int:
    """Tokens of hits that a share allows, rounded down."""
    return _share(ratio, sum(hit.tokens for hit in hits))


def _share(ratio: float, tokens: int) -> int:
    if not 0 <= ratio <= 1:
        raise InvalidInputError("a ratio is a share from 0 to 1", context={"ratio": ratio})
    return math.floor(ratio * tokens + 1e-9)


def choose(
    select: Select,
    hits: Sequence[Hit],
    ratio: float = RATIO,
    *,
    head_tokens: int = HEAD_TOKENS,
    scores: Tensor | None = None,
) -> Tensor:
    """The tokens of hits that ``union``, ``epic`` or ``query`` compute: positions in the prompt,
    ascending, int64. ``scores``: integers of every position of the prompt (:class:`Question`),
    which ``epic`` does not need. ``hkvd`` chooses while layers run: :class:`HKVDCalculator`.
    Raises :class:`~ucm.errors.InvalidInputError` for another rule, and for missing scores."""
    room, all_tokens = budget(hits, ratio), positions_of(hits)[0]
    if select == "epic":
        return _heads(hits, room)[:room].sort().values
    if select not in ("union", "query") or scores is None:
        rules = ", ".join(get_args(Select))
        raise InvalidInputError(
            f"tokens are chosen by one of {rules}; hkvd by HKVDCalculator, union and query by the"
            " scores of a question",
            context={"select": select, "scores": scores is not None},
        )
    if hits and len(scores) < hits[-1].end:
        raise InvalidInputError(
            "scores have an entry for every token up to the last hit",
            context={"scores": len(scores), "end": hits[-1].end},
        )
    first = _heads(hits, head_tokens)[:room] if select == "union" else all_tokens[:0]
    rest = all_tokens[~torch.isin(all_tokens, first)]
    best = rest[_highest(scores.cpu()[rest], room - len(first))]
    return torch.cat([first, best]).sort().values


def _heads(hits: Sequence[Hit], depth: int) -> Tensor:
    """The first ``depth`` tokens of every hit that follows others: the first of each hit, then the
    second of each, and so on."""
    depth = min(depth, max((hit.tokens for hit in hits), default=0))
    follow = [hit for hit in hits if hit.follows]
    rows = [hit.start + at for at in range(depth) for hit in follow if at < hit.tokens]
    return torch.tensor(rows, dtype=torch.int64)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Places of the ``count`` highest scores, ascending; of equal ones the lower place wins."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[: max(count, 0)].sort().values


def _fixed(means: Tensor) -> Tensor:
    """Means as integers. A mean that is no number counts as the largest: its KV is unusable."""
    bounded = means.double().nan_to_num(nan=_LARGEST, posinf=_LARGEST, neginf=0.0)
    return (bounded.clamp(0, _LARGEST) * _FIXED_POINT).round().long()


def _alone(scores: Tensor) -> Tensor:
    """The total of a single rank."""
    return scores


class Question:
    """The attention of a question on the tokens before it, in all layers, and the scores that it
    gives them.

    The score of a token is the sum, over the last two thirds of the layers, of the mean attention
    probability over the question's tokens and the heads. Keys and values of the question itself are
    passed to each call: an engine may not have slots for them yet.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        """``layers`` of the model, and ``tokens`` of the prompt before the question."""
        self._first = layers // 3
        self._scores = torch.zeros(tokens, dtype=torch.int64)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: tuple[Tensor, Tensor],
        values: tuple[Tensor, Tensor],
        scale: float,
        known: Tensor | None = None,
    ) -> Tensor:
        """The question's causal attention ``[q, heads, d]`` in a layer, from ``query [q, heads,
        d]``. ``keys`` and ``values``: those of the tokens before it ``[t, kv_heads, d]``, and the
        question's own ``[q, kv_heads, d]``. ``known [t]``: the tokens whose KV is there; all by
        default. Only one KV head at a time takes memory for probabilities."""
        (before, own), count = keys, len(query)
        every = torch.cat([before, own]).float()
        content = torch.cat([values[0], values[1]]).float()
        heads, kv_heads, tokens = query.shape[1], every.shape[1], len(before)
        hidden = torch.zeros(count, len(every), dtype=torch.bool, device=query.device)
        hidden[:, tokens:] = torch.ones_like(hidden[:, tokens:]).triu(1)
        if known is not None:
            absent = ~known.to(query.device)
            hidden[:, :tokens] |= absent
            content[:tokens].masked_fill_(absent[:, None, None], 0)  # whatever numbers are there
        grouped = query.float().view(count, kv_heads, heads // kv_heads, -1)
        output = torch.empty(*grouped.shape[:3], content.shape[-1], device=query.device)
        mass = torch.zeros(tokens, dtype=torch.float64, device=query.device)
        for head in range(kv_heads):
            logits = torch.einsum("qgd,td->gqt", grouped[:, head], every[:, head]) * scale
            weights = logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
            output[:, head] = torch.einsum("gqt,td->qgd", weights, content[:, head])
            mass += weights[..., :tokens].sum(dim=(0, 1), dtype=torch.float64)
        if layer >= self._first:
            self._scores += _fixed(mass / (count * heads)).cpu()
        return output.flatten(1, 2).view(count, heads, -1).to(query.dtype)

    def scores(self, total: Total = _alone) -> Tensor:
        """The scores of the tokens before the question: int64 ``[t]``, added up over ranks."""
        return total(self._scores)


# HKVD
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """What one check layer keeps: a share of the tokens of hits, or those that deviate by more
    than a threshold."""

    ratio: float | None = None
    threshold: float | None = None


def checks_of(
    compute_meta: Mapping[str, Any],
    num_layers: int,
    *,
    ratio: float | None = None,
    hkvd_threshold: float | None = None,
) -> dict[int, Check]:
    """The check layers by number, ascending, of ``compute_meta``: names of layers
    (``model.layers.1.self_attn.attn`` or ``model.layers.1.self_attn``) to ``ratio`` or
    ``hkvd_threshold``, in a mapping or as attributes. A layer with neither has ``hkvd_threshold``
    or ``ratio`` of this call, else :data:`RATIO`; without any layer, layer 1 checks.

    In layer 0 a fresh key differs from a turned one by rounding alone, so a check there takes the
    next layer, with a warning. Raises :class:`~ucm.errors.ConfigError` for a layer that the model
    does not have, or a layer with both keys.
    """
    if num_layers < 2:
        raise ConfigError(
            f"hkvd compares keys in layer 1 or behind it, and the model has {num_layers} layers;"
            " write select: union"
        )
    default = Check(RATIO if ratio is None else ratio)
    if hkvd_threshold is not None:
        default = Check(threshold=hkvd_threshold)
    found: dict[int, Check] = {}
    for name, keys in compute_meta.items():
        layer = layer_index(name, -1)
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"compute_meta names layers of the model, 0 to {num_layers - 1}, as"
                f' model.layers.1.self_attn.attn; it has "{name}"'
            )
        if layer in found:
            raise ConfigError(f"compute_meta names layer {layer} twice; write it once")
        found[layer] = _check_of(name, keys, default)
    if 0 in found:
        found = _without_layer_0(found)
    return dict(sorted(found.items())) or {1: default}


def _check_of(name: str, keys: Any, default: Check) -> Check:
    written = keys if isinstance(keys, Mapping) else vars(keys)
    share, threshold = written.get("ratio"), written.get("hkvd_threshold")
    if share is not None and threshold is not None:
        raise ConfigError(f"compute_meta.{name}: write ratio or hkvd_threshold, not both")
    return default if share is None and threshold is None else Check(share, threshold)


def _without_layer_0(found: dict[int, Check]) -> dict[int, Check]:
    first = found.pop(0)
    then = "layer 1 checks with its own keys" if 1 in found else "layer 1 checks in its place"
    _log.warning("compute_meta names layer 0, where keys deviate by rounding alone: %s", then)
    return {1: first} | found


def deviation(
    criterion: Criterion, fresh: tuple[Tensor, Tensor], reused: tuple[Tensor, Tensor]
) -> Tensor:
    """How far fresh keys and values (each ``[t, kv_heads, d]``) are from the reused ones: int64
    ``[t]``, fixed-point means over the heads of this rank. ``k_l1``: of the absolute difference of
    keys; ``k_l2``: of its square; ``k+v``: as k_l1, of keys and of values."""
    (key, value), (old_key, old_value) = fresh, reused
    if criterion not in get_args(Criterion):
        known = ", ".join(get_args(Criterion))
        raise InvalidInputError(f"a criterion is one of {known}", context={"is": criterion})
    off = (key.float() - old_key.float()).flatten(1)
    if criterion == "k_l2":
        return _fixed(off.square().mean(dim=1))
    found = off.abs().mean(dim=1)
    if criterion == "k+v":
        found += (value.float() - old_value.float()).flatten(1).abs().mean(dim=1)
    return _fixed(found)


class HKVDCalculator:
    """The highest KV deviation: which of the tokens of hits go on behind a check layer.

    Every token is computed up to the first check layer. There the ``ratio`` of the tokens of hits
    that deviate most are kept, or those above a threshold; each later check layer keeps some of
    these. The threshold is a share of the mean size of the reused keys: 0.1 means that a token's
    keys deviate by a tenth of what a key of these hits measures.
    """

    def __init__(
        self,
        num_layers: int,
        threshold: float | None = None,
        *,
        compute_meta: Mapping[str, Any] | None = None,
        ratio: float | None = None,
        criterion: Criterion = "k_l1",
        total: Total = _alone,
    ) -> None:
        """``num_layers`` of the model; ``threshold``: ``hkvd_threshold`` of the configuration;
        ``compute_meta`` and the others as :func:`checks_of` and :func:`deviation` read them;
        ``total`` adds up scores over ranks. Raises :class:`~ucm.errors.ConfigError`."""
        meta = compute_meta or {}
        self.checks = checks_of(meta, num_layers, ratio=ratio, hkvd_threshold=threshold)
        self._criterion: Criterion = criterion
        self._total = total

    def compute(
        self, key: Tensor, value: Tensor, cached_key: Tensor, cached_value: Tensor
    ) -> Tensor:
        """The deviation of each token over all ranks: int64 ``[t]``. All tensors are ``[t,
        kv_heads, d]``."""
        return self._total(deviation(self._criterion, (key, value), (cached_key, cached_value)))

    def compute_attention_mask(
        self,
        layer_name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cached_key: Tensor,
        cached_value: Tensor,
        *,
        candidates: int | None = None,
    ) -> Tensor | None:
        """Which of the tokens of hits that reached this layer are computed on: bool ``[t]``; None
        where the layer checks nothing. ``key``, ``value`` are fresh, ``cached_*`` reused (turned to
        their positions), all ``[t, kv_heads, d]``; ``query`` is not read. ``candidates``: tokens of
        all hits, of which a ratio is a share; by default those of this call, as in the first check
        layer."""
        del query
        check = self.checks.get(layer_index(layer_name, -1))
        if check is None:
            return None
        scores = self.compute(key, value, cached_key, cached_value)
        if check.threshold is not None:
            return scores >= self._least(check.threshold, cached_key, cached_value)
        share = RATIO if check.ratio is None else check.ratio
        all_hits = len(key) if candidates is None else candidates
        mask = torch.zeros(len(key), dtype=torch.bool, device=scores.device)
        mask[_highest(scores, _share(share, all_hits))] = True
        return mask

    def _least(self, threshold: float, key: Tensor, value: Tensor) -> Tensor:
        """The threshold in the unit of the scores: a share of the mean size of reused tensors."""
        nothing = torch.zeros_like(key), torch.zeros_like(value)
        sizes = self._total(deviation(self._criterion, (key, value), nothing)).double()
        power = 2 if self._criterion == "k_l2" else 1
        mean = sizes.mean() if len(sizes) else torch.zeros((), dtype=torch.float64)
        return (mean * threshold**power).clamp(min=1).ceil().long()
