"""Makes kernels/copy.ptx from kernels/copy.cu with NVIDIA's run-time compiler, which comes as a
wheel.

Run it by hand after a change of the source; with ``--check`` it only checks that the committed file
is up to date (a test does that). Needs neither a CUDA toolkit nor a GPU: only the wheel, at the
version in ``requirements/dev.txt``, because other versions write other text.

The compiler writes PTX of its own version. The kernels need no more than the first version of their
target that current drivers read, so the file declares that one; the tests assemble it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "kernels" / "copy.cu"
OUT = ROOT / "kernels" / "copy.ptx"
WHEEL = "nvidia-cuda-nvrtc-cu11"
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17"]
VERSION = "7.0"
HEAD = "// Made by tools/ptx.py from kernels/copy.cu.\n"


def compiler() -> ctypes.CDLL:
    """The library of the wheel."""
    wheel = importlib.metadata.distribution(WHEEL)
    if (
        f"{WHEEL}=={wheel.version}"
        not in (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").splitlines()
    ):
        raise SystemExit(f"{WHEEL} is {wheel.version}, not the version of requirements/dev.txt")
    libraries = {
        file.name.split(".")[0]: str(file.locate())
        for file in wheel.files or []
        if ".so" in file.name
    }
    # The compiler loads its built-in headers by name only, so they are loaded first.
    ctypes.CDLL(libraries["libnvrtc-builtins"])
    return ctypes.CDLL(libraries["libnvrtc"])


def compiled(source: str) -> str:
    """The compiler's output for a source."""
    nvrtc = compiler()
    program = ctypes.c_void_p()

    def text(of: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{of}")(program, buffer)
        return buffer.value.decode()

    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), SOURCE.name.encode(), 0, None, None
    )
    if status:
        raise SystemExit(f"{WHEEL}: nvrtcCreateProgram: status {status}")
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)):
        raise SystemExit(text("ProgramLog"))
    return text("PTX")


def tidied(ptx: str) -> str:
    """The same without comments, which name the build of the compiler, and with the requested
    version."""
    ptx = re.sub(r"[ \t]*(//.*)?$", "", ptx, flags=re.MULTILINE)
    ptx, versions = re.subn(r"^\.version .*$", f".version {VERSION}", ptx, flags=re.MULTILINE)
    if versions != 1:
        raise SystemExit(f"{versions} lines have a version")
    return HEAD + re.sub(r"\n{2,}", "\n\n", ptx).strip() + "\n"


def main() -> int:
    """Writes or checks the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that the file is up to date"
    )
    arguments = parser.parse_args()
    text = tidied(compiled(SOURCE.read_text(encoding="utf-8")))
    if not arguments.check:
        OUT.write_text(text, encoding="utf-8")
    elif OUT.read_text(encoding="utf-8") != text:
        print(
            f"{OUT.relative_to(ROOT)} is not what {SOURCE.relative_to(ROOT)} gives; run: python"
            " tools/ptx.py"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
