"""Prints the number of lines; with ``--budget`` fails if there are too many.

* Rust: every line of ``crates/*/src`` without ``ucm-testkit``, without files of tests
  (``tests.rs``, ``tests_*.rs``, ``tests/``) and without modules under ``#[cfg(test)]``, including
  those in files of their own.
* Python: every line of ``python/ucm``, without re-exporting files of at most 5 lines.
* Benches: every line of Rust and Python in ``benches``.

The share of comment lines, including docstrings, is counted for the first two.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Most lines and files: today's counts. A change that deletes lowers them; code that grows past one
#: replaces other code. ``docs/lines.md`` has the goals, and what later features were allowed.
BUDGETS = {"Rust": 56_898, "Python": 41_993, "Python files": 133, "benches": 8_145}
#: Least share of comment lines, in percent.
LEAST_COMMENTS = 13.0
#: Longest file of Python that only re-exports.
RE_EXPORT = 5

#: Matches the begin of a module of tests, one in the same file, or the name of one in a file.
TEST_MODULE = re.compile(r"\s*#\[cfg\((?:all\()?test\b")
MODULE = re.compile(r"(?:\s*#\[[^\]]*\]\n)*\s*(?:pub(?:\(.*\))? )?mod \w+ \{$", re.M)
TEST_FILE = re.compile(TEST_MODULE.pattern + r".*\n\s*(?:pub(?:\(.*\))? )?mod (\w+);")


def is_test(path: Path) -> bool:
    """True if a file has only tests, by its name."""
    return "tests" in path.parts or path.stem == "tests" or path.stem.startswith("tests_")


def rust_sources() -> dict[Path, list[str | None]]:
    """The files of Rust that are built, below the root. The lines of a module of tests are None; it
    ends with the brace of its indentation."""
    texts = {
        path: path.read_text()
        for path in sorted((ROOT / "crates").glob("*/src/**/*.rs"))
        if not is_test(path.relative_to(ROOT))
    }
    tests = {
        (path.parent if path.stem in ("mod", "lib") else path.with_suffix("")) / f"{name}.rs"
        for path, text in texts.items()
        for name in TEST_FILE.findall(text)
    }
    return {
        path.relative_to(ROOT): _without_tests(text.splitlines())
        for path, text in texts.items()
        if path not in tests
    }


def _without_tests(lines: list[str]) -> list[str | None]:
    kept: list[str | None] = []
    end = ""
    for number, line in enumerate(lines):
        if end:
            kept.append(None)
            end = "" if line == end else end
        elif TEST_MODULE.match(line) and MODULE.match("\n".join(lines[number + 1 : number + 7])):
            kept.append(None)
            end = line[: len(line) - len(line.lstrip())] + "}"
        else:
            kept.append(line)
    return kept


def comments(path: Path, lines: Iterable[str]) -> int:
    """Lines that are comments, or part of a docstring."""
    if path.suffix == ".rs":
        return sum(line.lstrip().startswith("//") for line in lines)
    found = sum(line.lstrip().startswith("#") for line in lines)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            found += (text.end_lineno or text.lineno) - text.lineno + 1
    return found


def main() -> int:
    """Prints the table, and with ``--budget`` the exceeded budgets."""
    rust: dict[str, int] = {}
    counted = dict.fromkeys(BUDGETS, 0)
    commented = {"Rust": 0, "Python": 0}
    for path, sources in rust_sources().items():
        lines = [line for line in sources if line is not None]
        crate = path.parts[1]
        rust[crate] = rust.get(crate, 0) + len(lines)
        if crate != "ucm-testkit":
            counted["Rust"] += len(lines)
            commented["Rust"] += comments(path, lines)
    for path in (ROOT / "python" / "ucm").rglob("*.py"):
        lines = path.read_text().splitlines()
        if len(lines) > RE_EXPORT:
            counted["Python"] += len(lines)
            counted["Python files"] += 1
            commented["Python"] += comments(path, lines)
    for path in (ROOT / "benches").rglob("*"):
        if path.suffix in (".rs", ".py"):
            counted["benches"] += len(path.read_text().splitlines())
    for name, number in rust.items():
        print(f"{name:14} {number:6}")
    over = []
    for name, number in counted.items():
        print(f"{name:14} {number:6} of {BUDGETS[name]}")
        if number > BUDGETS[name]:
            over.append(f"{name}: {number}, the budget is {BUDGETS[name]}")
    for name, number in commented.items():
        share = 100 * number / counted[name]
        print(f"{name + ' comments':16} {share:4.1f} % of at least {LEAST_COMMENTS}")
        if share < LEAST_COMMENTS:
            over.append(f"comments in {name}: {share:.1f} %, at least {LEAST_COMMENTS}")
    if "--budget" in sys.argv[1:] and over:
        print("over the budget of lines (tools/lines.py):", *over, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
