"""The refusals of ``tools/gates.py``, each in a small tree of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
KNOWN = '[words]\nmost = 2.0\nbanned = ["told"]\n'
GOOD = {
    "crates/one/src/lib.rs": "mod a;\nmod b;\npub use a::A;\n",
    "crates/one/src/a.rs": "use crate::b::B;\npub struct A(B);\nimpl A {\n    fn f(&self) {}\n}\n",
    "crates/one/src/b.rs": "pub struct B;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n",
    "python/ucm/one.py": '"""One."""\n\nfrom ucm import two\n',
    "python/ucm/two.py": '"""Two."""\n',
    "docs/page.md": "A sentence.\n",
}
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
            "impls: one::A: 41 functions",
            {"crates/one/src/a.rs": f"pub struct A;\nimpl A {{\n{FUNCTIONS}}}\n"},
        ),
        ("names: A: ", {"crates/two/src/lib.rs": "pub(crate) struct A;\n"}),
        (
            "circle: crates/one/src/a.rs: import each other: ",
            {"crates/one/src/b.rs": "use super::A;\npub struct B;\n"},
        ),
        (
            "circle: python/ucm/one.py: import each other: ",
            {"python/ucm/two.py": '"""Two."""\n\nfrom . import one\n'},
        ),
        ("width: docs/page.md: 1 lines", {"docs/page.md": "word " * 21 + "\n"}),
        ("docs/page.md: told 1", {"docs/page.md": "It is told.\n"}),
    ],
)
def test_what_is_out_of_shape_is_refused_and_named(
    gates: ModuleType,
    capsys: pytest.CaptureFixture[str],
    named: str,
    files: dict[str, str],
) -> None:
    assert refused(gates, files)
    assert named in capsys.readouterr().out


def test_an_exception_lets_its_place_pass_and_is_refused_once_it_is_not_needed(
    gates: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    known = '[width]\n"docs/page.md" = "a long word"\n' + KNOWN
    assert not refused(gates, {"docs/page.md": "word " * 21 + "\n"}, known)
    assert refused(gates, {}, known)
    assert "width: docs/page.md: no longer needed" in capsys.readouterr().out
