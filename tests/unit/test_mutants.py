"""The mutants of ``tests/mutants.py`` still fit the tree: each text occurs once, and each suite
exists."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


mutants = load()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_fits_the_tree(mutant: Any) -> None:
    assert mutants.file_of(mutant).is_file()
    assert "\n" not in mutant.text
    if isinstance(mutant.suite, mutants.Rust):
        assert (ROOT / "crates" / mutant.suite.crate / "Cargo.toml").is_file()
    else:
        assert all((ROOT / path).exists() for path in mutant.suite.paths)


def test_every_promise_has_a_mutant() -> None:
    assert len(mutants.MUTANTS) == 12
    assert {mutant.promise for mutant in mutants.MUTANTS} == set(range(1, 9))


def test_a_text_that_stands_twice_or_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "python/ucm").mkdir(parents=True)
    mutant = mutants.MUTANTS[0]
    with pytest.raises(LookupError, match="nowhere"):
        mutants.file_of(mutant, tmp_path)
    (tmp_path / "python/ucm/twice.py").write_text(2 * mutant.text)
    with pytest.raises(LookupError, match="one place"):
        mutants.file_of(mutant, tmp_path)
