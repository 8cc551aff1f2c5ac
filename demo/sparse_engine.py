"""One vLLM engine of ``sparse.py``, ``rerope.py`` or ``blend.py``, alone in its process: start,
answer the questions, stop, leave a result file.

Scheduler and worker live in this process, so that the counters of sparse attention can be read
where they are kept.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

from engine import QUIET, ask


def main(job_file: pathlib.Path) -> None:
    """Run the job of this file."""
    job = json.loads(job_file.read_text())
    os.environ.update(QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    events = pathlib.Path(job["events"])

    def tell(event: str, **values: Any) -> None:
        with events.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    from vllm import LLM
    from vllm.config import KVTransferConfig

    tell("imported")
    questions = job["questions"]
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=job["block_size"],
        max_model_len=job.get("max_model_len", 2048),
        hf_overrides=job.get("hf_overrides", {}),
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,  # the time to first token comes with them
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UCMConnector", kv_role="kv_both", kv_connector_extra_config=job["store"]
        ),
    )
    tell("ready")

    store(llm, job.get("documents", []), job["block_size"], job["store"])
    # One after the other: questions about one haystack share its KV.
    answers = [ask(llm, question["tokens"], 2) for question in questions]
    result = {
        "said": [list(answer.outputs[0].token_ids) for answer in answers],
        # of each haystack the first question
        "reused": sum(answer.num_cached_tokens for answer in answers[::3]),
        "sparse": counters(),
        "counters": totals(),
        "first_token_s": statistics.median(
            answer.metrics.first_token_latency for answer in answers[::3]
        ),
        "token_ms": token_ms(llm, questions[:8], job["max_tokens"]),
    }
    tell("decoded", **result)
    del llm
    tell("stopped", **result)


def counters() -> dict[str, float]:
    """What the method counted, of the questions alone."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found: dict[str, float] = get_kv_transfer_group().stats().get("sparse", {})
    return found


def store(llm: Any, documents: list[list[int]], block: int, keys: dict[str, Any]) -> None:
    """Ask for these prompts, and wait, for a minute at most, until all their blocks are stored."""
    for tokens in documents:
        ask(llm, tokens, 1)
    blocks = sum(len(tokens) // block for tokens in documents) if keys.get("enabled", True) else 0
    until = time.monotonic() + 60
    while totals().get("ucm_published_blocks_total", 0) < blocks:
        if time.monotonic() > until:
            raise RuntimeError(f"{blocks} blocks were not stored within a minute: {totals()}")
        ask(llm, documents[0][: block - 1], 1)  # a step, in which vLLM polls what was stored


def totals() -> dict[str, float]:
    """ucm's counters in this process, by their names."""
    from prometheus_client import REGISTRY

    return {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("ucm_") and sample.name.endswith("_total")
    }


def token_ms(llm: Any, questions: list[dict[str, Any]], tokens: int) -> float:
    """Milliseconds from one token to the next, one request at a time; the median over the
    requests."""
    times: list[float] = []
    for question in questions:
        began = time.perf_counter()
        answer = ask(llm, question["tokens"], tokens)
        times.append(
            (time.perf_counter() - began - answer.metrics.first_token_latency) / (tokens - 1) * 1e3
        )
    return statistics.median(times)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
