"""The page of what is cached is made from a table. Each test that the table names has marks with
the same cells, and no test has a mark with others."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import matrix
import pytest

TESTS = Path(matrix.__file__).parents[1] / "tests"
VERSIONS = set(matrix.OTHER_VERSIONS)
#: What each test of the table is named for: pairs of a kind, by an example of it, and a form.
CELLS: dict[str, set[tuple[str, str]]] = {}
for kind in matrix.KINDS:
    for form, cell in kind.in_forms():
        if cell.test:
            CELLS.setdefault(cell.test, set()).add((kind.such_as, form))


def words(call: ast.Call) -> list[str | None]:
    """The arguments of a call, all of which are written out."""
    return [ast.literal_eval(argument) for argument in call.args]


def shown() -> dict[str, set[tuple[str | None, str]]]:
    """What each test says of itself by ``pytest.mark.shows``: pairs of a kind and a form. A kind is
    None if the test takes the models from the table."""
    found: dict[str, set[tuple[str | None, str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.shows" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                name = f"{path.relative_to(TESTS.parent)}::{node.name}"
                for one in node.decorator_list:
                    if isinstance(one, ast.Call) and ast.unparse(one.func) == "pytest.mark.shows":
                        kind, *forms = words(one)
                        found.setdefault(name, set()).update((kind, str(form)) for form in forms)
    return found


SHOWN = shown()


def test_the_page_is_made_from_the_table() -> None:
    command = [sys.executable, matrix.__file__, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_old_page_is_found() -> None:
    page = matrix.PAGE.read_text()
    assert matrix.written(page) == page
    assert matrix.written(page.replace("Gemma 3 | engines", "Gemma 3 | no")) == page
    with pytest.raises(LookupError, match="others"):
        matrix.written(page.replace("<!-- others: made", "<!-- of others: written"))


@pytest.mark.parametrize("test", sorted(CELLS.keys() | SHOWN.keys()))
def test_a_test_shows_what_the_table_says(test: str) -> None:
    """No less and no more."""
    says = SHOWN.get(test, set())
    own = {pair for pair in says if pair[0] is not None}
    taken = {form for kind, form in says if kind is None}
    named = {pair for pair in CELLS.get(test, set()) if pair[1] not in taken}
    assert own == named, f"pytest.mark.shows of {test}, and tools/matrix.py"
    assert taken <= {form for _, form in CELLS.get(test, set())}, "the table has none of these"


@pytest.mark.parametrize(
    "test", sorted(test for test, says in SHOWN.items() if any(kind is None for kind, _ in says))
)
def test_a_test_that_takes_its_models_from_the_table_takes_them_of_its_own_cells(test: str) -> None:
    calls = [
        words(node)
        for node in ast.walk(ast.parse((TESTS.parent / test.partition("::")[0]).read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("matrix.models_of", "matrix.forms_of")
    ]
    assert [test] in calls


@pytest.mark.parametrize("test", sorted(CELLS))
def test_cells_of_engines_name_tests_of_engines(test: str) -> None:
    said = {cell.shown for kind in matrix.KINDS for _, cell in kind.in_forms() if cell.test == test}
    assert said == {"engines" if test.startswith("tests/vllm/") else "types"}


@pytest.mark.parametrize(
    "test", sorted(test for test, cells in CELLS.items() if VERSIONS & {form for _, form in cells})
)
def test_cells_of_other_versions_name_tests_that_run_there(test: str) -> None:
    file, _, name = test.partition("::")
    if file.startswith("tests/vllm_unit/"):  # all of them
        recipe = (TESTS.parent / "Makefile").read_text().partition("\ntest-versions:")[2]
        assert "tests/vllm_unit" in recipe.partition("\n\n")[0]
        return
    tree = ast.parse((TESTS.parent / file).read_text())
    (found,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    marks = {ast.unparse(one) for one in found.decorator_list}
    if any(kind is None for kind, _ in SHOWN.get(test, ())):
        marks |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "pytest.mark.versions" in marks


def test_every_cell_has_a_test_or_a_refusal() -> None:
    cells = [cell for kind in matrix.KINDS for _, cell in kind.in_forms()]
    assert all(bool(cell.test) != bool(cell.refused) for cell in cells)
