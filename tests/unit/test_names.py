"""The names users import (and those of the original), and what importing them costs."""

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
    "ucm.utils.validate_config",
    "ucm.utils.estimate_storage_requirements",
    "ucm.config.load",
]

#: Names that need the compiled core.
CORE = [
    "ucm.store.factory_v1.UcmConnectorFactoryV1",
    "ucm.store.ucmstore_v1.Task",
    "ucm.store.ucmstore_v1.UcmKVStoreBaseV1",
    "ucm.store.BlockHasher",
    "ucm.store.part_mask",
    "ucm.store.record_ids",
    "ucm.store.posix.connector.UcmPosixStore",
]

#: Names that need vLLM.
VLLM = [
    "ucm.integration.vllm.connector.UCMConnector",
    "ucm.integration.vllm.ucm_connector.UCMConnector",
    "ucm.integration.vllm.ucm_connector.UCMDirectConnector",
]


def found(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def need_core() -> None:
    if importlib.util.find_spec("ucm._core") is None:
        pytest.skip("the core is not compiled here")


@pytest.mark.parametrize("dotted", LIGHT)
def test_light_names(dotted: str) -> None:
    assert callable(found(dotted))


@pytest.mark.parametrize("dotted", CORE)
def test_names_of_the_core(dotted: str) -> None:
    need_core()
    assert callable(found(dotted))


@pytest.mark.vllm
@pytest.mark.parametrize("dotted", VLLM)
def test_names_that_need_vllm(dotted: str) -> None:
    pytest.importorskip("vllm")
    assert callable(found(dotted))


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_ucm_imports_nothing_heavy() -> None:
    assert not imported_by("import ucm") & {"vllm", "torch", "numpy", "pydantic", "yaml"}


@pytest.mark.parametrize("dotted", [*LIGHT, *CORE])
def test_no_name_but_the_connector_imports_vllm_or_torch(dotted: str) -> None:
    if dotted in CORE:
        need_core()
    assert not imported_by(f"import {dotted.rpartition('.')[0]}") & {"vllm", "torch"}


def test_one_version_everywhere() -> None:
    root = Path(__file__).parents[2]
    cargo = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    python = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert ucm.__version__ == cargo == python


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(ucm.__file__).parent / "py.typed").exists()
