"""The connector's modules import each other in one direction: the order that its package documents,
without cycles."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ucm

PACKAGE = "ucm.integration.vllm.connector"
ROOT = Path(ucm.__file__).parent / "integration" / "vllm" / "connector"

#: Parts, each of which imports only those before it; a package is one part. The two sides do not
#: import each other.
ORDER: tuple[frozenset[str], ...] = (
    frozenset({"guard", "platforms"}),
    frozenset({"stores", "stats"}),
    frozenset({"identity"}),
    frozenset({"metadata", "groups"}),
    frozenset({"admission"}),
    frozenset({"scheduler", "worker"}),
    frozenset({"factory"}),
    frozenset({"connector"}),
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The connector's modules that a file imports, wherever in it, and for types only too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {
            name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")
        }
    return found & modules


def graph() -> dict[str, set[str]]:
    files = {name_of(path): path for path in ROOT.rglob("*.py") if path.name != "__init__.py"}
    return {name: imports_of(path, set(files)) for name, path in files.items()}


def test_there_are_no_cycles() -> None:
    modules = graph()
    assert len(modules) > 20
    assert len(list(TopologicalSorter(modules).static_order())) == len(modules)


def test_imports_point_downwards_only() -> None:
    level = {part: number for number, parts in enumerate(ORDER) for part in parts}
    wrong = [
        f"{importer} imports {imported}"
        for importer, imports in graph().items()
        for imported in imports
        if (above := importer.partition(".")[0]) != (below := imported.partition(".")[0])
        and level[below] >= level[above]
    ]
    assert wrong == []
