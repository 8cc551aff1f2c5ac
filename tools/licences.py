"""Writes THIRD-PARTY-LICENSES.txt: the licences of all third-party code that is linked into the
wheel.

Run it by hand after a change of Cargo.lock; with ``--check`` it only checks that the file is up to
date (a test does that). Needs cargo and the crates' sources, which every build has fetched, and no
network.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "THIRD-PARTY-LICENSES.txt"
#: Targets of wheels, and their crate.
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
FEATURES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["maturin"][
    "features"
]
CRATE = ["--package", "ucm-py", "--features", ",".join(FEATURES)]
#: The standard library is linked too; not every compiler ships its texts, so they are here.
STD = "Copyright (c) The Rust Project Contributors"

MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""

HEAD = """The compiled module of this package contains the software named below, whose licences follow. Where there is a
choice (OR) it is used under the licence whose text is given. Made by tools/licences.py from Cargo.lock."""


def cargo(*arguments: str) -> str:
    """The output of cargo, offline."""
    command = ["cargo", *arguments, "--locked", "--offline"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def linked() -> set[tuple[str, str]]:
    """Names and versions of the third-party crates in the module, on any target."""
    asked = [
        "tree",
        *CRATE,
        "--edges",
        "normal,no-proc-macro",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]
    lines = {line for target in TARGETS for line in cargo(*asked, "--target", target).splitlines()}
    crates = {tuple(line.split()[:2]) for line in lines if line.strip()}
    return {
        (name, version.removeprefix("v")) for name, version in crates if not name.startswith("ucm-")
    }


def texts(package: dict[str, str]) -> list[str]:
    """The licence texts of a package, without unneeded alternatives."""
    where = Path(package["manifest_path"]).parent
    files = sorted(
        path for path in where.iterdir() if re.match(r"(?i)licen[cs]e|copying|notice", path.name)
    )
    files = [path for path in files if path.is_file()]
    if " OR " in package["license"].replace("/", " OR "):
        files = [
            path for path in files if not re.search(r"(?i)apache|boost|a2", path.name)
        ] or files
    found = [
        textwrap.dedent(path.read_text(encoding="utf-8").expandtabs()).strip() for path in files
    ]
    if not found:
        raise SystemExit(
            f"{package['name']}: no licence text in its package; add its source to tools/licences.py"
            " one is"
        )
    return [re.sub(r"[ ]+$", "", text, flags=re.MULTILINE) for text in found]


def document() -> str:
    """The whole file."""
    packages = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    known = {(package["name"], package["version"]): package for package in packages}
    users: dict[str, list[str]] = {f"{STD}\n\n{MIT}": ["Rust standard library (MIT OR Apache-2.0)"]}
    for crate in sorted(linked()):
        package = known[crate]
        for text in texts(package):
            users.setdefault(text, []).append(f"{crate[0]} {crate[1]} ({package['license']})")
    parts = [HEAD]
    for text, names in users.items():
        parts.append("=" * 120 + "\n" + "\n".join(names) + "\n" + "-" * 120 + "\n\n" + text)
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Writes or checks the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if the file is out of date"
    )
    check: bool = parser.parse_args().check
    wanted = document()
    if not check:
        OUT.write_text(wanted, encoding="utf-8")
    elif not OUT.exists() or OUT.read_text(encoding="utf-8") != wanted:
        print(f"{OUT.name} is out of date; run: python tools/licences.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
