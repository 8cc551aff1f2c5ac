"""Answers of the recall model under every selector, compared with dense attention and controls:
``make bench-quality``.

Prompts are computed densely, once. Then queries are fed to the decoder, one token at a time and
with their answers, so that decoding must find each answer. Windows, budget and rhythm are the
method's; attention reads the blocks of :class:`ucm.sparse.method.BlockSparse`, over plain torch
tensors, by the calls of vLLM's workers.
"""

from __future__ import annotations

import argparse
import platform
import re
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from recall_model import (
    HEADS,
    KV_HEADS,
    LAYERS,
    SIZE,
    WEIGHTS,
    Recall,
    after_attention,
    attended,
    projected,
)
from recall_task import FIRST, KINDS, LINK, LINKS, ONE_HOP, SECOND, Prompt, chain, recall
from torch import Tensor

from ucm.sparse.base import SparseBatch, SparseRow, UcmSparseRole
from ucm.sparse.factory import UcmSparseFactory
from ucm.sparse.method import BlockSparse
from ucm.sparse.selector import Geometry

BLOCK = 16
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
#: Windows and rhythm of all methods, so that they differ only in their selection.
EQUAL: dict[str, Any] = {"init_blocks": 1, "local_blocks": 2, "min_blocks": 0}
#: Name in the tables -> algorithm, and its keys in addition to the budget.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "oracle": ("Oracle", {}),
    "gsa_on_device": ("GSAOnDevice", {"windows_inside": False}),
    "gsa_on_device, 64 bits": ("GSAOnDevice", {"windows_inside": False, "hash_bits": 64}),
    "gsa_on_device, 32 bits": ("GSAOnDevice", {"windows_inside": False, "hash_bits": 32}),
    "quest": ("Quest", {}),
    "infllm": ("InfLLM", {}),
    "esa": ("ESA", {"stride": 1}),
    "gsa": ("GSA", {"stride": 1}),
    "esa, pool norm": ("ESA", {"stride": 1, "pool": "norm"}),
    "kvstar": ("KVStarMultiStep", {"stride": 1}),
    "kvstar, all channels, none merged": (
        "KVStarMultiStep",
        {"stride": 1, "prune_ratio": 1.0, "merge": 1},
    ),
    "random": ("Random", {}),
    "windows": ("Windows", {}),
}
#: Selected blocks, in addition to the three of the windows, of the 64 of a prompt of 1024 tokens.
BUDGETS = {0.344: 19, 0.156: 7, 0.109: 4}
#: As in vLLM on a CPU, where blocks are multiples of 32 tokens: 5 of the 33 of a prompt and its
#: queries.
WIDE: dict[str, Any] = {"block": 32, "local_blocks": 1, "topk_blocks": 3}
#: Rhythms, with the selections of the oracle and of two selectors: the cost of staleness alone.
RHYTHMS = [(1, 0), (1, 1), (2, 0), (4, 0), (8, 0), (8, 8), (16, 0)]


@dataclass
class Filled:
    """Computed prompts: the tensors of their tokens in each layer, and the tokens fed after
    them."""

    #: Queries, keys and values ``[batch, t, heads, d]`` of each layer.
    layers: list[tuple[Tensor, Tensor, Tensor]]
    #: Tokens fed to the decoder ``[batch, steps]``, and the kind of answer of each.
    fed: Tensor
    kinds: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Prompts, their tokens, and the steps after them."""
        return self.fed.shape[0], self.layers[0][0].shape[1], self.fed.shape[1]


@dataclass
class Outcome:
    """What decoding gave."""

    #: Answers of each kind, and the number of right ones.
    asked: Counter[int]
    right: Counter[int]
    #: Logits ``[batch, steps, vocabulary]``.
    logits: Tensor
    #: Counters of the method.
    stats: dict[str, float]

    def share(self, *kinds: int) -> float:
        """Share of right answers of these kinds; all kinds by default."""
        which = kinds or tuple(self.asked)
        return sum(self.right[kind] for kind in which) / sum(self.asked[kind] for kind in which)

    def count(self, *kinds: int) -> int:
        """Number of answers of these kinds."""
        return sum(self.asked[kind] for kind in kinds or tuple(self.asked))

    def error(self, *kinds: int) -> float:
        """Standard error of :meth:`share`, as of independent answers."""
        share, count = self.share(*kinds), self.count(*kinds)
        return float((share * (1 - share) / count) ** 0.5)


@torch.no_grad()
def fill(model: Recall, prompts: Sequence[Prompt], together: int = 16) -> Filled:
    """Compute prompts of one length densely, in batches."""
    layers: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(LAYERS)]
    for begin in range(0, len(prompts), together):
        x = model.embed_tokens(
            torch.tensor([prompt.tokens for prompt in prompts[begin : begin + together]])
        )
        places = torch.arange(x.shape[1])
        for number, layer in enumerate(model.layers):
            layers[number].append(projected(layer, x, places))
            x = after_attention(layer, x, attended(*layers[number][-1]))
    fed = torch.tensor([prompt.queries.tokens for prompt in prompts])
    kinds = torch.tensor([prompt.queries.kinds for prompt in prompts])
    joined = [tuple(torch.cat(parts) for parts in zip(*found, strict=True)) for found in layers]
    return Filled([(q, k, v) for q, k, v in joined], fed, kinds)


def attend(query: Tensor, cache: Sequence[Tensor], table: Tensor, lengths: Tensor) -> Tensor:
    """Paged attention of one query for each row, like an unmodified kernel.

    ``query [rows, heads, d]``; ``cache`` keys and values ``[blocks, b, h, d]``; ``table [rows, n]``
    physical blocks, of which the first ``lengths [rows]`` tokens count. ``[rows, heads * d]``.
    """
    (rows, heads, size), block = query.shape, cache[0].shape[1]
    most = -(-int(lengths.max()) // block)
    keys, values = (part[table[:, :most].long()].flatten(1, 2) for part in cache)  # [rows, t, h, d]
    there = torch.arange(most * block)[None] < lengths[:, None]
    grouped = query.view(rows, KV_HEADS, heads // KV_HEADS, size)
    scores = torch.einsum("rhgd,rthd->rhgt", grouped, keys) * size**-0.5
    weights = torch.softmax(scores.masked_fill(~there[:, None, None], -torch.inf), dim=-1)
    return torch.einsum("rhgt,rthd->rhgd", weights, values).reshape(rows, heads * size)


def method_of(algorithm: str, keys: Mapping[str, Any]) -> BlockSparse:
    """A method by the name of its algorithm, with windows of one size."""
    made = UcmSparseFactory.create_sparse_method(algorithm, UcmSparseRole.WORKER, {**EQUAL, **keys})
    assert isinstance(made, BlockSparse)
    return made


class Decoder:
    """The model over a paged cache with some prompts, one row each, with or without a method."""

    def __init__(
        self, model: Recall, filled: Filled, method: BlockSparse | None, block: int = BLOCK
    ) -> None:
        self._model, self._filled, self._method, self._block = model, filled, method, block
        batch, self._length, steps = filled.shape
        blocks = -(-(self._length + steps) // block)
        # Physical blocks in random order, on which no result may depend.
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(7))
        self._table = order.view(batch, blocks).int()
        self._caches = [
            torch.zeros(2, batch * blocks, block, KV_HEADS, SIZE).unbind() for _ in NAMES
        ]
        if method is not None:
            method.setup(
                Geometry(block, KV_HEADS, SIZE), NAMES, batch * blocks, max_sequences=batch
            )
        self._bind(self._length, self._length)
        for number, (q, k, v) in enumerate(filled.layers):
            self._layer(number, q, k, v, range(self._length))
        self._unbind()

    @torch.no_grad()
    def run(self) -> Outcome:
        """Feed the queries."""
        _, length, steps = self._filled.shape
        fed, logits = self._filled.fed, []
        for step in range(steps):
            self._bind(length + step + 1, 1)
            x = self._model.embed_tokens(fed[:, step : step + 1])
            for number, layer in enumerate(self._model.layers):
                q, k, v = projected(layer, x, torch.tensor([length + step]))
                table, lengths = self._layer(
                    number, q, k, v, range(length + step, length + step + 1)
                )
                found = attend(q[:, 0], self._caches[number], table, lengths)
                x = after_attention(layer, x, found[:, None])
            logits.append(self._model.logits(x)[:, 0])
            self._unbind()
        said = torch.stack(logits, dim=1)
        right, kinds = said[:, :-1].argmax(-1) == fed[:, 1:], self._filled.kinds[:, 1:]
        found_kinds = [kind for kind in KINDS if (kinds == kind).any()]
        return Outcome(
            Counter({kind: int((kinds == kind).sum()) for kind in found_kinds}),
            Counter({kind: int(right[kinds == kind].sum()) for kind in found_kinds}),
            said,
            {} if self._method is None else self._method.stats.snapshot(),
        )

    def _bind(self, tokens: int, queries: int) -> None:
        if self._method is not None:
            rows = [
                SparseRow(str(i), tokens, self._length, self._length, queries)
                for i in range(self._filled.shape[0])
            ]
            self._method.bind_sparse_metadata(SparseBatch(rows))

    def _unbind(self) -> None:
        if self._method is not None:
            self._method.clear_sparse_metadata()

    def _layer(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, places: range
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[batch, t, h, d]`` of these positions to the cache; returns the
        table and the lengths for the attention of the last one."""
        at, size = torch.tensor(places), self._block
        slots = (self._table[:, at // size].long() * size + at % size).flatten()
        for part, new in zip(self._caches[number], (k, v), strict=True):
            part.view(-1, KV_HEADS, SIZE)[slots] = new.flatten(0, 1)
        name, tokens = NAMES[number], places.stop
        table = self._table[:, : -(-tokens // size)]
        metadata = SimpleNamespace(
            block_table=table, seq_lens=torch.full((len(table),), tokens, dtype=torch.int32)
        )
        if self._method is not None:
            context = SimpleNamespace(attn_metadata={name: metadata})
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            self._method.write_keys(name, k, slots)
            self._method.attention_begin(q, k, v, name, context)
        return metadata.block_table, metadata.seq_lens


def outcome(
    model: Recall, filled: Filled, algorithm: str | None, block: int = BLOCK, **keys: Any
) -> Outcome:
    """Decode densely (None), or by an algorithm, over blocks of this size."""
    method = None if algorithm is None else method_of(algorithm, keys)
    try:
        found: Outcome = Decoder(model, filled, method, block).run()
        return found
    finally:
        if method is not None:
            method.close()


def prompts(count: int, length: int = 1024, records: int = 64, first: int = 0) -> list[Prompt]:
    """The prompts of the suite: seeds 0, 1, ...; training uses others."""
    return [recall(seed, length, records) for seed in range(first, first + count)]


# The tables
# --------------------------------------------------------------------------------------------------


def table_of_selectors(model: Recall, filled: Filled) -> list[str]:
    """Shares of right answers, by method and density."""
    dense = outcome(model, filled, None)
    columns = [
        *(f"density {density}" for density in BUDGETS),
        "0.152, blocks of 32",
        "at 0.156, second of two hops",
    ]
    lines = [
        f"| method | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        "| dense | "
        + " | ".join([_share(dense)] * (len(BUDGETS) + 1))
        + f" | {_share(dense, SECOND)} |",
    ]
    for name, (algorithm, keys) in METHODS.items():
        found = {}
        for density, budget in BUDGETS.items():
            chosen = {} if algorithm == "Windows" else {"topk_blocks": budget}
            found[density] = outcome(model, filled, algorithm, **keys, **chosen)
        wide = {**WIDE, "topk_blocks": None} if algorithm == "Windows" else WIDE
        cells = [
            _share(each)
            for each in (*found.values(), outcome(model, filled, algorithm, **keys, **wide))
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_share(found[0.156], SECOND)} |")
    return lines


def table_of_rhythms(model: Recall, recalls: Filled, chains: Filled) -> list[str]:
    """Shares of right answers with selections that are some steps old, for queries where each token
    needs another block, and where one block has many answers."""
    named = [("oracle", "Oracle"), ("gsa_on_device", "GSAOnDevice"), ("esa", "ESA")]
    lines = [
        "| stride | lag | "
        + " | ".join(f"{name}: records | {name}: chain" for name, _ in named)
        + " |",
        "|---|---|" + "---|---|" * len(named),
    ]
    for stride, lag in RHYTHMS:
        cells = []
        for name, algorithm in named:
            keys = {**METHODS[name][1], "stride": stride, "lag": lag, "topk_blocks": BUDGETS[0.156]}
            if lag:
                keys["retrieval_ms"] = 600_000  # no selection may be late: time is not tested here
            cells += [
                _share(outcome(model, filled, algorithm, **keys)) for filled in (recalls, chains)
            ]
        lines.append(f"| {stride} | {lag} | " + " | ".join(cells) + " |")
    return lines


def _share(found: Outcome, *kinds: int) -> str:
    return f"{found.share(*kinds):.3f} ± {found.error(*kinds):.3f}"


def write_into(document: Path, lines: Sequence[str]) -> None:
    """Puts lines between the marks ``<!-- quality -->`` and ``<!-- end -->`` of a document; text is
    wrapped."""
    marks = re.compile(r"(<!-- quality[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
    broken = (textwrap.wrap(line, 100) if line[:1] != "|" else [line] for line in lines)
    written = "\n".join(line for several in broken for line in several or [""])
    text, done = marks.subn(lambda m: f"{m[1]}{written}\n{m[2]}", document.read_text())
    if done != 1:
        raise SystemExit(f"{document} has no <!-- quality --> ... <!-- end --> to write between")
    document.write_text(text)


def main() -> None:
    """Print the tables, and optionally write them into a document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a few prompts, to check that it runs")
    parser.add_argument("--write", type=Path, help="the document between whose marks the tables go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    started, count = time.monotonic(), 4 if given.quick else given.prompts
    model = Recall(given.weights)
    recalls = fill(model, prompts(count))
    chains = fill(model, [chain(seed, 1024) for seed in range(count)])
    dense = outcome(model, recalls, None)
    kinds = ", ".join(f"{dense.count(kind)} {KINDS[kind]}" for kind in (ONE_HOP, FIRST, SECOND))
    setting = (
        f"{count} prompts (seeds 0 to {count - 1}) of 1024 tokens with 64 records, {dense.count()}"
        f" answers: {kinds}. Blocks of {BLOCK} tokens, the first and the last two always kept (of"
        " 32, the first and the last), the same for all methods; a new selection in every step, in"
        " every layer. ± is one binomial standard error."
    )
    staleness = (
        "Selections that are some steps old, at density 0.156: the same"
        f" {dense.count()} answers, and {int((chains.kinds == LINK).sum())} of {len(chains.fed)}"
        f" chains of {LINKS} records in a row, which lie in three or four blocks and are followed"
        " token by token (dense"
        f" {_share(outcome(model, chains, None))})."
    )
    selectors, rhythms = (
        table_of_selectors(model, recalls),
        table_of_rhythms(model, recalls, chains),
    )
    lines = [setting, "", *selectors, "", staleness, "", *rhythms]
    print("\n".join(lines))
    print(
        f"\n{time.monotonic() - started:.0f} s, torch {torch.__version__}, {platform.machine()},"
        f" {HEADS} query heads"
    )
    if given.write is not None:
        write_into(given.write, lines)


if __name__ == "__main__":
    main()
