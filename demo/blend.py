"""``make demo BLEND=1``: questions about documents that other prompts had in another order, in vLLM
with the recall model: computed whole, with prefixes alone, and with Blend.

A prompt is a haystack of eight documents, stored first; then its documents are asked about in
another order, so that no prefix of the new prompt is stored. Three engines, one after another, each
in a new process. Ends with one table, and exit code 0 only if everything was as promised.
"""

from __future__ import annotations

import json
import pathlib
import sys
from itertools import pairwise
from typing import Any

from process import DemoError, Progress, run_engine
from rerope import arguments, share
from sparse import BLOCK, LENGTH, QUALITY, questions

DOCUMENT, RATIO, TIMED = LENGTH // 8, 0.15, 2
#: None of the documents stands where it was stored, nor behind the same one.
ORDER = (5, 2, 7, 0, 3, 6, 1, 4)
#: Engines: name, and their keys beside those of the store.
ENGINES: dict[str, dict[str, Any]] = {
    "full prefill": {"enabled": False},
    "prefixes": {},
    "Blend": {"blend": {"chunk_size": DOCUMENT, "ratio": RATIO, "min_hit_blocks": 4}},
}


def main() -> int:
    """Run the demo; returns the exit code."""
    prompts, out = arguments(__doc__, "blend", prompts=12)
    asked, progress = permuted(prompts), Progress()
    documents = [question["tokens"][:LENGTH] for question in questions(prompts)[::3]]
    print(f"{len(asked)} questions about {len(ORDER)} documents of {DOCUMENT} tokens each")
    found: dict[str, dict[str, Any]] = {}
    try:
        for name, keys in ENGINES.items():
            job = {
                "model": str(QUALITY / "weights"),
                "block_size": BLOCK,
                "max_tokens": TIMED,
                "questions": asked,
                "documents": documents,
                "device": {"environment": {}},
                "store": {
                    "storage_path": str((out / f"store-{len(found)}").resolve()),
                    "admission": "always",  # this model computes faster than anything loads
                    **keys,
                },
            }
            found[name] = run_engine(name, job, out, progress, program="sparse_engine.py")
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    return shown(found, asked, out)


def shown(found: dict[str, dict[str, Any]], asked: list[dict[str, Any]], out: pathlib.Path) -> int:
    """Print the table and what was promised; returns the exit code."""
    right = {name: share([each["right"] for each in asked], x["said"]) for name, x in found.items()}
    tokens = sum(len(question["tokens"]) for question in asked)
    skipped = {name: skipped_tokens(one) / tokens for name, one in found.items()}
    same = share(found["full prefill"]["said"], found["Blend"]["said"])
    print(f"\n  {'engine':16}{'right answers':16}{'prompt tokens skipped':24}first token, median")
    for name, one in found.items():
        cells = f"{right[name]:<16.3f}{skipped[name]:<24.1%}{one['first_token_s'] * 1e3:.0f} ms"
        print(f"  {name:16}{cells}")
    result = {"right": right, "skipped": skipped, "same": same}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    checks = [
        ("prefixes alone reuse nothing of the documents", not found["prefixes"]["reused"]),
        ("Blend skips at least 80 % of the prompt tokens", skipped["Blend"] >= 0.80),
        ("its answers are those of the full prefill, at least 99 %", same >= 0.99),
    ]
    print()
    for text, kept in checks:
        print(f"  [{'ok' if kept else 'BROKEN'}] {text}")
    print(f"\n  logs and figures: {out}")
    return 0 if all(kept for _, kept in checks) else 1


def permuted(prompts: int) -> list[dict[str, Any]]:
    """The questions about haystacks whose documents stand in another order, but for those whose
    answer the end of a document cuts in two."""
    found = []
    for question in questions(prompts):
        *context, ask, key = question["tokens"]
        parts = (context[at * DOCUMENT : (at + 1) * DOCUMENT] for at in ORDER)
        moved = [token for part in parts for token in part]
        records, right = {*pairwise(moved)}, question["right"]
        if {(key, right[0]), (right[0], right[1])} <= records:
            found.append({"tokens": [*moved, ask, key], "right": right})
    return found


def skipped_tokens(one: dict[str, Any]) -> float:
    """Tokens of questions that an engine did not compute."""
    counts: dict[str, float] = one["counters"]
    reused, computed = (
        counts.get(f"ucm_blend_{name}_tokens_total", 0.0) for name in ("hit", "computed")
    )
    return reused - computed


if __name__ == "__main__":
    sys.exit(main())
