"""The copy kernels without a GPU: the committed PTX is made from the source, assembles, and moves
wide words.

The source, compiled for the host with sanitizers, copies like memcpy. ``tests/softcuda`` tests the
execution of the PTX.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PTX = ROOT / "kernels" / "copy.ptx"
HOST = Path(__file__).with_name("host.cpp")
KERNELS = {"ucm_batch", "ucm_gather", "ucm_scatter"}
#: Words of a thread's tile in flight (kernels/copy.cu, IN_FLIGHT).
IN_FLIGHT = 4


def run(*command: str | Path) -> str:
    """The output of a program, which must succeed."""
    # vLLM preloads libraries into child processes; a sanitizer must be first.
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=own
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def packaged(package: str, program: str) -> Path:
    """A program inside an installed package."""
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return next(Path(str(file.locate())) for file in files if file.name == program)


def cubin(arch: str, to: Path) -> tuple[Path, str]:
    """The machine code for one architecture, and the assembler's report."""
    path = to / f"{arch}.cubin"
    return path, run(packaged("triton", "ptxas"), "-v", f"-arch={arch}", PTX, "-o", path)


def test_the_committed_file_is_made_from_the_source() -> None:
    packaged("nvidia-cuda-nvrtc-cu11", "libnvrtc.so.11.2")
    run(sys.executable, ROOT / "tools" / "ptx.py", "--check")


def test_old_drivers_and_devices_read_it() -> None:
    lines = PTX.read_text(encoding="utf-8").splitlines()
    assert ".version 7.0" in lines
    assert ".target sm_70" in lines


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90"])
def test_it_assembles_without_spills(arch: str, tmp_path: Path) -> None:
    told = cubin(arch, tmp_path)[1]
    assert set(re.findall(r"Compiling entry function '(\w+)'", told)) == KERNELS
    spills = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told
    )
    assert spills == [("0", "0", "0")] * len(KERNELS)


def loops(code: str) -> list[list[str]]:
    """The instructions of each loop of a disassembled kernel: from the target of a branch backwards
    to the branch."""
    lines = code.splitlines()
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    found = []
    for at, line in enumerate(lines):
        target = re.search(r"\bBRA.*?`\((\.L_x_\d+)\)", line)
        if target and labels[target[1]] < at:
            found.append(lines[labels[target[1]] : at])
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_loop_has_four_wide_loads_in_flight(arch: str, tmp_path: Path) -> None:
    path = cubin(arch, tmp_path)[0]
    code = run(packaged("nvidia-cuda-nvdisasm", "nvdisasm"), "--print-code", path)
    kernels = dict(
        re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", code, re.MULTILINE | re.DOTALL)
    )
    assert set(kernels) == KERNELS
    for name, kernel in kernels.items():
        moves = [
            re.findall(r"\b(?:LDG|STG)\.E(?:\.\w+)*", "\n".join(loop)) for loop in loops(kernel)
        ]
        wide = [
            [move[:3] for move in loop]
            for loop in moves
            if loop and all(move.endswith(".128") for move in loop)
        ]
        assert wide == [["LDG"] * IN_FLIGHT + ["STG"] * IN_FLIGHT], (name, moves)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as a program for the host."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path_factory.mktemp("kernels") / "host"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    run(compiler, "-std=c++17", "-O1", "-g", *warnings, *sanitizers, HOST, "-o", program)
    return program


@pytest.mark.parametrize("seed", range(8))
def test_the_source_on_the_host_copies_as_memcpy_does(host: Path, seed: int) -> None:
    assert run(host, str(seed)) == ""
