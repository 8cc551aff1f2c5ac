"""``make demo REROPE=1``: a recall model trained with 2,048 tokens, in vLLM with prompts of
4,096: by RoPE, by ReRoPE, and by ReRoPE again with the KV that the engine before it stored.

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
    asked, progress = questions(prompts, LENGTH), Progress()
    print(f"{len(asked)} questions about prompts of {LENGTH} tokens; trained with {TRAINED}")
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, by_rule in ENGINES.items():
            job = {
                "model": str(QUALITY / "weights-2048"),
                "block_size": BLOCK,
                "max_tokens": TIMED,
                "max_model_len": LENGTH + 1024,
                "hf_overrides": BY_RULE if by_rule else POSITIONS,
                "questions": asked,
                "device": {"environment": {}},
                "store": config(by_rule, out),
            }
            found[name] = run_engine(name, job, out, progress, program="sparse_engine.py")
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    right = {name: share([each["right"] for each in asked], x["said"]) for name, x in found.items()}
    print(f"\n  {'positions':14}{'right answers':16}{'time per token':17}prompt tokens loaded")
    for name, one in found.items():
        cells = f"{right[name]:<16.3f}{one['token_ms']:<6.2f} ms        {one['reused']}"
        print(f"  {name:14}{cells}")
    (out / "result.json").write_text(json.dumps({"right": right}, indent=2) + "\n")
    checks = [
        ("RoPE loses answers beyond the trained length: at most .80", right["RoPE"] <= 0.80),
        ("ReRoPE finds at least .95 of them", right["ReRoPE"] >= 0.95),
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
