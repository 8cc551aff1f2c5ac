"""Blocks promoted from a server into the stages above it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blocks import PATIENT, Memory, ids
from remote_columns import REDIS, started
from test_matrix import opened, soon

COUNT = 4
SIDES = {"mean-k": 96, "codes": 6000}


@pytest.mark.parametrize("above", ["Cache", "Posix"])
def test_blocks_of_one_that_keeps_side_shards_come_up_for_one_that_keeps_none(
    tmp_path: Path, above: str
) -> None:
    """A value is longer than a record of the reader, which reads the known part of the reply."""
    top = {
        "Cache": {"type": "Cache", "cache_size": "4MiB"},
        "Posix": {
            "type": "Posix",
            "storage_backends": str(tmp_path / "root"),
            "storage_capacity": "1GiB",
            "free_space_floor": 0,
        },
    }[above]
    staged = replace(
        REDIS,
        store="UcmPipelineStore",
        keys=lambda at: {"store_pipeline": [top, {"type": "Redis", **REDIS.keys(at)}]},
    )
    random, source = np.random.default_rng(7), Memory(COUNT)
    beside = {
        name: random.integers(0, 256, (COUNT, size), dtype=np.uint8) for name, size in SIDES.items()
    }
    with started(REDIS, tmp_path / "server") as server:
        with opened(REDIS, server.at, sides=SIDES, deadlines=PATIENT) as writer:
            writer.wait(
                writer.dump_data(ids(COUNT), [0] * COUNT, source.rows(*range(COUNT)), sides=beside)
            )
        with opened(staged, server.at, deadlines=PATIENT) as reader:

            def all_come_up() -> bool:
                """Loads them; a copy without space is dropped, and made at the next load."""
                target = Memory(COUNT, fill=0)
                reader.wait(reader.load_data(ids(COUNT), [0] * COUNT, target.rows(*range(COUNT))))
                assert all(source.equals(target, block) for block in range(COUNT))
                return bool(reader.stats()["tiers"][0]["promotions"] >= COUNT)

            soon("they come up", all_come_up)
            assert all_come_up(), "from above now"
