"""Blend on the recall model, by plain torch: prompts whose chunks were computed elsewhere, the
rules of :mod:`ucm.sparse.blend.tokens`, and what they cost in answers.

``python tests/sparse/blend_harness.py`` prints the table of ``docs/blend-rules.md``, which ``make
bench-quality`` writes there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "quality"))

from recall_model import HEADS, KV_HEADS, LAYERS, SIZE, Recall, after_attention, projected, rotated
from recall_suite import write_into
from recall_task import STOP, recall

from ucm.sparse.blend.chunks import Hit
from ucm.sparse.blend.rotation import Rotation
from ucm.sparse.blend.tokens import (
    QUESTION_TOKENS,
    HKVDCalculator,
    Question,
    Select,
    choose,
    positions_of,
)

LENGTH, RECORDS, PROMPTS, CHUNKS = 1024, 64, 12, 8
SCALE = SIZE**-0.5
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
#: Keys and values ``[t, kv_heads, d]`` of each layer.
Layers = list[tuple[Tensor, Tensor]]


class Rotary:
    """The embedding of the recall model, in the form of vLLM's."""

    rotary_dim, is_neox_style = SIZE, True

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both, rotated to these positions."""
        shape = (len(positions), -1, SIZE)
        turned = [rotated(x.view(shape), positions).view_as(x) for x in (query, key)]
        return turned[0], turned[1]


ROTATION = Rotation(Rotary(), SIZE, 1 << 13)


@dataclass(frozen=True)
class Case:
    """One prompt: its context, its questions with their answers, and its chunks."""

    context: list[int]
    suffix: list[int]
    kinds: list[int]
    hits: list[Hit]
    #: Of the tokens of hits, in order, as they were computed elsewhere (not turned).
    cached: Layers

    @property
    def tokens(self) -> Tensor:
        """Context and suffix."""
        return torch.tensor([*self.context, *self.suffix])


@dataclass(frozen=True)
class Blended:
    """What a prompt gave."""

    #: Logits of the suffix ``[t, vocabulary]``.
    logits: Tensor
    #: Keys and values that its suffix attended to, of all tokens.
    layers: Layers
    #: Tokens of hits that were computed in the last layer, ascending.
    chosen: Tensor


@dataclass(frozen=True)
class Scoring:
    """Scores of a question's attention by another rule than the product's."""

    #: The first of the layers whose scores are added up.
    first: int = LAYERS // 3
    #: Of the mean over heads, the norm over the question's tokens, in place of the mean over both.
    norm: bool = False

    def of(self, query: Tensor, keys: Tensor, own: Tensor, known: Tensor) -> Tensor:
        """The scores in a layer of the tokens ``keys [t, kv_heads, d]``, of which those that are
        not ``known`` are hidden; ``own``: the keys of the question itself."""
        grouped = query.view(len(query), KV_HEADS, HEADS // KV_HEADS, SIZE)
        logits = torch.einsum("qhgd,thd->hgqt", grouped, torch.cat([keys, own])) * SCALE
        hidden = torch.ones(len(query), len(own), dtype=torch.bool).triu(1)
        hidden = torch.cat([(~known).expand(len(query), -1), hidden], dim=-1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).double()
        by_query = weights.mean(dim=(0, 1))[:, : len(keys)]
        score = by_query.norm(dim=0) if self.norm else by_query.mean(dim=0)
        return (score * 2**40).round().long()


# The model
# --------------------------------------------------------------------------------------------------


def project(model: Recall, layer: int, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[t, heads, d]`` of tokens ``[t, width]`` at these positions."""
    q, k, v = projected(model.layers[layer], x[None], places)
    return q[0], k[0], v[0]


def attend(query: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of tokens at these positions to all keys up to their own: ``[t, heads * d]``."""
    grouped = query.view(len(query), KV_HEADS, HEADS // KV_HEADS, SIZE)
    logits = torch.einsum("qhgd,thd->hgqt", grouped, keys) * SCALE
    hidden = torch.arange(len(keys))[None] > places[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hgqt,thd->qhgd", weights, values).reshape(len(query), HEADS * SIZE)


def step(model: Recall, layer: int, x: Tensor, found: Tensor) -> Tensor:
    """The output of a layer ``[t, width]``."""
    out: Tensor = after_attention(model.layers[layer], x[None], found[None])[0]
    return out


@torch.no_grad()
def prefill(model: Recall, tokens: Tensor) -> tuple[Tensor, Layers]:
    """A whole prompt densely: the logits of all tokens, and keys and values."""
    x, places, layers = model.embed_tokens(tokens), torch.arange(len(tokens)), Layers()
    for layer in range(LAYERS):
        q, k, v = project(model, layer, x, places)
        layers.append((k, v))
        x = step(model, layer, x, attend(q, places, k, v))
    return model.logits(x), layers


# Blend
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def blend(
    model: Recall,
    case: Case,
    select: Select,
    ratio: float,
    *,
    question: int | None = None,
    hkvd: HKVDCalculator | None = None,
    head_tokens: int = 2,
    scoring: Scoring | None = None,
) -> Blended:
    """A prompt with its chunks, of which a share is computed. ``question``: tokens of the suffix
    that score, all by default; ``scoring``: by another rule."""
    tokens, context = case.tokens, len(case.context)
    new, old = positions_of(case.hits)
    factors = ROTATION.factors(old, new)
    layers = [
        (torch.zeros(len(tokens), KV_HEADS, SIZE), torch.zeros(len(tokens), KV_HEADS, SIZE))
        for _ in range(LAYERS)
    ]
    for (keys, values), (cached_keys, cached_values) in zip(layers, case.cached, strict=True):
        keys[new], values[new] = ROTATION.turn(cached_keys, factors), cached_values
    if select == "hkvd":
        return _by_deviation(model, tokens, context, layers, new, hkvd or _calculator(ratio))
    scores = None
    if select in ("union", "query"):
        asked = tokens[context:][:question][-QUESTION_TOKENS:]
        scores = ask(model, asked, layers, context, new, scoring)
    chosen = choose(select, case.hits, ratio, head_tokens=head_tokens, scores=scores)
    kept = torch.ones(len(tokens), dtype=torch.bool)
    kept[new] = False
    kept[chosen] = True
    places = kept.nonzero()[:, 0]
    x = model.embed_tokens(tokens[places])
    for layer, (keys, values) in enumerate(layers):
        q, keys[places], values[places] = project(model, layer, x, places)
        x = step(model, layer, x, attend(q, places, keys, values))
    return Blended(model.logits(x[places >= context]), layers, chosen)


def _calculator(ratio: float) -> HKVDCalculator:
    return HKVDCalculator(LAYERS, ratio=ratio)


def ask(
    model: Recall,
    asked: Tensor,
    layers: Layers,
    context: int,
    known: Tensor,
    scoring: Scoring | None = None,
) -> Tensor:
    """The scores of the context by the attention of a question that stands behind it."""
    question, x = Question(LAYERS, context), model.embed_tokens(asked)
    places = torch.arange(context, context + len(asked))
    there, others = torch.zeros(context, dtype=torch.bool), torch.zeros(context, dtype=torch.int64)
    there[known] = True
    for layer, (keys, values) in enumerate(layers):
        q, k, v = project(model, layer, x, places)
        both = (keys[:context], k), (values[:context], v)
        found = question.attend(layer, q, *both, SCALE, there)
        if scoring is not None and layer >= scoring.first:
            others += scoring.of(q, keys[:context], k, there)
        x = step(model, layer, x, found.flatten(1))
    return question.scores() if scoring is None else others


def _by_deviation(
    model: Recall,
    tokens: Tensor,
    context: int,
    layers: Layers,
    hits: Tensor,
    hkvd: HKVDCalculator,
) -> Blended:
    """All tokens up to the first check layer; behind it those that are kept."""
    places, x = torch.arange(len(tokens)), model.embed_tokens(tokens)
    for layer, (keys, values) in enumerate(layers):
        q, k, v = project(model, layer, x, places)
        of_hits = torch.isin(places, hits)
        at = places[of_hits]
        mask = hkvd.compute_attention_mask(
            NAMES[layer], q[of_hits], k[of_hits], v[of_hits], keys[at], values[at],
            candidates=len(hits),
        )  # fmt: skip
        if mask is not None:
            kept = torch.ones_like(of_hits)
            kept[of_hits] = mask
            places, q, k, v, x = places[kept], q[kept], k[kept], v[kept], x[kept]
        keys[places], values[places] = k, v
        x = step(model, layer, x, attend(q, places, keys, values))
    chosen = places[torch.isin(places, hits)]
    return Blended(model.logits(x[places >= context]), layers, chosen)


# The prompts
# --------------------------------------------------------------------------------------------------


def ends(tokens: Sequence[int], cut: bool) -> list[int]:
    """Where the chunks of a context end: equal parts, or moved to the next place inside a record,
    between its key and its value."""
    equal = [len(tokens) * chunk // CHUNKS for chunk in range(1, CHUNKS)]
    if not cut:
        return [*equal, len(tokens)]
    inside = [at for at in range(1, len(tokens) - 1) if tokens[at + 1] == STOP]
    return [*(min(inside, key=lambda at: abs(at - end)) for end in equal), len(tokens)]


@torch.no_grad()
def case_of(model: Recall, seed: int, *, cut: bool, contextual: bool) -> Case:
    """Prompt ``seed``; its chunks were computed alone, or in stored prompts, behind three chunks of
    other prompts."""
    prompt = recall(seed, LENGTH, RECORDS)
    places = [0, *ends(prompt.tokens, cut)]
    hits, parts = list[Hit](), [list[tuple[Tensor, Tensor]]() for _ in range(LAYERS)]
    for number, (start, end) in enumerate(pairwise(places)):
        before = _before(seed, number) if contextual else []
        _, layers = prefill(model, torch.tensor([*before, *prompt.tokens[start:end]]))
        hits.append(Hit(start, end, len(before)))
        for part, (k, v) in zip(parts, layers, strict=True):
            part.append((k[len(before) :], v[len(before) :]))
    cached = [(torch.cat([k for k, _ in part]), torch.cat([v for _, v in part])) for part in parts]
    return Case(prompt.tokens, prompt.queries.tokens, prompt.queries.kinds, hits, cached)


@cache
def dense_logits(model: Recall, seed: int) -> Tensor:
    """The dense logits of the suffix of prompt ``seed``, whatever its chunks are."""
    prompt = recall(seed, LENGTH, RECORDS)
    tokens = torch.tensor([*prompt.tokens, *prompt.queries.tokens])
    return prefill(model, tokens)[0][len(prompt.tokens) :]


def _before(seed: int, number: int) -> list[int]:
    """The text before a chunk in the stored prompt that has it."""
    size, found = LENGTH // CHUNKS, list[int]()
    for which in range(3):
        other = recall(1000 + seed * 10 + which, LENGTH, RECORDS)
        found += other.tokens[number * size : (number + 1) * size]
    return found


# The figures
# --------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Of all prompts of a setting under one rule."""

    right: int = 0
    asked: int = 0
    #: Squares of the differences of logits, and of the dense logits.
    off: float = 0.0
    whole: float = 0.0
    computed: int = 0

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.asked

    @property
    def error(self) -> float:
        """Relative error of the suffix's logits."""
        return float((self.off / self.whole) ** 0.5)

    def __add__(self, other: Figures) -> Figures:
        """Those of more prompts."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Figures(*(one + more for one, more in pairs))

    def __str__(self) -> str:
        share = "" if self.right == self.asked else f" ({self.accuracy:.3f})"
        return f".{round(self.error * 10_000):04d}{share}"


class Setting:
    """Prompts from one seed on, and their dense logits."""

    def __init__(
        self,
        model: Recall,
        *,
        cut: bool,
        contextual: bool,
        first: int = 0,
        prompts: int = PROMPTS,
    ) -> None:
        self.model = model
        self.cases = [
            case_of(model, seed, cut=cut, contextual=contextual)
            for seed in range(first, first + prompts)
        ]
        self.dense = [dense_logits(model, seed) for seed in range(first, first + prompts)]

    def measure(self, select: Select, ratio: float, **given: Any) -> Figures:
        """All prompts under one rule."""
        found = Figures()
        for case, dense in zip(self.cases, self.dense, strict=True):
            blended = blend(self.model, case, select, ratio, **given)
            answers = torch.tensor(case.kinds[1:]) > 0
            right = blended.logits[:-1].argmax(-1) == torch.tensor(case.suffix[1:])
            found.right += int((right & answers).sum())
            found.asked += int(answers.sum())
            found.off += float((blended.logits - dense).double().square().sum())
            found.whole += float(dense.double().square().sum())
            found.computed += len(blended.chosen)
        return found


RATIOS = (0.02, 0.05, 0.15, 0.30)


def gradual(ratio: float) -> HKVDCalculator:
    """Two check layers, of which the first keeps twice the share."""
    meta = {NAMES[1]: {"ratio": min(2 * ratio, 1.0)}, NAMES[2]: {"ratio": ratio}}
    return HKVDCalculator(LAYERS, compute_meta=meta)


def table(model: Recall) -> list[str]:
    """The table of the page."""
    settings = {
        "alone": {"cut": False, "contextual": False},
        "alone, cut": {"cut": True, "contextual": False},
        "stored prompts": {"cut": False, "contextual": True},
        "stored prompts, cut": {"cut": True, "contextual": True},
    }
    made = {name: Setting(model, **given) for name, given in settings.items()}
    lines = [
        f"| rule: error (accuracy) at r = .02, .05, .15, .30 | {' | '.join(settings)} |",
        "|---|" + "---|" * len(settings),
    ]
    reuse = [str(each.measure("epic", 0.0)) for each in made.values()]
    lines.append(f"| pure reuse | {' | '.join(reuse)} |")
    rules: dict[str, tuple[Select, dict[str, Any]]] = {
        "`union`": ("union", {}),
        "`union`, scored by the first question alone": ("union", {"question": 4}),
        "`union`, 4 head tokens": ("union", {"head_tokens": 4}),
        "`union`, scores of all layers": ("union", {"scoring": Scoring(first=0)}),
        "`union`, scores of the last layer": ("union", {"scoring": Scoring(first=LAYERS - 1)}),
        "`union`, norms in place of means": ("union", {"scoring": Scoring(norm=True)}),
        "`query`": ("query", {}),
        "`epic`": ("epic", {}),
        "`hkvd`": ("hkvd", {}),
        "`hkvd`, 2 r then r": ("hkvd", {"gradual": True}),
    }
    for name, (select, given) in rules.items():
        cells = []
        for each in made.values():
            found = []
            for ratio in RATIOS:
                keys = dict(given)
                if keys.pop("gradual", False):
                    keys["hkvd"] = gradual(ratio)
                found.append(str(each.measure(select, ratio, **keys)))
            cells.append(", ".join(found))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


@dataclass(frozen=True)
class Dozen:
    """Twelve prompts with chunk ends as they fall: pure reuse, and 15 % computed by two rules."""

    reuse: Figures
    union: Figures
    hkvd: Figures

    def __str__(self) -> str:
        reuse, hkvd = (self.union.error / each.error for each in (self.reuse, self.hkvd))
        return f"union {self.union}, {reuse:.2f} of reuse ({self.reuse}), {hkvd:.2f} of hkvd"


def dozens(model: Recall, *, contextual: bool, count: int = 4) -> list[Dozen]:
    """Some dozens of prompts."""
    rules: list[tuple[Select, float]] = [("epic", 0.0), ("union", 0.15), ("hkvd", 0.15)]
    found = []
    for first in range(0, count * PROMPTS, PROMPTS):
        each = Setting(model, cut=False, contextual=contextual, first=first)
        found.append(Dozen(*(each.measure(select, ratio) for select, ratio in rules)))
    return found


def pooled(found: Sequence[Dozen]) -> Dozen:
    """All prompts of these dozens."""
    every = [(each.reuse, each.union, each.hkvd) for each in found]
    return Dozen(*(sum(rule, Figures()) for rule in zip(*every, strict=True)))


def shown(model: Recall) -> Iterator[str]:
    """The dozens in words."""
    for contextual in (False, True):
        found = dozens(model, contextual=contextual)
        where = "stored prompts" if contextual else "alone"
        for number, each in enumerate(found, 1):
            yield f"{where}, dozen {number}: {each}"
        yield f"{where}, all: {pooled(found)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--dozens", action="store_true", help="instead, more prompts at 15 %%")
    form.add_argument("--write", type=Path, help="document in which the table goes between marks")
    words = parser.parse_args()
    torch.set_num_threads(1)
    found = list((shown if words.dozens else table)(Recall()))
    print(*found, sep="\n")
    if words.write is not None:
        write_into(words.write, ["", *found, ""])
