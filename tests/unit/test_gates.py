"""The refusals of ``tools/gates.py``, each in a small tree of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
KNOWN = '"private words" = ["told", "so many"]\n'
GOOD = {
    "crates/one/src/lib.rs": "mod a;\nmod b;\npub use a::A;\n",
    "crates/one/src/a.rs": "use crate::b::B;\npub struct A(B);\nimpl A {\n    fn f(&self) {}\n}\n",
    "crates/one/src/b.rs": "pub struct B;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n",
    "python/ucm/one.py": '"""One."""\n\nfrom ucm import two\n',
    "python/ucm/two.py": '"""Two."""\n',
    "docs/page.md": "A sentence.\n",
}
LONG = "word " * 21 + "\n"
FUNCTIONS = "".join(f"    fn f{n}(&self) {{}}\n" for n in range(41))


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in ("gates", "lines"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gates
    import lines

    for module in (gates, lines):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return gates


def refused(gates: ModuleType, files: dict[str, str], known: str = KNOWN) -> bool:
    for name, text in {**GOOD, **files, "tools/gates.toml": known}.items():
        path = gates.ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return bool(gates.main())


def test_a_tree_in_shape_passes(gates: ModuleType) -> None:
    assert not refused(gates, {})


@pytest.mark.parametrize(
    ("named", "files"),
    [
        (
            "impls: one::A: 3 functions in 3 files",
            {f"crates/one/src/{n}.rs": "fn g(a: &A) {}\n" for n in ("c", "d")},
        ),
        (
            "impls: one::A: 3 functions in 3 files",
            {f"crates/one/src/{n}.rs": "fn g(a: &Arc<A>) {}\n" for n in ("c", "d")},
        ),
        (
            "impls: one::A: 41 functions",
            {"crates/one/src/a.rs": f"pub struct A;\nimpl A {{\n{FUNCTIONS}}}\n"},
        ),
        ("names: A: ", {"crates/two/src/lib.rs": "pub(crate) struct A;\n"}),
        (
            "circle: crates/one/src/a.rs: import each other: ",
            {"crates/one/src/b.rs": "use super::A;\npub struct B;\n"},
        ),
        (
            "circle: crates/one/src/a.rs: import each other: ",
            {
                "crates/one/src/lib.rs": "mod a;\nmod b;\nuse a::A;\npub struct X(A);\n",
                "crates/one/src/a.rs": "use super::X;\npub struct A;\n",
            },
        ),
        (
            "circle: python/ucm/one.py: import each other: ",
            {"python/ucm/two.py": '"""Two."""\n\nfrom . import one\n'},
        ),
        (
            "circle: python/ucm/one.py: import each other: ",
            {"python/ucm/two.py": '"""Two."""\n\n\ndef f():\n    from ucm import one\n'},
        ),
        ("width: docs/page.md: 1 lines", {"docs/page.md": LONG}),
        ("words: docs/page.md: told 1", {"docs/page.md": "It is told.\n"}),
        ("words: docs/page.md: so many 1", {"docs/page.md": "There are so\nmany.\n"}),
        ("words: CHANGELOG.md: told 1", {"CHANGELOG.md": "It is told.\n"}),
        ("words: tests/test_a.py: told 1", {"tests/test_a.py": '"""It is told."""\n'}),
        (
            "words: tests/test_a.py: so many 1",
            {"tests/test_a.py": "# There are so\n# many.\nX = 1\n"},
        ),
        (
            "words: crates/one/src/b.rs: told 2",
            {"crates/one/src/b.rs": '/// Told.\npub struct B;\nconst T: &str = "it \\" told";\n'},
        ),
        ("words: python/ucm/two.py: told 1", {"python/ucm/two.py": 'X = "told"\n'}),
        ("words: python/ucm/two.py: told 1", {"python/ucm/two.py": "X = 1  # told\n"}),
    ],
)
def test_a_violation_fails_and_is_named(
    gates: ModuleType,
    capsys: pytest.CaptureFixture[str],
    named: str,
    files: dict[str, str],
) -> None:
    assert refused(gates, files)
    assert named in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ucm import one\n",
        'NOT_PROSE = f"{told}"\n',
        'NAMES = told["x"]\n',
    ],
)
def test_types_alone_and_names_of_variables_pass(gates: ModuleType, text: str) -> None:
    assert not refused(gates, {"python/ucm/two.py": text})


def test_data_of_tests_passes(gates: ModuleType) -> None:
    assert not refused(gates, {"tests/test_a.py": 'X = "told"\n'})


def test_in_rust_names_of_variables_and_characters_pass(gates: ModuleType) -> None:
    text = "pub struct B;\nfn told<'a>(told: &'a u8) -> char {\n    let told = '\"';\n    told\n}\n"
    shown = 'fn shown(told: u8) -> String {\n    format!("{told:?} {told}")\n}\n'
    assert not refused(gates, {"crates/one/src/b.rs": text + shown})


@pytest.mark.parametrize(
    ("gate", "one", "two"), [("width", LONG, LONG * 2), ("words", "told\n", "told told\n")]
)
def test_the_number_of_an_exception_only_falls(
    gates: ModuleType, capsys: pytest.CaptureFixture[str], gate: str, one: str, two: str
) -> None:
    known = f'{KNOWN}[{gate}]\n"docs/page.md" = 1\n'
    assert not refused(gates, {"docs/page.md": one}, known)
    assert refused(gates, {"docs/page.md": two}, known)
    assert f"{gate}: docs/page.md: " in capsys.readouterr().out
    known = known.replace("= 1", "= 2")
    assert refused(gates, {"docs/page.md": one}, known)
    assert f"{gate}: docs/page.md: 2 in tools/gates.toml, 1 is enough" in capsys.readouterr().out
    assert refused(gates, {}, known)
    assert f"{gate}: docs/page.md: no longer needed" in capsys.readouterr().out


def test_an_exception_with_a_reason_passes_until_it_is_not_needed(
    gates: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    known = f'{KNOWN}[names]\nA = "a reason"\n'
    assert not refused(gates, {"crates/two/src/lib.rs": "pub(crate) struct A;\n"}, known)
    assert refused(gates, {"crates/two/src/lib.rs": "pub(crate) struct C;\n"}, known)
    assert "names: A: no longer needed" in capsys.readouterr().out


def test_combinators_and_moving_closures_are_printed_and_fail_nothing(
    gates: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = "pub fn f(x: Option<u8>) {\n    x.map_or(1, move |y| y);\n}\n"
    tests = (
        "#[cfg(test)]\nmod tests {\n    fn g() {\n        None.map_or(1, move |y| y);\n    }\n}\n"
    )
    assert not refused(gates, {"crates/two/src/lib.rs": chain + "// x\n" * 7 + tests})
    assert "two 100.0 100.0" in capsys.readouterr().out
