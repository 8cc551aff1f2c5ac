"""A selector of your own, run by vLLM on a CPU: ``python examples/own_selector.py``.

It makes a tiny Llama with random weights, answers one prompt twice, densely and over the blocks
that the selector chooses, and prints what was read. Needs ``ucm-kv[vllm]``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ucm.sparse.method import BlockSparse
from ucm.sparse.selector import BlockSelector
from ucm.sparse.selectors import register_selector


class LastKey(BlockSelector):
    """A block is as good as the product of its last key with the mean query of each KV head."""

    name = "last_key"

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """What is kept of a block, in one layer."""
        return (self.geometry.kv_heads, self.geometry.head_dim), torch.float32

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Keys ``[blocks, tokens, heads, size]`` to what is kept of each block."""
        del layer
        return keys[:, -1].float()

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """The latest query ``[1, query heads, size]`` and what is kept of the candidates: ``[heads,
        blocks]``."""
        del layer
        mean = self.grouped(query[-1:])[0].mean(dim=1)  # of the query heads of each KV head
        return (reps * mean).sum(dim=-1).T


# in every process of the engine, because each imports this module
register_selector("LastKey", LastKey)

PROMPT, ANSWER = 2000, 32


def run(model: Path, root: Path, sparse: bool) -> dict[str, Any]:
    """One engine, which lives in this process: its answer, seconds per token, and the share of
    blocks it read."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from ucm.sparse.state import get_ucm_sparse

    extra: dict[str, Any] = {"storage_path": str(root)}
    if sparse:
        extra |= {
            "ucm_sparse_module_path": "own_selector",
            "ucm_sparse_config": {"LastKey": {"ratio": 0.2, "min_tokens": 500}},
        }
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=4096,
        max_num_seqs=4,
        kv_cache_memory_bytes=256 << 20,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UCMConnector",
            kv_connector_module_path="ucm.integration.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    prompt = [(17 * place * place + 5 * place) % 1999 + 3 for place in range(PROMPT)]

    def ask(tokens: int) -> list[int]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        answer = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        return list(answer.outputs[0].token_ids)

    ask(2)  # the prompt is computed here; what is measured below decodes
    began = time.perf_counter()
    tokens = ask(ANSWER)
    seconds = (time.perf_counter() - began) / ANSWER
    density = 1.0
    if sparse:
        method = get_ucm_sparse()
        assert isinstance(method, BlockSparse)
        density = method.stats.snapshot().get("density", 1.0)
    llm.llm_engine.engine_core.shutdown()
    return {"tokens": tokens, "ms_per_token": 1000 * seconds, "blocks_read": density}


def main() -> None:
    """Both engines, one after the other, and one line of JSON for each."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
    import model

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model.write(root / "model")
        (root / "blocks").mkdir()
        for sparse in (False, True):
            # Each in a process of its own: vLLM chooses the backend of attention once in a process.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found = process.submit(run, root / "model", root / "blocks", sparse).result()
            print(json.dumps({"engine": "sparse" if sparse else "dense", **found}), flush=True)


if __name__ == "__main__":
    main()
