"""The plug-in runs in every process of vLLM: it has no effect without ucm's configuration, and
replaces nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness import EngineHost, machine_lock, run_program
from served import PATIENCE, vllm_server
from specs import EngineSpec, StoreSpec

import ucm
from ucm.integration.vllm.early import UNROTATED

#: The modules of ucm that a vLLM process imports without its configuration.
LEAF = {
    "ucm",
    "ucm.errors",
    "ucm.integration",
    "ucm.integration.vllm",
    "ucm.integration.vllm.attention",
    "ucm.integration.vllm.attention.registering",
    "ucm.integration.vllm.early",
    "ucm.integration.vllm.plugin",
    "ucm.refused",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without its compiled core."""
    place = tmp_path_factory.mktemp("broken")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(ucm.__file__).parent, place / "ucm", ignore=ignored)
    return place


def test_a_core_that_cannot_be_imported_harms_no_engine_without_ucm(
    host: EngineHost, model: Path, broken: Path, tmp_path: Path
) -> None:
    host.stop()
    path = {"PYTHONPATH": f"{broken}:{Path(__file__).parent}"}
    answers = run_program("programs:without_core", path, tmp_path / "log", model=str(model))
    assert answers.pop("package") == str(broken / "ucm" / "__init__.py")
    assert set(answers.pop("registered")) <= LEAF
    assert len(answers.pop("tokens")) == 4
    warned = [name for name, answer in answers.items() if answer["warnings"]]
    for name, answer in answers.items():
        assert len(answer["backends"]) == 9
        assert all(answer["backends"].values()), (name, answer)
    for name in ("no configuration", "no connector", "another connector"):
        assert set(answers[name]["loaded"]) <= LEAF, name
    # Logged once in a process, by the first that configures sparse attention.
    assert warned == ["sparse"]
    assert len(answers["sparse"]["warnings"]) == 1
    assert "ucm._core" in answers["sparse"]["warnings"][0]


def test_a_server_with_a_typo_ends_with_one_sentence(
    host: EngineHost, model: Path, tmp_path: Path
) -> None:
    """vLLM's own server, before it loads anything."""
    host.stop()
    log = tmp_path / "log"
    store = StoreSpec(tmp_path / "root", "UcmPosixStore")
    spec = EngineSpec(model, store=store, extra_config={"admision": "no"})
    with machine_lock():
        server = vllm_server(spec, log)
        try:
            assert server.process.wait(PATIENCE) == 1
        finally:
            server.close()
    lines = log.read_text().splitlines()
    sentence = 'ucm: unknown key "admision" in kv_connector_extra_config; did you mean "admission"?'
    assert [line for line in lines if "admision" in line] == [sentence], lines
    assert not any("Traceback" in line for line in lines), lines
    assert not (tmp_path / "root").exists()


#: Entries of vLLM's registries that ucm makes through vLLM's own functions: the only permitted
#: changes.
CONNECTORS = {
    f"vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory._registry[{name}]"
    for name in ("UCMConnector", "UCMDirectConnector", "UCMBlendConnector")
}
BACKENDS = {
    f"vllm.v1.attention.backends.registry._ATTN_OVERRIDES[{name}]"
    for name in (
        "CPU_ATTN",
        "FLASH_ATTN",
        "TRITON_ATTN",
        "CPU_MLA",
        "AMX_MLA",
        "TRITON_MLA",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "CUTLASS_MLA",
    )
}
#: Model classes of ours, by the places where vLLM keeps its one registry of models.
MODELS = {
    f"vllm.model_executor.models{place}.ModelRegistry.models[{name}]"
    for place in ("", ".registry")
    for name in UNROTATED.values()
}
#: Specs of ours, added where sparse attention is configured.
SPECS = {
    f"vllm.v1.kv_cache_spec_registry._REGISTRY_KVCACHESPEC_LIST[{name}]"
    for name in ("SparseFullAttentionSpec", "SparseMLAAttentionSpec")
}


def test_nothing_of_vllm_is_another_object_after_ucm(
    host: EngineHost, model: Path, tmp_path: Path
) -> None:
    """Promise 7 by behaviour. Changes in vLLM by an engine without the plug-in are vLLM's own."""
    host.stop()
    store = {
        "storage_backends": str(tmp_path / "root"),
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
    }
    answers = run_program("programs:lives", {}, tmp_path / "log", model=str(model), store=store)
    assert answers["places"] > 10_000
    own = set(answers["vllm alone"])
    assert set(answers["register"]) == CONNECTORS | BACKENDS | MODELS
    dense, sparse = answers["dense"], answers["sparse"]
    assert set(dense) - own == set(), {place: dense[place] for place in set(dense) - own}
    entries = {place.partition("].")[0].removesuffix("]") + "]" for place in set(sparse) - own}
    assert entries == SPECS, {place: sparse[place] for place in set(sparse) - own}
    # Both engines had the expected configuration.
    assert answers["dense tokens"] == answers["alone tokens"]
    assert answers["sparse tokens"] != answers["alone tokens"]
    # An assignment through another name, which the scan of the source (tests/unit/test_no_patch.py)
    # does not see.
    assert set(answers["alias"]) == {"vllm.v1.core.sched.scheduler.Scheduler.schedule"}
