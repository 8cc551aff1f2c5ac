"""Promise 7: no object of vLLM's own modules and classes is replaced; its official extension points
are enough.

This scan of the source is fast and blind to aliases; ``tests/vllm/test_plugin.py`` compares vLLM's
objects themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "ucm"


def replaced(source: str) -> list[str]:
    """Names below those imported from vLLM that the code assigns to, deletes or sets by
    ``setattr``."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    theirs = set(_imported(nodes))
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "delattr",
            "patch.object",
        ):
            found += node.args[:1]
    return [text for text in map(ast.unparse, found) if text.split(".")[0].split("[")[0] in theirs]


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (
                alias.asname or alias.name.split(".")[0]
                for alias in node.names
                if alias.name.split(".")[0] == "vllm"
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (alias.asname or alias.name for alias in node.names)


def test_nothing_of_vllm_is_replaced() -> None:
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert any("from vllm" in source for source in sources.values())
    assert {
        path.name: replaced(source) for path, source in sources.items() if replaced(source)
    } == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vllm.v1.engine as engine\nengine.core.run = print", ["engine.core"]),
        ("import vllm.v1\nvllm.v1.run = print", ["vllm.v1"]),
        ("from vllm.v1.request import Request\nsetattr(Request, 'x', 1)", ["Request"]),
        ("def f():\n    from vllm import LLM\n    del LLM.generate", ["LLM"]),
        ("from vllm import LLM\nmine = LLM\nself.x = LLM.y", []),
    ],
)
def test_what_counts_as_replacing(source: str, found: list[str]) -> None:
    assert replaced(source) == found
