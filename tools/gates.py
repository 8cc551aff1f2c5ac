"""Checks the structure of the repository; ``make lint`` runs it.

Each gate prints every place that fails. Exceptions are in ``gates.toml`` beside this file, with
reasons; an entry that is no longer needed fails too.

====== =====================================================================================
gate   rule
====== =====================================================================================
impls  the functions of one type stand in at most 2 files and are at most 40; a free function
       whose first argument is a reference to a type of its crate counts as one of them
names  a ``pub`` or ``pub(crate)`` type name stands once in the crate graph
circle the imports of files have no circle, in Rust and in Python
width  100 columns in code, comments and Markdown, tables excepted
words  comments, documents and messages use the field's words (``words`` in ``gates.toml``)
====== =====================================================================================
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from lines import rust_sources

ROOT = Path(__file__).resolve().parents[1]
FILES, METHODS, COLUMNS = 2, 40, 100
#: Lines that may be longer: tables, addresses, and directives for tools at the end of a line.
FREE = re.compile(r"^[ >/!]*\||https?://|# (noqa|type:)")
TYPE = re.compile(r"^\s*pub(?:\(crate\))? (?:struct|enum|union|trait|type) (\w+)")
IMPL = re.compile(r"^(\s*)(?:unsafe )?impl(?:<.*?>)? (?:.*? for )?(?:[\w:]*::)?(\w+)")
FUNCTION = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?(?:async )?(?:unsafe )?fn (\w+)")
FIRST = re.compile(r"fn \w+(?:<[^(]*>)?\(\s*(?:mut )?\w+: &(?:'\w+ )?(?:mut )?(?:[\w:]*::)?(\w+)")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository whose names match, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [Path(name) for name in listed.stdout.split("\n") if (ROOT / name).is_file() and name]


def rust() -> dict[Path, list[str]]:
    """The product's Rust: the lines of each file; those of tests are empty."""
    return {
        path: [line or "" for line in lines]
        for path, lines in rust_sources().items()
        if path.parts[1] != "ucm-testkit"
    }


def impls(sources: dict[Path, list[str]]) -> Iterator[tuple[str, str]]:
    """Types with too many functions, or with functions in too many files."""
    types = defaultdict(set)
    for path, lines in sources.items():
        for line in lines:
            if found := re.match(r"\s*(?:pub(?:\([^)]*\))? )?(?:struct|enum) (\w+)", line):
                types[path.parts[1]].add(found[1])
    places: dict[tuple[str, str], Counter[Path]] = defaultdict(Counter)
    for path, lines in sources.items():
        crate, owner, depth = path.parts[1], "", ""
        for number, line in enumerate(lines):
            if found := IMPL.match(line):
                # The functions of a trait belong to the trait.
                depth, owner = found[1], "" if " for " in line.split("{")[0] else found[2]
            elif owner and line == depth + "}":
                owner = ""
            elif found := FUNCTION.match(line):
                if owner and len(found[1]) == len(depth) + 4:
                    places[crate, owner][path] += 1
                elif not found[1]:
                    head = " ".join(part.strip() for part in lines[number : number + 3])
                    first = FIRST.search(head)
                    if first and first[1] in types[crate]:
                        places[crate, first[1]][path] += 1
    for (crate, name), files in sorted(places.items()):
        if len(files) > FILES or sum(files.values()) > METHODS:
            most = ", ".join(f"{path} {n}" for path, n in files.most_common(4))
            yield (
                f"{crate}::{name}",
                f"{sum(files.values())} functions in {len(files)} files: {most}",
            )


def names(sources: dict[Path, list[str]]) -> Iterator[tuple[str, str]]:
    """Type names that are used for several types."""
    places = defaultdict(list)
    for path, lines in sources.items():
        for number, line in enumerate(lines):
            found = TYPE.match(line)
            if found and not any(
                "cfg(" in above or "pyclass" in above for above in lines[number - 4 : number]
            ):
                places[found[1]].append(f"{path}:{number + 1}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield name, "stands for several types: " + ", ".join(where)


def rust_imports(sources: dict[Path, list[str]]) -> dict[str, set[str]]:
    """The files that each file of a crate imports from. Names that a parent re-exports count for
    their own file; ``mod`` and ``pub use`` of a parent do not count."""
    modules = {}
    for path in sources:
        inside = path.relative_to(Path(*path.parts[:3])).with_suffix("").parts
        inside = inside[:-1] if inside[-1] in ("mod", "lib", "main") else inside
        modules[path.parts[1], inside] = path
    exported: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = defaultdict(dict)
    uses: dict[Path, list[tuple[tuple[str, ...], bool]]] = {}
    for (crate, inside), path in modules.items():
        uses[path] = []
        for statement in re.findall(
            r"^\s*((?:pub(?:\([^)]*\))? )?use [^;]+);", "\n".join(sources[path]), re.M
        ):
            for parts in expand(statement.split("use ", 1)[1]):
                target = resolve(parts, inside)
                if target is None and (crate, (*inside, parts[0])) in modules:
                    target = (*inside, *parts)
                if target is None:
                    continue
                uses[path].append((target, statement.startswith("pub")))
                if target[: len(inside)] == inside and len(target) > len(inside):
                    exported[crate, inside][target[-1]] = target
    edges: dict[str, set[str]] = defaultdict(set)
    for (crate, inside), path in modules.items():
        for target, public in uses[path]:
            at = target
            for _ in range(8):
                module = next(
                    (at[:n] for n in range(len(at), -1, -1) if (crate, at[:n]) in modules), ()
                )
                further = (
                    exported[crate, module].get(at[len(module)]) if len(at) > len(module) else None
                )
                if further is None or further == at:
                    break
                at = further + at[len(module) + 1 :]
            below = module[: len(inside)] == inside and len(module) > len(inside)
            if module != inside and not (below and (public or path.name in ("mod.rs", "lib.rs"))):
                edges[str(path)].add(str(modules[crate, module]))
    return edges


def resolve(parts: tuple[str, ...], inside: tuple[str, ...]) -> tuple[str, ...] | None:
    """A path in its crate from the root on; None for another crate's."""
    if parts[0] == "crate":
        return parts[1:]
    at = inside
    while parts and parts[0] in ("super", "self"):
        at = at[:-1] if parts[0] == "super" else at
        parts = parts[1:]
        if not parts or parts[0] not in ("super", "self"):
            return (*at, *parts)
    return None


def expand(tree: str) -> Iterator[tuple[str, ...]]:
    """The paths of a tree of ``use``."""
    tree = re.sub(r"//[^\n]*", "", tree).strip()
    head, brace, rest = tree.partition("{")
    if not brace:
        path = re.sub(r"\s+as\s+\w+", "", tree).strip()
        if path:
            yield tuple(
                part.strip()
                for part in path.split("::")
                if part.strip() not in ("*", "self") or (part == "self" and path.startswith("self"))
            )
        return
    depth, item = 0, ""
    for char in rest:
        if char == "}" and depth == 0:
            break
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            yield from expand(head + item)
            item = ""
        else:
            item += char
    if item.strip():
        yield from expand(head + item)


def python_imports() -> dict[str, set[str]]:
    """The files that each file of the package imports from when it is imported; imports within
    functions and for types alone are not counted."""
    paths = {
        path: ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        for path in tracked("python/ucm/*.py")
    }
    files = {name: path for path, name in paths.items()}
    edges: dict[str, set[str]] = defaultdict(set)
    for path, name in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in at_import(ast.parse((ROOT / path).read_text()).body):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = (
                    package.split(".")[: len(package.split(".")) - node.level + 1]
                    if node.level
                    else []
                )
                module = ".".join([*base, *([node.module] if node.module else [])])
                targets = [
                    f"{module}.{a.name}" if f"{module}.{a.name}" in files else module
                    for a in node.names
                ]
            own = (files.get(target) for target in targets)
            edges[str(path)] |= {str(target) for target in own if target and target != path}
    return edges


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run with the module."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from at_import(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )


def circles(edges: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Files that import each other: one circle after the other, each without the edges of the
    earlier ones."""
    left = {node: set(others) for node, others in edges.items()}
    while True:
        try:
            TopologicalSorter({node: sorted(left[node]) for node in sorted(left)}).prepare()
        except CycleError as error:
            group = sorted(set(error.args[1]))
            yield group[0], "import each other: " + ", ".join(group)
            for node in group:
                left[node] -= set(group)
        else:
            return


def width() -> Iterator[tuple[str, str]]:
    """Lines of more than 100 columns."""
    for path in tracked("*.rs", "*.py", "*.pyi", "*.md"):
        lines = (ROOT / path).read_text().splitlines()
        long = [
            n for n, line in enumerate(lines, 1) if len(line) > COLUMNS and not FREE.search(line)
        ]
        if long:
            yield str(path), f"{len(long)} lines over {COLUMNS} columns, the first ones: {long[:5]}"


def prose() -> Iterator[tuple[Path, str]]:
    """The comments and documentation of code, and the documents."""
    for path in tracked("crates/*.rs", "benches/*.rs"):
        yield path, "\n".join(re.findall(r"//[/!]?(.*)", (ROOT / path).read_text()))
    for path in tracked("python/*.py", "benches/*.py", "tools/*.py"):
        text = (ROOT / path).read_text()
        comments = re.findall(r"#:? (.*)", text)
        strings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text))
                   if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]  # fmt: skip
        yield path, "\n".join(comments + strings)
    for path in tracked("*.md"):
        yield path, (ROOT / path).read_text()


def words(banned: dict[str, str]) -> tuple[int, int, dict[Path, Counter[str]]]:
    """The number of words of prose, the number of private ones among them, and the latter by
    file."""
    pattern = re.compile(r"\b(" + "|".join(banned) + r")\b", re.IGNORECASE)
    total, where = 0, {}
    for path, text in prose():
        if path.parts[0] in ("tests", "CHANGELOG.md"):
            continue
        total += len(re.findall(r"[A-Za-z']+", text))
        if found := Counter(word.lower() for word in pattern.findall(text)):
            where[path] = found
    return total, sum(sum(found.values()) for found in where.values()), where


def main() -> int:
    """Run every gate; 1 if one fails."""
    known = tomllib.loads((ROOT / "tools/gates.toml").read_text())
    sources = rust()
    found = {
        "impls": dict(impls(sources)),
        "names": dict(names(sources)),
        "circle": dict([*circles(rust_imports(sources)), *circles(python_imports())]),
        "width": dict(width()),
    }
    failed = 0
    for gate, places in found.items():
        allowed = known.get(gate, {})
        for place, text in places.items():
            if place not in allowed:
                failed += 1
                print(f"{gate}: {place}: {text}")
        for place in allowed.keys() - places.keys():
            failed += 1
            print(f"{gate}: {place}: no longer needed in tools/gates.toml")
    total, private, where = words(known["words"]["banned"])
    rate = 1000 * private / max(total, 1)
    if rate > known["words"]["most"]:
        failed += 1
        print(f"words: {rate:.1f} private words a 1000, at most {known['words']['most']}; most in:")
        for path, some in sorted(where.items(), key=lambda item: -item[1].total())[:20]:
            print(f"  {path}: " + ", ".join(f"{word} {n}" for word, n in some.most_common(6)))
    print(
        f"{rate:.1f} private words a 1000 of {total}; "
        + ", ".join(f"{gate} {len(places)}" for gate, places in found.items())
        + " known"
    )
    return failed > 0


if __name__ == "__main__":
    if "--words" in sys.argv[1:]:
        banned = tomllib.loads((ROOT / "tools/gates.toml").read_text())["words"]["banned"]
        for path, some in sorted(words(banned)[2].items()):
            print(f"{path}: " + ", ".join(f"{word} {n}" for word, n in some.most_common()))
        sys.exit(0)
    sys.exit(main())
