"""The names that users import (including those of the original), and the cost of their import."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import ucm.sparse.state
from ucm.config import UCMConfig, parse
from ucm.config.words import INSTEAD
from ucm.errors import ConfigError
from ucm.refused import REFUSED

#: Names that need neither vLLM nor the core; each part that is built adds its own line.
LIGHT = [
    "ucm.UcmError",
    "ucm.logger.init_logger",
    "ucm.logger.ucm_logger",
    "ucm.utils.include_dir",
    "ucm.metrics.UCMMetrics",
    "ucm.utils.validate_config",
    "ucm.utils.estimate_storage_requirements",
    "ucm.bench.BenchmarkMetrics",
    "ucm.bench.check_performance_regression",
    "ucm.config.load",
    "ucm.config.UCMConfig",
    "ucm.config.UCMConfig.from_yaml",
    "ucm.config.UCMConfig.from_vllm_config",
    "ucm.cli.main",
    "ucm.pd.Settings",
    "ucm.pd.toy_proxy_server.main",
    "ucm.sparse.base.UcmSparseBase",
    "ucm.sparse.base.UcmSparseMetadata",
    "ucm.sparse.base.UcmSparseRole",
    "ucm.sparse.base.INVALID_SLOT",
    "ucm.sparse.state.get_ucm_sparse",
    "ucm.sparse.state.has_ucm_sparse",
    "ucm.sparse.state.ensure_ucm_sparse_initialized",
]

#: Names that need the compiled core.
CORE = [
    "ucm.store.BlockHasher",
    "ucm.store.BlockId",
    "ucm.store.RequestHasher",
    "ucm.store.select_storage",
    "ucm.store.V0ToV1Adapter",
    "ucm.store.v0.V0ToV1Adapter",
    "ucm.store.compute_block_hash",
    "ucm.store.part_mask",
    "ucm.store.record_ids",
    "ucm.store.ucmstore.Task",
    "ucm.store.ucmstore.UcmKVStoreBase",
    "ucm.store.ucmstore_v1.UcmKVStoreBaseV1",
    "ucm.store.ucmstore_v1.Task",
    "ucm.store.factory.UcmConnectorFactory",
    "ucm.store.factory_v1.UcmConnectorFactoryV1",
    "ucm.store.factory_v1.select_storage",
    "ucm.store.posix.connector.UcmPosixStore",
    "ucm.store.cache.connector.UcmCacheStore",
    "ucm.store.pipeline.connector.UcmPipelineStore",
    "ucm.store.nfs.connector.UcmNfsStore",
    "ucm.store.nfsstore.nfsstore_connector.UcmNfsStore",
    "ucm.store.ds3fs.connector.UcmDs3fsStore",
    "ucm.store.pc.connector.UcmPcStore",
    "ucm.store.pcstore.pcstore_connector_v1.UcmPcStore",
    "ucm.store.mooncake.connector.UcmMooncakeStore",
    "ucm.store.mooncakestore.mooncake_connector.UcmMooncakeStore",
    "ucm.store.empty.connector.UcmEmptyStore",
    "ucm.store.fake.connector.UcmFakeStore",
    "ucm.trans.Device",
    "ucm.trans.PlatformAbstraction",
    "ucmtrans.Device",
    "ucmtrans.Stream",
    "ucmtrans.project",
    "ucmtrans.version",
    "ucmtrans.commit_id",
    "ucmtrans.build_type",
    "ucm.sparse.factory.UcmSparseFactory",
]

#: Names that need torch, but not vLLM: tags of tenants, and sparse attention where it computes.
TORCH = [
    "ucm.integration.vllm.connector.identity.tenant.TenantTags",
    "ucm.sparse.blend.hkvd.HKVDCalculator",
    "ucm.sparse.esa.esa.ESA",
    "ucm.sparse.esa.esa.ESASparse",
    "ucm.sparse.esa.esa.ESARetrievalEngine",
    "ucm.sparse.esa.esa.BlockReprPool",
    "ucm.sparse.gsa.gsa.GSA",
    "ucm.sparse.gsa.gsa.GSAReqStat",
    "ucm.sparse.gsa.gsa.GSASparseKernel",
    "ucm.sparse.gsa.gsa.compute_block_scores",
    "ucm.sparse.gsa.gsa.compute_topk_len",
    "ucm.sparse.gsa.gsa.select_topk_blocks",
    "ucm.sparse.gsa.gsa.LRUEvictionPolicy",
    "ucm.sparse.gsa.gsa.ScoreBasedEvictionPolicy",
    "ucm.sparse.gsa.gsa.HybridEvictionPolicy",
    "ucm.sparse.gsa.prefetch.prefetch_engine.GSAPrefetchEngineC",
    "ucm.sparse.gsa.prefetch.prefetch_engine.PrefetchEngine",
    "ucm.sparse.gsa.prefetch.prefetch_engine.PrefetchHandle",
    "ucm.sparse.gsa.prefetch.prefetch_engine.PrefetchPriority",
    "ucm.sparse.gsa.prefetch.prefetch_engine.PrefetchTask",
    "ucm.sparse.gsa_on_device.gsa_on_device.GSAOnDevice",
    "ucm.sparse.gsa_on_device.hash_encoder.HashEncoder",
    "ucm.sparse.gsa_on_device.hash_encoder.torch_hash_code",
    "ucm.sparse.gsa_on_device.hash_encoder.triton_hash_code",
    "ucm.sparse.gsa_on_device.hash_encoder.reshape_and_cache_khash_triton",
    "ucm.sparse.gsa_on_device.hamming_topk.cuda_hamming_topk",
    "ucm.sparse.gsa_on_device.hamming_topk.hamming_distance",
    "ucm.sparse.gsa_on_device.hamming_topk.update_seq_lens",
    "ucm.sparse.kvstar.multistep.KVStarMultiStep",
    "ucm.sparse.kvstar.multistep.ReqMeta",
    "ucm.sparse.kvstar.multistep.ReqStage",
    "ucm.sparse.rerope.rerope_utils.default_config",
    "ucm.sparse.rerope.triton_unified_attention_rerope.unified_attention_rerope",
]

#: Names that need vLLM.
VLLM = [
    "ucm.integration.vllm.blend_connector.UCMBlendConnector",
    "ucm.integration.vllm.connector.UCMConnector",
    "ucm.integration.vllm.ucm_connector.UCMConnector",
    "ucm.integration.vllm.ucm_connector.UCMDirectConnector",
    "ucm.integration.vllm.ucm_connector.RequestHasher",
    "ucm.integration.vllm.ucm_connector.UCMConnectorMetadata",
    "ucm.integration.vllm.ucm_connector.compute_block_hash",
]

#: Of those that are refused, the ones that need vLLM or torch to be refused.
NEEDING = ("ucm.integration.vllm.ucm_connector.", "ucm.sparse.kvstar.")


def importable(names: list[str]) -> tuple[list[str], set[str]]:
    """The names that a new process cannot use, and the packages that it imported for them."""
    code = (
        "import importlib, sys\n"
        "wrong = []\n"
        "for dotted in sys.argv[1:]:\n"
        "    module, _, name = dotted.rpartition('.')\n"
        "    try:\n"
        "        found = importlib.import_module(module)\n"
        "    except ModuleNotFoundError:\n"
        "        module, _, above = module.rpartition('.')\n"
        "        found = getattr(importlib.import_module(module), above)\n"
        "    if getattr(found, name, None) is None:\n"
        "        wrong.append(dotted)\n"
        "print('\\n' + ' '.join(wrong))\n"
        "print(' '.join(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    wrong, modules = done.stdout.split("\n")[-3:-1]
    return wrong.split(), {name.partition(".")[0] for name in modules.split()}


def test_light_names_import_nothing_of_the_engine() -> None:
    wrong, imported = importable(LIGHT)
    assert wrong == []
    assert not imported & {"vllm", "torch", "numpy"}


def test_names_of_the_core_import_neither_vllm_nor_torch() -> None:
    if importlib.util.find_spec("ucm._core") is None:
        pytest.skip("the core is not compiled here")
    wrong, imported = importable(CORE)
    assert wrong == []
    assert not imported & {"vllm", "torch"}


def test_names_that_need_torch_do_not_import_vllm() -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("ucm._core") is None:
        pytest.skip("torch or the core is missing here")
    wrong, imported = importable(TORCH)
    assert wrong == []
    assert "vllm" not in imported


def refusals(names: list[str]) -> dict[str, list[str]]:
    """The answers of a new process to both forms of an import of each name."""
    code = (
        "import importlib, json, sys\n"
        "def answer(text):\n"
        "    try:\n"
        "        exec(text, {})\n"
        "    except ImportError as error:\n"
        "        return str(error)\n"
        "    return 'imported'\n"
        "found = {}\n"
        "for dotted in sys.argv[1:]:\n"
        "    module, _, name = dotted.rpartition('.')\n"
        "    found[dotted] = [answer(f'from {module} import {name}')]\n"
        "    if name.islower() and hasattr(importlib.import_module(module), '__path__'):\n"
        "        found[dotted].append(answer(f'import {dotted}.deeper'))\n"
        "print('\\n' + json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_other_name_of_the_documents_is_refused_by_its_sentence() -> None:
    light = [name for name in REFUSED if not name.startswith(NEEDING)]
    for name, answers in refusals(light).items():
        assert set(answers) == {f"{name}: {REFUSED[name]} (docs/not-ours.md)"}


@pytest.mark.vllm
@pytest.mark.timeout(600)  # importing vLLM takes a minute where the machine is busy
def test_names_that_need_vllm_to_be_imported_or_refused() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    refused = [name for name in REFUSED if name.startswith(NEEDING)]
    for name, answers in refusals([*VLLM, *refused]).items():
        wanted = f"{name}: {REFUSED[name]} (docs/not-ours.md)" if name in refused else "imported"
        assert answers[0] == wanted


def test_another_wrong_name_is_no_refusal() -> None:
    answers = refusals(["ucm.nothing", "ucm.store.Nothing", "ucm.sparse.state.nothing"])
    assert answers["ucm.nothing"][1] == "No module named 'ucm.nothing'"
    for name, (answer, *_) in answers.items():
        assert answer.startswith(f"cannot import name '{name.rpartition('.')[2]}' from 'ucm")
    assert not hasattr(ucm.sparse.state, "Nothing")


@pytest.mark.parametrize("key", INSTEAD)
def test_every_word_of_other_caches_is_refused_with_what_to_do(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"storage_path": "/nowhere", key: 1}, {})
    expected = f'unknown key "{key}" in kv_connector_extra_config; {INSTEAD[key]}'
    assert error.value.message == expected


def test_the_page_has_every_refusal() -> None:
    page = (Path(__file__).parents[2] / "docs" / "not-ours.md").read_text()
    rows = [f"| `{name}` | {why} |" for name, why in (*REFUSED.items(), *INSTEAD.items())]
    assert [row for row in rows if row not in page] == []
    tables = page.partition("## Decisions")[0]
    assert sum(line.startswith("| `") for line in tables.splitlines()) == len(rows)


def test_the_book_s_ways_into_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("storage_backends: /a\nmin_hit_tokens: 7\n")
    assert UCMConfig.from_yaml(str(file)).min_hit_tokens == 7
    transfer = SimpleNamespace(kv_connector_extra_config={"UCM_CONFIG_FILE": str(file)})
    assert UCMConfig.from_vllm_config(SimpleNamespace(kv_transfer_config=transfer)).root == "/a"
    with pytest.raises(ConfigError, match="no kv_transfer_config"):
        UCMConfig.from_vllm_config(SimpleNamespace(kv_transfer_config=None))


def test_importing_ucm_imports_nothing_heavy() -> None:
    _, imported = importable(["ucm.UcmError"])
    assert not imported & {"vllm", "torch", "numpy", "pydantic", "yaml"}


def test_one_version_everywhere() -> None:
    root = Path(__file__).parents[2]
    cargo = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    python = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert ucm.__version__ == cargo == python


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(ucm.__file__).parent / "py.typed").exists()
