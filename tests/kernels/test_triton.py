"""The Triton kernels of sparse attention and of ReRoPE, compiled for absent devices.

The functions that launch them are called with tensors of the host; instead of a launch, Triton
compiles for the device of a dummy driver. So the compiled code is that of a GPU for these shapes:
PTX, which Triton's own ptxas assembles without spills, and AMD's machine code.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from ucm.sparse.kernels import gpu  # noqa: E402
from ucm.sparse.rerope.triton_unified_attention_rerope import unified_attention_rerope  # noqa: E402

# Half a minute each, of several compilers; more than two beside a busy build.
pytestmark = pytest.mark.timeout(900)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Most shared memory of a program: an A100's, an H100's, an MI300's.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


class Named:
    """A driver of an absent device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def code(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def every_kernel() -> None:
    """Heads of 128 channels, 8 of them and 4 queries each, blocks of 128 tokens; a latent of 512
    and 64 channels; steps by the rule of ReRoPE over blocks of vLLM's Triton backend, also with
    heads of 64 channels and one query each."""
    table, blocks = torch.zeros((2, 256), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    slots, query = torch.zeros(64, dtype=torch.int64), half(2, 32, 128)
    gpu.hash_encode(half(64, 8, 128), torch.zeros(128, 128), code(32, 128, 8, 16), slots)
    gpu.hash_encode(half(64, 1, 512), torch.zeros(512, 512), code(32, 128, 1, 72)[..., :64], slots)
    gpu.hash_encode_query(query, torch.zeros(128, 128), 8)
    gpu.scatter_codes(code(64, 8, 16), slots, code(32, 128, 8, 16))
    gpu.hamming_scores(code(2, 8, 16), code(32, 128, 8, 16), table, blocks)
    gpu.hamming_scores(code(2, 1, 64, 72), code(32, 128, 1, 72), table, blocks)
    gpu.dot_scores(query, half(32, 8, 128), table, blocks)
    gpu.quest_scores(query, half(32, 2, 8, 128), table, blocks)
    gpu.select_blocks(torch.zeros((2, 1, 256), dtype=torch.int32), table, blocks, 128, [8, 8])
    gpu.select_blocks(torch.zeros((2, 1, 256)), table, blocks, 128, [8, 8])
    rotation, starts = torch.zeros(4096, 128), torch.tensor([0, 40, 41], dtype=torch.int32)
    for dim, heads in ((128, 32), (64, 8)):
        keys, values = half(64, 8, 16, 2 * dim).transpose(1, 2).chunk(2, dim=-1)
        given = starts, 40, blocks, dim**-0.5, 512, table, rotation[:, :dim].contiguous()
        unified_attention_rerope(half(41, heads, dim), keys, values, half(41, heads, dim), *given)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[Any]]:
    """Compiles every kernel for a target."""
    made: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.device_caches.clear()
        made.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return made[-1]

    def compile_for(name: str) -> list[Any]:
        monkeypatch.setattr(driver, "_active", Named(TARGETS[name]))
        monkeypatch.setattr(torch.version, "hip", "6" if name == "gfx942" else None)
        every_kernel()
        return made

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return compile_for


def assembled(ptx: str, arch: str, to: Path) -> str:
    """The report of Triton's ptxas on a kernel."""
    source = to / "kernel.ptx"
    source.write_text(ptx, encoding="utf-8")
    # Hopper's own instructions have a name of their own.
    arch = "sm_90a" if arch == "sm_90" else arch
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    done = subprocess.run(
        [program, "-v", f"-arch={arch}", source, "-o", to / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


NAMES = {"encode_write", "scatter", "count_bits", "hamming_block", "dot_block", "select_row"}
NAMES |= {"rerope_tile"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_they_assemble_for_nvidia_without_spills(arch: str, compiled: Any, tmp_path: Path) -> None:
    kernels = compiled(arch)
    assert {kernel.metadata.name for kernel in kernels} == NAMES
    for kernel in kernels:
        said = assembled(kernel.asm["ptx"], arch, tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in said, (
            f"{kernel.metadata.name}: {said}"
        )
        assert kernel.metadata.shared <= SHARED[arch]
        if kernel.metadata.name in ("hamming_block", "dot_block"):
            # Codes of 16 bytes and vectors 16 bytes at a time, those of a latent (72 bytes) 8.
            assert re.search(r"ld\.global[\w.]*\.v[24]\.b32", kernel.asm["ptx"]), (
                kernel.metadata.name
            )


def test_they_compile_for_amd_without_scratch(compiled: Any) -> None:
    kernels = compiled("gfx942")
    assert {kernel.metadata.name for kernel in kernels} == NAMES
    for kernel in kernels:
        said = kernel.asm["amdgcn"]
        numbers = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\n", said)}
        assert (numbers["vgpr_spill_count"], numbers["private_segment_fixed_size"]) == (0, 0), (
            kernel.metadata.name
        )
        assert kernel.metadata.shared <= SHARED["gfx942"]
        assert kernel.asm["hsaco"][:4] == b"\x7fELF"
