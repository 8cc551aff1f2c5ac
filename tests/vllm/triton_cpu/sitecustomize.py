"""Lets vLLM's V2 model runner start on a machine without an accelerator; on PYTHONPATH of such test
engines only.

The V2 runner needs Triton with an active driver. Triton's interpreter (``TRITON_INTERPRET=1``)
can run its kernels on the CPU, but announces no driver; this adds one in name, as soon as
``triton.backends`` is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from instruction_sets import pin


class _Driver:
    """A driver that says it is active; the interpreter uses nothing else of it."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then adds the backend."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        module.__dict__["backends"]["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``triton.backends`` once, through the finders behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


pin()
sys.meta_path.insert(0, _Finder())
