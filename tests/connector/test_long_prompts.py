"""Prompts whose one step computes more blocks than staging holds, as on a fast device.

Both sides of the connector over a real store on the software driver (``tests/softcuda``), without
an engine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from blocks import PATIENT  # noqa: E402
from parts import BLOCK, Rig, eventually  # noqa: E402
from software_driver import driver, ok, use_device  # noqa: E402

from ucm.integration.vllm.connector.identity.weights import WeightsReport  # noqa: E402
from ucm.integration.vllm.connector.metadata import UCMConnectorMetadata  # noqa: E402
from ucm.integration.vllm.connector.platforms import Platform  # noqa: E402
from ucm.integration.vllm.connector.stores import ConfiguredStore  # noqa: E402
from ucm.integration.vllm.connector.worker.worker import Rank, UCMConnectorWorker  # noqa: E402
from ucm.store.factory_v1 import UcmConnectorFactoryV1  # noqa: E402
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1  # noqa: E402

pytestmark = pytest.mark.skipif(
    not os.path.exists(os.environ.get("UCM_TEST_DRIVER", "")),
    reason="UCM_TEST_DRIVER names no software driver; make test-py builds one",
)

#: Tokens that a step computes at most, and the blocks of such a step.
STEP_TOKENS = 8192
STEP_BLOCKS = STEP_TOKENS // BLOCK
LAYERS, SIZE = 2, 8
#: The device's blocks: some more than a prompt has.
DEVICE_BLOCKS = STEP_BLOCKS + 256


class Device:
    """KV in memory that the driver takes for its own, and the model's stream."""

    def __init__(self) -> None:
        shape = (DEVICE_BLOCKS + 1, 1, BLOCK, SIZE)
        self.caches = {f"layers.{layer}": torch.zeros(shape) for layer in range(LAYERS)}
        use_device()
        for tensor in self.caches.values():
            memory = tensor.untyped_storage()
            start, size = ctypes.c_size_t(memory.data_ptr()), ctypes.c_size_t(memory.nbytes())
            ok(driver().softcuda_accept(start, size))
        self.stream = ctypes.c_void_p()
        ok(driver().cuStreamCreateWithPriority(ctypes.byref(self.stream), 1, 0))

    def close(self) -> None:
        """The memory is the host's again."""
        for tensor in self.caches.values():
            ok(driver().softcuda_forget(ctypes.c_size_t(tensor.untyped_storage().data_ptr())))

    def mark(self, _device: Any) -> tuple[int, Any]:
        """An event on the model's stream. It is there for as long as the process."""
        event = ctypes.c_void_p()
        use_device()
        ok(driver().cuEventCreate(ctypes.byref(event), 2))
        ok(driver().cuEventRecord(event, self.stream))
        return event.value or 0, event


class Weights:
    """Those in memory, which stay as they were."""

    def remember(self) -> None:
        """Nothing to do."""

    def compare(self, generation: int) -> WeightsReport:
        """They are the same."""
        return WeightsReport(generation, True, None, 0)


class Engine:
    """A scheduler side and a worker side, driven as vLLM drives them."""

    def __init__(self, device: Device, root: Path, store: dict[str, Any]) -> None:
        def make(config: dict[str, Any]) -> UcmKVStoreBaseV1:
            return UcmConnectorFactoryV1.create_connector(store["name"], config)

        keys = {
            "storage_backends": str(root),
            "storage_capacity": "1GiB",
            "free_space_floor": 0,
            "staging_capacity": "1MiB",
            "platform": "cuda",
            "processes": 1,
            "scheduler_elsewhere": False,
            "step_tokens": STEP_TOKENS,
            "deadlines": PATIENT,
            **store["keys"],
        }
        stores = [ConfiguredStore("Store", f"Store on {root}", keys, make)]
        self.device = device
        self.rig = Rig(
            opened=False,
            stores=stores,
            blocks=DEVICE_BLOCKS,
            admission="always",
            unknown_load_s=PATIENT["load_unknown_s"],
        )
        rank = Rank(
            number=0,
            part=(0, 0, 0),
            writer=True,
            layers=list(device.caches),
            block_tokens=BLOCK,
            identity=lambda: {"dtype": "float32"},
        )
        self.worker = UCMConnectorWorker(
            rank,
            Platform("cuda", ("cpu",), "cpu", device.mark),
            stores,
            memory=Weights(),  # type: ignore[arg-type]
        )
        self.worker.register_kv_caches(device.caches)
        self.steps = 0
        eventually("both sides opened their stores", self._is_open)

    def _is_open(self) -> bool:
        self.rig.later.run()
        self.rig.readiness.request_weights_check()
        self.step()
        return self.rig.readiness.phase == "open" and self.rig.readiness.weights_confirmed

    def step(self, *requests: Any) -> UCMConnectorMetadata:
        """One step of the scheduler, the worker and the scheduler again."""
        self.steps += 1
        plan = self.rig.step(*requests)
        self.worker.bind_connector_metadata(plan)
        self.worker.start_load_kv()
        self.worker.start_dumps()
        ended = self.worker.take_ended_loads()
        self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        if report is not None or ended:
            self.rig.report(*([] if report is None else report.ranks), recved=ended or None)
        self.rig.clock.now += 0.001
        return plan

    def close(self) -> None:
        """End both sides."""
        self.rig.later.run()
        self.worker.shutdown()
        self.rig.scheduler.shutdown()


STORES: dict[str, dict[str, Any]] = {
    "posix": {"name": "UcmPosixStore", "keys": {}},
    "Cache|Pc": {
        "name": "UcmPipelineStore",
        "keys": {"store_pipeline": "Cache|Pc", "cache_size": "64MiB"},
    },
}


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


@pytest.fixture(params=STORES)
def engine(request: Any, device: Device, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(device, tmp_path / "root", STORES[request.param])
    yield engine
    engine.close()


def content(seed: int, layer: int) -> Any:
    """What a prompt's blocks hold in a layer."""
    numbers = torch.arange(STEP_BLOCKS, dtype=torch.float32)
    return numbers.reshape(-1, 1, 1, 1) + seed + layer / 2


def look_up(engine: Engine, name: str, seed: int) -> tuple[Any, int]:
    """A prompt of a whole step, and how many of its tokens the store has."""
    rig = engine.rig
    request = rig.request(name, STEP_TOKENS, seed)
    answers: list[int | None] = []

    def is_answered() -> bool:
        rig.later.run()
        answers.append(rig.scheduler.get_num_new_matched_tokens(request, 0)[0])
        return answers[-1] is not None

    eventually("the lookup is answered", is_answered)
    return request, answers[-1] or 0


def compute(engine: Engine, name: str, seed: int) -> None:
    """A prompt of which nothing is stored: one step, with one token of answer."""
    rig = engine.rig
    request, hit = look_up(engine, name, seed)
    assert hit == 0
    blocks = rig.tables.allocate(request, STEP_BLOCKS)
    rig.scheduler.update_state_after_alloc(request, blocks, 0)
    table = torch.tensor([block.block_id for block in blocks.blocks[0]])
    for layer, tensor in enumerate(engine.device.caches.values()):
        tensor[table] = content(seed, layer)
    engine.step(request)
    request.append_output_token_ids([1])
    rig.scheduler.request_finished(request)
    rig.tables.free(request)


def idle(engine: Engine) -> None:
    """The engine has no request: it steps as long as there is something to do, and dumps end."""

    def is_idle() -> bool:
        scheduler = engine.rig.scheduler
        if scheduler.has_pending_push_work or scheduler.dumps.under_way:
            engine.step()
            return False
        return True

    eventually("all dumps have ended", is_idle)


def test_a_prompt_of_more_blocks_than_staging_holds_is_stored_whole(engine: Engine) -> None:
    slots = engine.worker.stats()["slots"]
    assert slots < STEP_BLOCKS / 10, "staging is smaller than a step"
    compute(engine, "cold", seed=1)
    idle(engine)
    assert engine.rig.scheduler.stats()["published_blocks"] == STEP_BLOCKS

    request, hit = look_up(engine, "warm", seed=1)
    assert hit == STEP_TOKENS - BLOCK, "all that vLLM lets a request reuse"
    rig = engine.rig
    blocks = rig.tables.allocate(request, STEP_BLOCKS)
    rig.scheduler.update_state_after_alloc(request, blocks, hit)
    for tensor in engine.device.caches.values():
        tensor.zero_()
    engine.step()

    def is_loaded() -> bool:
        engine.step()
        loaded: int = rig.scheduler.stats()["loaded_blocks"]
        return loaded == STEP_BLOCKS - 1

    eventually("the hit is loaded", is_loaded)
    table = torch.tensor([block.block_id for block in blocks.blocks[0]])[:-1]
    for layer, tensor in enumerate(engine.device.caches.values()):
        assert torch.equal(tensor[table], content(1, layer)[:-1].expand(tensor[table].shape))
    rig.tables.free(request)
