"""Time to first token of vLLM on a GPU, computed and loaded: ``python benches/python/gpu_ttft.py``.

A model of Llama 3.1 8B's shape with random weights. Its engine gets prompts of several lengths:
*cold*, which nobody stored; again, *own*, a hit of vLLM's own prefix cache on the GPU; and *warm*,
after that cache was emptied. An engine without ucm says what a cold prompt costs there. Warm
answers are compared with those of vLLM's own hits.

Needs vLLM for CUDA, whose attention is that of ``tests/vllm`` on a GPU (docs/devices.md). Prints a
table; ``--json`` keeps every time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from variants import OURS, transfer

os.environ["UCM_TEST_GPU"] = "1"
from harness import Engine
from specs import EngineSpec, prompt

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = (
    32,
    4096,
    14336,
    32,
    8,
    128,
    128256,
)
#: Tokens of a block, vLLM's own default on a GPU.
BLOCK = 16
RUNS = ("cold", "own", "warm")


def write_model(directory: Path, layers: int) -> Path:
    """Writes the checkpoint, a file for each layer."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCAB,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (
            torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5
        ).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    torch.manual_seed(7)
    ends = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": ones()}
    save_file(
        ends | {"lm_head.weight": matrix(VOCAB, HIDDEN)}, directory / "model-ends.safetensors"
    )
    for layer in range(layers):
        base = f"model.layers.{layer}."
        weights = {
            base + "input_layernorm.weight": ones(),
            base + "post_attention_layernorm.weight": ones(),
            base + "self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN),
            base + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            base + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            base + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
            base + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            base + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            base + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
        save_file(weights, directory / f"model-{layer:02}.safetensors")
    torch.cuda.empty_cache()
    return directory


def spec(variant: str, model: Path, root: Path, chosen: argparse.Namespace) -> EngineSpec:
    """An engine with room for two prompts of the longest."""
    longest = max(chosen.tokens)
    return EngineSpec(
        model,
        chosen.runner,
        blocks=2 * (longest // BLOCK + 2),
        budget=8192,
        transfer=transfer(variant, root),
        args={
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "max_model_len": longest + BLOCK,
            "kv_cache_memory_bytes": 40 << 30,  # less is used: blocks are counted
        },
        env={"OMP_NUM_THREADS": "8"},
        label=variant,
    )


def ask(running: Engine, tokens: Sequence[int]) -> tuple[float, int, tuple[int, float]]:
    """Seconds to the first token, tokens that were not computed, and the answer with its
    log-probability."""
    answer = running.ask(tokens, 1)
    running.wait_idle()
    assert answer.first is not None
    return answer.first, answer.cached, (answer.tokens[0], answer.logprobs[0])


def measure(running: Engine, ours: bool, length: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """The times of prompts of this length."""
    got: dict[str, Any] = {run: [] for run in RUNS} | {"cached": [], "same": 0, "apart": 0.0}
    for number in range(chosen.prompts):
        tokens = prompt(1000 * length + number, length)
        answers = {}
        for run in RUNS if ours else ("cold", "own"):
            if run != "own":
                running.reset()
            seconds, cached, answers[run] = ask(running, tokens)
            got[run].append(seconds)
            if run == "warm":
                got["cached"].append(cached)
        if ours:
            (token, logprob), (right, expected) = answers["warm"], answers["own"]
            got["same"] += token == right
            got["apart"] = max(got["apart"], abs(logprob - expected))
    return got


def main() -> None:
    """Measures and prints."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--variant", nargs="+", choices=OURS, default=["none", "segment", "cache-pc"]
    )
    arguments.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of prompts"
    )
    arguments.add_argument("--prompts", type=int, default=5, help="of each length")
    arguments.add_argument("--layers", type=int, default=LAYERS)
    arguments.add_argument("--runner", choices=("v1", "v2"), default="v2")
    arguments.add_argument(
        "--work", type=Path, help="where the model (16 GB) and the blocks lie; a folder in memory"
    )
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing is measured")
        return
    rows: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "runner": chosen.runner,
        "layers": chosen.layers,
    }
    with tempfile.TemporaryDirectory(prefix="gpu-ttft-", dir=chosen.work) as folder:
        work = Path(folder)
        model = write_model(work / "model", chosen.layers)
        print(
            "| variant | tokens | cold, s | vLLM's own hit, s | warm, s | warm, cold = 1 | tokens"
            " reused | answers |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for variant in chosen.variant:
            (work / variant).mkdir()
            with Engine(
                spec(variant, model, work / variant, chosen), work / f"{variant}.log"
            ) as running:
                ask(running, prompt(1, max(chosen.tokens)))  # kernels are compiled
                for length in chosen.tokens:
                    got = rows[f"{variant} {length}"] = measure(
                        running, variant != "none", length, chosen
                    )
                    middle = {run: statistics.median(got[run]) for run in RUNS if got[run]}
                    times = " | ".join(
                        f"{middle[run]:.3f}" if run in middle else "-" for run in RUNS
                    )
                    ours = "- | - | -"
                    if "warm" in middle:
                        ours = (
                            f"{middle['warm'] / middle['cold']:.2f} |"
                            f" {statistics.median(got['cached']):.0f} | {got['same']} of"
                            f" {chosen.prompts}, {got['apart']:.4f} apart"
                        )
                    print(f"| {variant} | {length} | {times} | {ours} |", flush=True)
                    if chosen.json:
                        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
