"""Each store logs under its own name, so that an operator can find and filter its lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from blocks import PATIENT

from ucm.store.posix import UcmPosixStore

Open = Callable[[str, Mapping[str, Any]], UcmPosixStore]

#: No server is there.
NOWHERE = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    ("store", "keys", "name"),
    [
        ("UcmPosixStore", {}, "ucm.store.posix"),
        ("UcmPcStore", {}, "ucm.store.pc"),
        ("UcmCacheStore", {"cache_size": "1MiB"}, "ucm.store.cache"),
        ("UcmRedisStore", {"storage_backends": NOWHERE}, "ucm.store.redis"),
        (
            "UcmPipelineStore",
            {"store_pipeline": "Cache|Posix", "cache_size": "1MiB"},
            "ucm.store.pipeline",
        ),
        (
            "UcmPipelineStore",
            {"store_pipeline": "Cache|Redis", "cache_size": "1MiB", "storage_backends": NOWHERE},
            "ucm.store.pipeline",
        ),
    ],
)
def test_a_store_logs_under_its_own_name(
    store: str,
    keys: dict[str, Any],
    name: str,
    open_store: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = {} if store == "UcmCacheStore" else {"storage_backends": str(tmp_path / "root")}
    sizes = {
        "tensor_size": 4096,
        "shard_size": 4096,
        "block_size": 4096,
        "staging_capacity": "1MiB",
    }
    with caplog.at_level(logging.INFO, "ucm"):
        open_store(
            store, {**sizes, "identity": "tests", "deadlines": PATIENT, **place, **keys}
        ).close()
    lines = [record for record in caplog.records if record.name.startswith("ucm.store.")]
    assert lines
    assert {record.name for record in lines} == {name}
