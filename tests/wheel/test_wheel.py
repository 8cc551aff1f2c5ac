"""The installed wheel on a machine without Rust, vLLM or torch."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from wheels import ROUND_TRIP


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name).decode()


def run(python: Path, env: dict[str, str], program: str, tmp_path: Path, *arguments: str) -> str:
    """Output of a program in the clean environment; warnings are errors there, as in our own
    tests."""
    command = [str(python), "-I", "-W", "error", "-c", program, *arguments]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pythons() -> list[Path]:
    """Interpreters of CPython 3.11 and newer on this machine, one of each version: on the PATH, and
    pyenv's. Builds without the GIL have another ABI."""
    program = """
import platform, sys, sysconfig
free = sysconfig.get_config_var("Py_GIL_DISABLED")
if platform.python_implementation() == "CPython" and sys.version_info >= (3, 11) and not free:
    print(*sys.version_info[:2], sep=".")
"""
    on_path = [shutil.which(f"python3.{minor}") for minor in range(11, 30)]
    places = [Path(place) for place in (sys.executable, *on_path) if place]
    places += sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3"))
    found: dict[str, Path] = {}
    for place in places:
        command = [str(place), "-I", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if version := done.stdout.strip():  # a shim of pyenv fails where its version is not chosen
            found.setdefault(version, place)
    return list(found.values())


@pytest.fixture(scope="module")
def unpacked(native_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel."""
    place = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(native_wheel) as archive:
        archive.extractall(place)
    return place


def test_one_wheel_serves_every_python_from_3_11_on(
    unpacked: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    """The extension is loaded and called in every Python here, independent of the build's
    Python."""
    program = f"""
import json, sys
sys.path.insert(0, {str(unpacked)!r})
import ucm._core
assert ucm._core.__file__ == {str(unpacked / "ucm" / "_core.abi3.so")!r}
kinds = json.loads(ucm._core.tier_kinds())
print(len(kinds) > 0, ucm._core.part_mask(0, 1, 2).hex())
"""
    answers = {run(python, clean_env, program, tmp_path) for python in pythons()}
    assert len(answers) == 1
    assert answers.pop().startswith("True ")


def test_the_wheel_has_one_extension_for_every_version(wheel: Path, names: list[str]) -> None:
    assert "-cp311-abi3-" in wheel.name
    assert [name for name in names if name.endswith(".so")] == ["ucm/_core.abi3.so"]


def test_the_extension_uses_the_stable_abi_alone(
    wheel: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    """Only symbols of Python 3.11's stable ABI, because not all later versions are tested here."""
    command = [
        os.environ["UCM_TEST_UV"],
        "tool",
        "run",
        "abi3audit==0.0.26",
        "--strict",
        "--report",
        str(wheel),
    ]
    done = subprocess.run(
        command,
        env=clean_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (audited,) = json.loads(done.stdout)["specs"].values()
    (extension,) = audited["wheel"]
    assert extension["name"] == "_core.abi3.so"
    assert extension["result"]["is_abi3"], extension


def test_wheel_carries_types_licence_and_nothing_of_the_repository(names: list[str]) -> None:
    assert {"ucm/py.typed", "ucm/_core.pyi", "ucm/include/ucm_store.h"} <= set(names)
    files = ("overview.json", "overview.yaml", "alerts.yml")
    assert {f"ucm/metrics/{name}" for name in files} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)
    assert any(name.endswith("/THIRD-PARTY-LICENSES.txt") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top.rpartition(".")[2] if "-" in top else top for top in tops} <= {
        "ucm",
        "ucmtrans",
        "dist-info",
        "libs",
    }


def test_only_small_things_are_required_and_vllm_is_an_extra(wheel: Path) -> None:
    metadata = Parser().parsestr(read(wheel, ".dist-info/METADATA"))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0].strip() for line in required) == [
        "click",
        "numpy",
        "pydantic",
        "pyyaml",
        "rich",
        "tqdm",
    ]
    assert set(metadata.get_all("Provides-Extra", [])) == {"vllm", "pd", "bench", "metrics"}


def test_vllm_finds_the_connector_by_its_entry_point(wheel: Path) -> None:
    lines = read(wheel, ".dist-info/entry_points.txt").replace(" ", "").splitlines()
    assert "ucm=ucm.integration.vllm.plugin:register" in lines
    assert "ucm_mode=ucm.integration.vllm.plugin:ModeEndpoint" in lines


def test_the_command_line_is_installed(
    clean_python: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    command = [str(clean_python.parent / "ucm"), "inspect", str(tmp_path)]
    done = subprocess.run(
        command, env=clean_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "is no root of ucm" in done.stderr


def test_the_proxy_names_its_extra(clean_python: Path, clean_env: dict[str, str]) -> None:
    command = [str(clean_python.parent / "ucm"), "pd-proxy", "--mixed", "localhost:1"]
    done = subprocess.run(
        command, env=clean_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "pip install 'ucm-kv[pd]'" in done.stderr


def test_the_dashboard_needs_no_extra(clean_python: Path, clean_env: dict[str, str]) -> None:
    command = [str(clean_python.parent / "ucm"), "dashboard"]
    done = subprocess.run(
        command, env=clean_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "UCM Overview"


@pytest.mark.parametrize("script", ["tests/gpu/checks.py", "benches/python/gpu.py"])
def test_what_a_machine_with_a_gpu_runs_needs_nothing_else(
    clean_python: Path, clean_env: dict[str, str], tmp_path: Path, script: str
) -> None:
    root = Path(__file__).parents[2]
    command = [str(clean_python), str(root / script), "--quick", "--device", "host"]
    done = subprocess.run(
        command,
        env=clean_env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_environment_is_clean(
    clean_python: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    program = """
import importlib.util, shutil
found = [name for name in ("vllm", "torch") if importlib.util.find_spec(name)]
print(found, shutil.which("cargo"), shutil.which("rustc"))
"""
    assert run(clean_python, clean_env, program, tmp_path) == "[] None None"


def test_imports_without_vllm_and_torch(
    clean_python: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    program = """
import sys
import ucm, ucm.config, ucm.errors, ucm.logger, ucm.store, ucm.integration.vllm.plugin
assert ucm.__file__.startswith(sys.prefix), ucm.__file__
assert not {"vllm", "torch"} & set(sys.modules)
print(ucm.UcmError.__name__)
"""
    assert run(clean_python, clean_env, program, tmp_path) == "UcmError"


def test_without_a_library_of_a_vendor_the_host_is_used_and_logged(
    clean_python: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    libraries = ["cuda", "amdhip64", "musart", "mcruntime", "ascendcl"]
    if found := [name for name in libraries if ctypes.util.find_library(name)]:
        pytest.skip(f"this machine has {', '.join(found)}")
    program = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from ucm import trans
trans.Device().setup(0)
"""
    said = run(clean_python, clean_env, program, tmp_path)
    assert ": device host, because: " in said and said.count("ucm 0") == 1
    assert all(f"lib{name}.so" in said for name in libraries)


def test_a_block_goes_to_disk_and_comes_back(
    clean_python: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    said = run(clean_python, clean_env, ROUND_TRIP, tmp_path, "root", "dump", "load")
    assert said == "dumped equal"
