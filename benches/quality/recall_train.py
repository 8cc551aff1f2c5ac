"""Train the recall model: ``python benches/quality/recall_train.py --out DIR [--length 2048]``.
Some minutes of one core, no download.

Two things make it learn in minutes. The names grow from 16 to 128 while sequences are short, and
only then the sequences grow: with 128 names from the start it goes on guessing one of the values it
has seen. And matrices are trained by Muon (orthogonalised momentum), embeddings, norms and biases
by AdamW. Its first weights look back: keys and queries of a layer resemble each other, and two
heads of the first layer attend to the tokens one and two before.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recall_model import HEADS, KV_HEADS, SIZE, WEIGHTS, rotated
from recall_task import (
    KEYS,
    LINK,
    LINKS,
    MIDDLES,
    STOP,
    VALUES,
    Filler,
    Sequence,
    chain_of,
    follow,
    links,
    query,
    recall,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

#: Length, sequences of a batch, most steps, names, and whether there are chains. A stage ends when
#: 20 steps got more than .97 of the answers right (chains aside), or with its last step; the last
#: stage takes all of its steps, with a falling rate.
STAGES = [
    (48, 64, 300, 16, False),
    (48, 64, 300, 32, False),
    (64, 64, 300, 64, False),
    (64, 64, 300, 128, False),
    (128, 32, 150, 128, True),
    (256, 16, 150, 128, True),
    (512, 8, 150, 128, True),
    (1024, 4, 400, 128, True),
    (2048, 2, 400, 128, True),
]
MUON_RATE, ADAM_RATE, GOOD = 0.02, 3e-3, 0.97
#: Steps in which the rate rises: of the first stage, and of those after it, which begin without
#: momentum.
WARM_UP = (50, 10)


def stream(rng: np.random.Generator, length: int, names: int, chains: bool) -> Sequence:
    """A sequence to train on: records and queries of them, mixed, so that most tokens are answers.
    ``names``: the number of keys, of middles and of values."""
    found, filler = Sequence(), Filler(rng)
    keys, middles, values = (rng.permutation(names).tolist() for _ in range(3))
    chained = chains and rng.random() < 0.3
    most = int(rng.integers(2, max(3, min(names - LINKS * chained, length // 8)) + 1))
    gap = float(rng.choice([0.0, 1.0, 2.0, 4.0, 8.0]))
    eager = float(rng.choice([0.4, 0.85]))
    waiting: list[tuple[int, int, int]] = []  # two hops whose second half is still to come
    known: list[tuple[int, ...]] = []
    chain: list[int] = []
    told = 0
    while len(found.tokens) < length:
        if gap:
            found.add(filler.take(int(rng.geometric(1 / (1 + gap))) - 1))
        if chained and not chain and rng.random() < 0.1:
            most_links = min(LINKS, length // 12)
            chain = chain_of(keys[-1], middles[-int(rng.integers(2, most_links + 1)) :], values[-1])
            found.add(links(chain))
        elif chain and rng.random() < 8 / length:
            found.add(*follow(chain))
        elif waiting and rng.random() < 0.3:
            key, middle, value = waiting.pop(int(rng.integers(len(waiting))))
            found.add([MIDDLES + middle, VALUES + value, STOP])
            known.append((key, middle, value))
        elif told < most and (not known or rng.random() < eager):
            key, middle, value = keys[told], middles[told], values[told]
            told += 1
            if rng.random() < 0.3:
                found.add([KEYS + key, MIDDLES + middle, STOP])
                waiting.append((key, middle, value))
            else:
                found.add([KEYS + key, VALUES + value, STOP])
                known.append((key, value))
        elif known:
            found.add(*query(known[int(rng.integers(len(known)))]))
    return Sequence(found.tokens[:length], found.kinds[:length])


@torch.no_grad()
def begin(layers: Any, embedding: Tensor, generator: torch.Generator) -> None:
    """Weights to start from."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width, group = embedding.shape[1], HEADS // KV_HEADS
    embedding.copy_(0.05 * normal(*embedding.shape))
    for number, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        k = normal(KV_HEADS, SIZE, width) * width**-0.5
        q = k.repeat_interleave(group, 0) + 0.3 * normal(HEADS, SIZE, width) * width**-0.5
        v = normal(KV_HEADS * SIZE, width) * width**-0.5
        attention.k_proj.weight.copy_(k.flatten(0, 1))
        attention.q_proj.weight.copy_(q.flatten(0, 1))
        attention.v_proj.weight.copy_(v)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.bias.zero_()
        o = 0.1 * normal(width, HEADS * SIZE) * width**-0.5
        if number == 0:
            # As large as an embedding, so that neither hides the other.
            value = v.view(KV_HEADS, SIZE, width).repeat_interleave(group, 0).flatten(0, 1)
            o = 0.1 * (o + value.T)
            look_back(attention.q_proj.bias, attention.k_proj.bias)
        attention.o_proj.weight.copy_(o)
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.copy_(normal(*linear.weight.shape) * width**-0.5)
        down = mlp.down_proj
        down.weight.copy_(0.05 * normal(*down.weight.shape) * down.in_features**-0.5)


def look_back(query: Tensor, key: Tensor) -> None:
    """Biases by which the first query head of each KV head attends to the token one, and two,
    before."""
    for kv in range(KV_HEADS):
        ones = torch.cat([torch.full((SIZE // 2,), 6.0), torch.zeros(SIZE // 2)])
        key[kv * SIZE : (kv + 1) * SIZE] = ones
        head = kv * (HEADS // KV_HEADS)
        turned = rotated(ones.view(1, 1, SIZE), torch.tensor([-(kv + 1.0)])).flatten()
        query[head * SIZE : (head + 1) * SIZE] = turned


class Muon:
    """Steps of a matrix are its momentum with all singular values near 1 (five Newton-Schulz
    steps). By Keller Jordan."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            self._groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self._momentum = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step."""
        for shape, group in self._groups.items():
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum = self._momentum[shape].mul_(0.95).add_(gradient)
            update = self._orthogonal(gradient.add(momentum, alpha=0.95))
            for matrix, change in zip(group, update, strict=True):
                matrix.add_(change, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)

    @staticmethod
    def _orthogonal(x: Tensor) -> Tensor:
        tall = x.shape[1] > x.shape[2]
        x = (x.mT if tall else x).bfloat16()
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        return (x.mT if tall else x).float()


@torch.no_grad()
def measured(model: Any, length: int, prompts: int, names: int) -> dict[int, float]:
    """Share of right answers of each kind to prompts that it was not trained on."""
    right: dict[int, list[bool]] = {}
    for seed in range(prompts):
        prompt = recall(900_000 + seed, length, min(64, length // 16), names=names)
        tokens = torch.tensor([prompt.tokens + prompt.queries.tokens])
        likeliest = model(tokens).logits[0].argmax(-1)
        for at, kind in enumerate(prompt.queries.kinds, length):
            if kind:
                right.setdefault(kind, []).append(bool(likeliest[at - 1] == tokens[0, at]))
    return {kind: sum(found) / len(found) for kind, found in sorted(right.items())}


def save(model: Any, directory: Path) -> None:
    """Write a checkpoint in bf16 that vLLM and transformers read, as the committed one."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(directory / "model.safetensors"), {"format": "pt"})
    if directory != WEIGHTS:
        shutil.copy(WEIGHTS / "config.json", directory)


def main() -> None:
    """Train, stage by stage; the checkpoint is written after each one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--length", type=int, choices=(1024, 2048), default=1024)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = Qwen2Config.from_pretrained(WEIGHTS, dtype="float32")
    # For short sequences the fused kernel's backward pass is many times slower on a CPU.
    config._attn_implementation = "eager"
    model: Any = Qwen2ForCausalLM(config).float()
    begin(
        model.model.layers,
        model.model.embed_tokens.weight,
        torch.Generator().manual_seed(given.seed),
    )
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    stages = [stage for stage in STAGES if stage[0] <= given.length]
    step = 0
    for stage, (length, size, most, names, chains) in enumerate(stages):
        last = stage == len(stages) - 1
        if length > 256:
            model.set_attn_implementation("sdpa")
        # Each stage begins from the weights alone.
        rng = np.random.Generator(np.random.PCG64([given.seed, stage]))
        muon, adam = Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
        recent, followed = deque[float](maxlen=20), deque[float](maxlen=20)
        for done in range(most):
            if not last and len(recent) == 20 and sum(recent) / 20 > GOOD:
                break
            sequences = [stream(rng, length, names, chains) for _ in range(size)]
            tokens = torch.tensor([s.tokens for s in sequences])
            kinds = torch.tensor([s.kinds for s in sequences])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1]).logits
            answers = kinds[:, 1:] > 0
            weights = torch.where(answers, 1.0, 0.02)
            loss = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            loss = (loss * weights.flatten()).sum() / weights.sum()
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rate = min(1.0, (done + 1) / WARM_UP[stage > 0]) * (1 - done / most if last else 1.0)
            muon.step(MUON_RATE * rate)
            for group in adam.param_groups:
                group["lr"] = ADAM_RATE * rate
            adam.step()
            right = logits.argmax(-1) == tokens[:, 1:]
            recent.append(right[answers & (kinds[:, 1:] != LINK)].float().mean().item())
            if (kinds == LINK).any():
                followed.append(right[kinds[:, 1:] == LINK].float().mean().item())
            step += 1
            if step % 20 == 0:
                print(
                    f"T{length} names {names} step {step} cpu {time.process_time():.0f} s "
                    f"loss {loss.item():.4f} right {sum(recent) / len(recent):.3f} "
                    f"chains {sum(followed) / max(1, len(followed)):.3f}",
                    flush=True,
                )
        save(model, given.out)
        unseen = measured(model, length, 64 if last else 8, names)
        print(f"-- T{length} names {names} done at step {step}, unseen: {unseen}", flush=True)


if __name__ == "__main__":
    main()
