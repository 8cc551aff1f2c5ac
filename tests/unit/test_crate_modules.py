"""The modules directly below the root of each Rust crate use each other in one direction (a
directory is one module).

And no struct has too many fields.
"""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

CRATES = Path(__file__).resolve().parents[2] / "crates"

#: Plain records of options, counters or a format may be long.
PLAIN = {
    "EngineConfig",
    "StoreSpec",
    "PosixOptions",
    "ObjectOptions",
    "Stats",
    "RecordHeader",
    "Table",
}

#: Most fields of any other struct.
MOST_FIELDS = 12

TEST_MODULE = re.compile(r"#\[cfg\([^\]]*test[^\]]*\)\]\s*mod \w+ \{.*?\n\}\n", re.DOTALL)
STRUCT = re.compile(
    r"^( *)(?:pub(?:\([^)]*\))? )?struct (\w+)[^;{(]*\{\n(.*?)^\1\}", re.MULTILINE | re.DOTALL
)
FIELD = re.compile(r"^ +(?:pub(?:\([^)]*\))? )?\w+: ", re.MULTILINE)


def sources(crate: Path) -> dict[Path, str]:
    """The text of each file that is built, without comments and modules of tests."""
    found = {}
    for path in (crate / "src").rglob("*.rs"):
        if "tests" not in path.parts and not path.stem.startswith("tests"):
            found[path.relative_to(crate / "src")] = re.sub(
                "//.*", "", TEST_MODULE.sub("", path.read_text())
            )
    return found


def used(text: str, start: str) -> set[str]:
    """The first names of all paths that begin with ``start``, in lists of them too."""
    names = set(re.findall(rf"\b{start}::(\w+)", text))
    for group in re.findall(rf"\b{start}::\{{([^;]*)\}};", text):
        names |= set(re.findall(r"(?:^|[,{])\s*(\w+)", group))
    return names


def graph(crate: Path) -> dict[str, set[str]]:
    """The uses between modules directly below a crate's root; a directory is one module."""
    uses: dict[str, set[str]] = {}
    files = sources(crate)
    # A re-export of the root counts for its own module.
    passed_on = {
        name: module
        for module, group in re.findall(r"\buse (\w+)::(\w+|\{[^;]*\});", files[Path("lib.rs")])
        for name in re.findall(r"\w+", group)
    }
    for path, text in files.items():
        if path.name == "lib.rs":
            continue
        names = used(text, "crate")
        if len(path.parts) == 1 or path.parts[1:] == ("mod.rs",):
            names |= used(text, "super")
        names |= {passed_on[name] for name in names if name in passed_on}
        uses.setdefault(path.parts[0].removesuffix(".rs"), set()).update(names)
    return {module: (names & set(uses)) - {module} for module, names in uses.items()}


@pytest.mark.parametrize(
    "crate", sorted(path.name for path in CRATES.iterdir() if (path / "src").is_dir())
)
def test_modules_have_no_cycles(crate: str) -> None:
    modules = graph(CRATES / crate)
    assert len(list(TopologicalSorter(modules).static_order())) == len(modules) >= 3


def test_there_are_edges_to_judge() -> None:
    modules = graph(CRATES / "ucm-media")
    assert modules["segment"] >= {"shared", "backend"}
    assert "posix" not in modules["shared"]


def test_no_struct_is_a_heap() -> None:
    fields = [
        (name, len(FIELD.findall(body)))
        for crate in CRATES.iterdir()
        for text in sources(crate).values()
        for _, name, body in STRUCT.findall(text)
    ]
    assert len(fields) > 200
    assert {name for name, count in fields if count > MOST_FIELDS} == PLAIN


@pytest.mark.parametrize(
    "crate", sorted(path.parents[1].name for path in CRATES.glob("*/tests/main.rs"))
)
def test_every_test_file_is_built(crate: str) -> None:
    """With ``autotests = false`` cargo ignores a file without a target."""
    directory = CRATES / crate / "tests"
    manifest = (CRATES / crate / "Cargo.toml").read_text()
    programs = {Path(path) for path in re.findall(r'path = "tests/(.*)"', manifest)}
    built = set(programs)
    for program in programs:
        text = (directory / program).read_text()
        built |= {Path(f"{name}.rs") for name in re.findall(r"^mod (\w+);", text, re.MULTILINE)}
    assert {path.relative_to(directory) for path in directory.glob("*.rs")} <= built
