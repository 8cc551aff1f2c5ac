"""Questions about documents in another order, as retrieval brings them: ``python
benches/python/blend.py [--turns 7]``.

A prompt has ten documents of 400 tokens and a question. All documents were stored with an earlier
prompt; the prompts of each turn have them in another order. Three engines answer, one after the
other: one without a cache, one with prefixes alone, one with Blend (15 % of the chunks' tokens are
computed again). The model is a Llama of 113 million random parameters in bfloat16: times and counts
mean something, its answers do not. Prints the medians, and the share of prompt tokens that each
engine did not compute; ``--json`` writes every time, ``--svg`` a plot of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from variants import BLOCK, transfer  # isort: split

from harness import Engine
from specs import Ask, EngineSpec

from ucm.bench.plot import svg

DOCUMENTS, LENGTH, QUESTION, VOCABULARY = 10, 400, 32, 16_384
#: What ends a document.
END = [5, 6]
ENGINES: dict[str, dict[str, Any] | None] = {
    "no cache": None,
    "prefixes": {},
    "Blend": {"blend": {"ratio": 0.15, "separators": [END]}},
}


def write(directory: Path) -> int:
    """Write the model; returns its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def tokens_of(seed: int, length: int) -> list[int]:
    """Of a text."""
    return random.Random(seed).choices(range(10, VOCABULARY), k=length)


def asked(turn: int, again: int = 0) -> list[int]:
    """The prompt of a turn: the documents in the order of this turn, and a question."""
    order = list(range(DOCUMENTS))
    if turn:
        random.Random(turn).shuffle(order)
    documents = [[*tokens_of(1000 * again + at, LENGTH - len(END)), *END] for at in order]
    return [token for part in documents for token in part] + tokens_of(-1 - turn, QUESTION)


def spec_of(name: str, keys: dict[str, Any] | None, model: Path, root: Path) -> EngineSpec:
    """An engine with room for two prompts."""
    length = DOCUMENTS * LENGTH + QUESTION
    blocks = 2 * (length // BLOCK + 2)
    found = None if keys is None else transfer("segment", root)
    if found is not None and keys:
        found["kv_connector_extra_config"] |= keys
    return EngineSpec(
        model,
        blocks=blocks,
        budget=length + BLOCK,
        transfer=found,
        args={"max_model_len": length + BLOCK, "dtype": "bfloat16", "max_num_seqs": 256},
        env={"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        label=name,
    )


def main() -> None:
    """Measure, and print a table."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--turns", type=int, default=7)
    words.add_argument("--json", type=Path)
    words.add_argument("--svg", type=Path)
    given = words.parse_args()
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    skipped: dict[str, list[float]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory(prefix="blend-") as folder:
        work = Path(folder)
        print(f"{write(work / 'model') / 1e6:.0f} million parameters", flush=True)
        for at, (name, keys) in enumerate(ENGINES.items()):
            (root := work / f"store-{at}").mkdir()
            with Engine(spec_of(name, keys, work / "model", root), work / f"{at}.log") as engine:
                prepare(engine)
                for turn in range(1, given.turns + 1):
                    engine.reset()
                    before = computed(engine)
                    answer = engine.generate(Ask(asked(turn), 1))[0]
                    anew = computed(engine) - before
                    times[name].append(answer.first or 0.0)
                    skipped[name].append((answer.cached - anew) / len(asked(turn)))
                    print(f"{name}: {times[name][-1]:.3f} s", flush=True)
                    engine.wait_idle()
    print(f"\n| {len(asked(1))} tokens | first token, median | of prefixes | tokens skipped |")
    print("|---|---|---|---|")
    for name in ENGINES:
        pairs = zip(times["prefixes"], times[name], strict=True)
        ratio = statistics.median(prefixes / own for prefixes, own in pairs)
        row = f"{statistics.median(times[name]):.2f} s | {ratio:.2f} x"
        print(f"| {name} | {row} | {statistics.median(skipped[name]):.1%} |")
    if given.svg:
        title = f"A question about {DOCUMENTS} documents, {len(asked(1))} tokens"
        given.svg.write_text(svg(title, {"first token": times}))
    if given.json:
        given.json.write_text(json.dumps({"seconds": times, "skipped": skipped}, indent=1) + "\n")


def prepare(engine: Engine) -> None:
    """Store the documents, and others: each is loaded once, so that speeds are known."""
    for other in (1, 2, 0):
        for prompt in (asked(0, other), [*asked(0, other)[:-QUESTION], 7]):
            engine.ask(prompt, 1)
            engine.wait_idle()
            engine.reset()


def computed(engine: Engine) -> float:
    """Tokens of chunks that were computed again, and those between chunks."""
    found = engine.metrics()
    names = (f"ucm_blend_{name}_tokens_total" for name in ("computed", "missed"))
    return sum(found.get(name, 0.0) for name in names)


if __name__ == "__main__":
    main()
