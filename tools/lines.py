"""Prints how many lines of Rust each crate has: what is built, without tests.

Counted is every line of ``crates/*/src`` but files of tests (``tests.rs``, ``tests_*.rs``,
``tests/``) and modules under ``#[cfg(test)]``.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def is_test(path: Path) -> bool:
    """Whether a file holds nothing but tests."""
    return "tests" in path.parts or path.stem == "tests" or path.stem.startswith("tests_")


def built(path: Path) -> int:
    """Lines of a file that are no tests: a module of them ends with the brace that stands where it
    began."""
    count, end = 0, ""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        follows = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if end:
            end = "" if line == end else end
        elif (
            line.strip().startswith("#[cfg(")
            and "test" in line
            and follows.startswith("mod ")
            and follows[-1] == "{"
        ):
            end = line[: len(line) - len(line.lstrip())] + "}"
        else:
            count += 1
    return count


def main() -> None:
    """One line for each crate, and their sum."""
    crates = {}
    for crate in sorted((ROOT / "crates").iterdir()):
        files = (
            path for path in (crate / "src").rglob("*.rs") if not is_test(path.relative_to(crate))
        )
        crates[crate.name] = sum(map(built, files))
    for name, lines in [*crates.items(), ("all", sum(crates.values()))]:
        print(f"{name:14} {lines:6}")


if __name__ == "__main__":
    main()
