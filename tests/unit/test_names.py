"""The names that users import (including those of the original), and the cost of their import."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ucm

#: Names that need neither vLLM nor the core; each part that is built adds its own line.
LIGHT = [
    "ucm.UcmError",
    "ucm.logger.init_logger",
    "ucm.logger.ucm_logger",
    "ucm.utils.include_dir",
    "ucm.utils.validate_config",
    "ucm.utils.estimate_storage_requirements",
    "ucm.config.load",
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

#: Names of sparse attention that compute, and so need torch.
TORCH = [
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
]

#: Names that need vLLM.
VLLM = [
    "ucm.integration.vllm.connector.UCMConnector",
    "ucm.integration.vllm.ucm_connector.UCMConnector",
    "ucm.integration.vllm.ucm_connector.UCMDirectConnector",
    "ucm.integration.vllm.ucm_connector.RequestHasher",
]


def importable(names: list[str]) -> tuple[list[str], set[str]]:
    """The names that a new process cannot use, and the packages that it imported for them."""
    code = (
        "import importlib, sys\n"
        "wrong = []\n"
        "for dotted in sys.argv[1:]:\n"
        "    module, _, name = dotted.rpartition('.')\n"
        "    if getattr(importlib.import_module(module), name, None) is None:\n"
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


def test_names_of_sparse_attention_do_not_import_vllm() -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("ucm._core") is None:
        pytest.skip("torch or the core is missing here")
    wrong, imported = importable(TORCH)
    assert wrong == []
    assert "vllm" not in imported


@pytest.mark.vllm
@pytest.mark.timeout(600)  # importing vLLM takes a minute where the machine is busy
def test_names_that_need_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    assert importable(VLLM)[0] == []


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
