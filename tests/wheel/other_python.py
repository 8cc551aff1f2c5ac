"""Debian 13 with its Python 3.13, for this processor or another (``build/debian``, by ``make``).

Its packages are unpacked and not set up, so its Python is started with its own loader and C
library; that of another processor runs in qemu. Neither needs root or a container.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from wheels import machine_of

#: Set where Debian and qemu are known to be there: in the workflow, and for a release.
SWITCH = "UCM_REQUIRE_DEBIAN"
VERSION = "3.13"
LIBC = "glibc 2.41"
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
#: Processor that qemu emulates, without what later ones have: the wheel needs the oldest alone.
OLDEST = {"aarch64": "cortex-a72", "x86_64": "Nehalem"}


def missing(why: str) -> NoReturn:
    """Skip this test with a reason; with :data:`SWITCH` in the environment fail it."""
    if os.environ.get(SWITCH):
        pytest.fail(f"{SWITCH} is set, but {why}")
    pytest.skip(why)


@dataclass(frozen=True)
class OtherPython:
    """Debian's Python, and a directory into which a wheel and its requirements were installed."""

    root: Path
    machine: str
    site: Path
    emulator: tuple[str, ...]

    def run(self, env: dict[str, str], program: str, *arguments: str) -> str:
        """Output of a program; warnings are errors there, as in our own tests."""
        libraries = self.root / "usr" / "lib" / f"{self.machine}-linux-gnu"
        python = self.root / "usr" / "bin" / f"python{VERSION}"
        loader = [str(libraries / LOADERS[self.machine]), "--inhibit-cache"]
        loader += ["--library-path", str(libraries), "--argv0", str(python), str(python)]
        path = f"import sys; sys.path.insert(0, {str(self.site)!r})\n"
        command = [*self.emulator, *loader, "-I", "-W", "error", "-c", path + program, *arguments]
        # Options for this machine's processor have no meaning on another.
        env = {key: value for key, value in env.items() if not key.startswith("OPENBLAS")}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()


def other_python(wheel: Path, env: dict[str, str], site: Path) -> OtherPython:
    """Install a wheel for Debian's Python of its processor, as an installer there selects it and
    what it requires: by their tags."""
    machine = machine_of(wheel)
    root = Path(os.environ.get("UCM_TEST_DEBIAN", "build/debian")).resolve() / machine
    if not (root / ".stamp").exists():
        missing(f"there is no Debian 13 for {machine} ({root}); mmdebstrap makes it")
    emulator: tuple[str, ...] = ()
    if machine != platform.machine():
        names = (f"qemu-{machine}-static", f"qemu-{machine}")
        found = [path for name in names if (path := shutil.which(name))]
        if not found:
            missing(f"qemu for {machine} is not there (package qemu-user-static)")
        emulator = (found[0], "-cpu", OLDEST[machine])
    (tag,) = re.findall(rf"manylinux_2_\d+(?=_{machine}$)", wheel.stem)
    uv = os.environ["UCM_TEST_UV"]
    install = [uv, "pip", "install", "--quiet", "--target", str(site), "--only-binary", ":all:"]
    install += ["--python-version", VERSION, "--python-platform", f"{machine}-{tag}", str(wheel)]
    subprocess.run(install, check=True, env=env, timeout=110)
    return OtherPython(root, machine, site, emulator)
