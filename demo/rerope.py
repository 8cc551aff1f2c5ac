"""``make demo REROPE=1``: a recall model trained with 2,048 tokens, in vLLM with prompts of
4,096 and of 2,048: by RoPE, by ReRoPE, and by ReRoPE again with the KV that the engine before it
stored.

Each question is a haystack of 64 records and the beginning of a query of two hops; both answers
must be found anywhere in it. Three engines, one after another, each in a new process. Ends with one
table, and exit code 0 only if everything was as promised.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
from typing import Any

from process import DemoError, Progress, run_engine
from sparse import BLOCK, QUALITY, questions

LENGTH, TRAINED, WINDOW, TIMED = 4096, 2048, 1024, 24
POSITIONS = {"max_position_embeddings": 2 * LENGTH}
BY_RULE = POSITIONS | {"architectures": ["UcmReRopeQwen2ForCausalLM"]}
#: Engines: name, ReRoPE or not.
ENGINES = {"RoPE": False, "ReRoPE": True, "ReRoPE again": True}


def main() -> int:
    """Run the demo; returns the exit code."""
    prompts, out = arguments(__doc__, "rerope", prompts=8)
    lengths, progress = (LENGTH, TRAINED), Progress()
    asked = {length: questions(prompts, length) for length in lengths}
    every = [question for each in asked.values() for question in each]
    print(f"{len(every)} questions about prompts of {LENGTH} tokens, and of {TRAINED} as trained")
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, by_rule in ENGINES.items():
            job = {
                "model": str(QUALITY / "weights-2048"),
                "block_size": BLOCK,
                "max_tokens": TIMED,
                "max_model_len": LENGTH + 1024,
                "hf_overrides": BY_RULE if by_rule else POSITIONS,
                "questions": every,
                "device": {"environment": {}},
                "store": config(by_rule, out),
            }
            found[name] = run_engine(name, job, out, progress, program="sparse_engine.py")
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    right = {name: shares(asked, one["said"]) for name, one in found.items()}
    heads = "".join(f"{f'right at {length}':16}" for length in lengths)
    print(f"\n  {'positions':14}{heads}{'time per token':17}prompt tokens loaded")
    for name, one in found.items():
        cells = "".join(f"{right[name][length]:<16.3f}" for length in lengths)
        print(f"  {name:14}{cells}{one['token_ms']:<6.2f} ms        {one['reused']}")
    (out / "result.json").write_text(json.dumps({"right": right}, indent=2) + "\n")
    beyond = {name: of_length[LENGTH] for name, of_length in right.items()}
    checks = [
        ("RoPE loses answers beyond the trained length: at most .80", beyond["RoPE"] <= 0.80),
        ("ReRoPE finds at least .95 of them", beyond["ReRoPE"] >= 0.95),
        ("it loses none within that length", right["ReRoPE"][TRAINED] == 1.0),
        ("the KV of RoPE was not loaded by ReRoPE", not found["ReRoPE"]["reused"]),
        (
            "stored KV was loaded by the next engine, with the same answers",
            bool(found["ReRoPE again"]["reused"])
            and found["ReRoPE again"]["said"] == found["ReRoPE"]["said"],
        ),
    ]
    print()
    for text, kept in checks:
        print(f"  [{'ok' if kept else 'BROKEN'}] {text}")
    print(f"\n  logs and figures: {out}")
    return 0 if all(kept for _, kept in checks) else 1


def arguments(text: str, name: str, prompts: int) -> tuple[int, pathlib.Path]:
    """The number of haystacks, by default ``prompts``, and an empty directory of this name."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("demo-out"), help="where files go"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=prompts,
        help="haystacks, of each of which three questions are asked",
    )
    given = parser.parse_args()
    out: pathlib.Path = given.out / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return given.prompts, out


def config(by_rule: bool, out: pathlib.Path) -> dict[str, Any]:
    """The keys of the store and of the rule for an engine."""
    store: dict[str, Any] = {
        "storage_backend": "posix",
        "storage_path": str((out / "store").resolve()),
        "admission": "always",  # this model computes faster than anything loads
    }
    return store | ({"rerope": {"window": WINDOW, "training_length": TRAINED}} if by_rule else {})


def shares(asked: dict[int, list[dict[str, Any]]], said: list[list[int]]) -> dict[int, float]:
    """Share of right answers to the questions of each length, answered one after the other."""
    found, first = dict[int, float](), 0
    for length, each in asked.items():
        found[length] = share([one["right"] for one in each], said[first : first + len(each)])
        first += len(each)
    return found


def share(right: list[list[int]], said: list[list[int]]) -> float:
    """Share of right answers, first and second ones."""
    pairs = [
        a == b
        for one, other in zip(right, said, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
