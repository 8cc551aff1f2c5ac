"""Memory above a directory, configured in the connector, has the results of the directory alone.

With the first model runner that is a directory of compressed segments, with the second one of block
files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import STORED
from checks import assert_reused, assert_same
from harness import Engine, EngineHost, wait_until
from lives import Disk, new_disk
from plain_record import parse_header
from plain_segment import parse_footer
from specs import ROOM, EngineSpec, StoreSpec

pytestmark = pytest.mark.one_runner

ASKED = ("short", "middle", "shared_a")


def spec(model: Path, runner: str, disk: Disk) -> EngineSpec:
    """An engine over a pipeline; its metrics have the counts of each tier."""
    options = {"store_pipeline": "Cache|Posix", "cache_size": "64MiB", "layout": "file", **ROOM}
    if runner == "v1":
        options = {"store_pipeline": "Cache|Compress|Pc", "cache_size": "64MiB", **ROOM}
    store = StoreSpec(disk.root, "UcmPipelineStore", options=options)
    return EngineSpec(model, runner, store, label=f"pipeline-{runner}")


def stored_in(disk: Disk, runner: str) -> list[str]:
    """The blocks in the directory; those in segments are compressed."""
    if runner == "v2":
        return [path.name for path in disk.files()]
    blocks = []
    for path in disk.root.glob("*/segments/*.seg"):
        data = path.read_bytes()
        for entry in parse_footer(data, len(data)).entries:
            assert parse_header(data[entry.offset : entry.offset + entry.length]).compressed
            blocks.append(entry.record_id.hex())
    return sorted(blocks)


def moved(engine: Engine, tier: int) -> int:
    """Bytes of KV loaded from a tier, as reported by the ranks to the scheduler side."""
    return int(engine.scheduler_eval(f"connector._scheduler.admission._tier({tier}).moved"))


@pytest.mark.skipif(
    "os.environ.get('UCM_TEST_STORE', 'posix') != 'posix'", reason="a pipeline is of our own stores"
)
def test_hits_from_memory_and_after_a_restart_from_the_directory(
    runner: str, work: Path, host: EngineHost, model: Path
) -> None:
    pytest.importorskip("ucm._core", reason="the core is not compiled here")
    disk = new_disk(work, f"pipeline-{runner}")
    host.stop()
    engine = host.get(spec(model, runner, disk))
    computed = {name: engine.generate(STORED[name].ask())[0] for name in ASKED}
    assert all(answer.cached == 0 for answer in computed.values())
    engine.wait_idle()
    engine.reset()
    for name in ASKED:
        answer = engine.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        assert_reused(answer, STORED[name])
    engine.wait_idle()
    assert moved(engine, 0) > 0, "loads from memory are counted as such"
    assert moved(engine, 1) == 0
    assert (
        int(
            engine.scheduler_eval(
                "min(connector._scheduler._rank_hints.prefetches._rooms.values())"
            )
        )
        > 0
    )
    host.stop()
    stored = stored_in(disk, runner)
    assert stored, "blocks in memory are also on the disk"
    engine = host.get(spec(model, runner, disk))
    for name in ASKED:
        answer = engine.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        assert_reused(answer, STORED[name])
    engine.wait_idle()
    assert moved(engine, 1) > 0, "and those from the directory"
    assert stored_in(disk, runner) == stored

    def promoted() -> bool:
        # Tiers are reported about once a second, with a step: a prompt of one block makes some.
        engine.ask([5, 6, 7], 2)
        return engine.metrics().get("ucm_tier_promoted_blocks_total", 0) > 0

    wait_until(promoted, "blocks from the directory were kept in memory, and counted")
    host.stop()
