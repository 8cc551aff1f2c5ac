"""Programs of ``test_plugin.py`` and ``test_faults.py``, for processes that have imported vLLM and
nothing of ucm."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from replaced import changed, snapshot

QUEST = {"sparse_type": "Quest", "ucm_sparse_config": {"Quest": {"ratio": 0.2, "min_tokens": 0}}}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _loaded() -> list[str]:
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("ucm", "ucmtrans"))


def _backends() -> dict[str, bool]:
    """For each name, whether vLLM's path resolves to vLLM's own class, or the error."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES

    def found(resolve: Any) -> Any:
        try:
            return resolve()
        except Exception as error:  # a backend of an absent platform
            return repr(error)

    def own(backend: Any) -> Any:
        return found(lambda: resolve_obj_by_qualname(backend.value))

    return {backend.name: found(backend.get_class) == own(backend) for backend in _ATTN_OVERRIDES}


def without_core(model: str) -> dict[str, Any]:
    """With a core that cannot be imported: the results of the nine paths under several
    configurations, and an engine without ucm."""
    from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
    from vllm.plugins import load_general_plugins

    said = _Warnings()
    logging.getLogger("ucm.vllm").addHandler(said)
    load_general_plugins()

    def configured(connector: str, **extra: Any) -> VllmConfig:
        config = VllmConfig()
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
        )
        return config

    def inside(**extra: Any) -> VllmConfig:
        children = [
            {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            {
                "kv_connector": "UCMConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        ]
        return configured("MultiConnector", connectors=children)

    root = {"storage_backends": "/nowhere"}
    cases: dict[str, tuple[VllmConfig | None, dict[str, str]]] = {
        "no configuration": (None, {}),
        "no connector": (VllmConfig(), {"UCM_SPARSE_TYPE": "Quest", "UCM_CONFIG_FILE": "/nowhere"}),
        "another connector": (configured("ExampleConnector", **QUEST), {}),
        "dense": (configured("UCMConnector", ucm_connectors=[{"ucm_connector_config": root}]), {}),
        "disabled": (configured("UCMConnector", **root, **QUEST), {"UCM_DISABLE": "1"}),
        "sparse": (configured("UCMConnector", **root, **QUEST), {}),
        "sparse inside another": (inside(**root, **QUEST), {}),
        "a nested word": (configured("UCMConnector", vllm={"GSA": {}}), {}),
        "a file": (configured("UCMDirectConnector", ucm_config_path="/nowhere"), {}),
        "a variable": (configured("UCMConnector", **root), {"UCM_SPARSE_TYPE": "Quest"}),
    }
    answers: dict[str, Any] = {
        "package": importlib.import_module("ucm").__file__,
        "registered": _loaded(),
    }
    for name, (config, variables) in cases.items():
        os.environ.update(variables)
        said.texts.clear()
        if config is None:
            backends = _backends()
        else:
            with set_current_vllm_config(config):
                backends = _backends()
        answers[name] = {"backends": backends, "warnings": list(said.texts), "loaded": _loaded()}
        for variable in variables:
            del os.environ[variable]
    answers["tokens"] = _generate(model)
    return answers


def lives(model: str, store: dict[str, Any]) -> dict[str, Any]:
    """Changed objects of vLLM: after an engine without the plug-in, after ``register()``, after
    engines with ucm, dense and sparse, and after a method was replaced through an alias."""
    import ucm_names

    for name in ucm_names.vllm_modules():
        importlib.import_module(name)
    answers: dict[str, Any] = {}
    os.environ["VLLM_PLUGINS"] = ""
    start = snapshot()
    answers["alone tokens"] = _generate(model)
    before = snapshot()
    answers["vllm alone"] = changed(start, before)
    from ucm.integration.vllm.plugin import register

    register()
    after = snapshot()
    answers["register"] = changed(before, after)
    for name, words in {"dense": {}, "sparse": QUEST}.items():
        answers[f"{name} tokens"] = _generate(model, store | words)
        now = snapshot()
        answers[name] = changed(after, now)
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    target = module.Scheduler
    target.schedule = lambda self: None
    answers["alias"] = changed(now, snapshot())
    answers["places"] = len(start)
    return answers


def raising(model: str, store: dict[str, Any]) -> dict[str, Any]:
    """One engine whose connector's methods raise: tokens of one prompt, at first and under each
    fault, and the number of its tokens loaded just before the faults."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    llm, params = _engine(model, store)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
    worker = get_kv_transfer_group()
    answers: dict[str, Any] = {"loaded": 0}
    answers["computed"], _ = _ask(llm, params)
    for _ in range(1000):  # stored blocks become visible after a moment
        llm.reset_prefix_cache()
        answers["warm"], answers["loaded"] = _ask(llm, params)
        if answers["loaded"]:
            break

    def plant(side: Any, name: str, *, once: bool) -> None:
        def raises(*_: Any) -> None:
            if once:
                delattr(side, name)
            raise RuntimeError(f"planted in {name}")

        setattr(side, name, raises)

    for side, name, once in (
        (worker._worker, "take_ended_loads", True),
        (worker._worker, "get_block_ids_with_load_errors", True),
        (scheduler._scheduler, "update_state_after_alloc", True),
        (scheduler._scheduler, "build_connector_meta", False),
    ):
        plant(side, name, once=once)
        llm.reset_prefix_cache()
        answers[name], _ = _ask(llm, params)
    answers["failures"] = [worker.failures.count, scheduler.failures.count]
    for _ in range(32):  # an engine that steps until the side is given up
        llm.reset_prefix_cache()
        answers["given up"], _ = _ask(llm, params)
        if scheduler.failures.why and worker.failures.why:
            break
    answers["why"] = [scheduler.failures.why, worker.failures.why]
    answers["pending"] = scheduler.has_pending_push_work()
    _end(llm)
    return answers


def _generate(model: str, store: dict[str, Any] | None = None) -> list[int]:
    """Tokens of one prompt from an engine in this process, which then ends."""
    llm, params = _engine(model, store)
    tokens, _ = _ask(llm, params)
    _end(llm)
    return tokens


def _engine(model: str, store: dict[str, Any] | None) -> tuple[Any, Any]:
    """An engine in this process, and its sampling parameters."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()  # it holds the classes of the engine before
    transfer = None
    if store is not None:
        transfer = KVTransferConfig(
            kv_connector="UCMConnector", kv_role="kv_both", kv_connector_extra_config=store
        )
    llm = LLM(
        model=str(Path(model)),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        kv_transfer_config=transfer,
    )
    return llm, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)


def _ask(llm: Any, params: Any) -> tuple[list[int], int]:
    """Tokens of one prompt, and the number of its reused tokens."""
    answer = llm.generate([{"prompt_token_ids": list(range(3, 203))}], params, use_tqdm=False)[0]
    return list(answer.outputs[0].token_ids), int(answer.num_cached_tokens or 0)


def _end(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def example(file: str, arguments: list[str]) -> list[dict[str, Any]]:
    """A Python program of ``examples``, run as a user starts it: its lines of JSON."""
    text = io.StringIO()
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    with contextlib.redirect_stdout(text):
        runpy.run_path(file, run_name="__main__")
    return [json.loads(line) for line in text.getvalue().splitlines() if line.startswith("{")]
