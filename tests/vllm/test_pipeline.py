"""Memory above a directory, chosen in the connector's configuration, does what the directory alone does."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import STORED
from checks import assert_reused, assert_same
from harness import EngineHost, wait_until
from lives import Disk, new_disk
from specs import EngineSpec, StoreSpec

ASKED = ("short", "middle", "shared_a")


def spec(model: Path, runner: str, disk: Disk) -> EngineSpec:
    """An engine whose store is a pipeline; its metrics tell what each tier did."""
    store = StoreSpec(disk.root, "UcmPipelineStore", options={"store_pipeline": "Cache|Posix", "cache_size": "64MiB"})
    return EngineSpec(model, runner, store, label=f"pipeline-{runner}")


@pytest.mark.skipif("os.environ.get('UCM_TEST_STORE', 'posix') != 'posix'", reason="a pipeline is of our own stores")
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
    host.stop()
    stored = disk.files()
    assert stored, "what is in memory is on the disk too"
    engine = host.get(spec(model, runner, disk))
    for name in ASKED:
        answer = engine.generate(STORED[name].ask())[0]
        assert_same(answer, computed[name])
        assert_reused(answer, STORED[name])
    assert disk.files() == stored

    def promoted() -> bool:
        # Tiers are told of about once a second, with a step: a prompt of one block makes some.
        engine.ask([5, 6, 7], 2)
        return engine.metrics().get("ucm_tier_promoted_blocks_total", 0) > 0

    wait_until(promoted, "what came from the directory was kept in memory, and said so")
    host.stop()
