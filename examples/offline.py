"""Answers a prompt twice: computed, then from blocks of a store. Any configuration of ucm fits:

    python examples/offline.py                                    # a directory, a tiny model
    python examples/offline.py --config examples/redis.yaml --model Qwen/Qwen3-0.6B
    python examples/offline.py --set storage_backends=/mnt/kv

Prints a line of JSON for each answer: the tokens of the prompt that were not computed, the seconds
to the first token, and the answer. A slow medium may still be writing some blocks when the second
answer begins; these are computed. Needs ``ucm-kv[vllm]``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
BLOCK = 32


def keys(given: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` of the command line; values are YAML."""
    return {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in given)}


def ask(llm: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """The likeliest answer to a prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return {
        "cached_tokens": answer.num_cached_tokens,
        "seconds": round(answer.metrics.first_token_latency, 4),
        "answer": list(answer.outputs[0].token_ids),
    }


def main() -> None:
    """One engine, two answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a configuration of ucm (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="its keys")
    parser.add_argument("--model", help="a model; else a tiny one with random weights")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="KEY=VALUE", help="an argument of vLLM's"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--answer", type=int, default=16, help="length of the answer")
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text()) if arguments.config else {}
    config |= keys(arguments.set)
    engine = {"model": arguments.model, **keys(arguments.engine)}
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

    with tempfile.TemporaryDirectory() as directory:
        if not config:
            config = {"storage_backends": f"{directory}/blocks"}
        if arguments.model is None:
            sys.path.insert(0, str(HERE.parent / "demo"))
            import model

            model.write(Path(directory, "model"))
            small = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
            engine = small | engine | {"model": f"{directory}/model"}
        run(arguments, engine, config)


def run(arguments: argparse.Namespace, engine: dict[str, Any], config: dict[str, Any]) -> None:
    """The two answers, with the device's cache emptied between them."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    llm = LLM(
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=arguments.tokens + arguments.answer,
        max_num_seqs=4,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UCMConnector",
            kv_connector_module_path="ucm.integration.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=config,
        ),
        **engine,
    )
    prompt = [(17 * n * n + 5 * n) % 997 + 3 for n in range(arguments.tokens)]
    for number in (1, 2):
        print(json.dumps({"pass": number, **ask(llm, prompt, arguments.answer)}), flush=True)
        while not llm.reset_prefix_cache():  # blocks are still being copied from the device
            time.sleep(0.01)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
