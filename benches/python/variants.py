"""The stores under an engine in ``ttft.py`` and ``chat.py``: one line for each variant, including
none.

Both run the deep, tiny model of the demo in engines of ``tests/vllm/harness.py``, one at a time on
a machine. A variant that this version does not have is reported with the engine's error. Other
projects' connectors, with their servers, are in ``peer_connectors.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer_connectors import PEERS, WHOLE_PROMPTS, Given

if TYPE_CHECKING:
    from specs import EngineSpec

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests/vllm", "demo"):
    sys.path.insert(0, str(ROOT / folder))

#: Name -> the entry of ``ucm_connectors`` without the directory; None is an engine without ucm.
OURS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "file": {"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": {"layout": "file"}},
    "segment": {
        "ucm_connector_name": "UcmPosixStore",
        "ucm_connector_config": {"layout": "segment"},
    },
    "cache-pc": {
        "ucm_connector_name": "UcmPipelineStore",
        "ucm_connector_config": {"store_pipeline": "Cache|Pc"},
    },
}

VARIANTS = (*OURS, *PEERS)
#: The default variants: the others need packages that are not installed with vLLM.
USUAL = tuple(OURS)

#: Tokens of the engines' blocks.
BLOCK = 32


def transfer(variant: str, root: Path) -> dict[str, Any] | None:
    """Arguments of vLLM's KVTransferConfig for one of ours, with blocks below ``root``."""
    entry = OURS[variant]
    if entry is None:
        return None
    options = {"storage_backends": str(root), **entry.get("ucm_connector_config", {})}
    return {
        "kv_connector": "UCMConnector",
        "kv_connector_module_path": "ucm.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "ucm_connectors": [{**entry, "ucm_connector_config": options}]
        },
    }


@contextlib.contextmanager
def engine(variant: str, model: Path, root: Path, blocks: int, length: int) -> Iterator[EngineSpec]:
    """An engine over the demo's model with room for ``blocks`` blocks and prompts of ``length``
    tokens.

    Runs the servers that a peer needs; raises UnavailableError if they are not installed.
    """
    from specs import EngineSpec

    with contextlib.ExitStack() as stack:
        given: Given | None = None
        if variant in PEERS:
            given = stack.enter_context(PEERS[variant](root))
        yield EngineSpec(
            model,
            blocks=blocks,
            budget=max(2048, length) if variant in WHOLE_PROMPTS else 2048,
            transfer=given.transfer if given else transfer(variant, root),
            args={"max_model_len": length, "kv_cache_memory_bytes": (blocks + 2) << 20},
            env={
                "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
                **(given.env if given else {}),
            },
            label=variant,
            fork=False,
        )


def why(log: str) -> str:
    """Why an engine did not start: the most informative line of its log."""
    said: list[str] = re.findall(r"(?:ucm\.errors\.)?\w*Error: .*", log)
    ours = [line for line in said if "ConfigError" in line or "not built" in line]
    return (ours or said or ["it says nothing"])[-1].strip()[:300]
