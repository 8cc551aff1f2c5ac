"""Recall beyond the trained length: a committed model by RoPE and by ReRoPE. ``python
benches/quality/rerope_suite.py [--trained 2048] [--prompts N]`` prints a table of docs/rerope.md.

Right is the likeliest token at the place of an answer, in one pass over haystack and queries."""

from __future__ import annotations

import argparse

import torch
from recall_model import SIZE, THETA, TRAINED, Recall, after_attention
from recall_task import recall
from torch import Tensor

from ucm.sparse.rerope.rule import RotationTable, Rule, attention

RECORDS = 64
LENGTHS = (1024, 2048, 4096, 8192)
WINDOWS = (None, 1024, 512, 256)  # None: RoPE


def answers(model: Recall, tokens: Tensor, rule: Rule) -> Tensor:
    """The likeliest token after each one of ``tokens [t]``."""
    rates = THETA ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(len(tokens))[:, None] * rates
    rotation = RotationTable(torch.cat([angles.cos(), angles.sin()], dim=-1))
    x = model.embed_tokens(tokens)
    for layer in model.layers:
        own, normed = layer.self_attn, layer.input_layernorm(x)
        projections = (own.q_proj, own.k_proj, own.v_proj)
        q, k, v = (each(normed).view(len(tokens), -1, SIZE) for each in projections)
        found = attention(q, k, v, rotation, rule, SIZE**-0.5)
        x = after_attention(layer, x, found.flatten(1))
    return model.logits(x).argmax(-1)


def right(model: Recall, length: int, rule: Rule, prompts: int) -> float:
    """Share of right answers."""
    found: list[bool] = []
    for seed in range(prompts):
        prompt = recall(seed, length, RECORDS)
        likeliest = answers(model, torch.tensor(prompt.tokens + prompt.queries.tokens), rule)
        for at, kind in enumerate(prompt.queries.kinds):
            if kind:
                found.append(int(likeliest[length + at - 1]) == prompt.queries.tokens[at])
    return sum(found) / len(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--trained", type=int, choices=[*TRAINED], default=1024)
    given = parser.parse_args()
    prompts, model = given.prompts, Recall(TRAINED[given.trained])
    print("| positions |", " | ".join(f"{length} tokens" for length in LENGTHS), "|")
    for window in WINDOWS:
        for log_scale in (False, True) if window else (False,):
            rule = Rule(window or 1 << 20, given.trained, log_scale)
            name = f"window {window}{', log scale' if log_scale else ''}" if window else "RoPE"
            shares = [f"{right(model, length, rule, prompts):.3f}" for length in LENGTHS]
            print(f"| {name} |", " | ".join(shares), "|", flush=True)


if __name__ == "__main__":
    main()
