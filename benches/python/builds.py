"""Builds of ucm to compare: this tree's and that of a revision, each an unpacked wheel.

Both are made in the same way, by the same compiler, like released wheels. The revision is checked
out in a Git worktree below ``target/beside`` and keeps its compiled files for the next run. Each
has a directory of its own in ``PYTHONPATH``, before installed packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "target" / "beside"
#: Lines to show of a failed build's log.
SHOWN = 30


class BuildError(Exception):
    """There is no such build; the text has the reason."""


@dataclass(frozen=True)
class Build:
    """An importable build: Git's name, and the directory for ``PYTHONPATH``."""

    name: str
    site: Path

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of a process that imports this build and no other."""
        kept = {
            name: value for name, value in base.items() if not name.startswith(("PYTHON", "UCM_"))
        }
        return kept | {"PYTHONPATH": str(self.site)}


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"git {' '.join(arguments)}: {done.stderr.strip() or 'failed'}")
    return done.stdout.strip()


def commit_of(revision: str) -> str:
    """The commit that a revision names."""
    try:
        return _git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
    except BuildError:
        raise BuildError(f"there is no revision {revision!r} in this repository") from None


def of_revision(revision: str) -> Build:
    """The build of a revision; takes minutes the first time."""
    commit = commit_of(revision)
    place = PLACE / commit[:12]
    tree = place / "tree"
    if not (tree / ".git").exists():
        place.mkdir(parents=True, exist_ok=True)
        # Twice --force: also if one existed and its directory was removed.
        _git("worktree", "add", "--force", "--force", "--detach", str(tree), commit)
    return _built(_git("describe", "--always", commit), tree, place, place / "cargo")


def of_this_tree() -> Build:
    """The build of the current working tree, with uncommitted changes."""
    place = PLACE / "this-tree"
    return _built(_git("describe", "--always", "--dirty"), ROOT, place, ROOT / "target")


def _maturin() -> str:
    """The program, beside this interpreter, in the environment of the source tree, or anywhere."""
    places = [
        Path(sys.executable).parent,
        ROOT / ".venv" / "bin",
        *os.environ.get("PATH", "").split(os.pathsep),
    ]
    found = shutil.which("maturin", path=os.pathsep.join(map(str, places)))
    if found is None:
        raise BuildError("there is no maturin to build with: make lint sets one up in .venv")
    return found


def _built(name: str, tree: Path, place: Path, compiled: Path) -> Build:
    """A wheel of that tree, unpacked to ``site`` and imported once."""
    wheels, site, log = place / "wheel", place / "site", place / "build.log"
    for old in (wheels, site):
        shutil.rmtree(old, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    command = [_maturin(), "build", "--release", "--locked"]
    command += ["--interpreter", sys.executable, "--out", str(wheels)]
    _logged(command, log, f"{name} does not build", tree, {"CARGO_TARGET_DIR": str(compiled)})
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    build = Build(name, site)
    seen = (
        "import ucm._core, pathlib, sys; sys.exit(not"
        f" pathlib.Path(ucm.__file__).is_relative_to({str(site)!r}))"
    )
    _logged(
        [sys.executable, "-c", seen],
        log,
        f"{name} cannot be imported",
        place,
        build.environment({}),
    )
    return build


def _logged(
    command: Sequence[str], log: Path, failure: str, folder: Path, more: Mapping[str, str]
) -> None:
    """Runs a command; its output is in the log, and the end of it in the error."""
    with log.open("w") as out:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | dict(more),
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:])
        raise BuildError(f"{failure} (status {done.returncode}); the end of {log}:\n{end}")
