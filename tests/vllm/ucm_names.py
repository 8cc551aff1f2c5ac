"""Modules of vLLM that the code of ucm names."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def vllm_modules() -> list[str]:
    """Every module of vLLM from which any file of the package imports, wherever in it."""
    spec = importlib.util.find_spec("ucm")
    assert spec is not None and spec.origin is not None
    names: set[str] = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                names |= {node.module}
    return sorted(name for name in names if name.partition(".")[0] == "vllm")
