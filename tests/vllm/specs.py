"""Descriptions of engines, requests and results for the tests.

:class:`EngineSpec` and :class:`StoreSpec` become the arguments and the environment of one engine;
:class:`Ask` is one request and :class:`Result` its result. ``harness.py`` runs engines.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models import MAX_LEN, VOCAB
from software_driver import IN_USE

HERE = Path(__file__).resolve().parent
BLOCK = 32
#: True if vLLM compiles the models of all engines, as for its users, which takes half a minute more
#: for each. Not with the second runner, whose Triton kernels are interpreted here.
COMPILED = os.environ.get("UCM_TEST_COMPILED") == "1"
#: Whether engines run on a GPU (docs/devices.md), with the attention of vLLM that computes in
#: float32 there, and not on the CPU.
ON_GPU = os.environ.get("UCM_TEST_GPU") == "1"
#: The variables of this run. Tests add others, for their engines and not for the import of vLLM.
VARIABLES = frozenset(os.environ)
#: Long enough for a busy machine, because a late lookup is a miss.
PATIENT = {
    "lookup_ms": 5000,
    "load_min_ms": 60_000,
    "load_max_s": 60.0,
    "load_unknown_s": 60.0,
    "dump_s": 120.0,
    "probe_s": 60.0,
    "shutdown_s": 15.0,
}


#: Limit of a store in directories, independent of the disk of the tests.
ROOM: Mapping[str, Any] = {"storage_capacity": "4GiB", "free_space_floor": 0}


@dataclass(frozen=True)
class StoreSpec:
    """One entry of ``ucm_connectors``: the store, its location and its keys."""

    root: Path
    name: str
    module_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """The entry as a user writes it."""
        entry: dict[str, Any] = {
            "ucm_connector_name": self.name,
            "ucm_connector_config": {"storage_backends": str(self.root), **self.options},
        }
        if self.module_path is not None:
            entry["ucm_connector_module_path"] = self.module_path
        return entry


@dataclass(frozen=True)
class EngineSpec:
    """The settings of an engine. ``store`` None is an engine without any connector."""

    model: Path
    runner: str = "v1"
    store: StoreSpec | None = None
    blocks: int = 160
    prefix_caching: bool = True
    budget: int = 256
    tensor_parallel: int = 1
    lora: bool = False
    #: None: the connector's name alone, as its entry point registers it.
    connector_module: str | None = "ucm.integration.vllm.connector"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pythonpath: tuple[str, ...] = ()
    #: Arguments of vLLM's KVTransferConfig for another connector, in place of ours.
    transfer: Mapping[str, Any] | None = None
    label: str = ""
    #: Its processes are forked, like vLLM's with a GPU; on the CPU vLLM spawns them, and each
    #: imports everything again, which doubles the time of a start.
    fork: bool = True
    #: Scheduler and worker are in the process of their user, which calls every step.
    in_process: bool = False
    #: Its KV counts as the memory of an accelerator (see ``accelerated.py``).
    accelerated: bool = IN_USE

    def but(self, **changes: Any) -> EngineSpec:
        """The same with some fields changed."""
        return replace(self, **changes)

    def first_message(self) -> dict[str, Any]:
        """The first message to ``engine_child.py``."""
        return {
            "args": self.engine_args(),
            "kv_transfer": self.kv_transfer(),
            "environment": self.environment(),
            "fork": self.fork,
            "in_process": self.in_process,
        }

    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's AsyncEngineArgs."""
        args: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": MAX_LEN,
            "kv_cache_memory_bytes": 160 << 20,
            "num_gpu_blocks_override": self.blocks + 1,  # vLLM keeps one null block to itself
            "max_num_batched_tokens": self.budget,
            "max_num_seqs": 16,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": self.prefix_caching,
            "enforce_eager": not COMPILED,
            "tensor_parallel_size": self.tensor_parallel,
            "scheduler_cls": "probe.ProbedScheduler",
            "worker_extension_cls": "probe.Probe",
            "disable_log_stats": False,
            "seed": 0,
        }
        if ON_GPU:
            args["attention_backend"] = "TRITON_ATTN"
        if self.lora:
            args |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        return args | dict(self.args)

    def kv_transfer(self) -> dict[str, Any] | None:
        """Arguments of vLLM's KVTransferConfig."""
        if self.transfer is not None:
            return dict(self.transfer)
        if self.store is None:
            return None
        path = "accelerated" if self.accelerated else self.connector_module
        module = {"kv_connector_module_path": path} if path else {}
        platform = {"platform": "cuda"} if self.accelerated else {}
        return module | {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "ucm_connectors": [self.store.entry()],
                "deadlines": PATIENT,
                "admission": "always",  # these models compute faster than anything loads
                **platform,
                **self.extra_config,
            },
        }

    def imported_in(self) -> dict[str, str]:
        """The environment of vLLM's import; the other variables of :meth:`environment` are read
        only when an engine starts."""
        alike = self.but(
            env={}, pythonpath=(), in_process=False, tensor_parallel=1, accelerated=False
        )
        added = os.environ.keys() - VARIABLES
        return {name: value for name, value in alike.environment().items() if name not in added}

    def environment(self) -> dict[str, str]:
        """The child's whole environment."""
        others = ("VLLM_", "UCM_", "TRITON_", "PYTEST_")
        kept = ("UCM_STATE_DIR", "UCM_TEST_ISA")
        env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(others)}
        # An engine is three processes; without this each of them compiles torch and vLLM again.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        path = [
            *self.pythonpath,
            str(HERE),
            *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
        ]
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.in_process else "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "v2" else "0",
            "OMP_NUM_THREADS": "1",
            # PyTorch compiles a function of an eager engine's sampler, which takes two seconds.
            "TORCHDYNAMO_DISABLE": str(int(not COMPILED)),
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "20",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.accelerated:
            env["UCM_TEST_DRIVER"] = os.environ["UCM_TEST_DRIVER"]
        if ON_GPU:
            # Without "ieee" answers depend on the chunks of a prompt.
            env |= {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        else:
            ranks = "|".join(str(rank) for rank in range(self.tensor_parallel))
            env["VLLM_CPU_OMP_THREADS_BIND"] = ranks if self.tensor_parallel > 1 else "nobind"
            if self.runner == "v2":
                env["TRITON_INTERPRET"] = "1"
                path.insert(0, str(HERE / "triton_cpu"))
        env["PYTHONPATH"] = os.pathsep.join(path)
        return env | dict(self.env)


@dataclass(frozen=True)
class Result:
    """The result of one request. ``cached`` counts reused tokens; ``first`` is seconds to the first
    token."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: str
    first: float | None
    others: list[list[int]] = field(default_factory=list)  # tokens of further sequences
    params: Mapping[str, Any] | None = None  # ``kv_transfer_params`` of the answer

    @property
    def cached_blocks(self) -> int:
        """Whole blocks that were not computed."""
        return self.cached // BLOCK


@dataclass(frozen=True)
class Ask:
    """One request. ``lora`` is (name, number, directory); ``picture`` is (seed, the client's name
    for it); ``sequences`` answers are drawn, each the likeliest."""

    tokens: Sequence[int]
    max_tokens: int = 8
    salt: str | None = None
    lora: tuple[str, int, str] | None = None
    priority: int = 0
    extra_args: Mapping[str, Any] | None = None
    picture: tuple[int, str | None] | None = None
    sequences: int = 1
    #: The data-parallel engine that gets it; None: vLLM chooses.
    engine: int | None = None


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that depend on the seed alone; the same seed gives the same beginning at any
    length."""
    source = random.Random(seed)
    return [source.randrange(3, VOCAB) for _ in range(length)]
