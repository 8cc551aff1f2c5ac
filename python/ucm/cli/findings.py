"""The findings of ``ucm doctor``, and its texts: the table of symptoms and the checklist of a
production engine, which name commands, metrics and keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]

#: Seconds that a file system or a server has to answer.
ANSWER_S = 10.0


@dataclass(frozen=True)
class Finding:
    """One result of a check. ``error``: the cache will not work; ``warning``: it works, and worse
    than it could, or only in part; ``note``: a fact; ``ok``: a check that passed."""

    level: Level
    text: str
    remedy: str = ""
    area: str = ""


ok, note = partial(Finding, "ok"), partial(Finding, "note")
warning, error = partial(Finding, "warning"), partial(Finding, "error")


def of_area(area: str, findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one area."""
    return [replace(finding, area=area) for finding in findings]


def exit_status(findings: Iterable[Finding]) -> int:
    """2 with an error, 1 with a warning, else 0."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if "warning" in levels else 0


def in_time(what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check that may hang on a file system or a server; an error if it does not
    end in time. Its thread is then left behind."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(check())
        except Exception as failure:
            found.append(error(f"{what}: {failure}"))

    thread = threading.Thread(target=run, name="ucm-doctor", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not thread.is_alive():
        return found
    text = f"{what} does not answer within {ANSWER_S:.0f} seconds"
    return [*found, error(text, "check its server and the network to it")]


#: The table of the seeds, and questions of users: symptom, likely cause, where it is seen, remedy.
SYMPTOMS: tuple[tuple[str, str, str, str], ...] = (
    (
        "TTFT is high",
        "loads take longer than computing, or the store is new and empty",
        "ucm_load_seconds, ucm_load_bytes_per_second, ucm_prefill_tokens_per_second",
        "a faster store, or Cache above it (Cache|Posix); `ucm plan` names the slowest that pays",
    ),
    (
        "few or no hits",
        "another build of vLLM, weights, dtype, parallelism, block size or salt; evicted blocks",
        "missed blocks by reason; `ucm inspect ROOT`",
        "`ucm doctor --config F -- MODEL ...` names what differs; a larger storage_capacity",
    ),
    (
        "out of memory",
        "buffers and vLLM's KV are larger than the machine or container",
        "`ucm doctor`: limits",
        "a smaller cache_size or --gpu-memory-utilization, or sparse attention (docs/sparse.md)",
    ),
    (
        "the store is the bottleneck",
        "the medium is slower than the engine writes",
        "ucm_tier_written_bytes_total, ucm_unpublished_blocks_total; `ucm doctor`: store",
        "several tiers (Cache|Posix), several directories (storage_backends), or dump: prompt",
    ),
    (
        "a version does not fit",
        "vLLM is older than those that ucm serves, or torch is another than vLLM requires",
        "`ucm doctor`: software",
        "update vLLM; install the torch that it requires",
    ),
    (
        "nothing is stored",
        "no room, no permission, a store that failed, or the mode is read-only",
        "ucm_tier_writable, ucm_tier_refused_blocks_total, ucm_tier_healthy; `ucm mode`",
        "`ucm gc ROOT`, a larger storage_capacity, `ucm mode [--root ROOT] read-write`",
    ),
    (
        "answers are doubted",
        "any cache is a suspect",
        "`ucm verify ROOT`, docs/trust.md",
        "`ucm mode off` computes everything without a restart; compare the answers",
    ),
)
#: The seeds' checklist: what doctor checked, by area, and what only a run can show.
_CHECKED = (
    ("device", "processors and accelerators"),
    ("software", "versions of vLLM, torch and ucm"),
    ("configuration", "configuration, log and metrics"),
    ("store", "every place of blocks"),
    ("limits", "memory and limits of the process"),
)
_TO_RUN = (
    ("40 GB or more of device memory; its driver fits torch's CUDA", "nvidia-smi"),
    ("1 TB or more of NVMe disk; a fast network between hosts", "`ucm plan MODEL ...`"),
    ("the newest version of ucm", "CHANGELOG.md, `ucm --version`"),
    ("a prompt is loaded after a restart", "send a long prompt, restart, send it again"),
    ("a baseline of the performance", "`ucm bench vllm --url U --scenario prefix_sharing`"),
    ("full load", "`ucm bench vllm --url U --scenario short_high_concurrency`"),
)


def checklist(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The seeds' checklist before production."""
    found = {(finding.area, finding.level in ("warning", "error")) for finding in findings}
    for area, text in _CHECKED:
        if (area, True) in found:
            yield note(f"{text}: see {area} above")
        else:
            yield ok(f"{text}: good") if (area, False) in found else note(f"{text}: not checked")
    for text, command in _TO_RUN:
        yield note(f"not checked here: {text}", command)
