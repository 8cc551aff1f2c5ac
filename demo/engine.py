"""One vLLM engine of the demo, alone in its process: start, answer one prompt, stop, leave a result
file.

``run.py`` starts it as ``python engine.py JOB`` with a JSON job file and shows what it reports: one
line of JSON per event in ``job["events"]``. What vLLM itself prints goes to the log that ``run.py``
opened for this process.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

#: Nothing of the demo needs a network.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main(job_file: pathlib.Path) -> None:
    """Run the job of this file."""
    job = json.loads(job_file.read_text())
    os.environ.update(QUIET)
    events = pathlib.Path(job["events"])

    def tell(event: str, **values: Any) -> None:
        with events.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    from vllm import LLM
    from vllm.config import KVTransferConfig

    tell("imported")
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=job["block_size"],
        max_model_len=4096,
        max_num_seqs=4,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,  # the time to first token comes with them
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UCMConnector",
            kv_role="kv_both",
            kv_connector_extra_config={**job["store"], **job["device"]["config"]},
            kv_connector_module_path=job["device"]["connector"],
        ),
    )
    tell("ready")
    # shorter than a block: it wakes the threads up and leaves nothing in the store
    ask(llm, job["warm_up"], 2)
    answer = ask(llm, job["prompt"], job["max_tokens"])
    result = {
        "reused": answer.num_cached_tokens,
        "first_token_s": answer.metrics.first_token_latency,
        "output": list(answer.outputs[0].token_ids),
    }
    tell("answered", **result)
    del llm  # stops the engine's process, which writes out what it still holds
    tell("stopped", **result)


def ask(llm: Any, prompt: list[int], tokens: int) -> Any:
    """vLLM's answer of ``tokens`` tokens, each the likeliest."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
