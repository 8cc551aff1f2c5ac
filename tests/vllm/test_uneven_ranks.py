"""Pipeline ranks with different numbers of layers: their blocks differ in size, and a hit needs
both.

Three layers on two ranks, the first or the second of which has two. The second model runner, since
the first one of vLLM's build for CPUs has no pipelines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import STORED
from checks import assert_reused, assert_same
from harness import EngineHost
from lives import LAYERS, new_disk, over_device
from specs import ON_GPU, ROOM, EngineSpec, StoreSpec

pytestmark = [
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="a GPU for each rank"),
    pytest.mark.skipif(
        "os.environ.get('UCM_TEST_STORE', 'posix') != 'posix'",
        reason="sizes are those of our records",
    ),
]


@pytest.mark.shows("Llama, Qwen", "PP 2")
@pytest.mark.parametrize("partition", ["2,1", pytest.param("1,2", marks=pytest.mark.long)])
def test_blocks_of_ranks_with_different_layers_are_hit(
    work: Path, host: EngineHost, model: Path, partition: str
) -> None:
    pytest.importorskip("ucm._core", reason="the core is not compiled here")
    assert sum(map(int, partition.split(","))) == LAYERS
    disk = new_disk(work, f"uneven-{partition}")
    store = StoreSpec(
        disk.root, "UcmPosixStore", options={"layout": "file", **ROOM, **over_device()}
    )
    spec = EngineSpec(
        model,
        "v2",
        store,
        args={"pipeline_parallel_size": 2},
        env={"VLLM_PP_LAYER_PARTITION": partition, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        label=f"uneven-{partition}",
    )
    engine = host.get(spec)
    case = STORED["middle"]
    computed = engine.generate(case.ask())[0]
    assert computed.cached == 0
    engine.wait_idle()
    stored = disk.files()
    assert len(stored) == 2 * case.full_blocks
    assert len({path.stat().st_size for path in stored}) == 2, "the ranks' blocks differ in size"
    engine.reset()
    answer = engine.generate(case.ask())[0]
    assert_same(answer, computed)
    assert_reused(answer, case)
    engine.wait_idle()
    assert disk.files() == stored, "nothing was stored again"
