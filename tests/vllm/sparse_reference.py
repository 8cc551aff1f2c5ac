"""The expected answer of an engine with sparse attention, computed by plain torch: a Llama, one
sequence, no cache pages.

The prompt is dense. For each later token, every layer attends to the blocks of ``keep``, given the
query and all keys so far as in the method under test; everything else is an independent
implementation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ucm.config.sparse import AlgorithmConfig
from ucm.sparse.policy import method_of
from ucm.sparse.selection import choose, with_windows
from ucm.sparse.selector import Geometry

#: ``(layer, query [heads, d], keys [tokens, kv heads, d]) -> blocks``: logical ids, ascending;
#: None: all.
Keep = Callable[[int, Tensor, Tensor], Tensor | None]
#: A prompt is computed in parts of this number of tokens, to bound memory.
CHUNK = 1024


@dataclass
class Answer:
    """Tokens and their log-probabilities, and the kept and total blocks, over all layers and
    steps."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: int = 0
    seen: int = 0
    #: The kept blocks of partial selections, by number of tokens and layer.
    choices: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


class Llama:
    """The models of ``models.py``, in float32."""

    def __init__(self, directory: Path, block: int) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(str(directory / "model.safetensors"))
        self.block = block
        self.heads, self.kv_heads = (
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
        )
        self.size = self.config["head_dim"]

    def answer(
        self,
        prompt: Sequence[int],
        length: int,
        keep: Keep | None,
        dense_tokens: int = 0,
        forced: Sequence[int] | None = None,
        stored: int | None = None,
    ) -> Answer:
        """``length`` tokens after ``prompt``, each the likeliest, or those of ``forced``; ``keep``
        is asked once a sequence is longer than ``dense_tokens``, and already for what follows the
        first ``stored`` tokens of the prompt."""
        answer = Answer()
        cache: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * self.config[
            "num_hidden_layers"
        ]
        tokens = list(prompt)
        torch.set_num_threads(1)  # the cores are the engine's
        with torch.no_grad():
            for _ in range(length):
                at = len(prompt) + len(answer.tokens) - len(tokens)
                asked = keep if answer.tokens and len(tokens) + at > dense_tokens else None
                parts = list(torch.tensor(tokens).split(CHUNK))
                if stored is not None and not answer.tokens:
                    parts = [
                        *torch.tensor(tokens[:stored]).split(CHUNK),
                        torch.tensor(tokens[stored:]),
                    ]
                for chunk in parts:
                    selects = stored is not None and at >= stored
                    raw = self._run(chunk, at, cache, keep if selects else asked, answer)
                    at += len(chunk)
                logits = torch.log_softmax(raw, dim=-1)
                end = self.config["eos_token_id"]  # engines of these tests never end an answer
                likeliest = int(logits.index_fill(0, torch.tensor([end]), -torch.inf).argmax())
                tokens = [likeliest if forced is None else forced[len(answer.tokens)]]
                answer.tokens += tokens
                answer.logprobs.append(float(logits[tokens[0]]))
        return answer

    def _run(
        self,
        tokens: Tensor,
        at: int,
        cache: list[tuple[Tensor, Tensor]],
        keep: Keep | None,
        answer: Answer,
    ) -> Tensor:
        """Logits after the last of ``tokens``, the first of which is number ``at``."""
        weights, eps = self.weights, self.config["rms_norm_eps"]
        hidden = weights["model.embed_tokens.weight"][tokens]
        for layer in range(len(cache)):
            base = f"model.layers.{layer}."
            normed = _norm(hidden, weights[base + "input_layernorm.weight"], eps)
            attended = self._attend(layer, base + "self_attn.", normed, at, cache, keep, answer)
            hidden = hidden + attended @ weights[base + "self_attn.o_proj.weight"].T
            normed = _norm(hidden, weights[base + "post_attention_layernorm.weight"], eps)
            gate = torch.nn.functional.silu(normed @ weights[base + "mlp.gate_proj.weight"].T)
            hidden = hidden + (gate * (normed @ weights[base + "mlp.up_proj.weight"].T)) @ (
                weights[base + "mlp.down_proj.weight"].T
            )
        return _norm(hidden[-1], weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T

    def _attend(
        self,
        layer: int,
        base: str,
        hidden: Tensor,
        at: int,
        cache: list[tuple[Tensor, Tensor]],
        keep: Keep | None,
        answer: Answer,
    ) -> Tensor:
        count = hidden.shape[0]
        places = torch.arange(at, at + count)
        query, key, value = (
            (hidden @ self.weights[base + f"{name}_proj.weight"].T).view(count, -1, self.size)
            for name in "qkv"
        )
        query, key = self._rotated(query, places), self._rotated(key, places)
        if at:
            key, value = torch.cat([cache[layer][0], key]), torch.cat([cache[layer][1], value])
        cache[layer] = key, value
        seen = torch.ones(len(key), dtype=torch.bool)
        blocks = -(-len(key) // self.block)
        if keep is not None and (ids := keep(layer, query[-1], key)) is not None:
            seen = (
                torch.zeros(blocks, dtype=torch.bool)
                .index_fill(0, ids, True)
                .repeat_interleave(self.block)
            )
            seen = seen[: len(key)]
            answer.kept += len(ids)
            answer.seen += blocks
            answer.choices[len(key), layer] = tuple(ids.tolist())
        mask = (torch.arange(len(key))[None] <= places[:, None]) & seen
        group = self.heads // self.kv_heads
        scores = (
            torch.einsum("thd,shd->hts", query, key.repeat_interleave(group, 1)) * self.size**-0.5
        )
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        return torch.einsum("hts,shd->thd", weights, value.repeat_interleave(group, 1)).reshape(
            count, -1
        )

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        rates = self.config["rope_theta"] ** (-torch.arange(0, self.size, 2) / self.size)
        angles = places[:, None, None] * rates
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            dim=-1,
        )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def choosing(settings: AlgorithmConfig, block: int, kv_heads: int, size: int) -> Callable[[], Keep]:
    """Makes the function that returns an algorithm's kept blocks, for one answer: its selector
    over all candidates at once, in the order of the tokens, without an engine. Steps count from
    its first call; a selection is used until the next one, together with the blocks of its last
    window."""
    method = method_of(settings, Geometry(block, kv_heads, size))
    policy, selector = method.policy, method.selector

    def begin() -> Keep:
        made: dict[int, Tensor] = {}
        steps: Counter[int] = Counter()
        chosen: dict[int, tuple[Tensor, int]] = {}

        def keep(layer: int, query: Tensor, keys: Tensor) -> Tensor | None:
            steps[layer] += 1
            blocks = -(-len(keys) // block)
            if policy.is_dense(blocks, len(keys)):
                return None
            known = made.get(layer)
            begin, full = 0 if known is None else len(known), len(keys) // block
            if full > begin:
                new = selector.encode(
                    layer, keys[begin * block : full * block].view(-1, block, kv_heads, size)
                )
                made[layer] = new if known is None else torch.cat([known, new])
            if layer not in chosen or (steps[layer] - 1) % policy.stride == 0:
                reps = made[layer][policy.init : blocks - policy.local]
                scores = selector.score(layer, query[None], reps)
                wide = scores.double() if scores.is_floating_point() else scores.long()
                one = (
                    wide.sum(0, keepdim=True)
                    if selector.combine == "sum"
                    else wide.amax(0, keepdim=True)
                )
                chosen[layer] = choose(policy, one, blocks)[0], blocks
            return with_windows(policy, *chosen[layer], blocks)

        return keep

    return begin
