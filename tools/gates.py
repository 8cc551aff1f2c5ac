"""Checks the structure of the repository; ``make lint`` runs it.

Each gate prints every place that fails. Exceptions are in ``gates.toml`` beside this file, with
reasons; an entry that is no longer needed fails too. For ``width`` and ``words`` an exception is
the number of lines or words in a file: a larger number fails, and so does a smaller one, so that
the list is lowered with it.

====== =====================================================================================
gate   rule
====== =====================================================================================
impls  the functions of one type stand in at most 2 files and are at most 40; a free function
       whose first argument is a reference to a type of its crate counts as one of them
names  a ``pub`` or ``pub(crate)`` type name stands once in the crate graph
circle the imports of files have no circle, in Rust and in Python; those within functions count
width  100 columns in code, comments and Markdown, tables excepted
words  comments, documents and strings use the field's words (``words`` in ``gates.toml``)
====== =====================================================================================

How many combinators and moving closures a crate has is printed, and fails nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
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
FIRST = re.compile(
    r"fn \w+(?:<[^(]*>)?\(\s*(?:mut )?\w+: &(?:'\w+ )?(?:mut )?(?:Arc<)?(?:[\w:]*::)?(\w+)"
)

#: Calls that chain an Option or a Result; the names that iterators have too are not counted.
COMBINATOR = re.compile(
    r"\.(?:and_then|filter_map|is_none_or|is_some_and|map_or|map_or_else|ok_or_else|then_some"
    r"|unwrap_or_else)\("
)
#: In Rust: a comment or a string, with its text; a character in quotes is neither.
RUST_TEXT = re.compile(
    r"//[/!]?([^\n]*)|'(?:\\[^\n]|[^\\'\n])'|r(#*)\"(.*?)\"\2|\"((?:\\.|[^\"\\])*)\"", re.S
)


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
            if module != inside and not (below and public):
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
    """The files that each file of the package imports from, at any time; imports for types alone
    are not counted."""
    paths = {
        path: ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        for path in tracked("python/ucm/*.py")
    }
    files = {name: path for path, name in paths.items()}
    edges: dict[str, set[str]] = defaultdict(set)
    for path, name in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in imports(ast.parse((ROOT / path).read_text())):
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


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below a node that can run."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in node.orelse if only_types else ast.iter_child_nodes(node):
        yield from imports(child)


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


def width() -> dict[str, tuple[int, str]]:
    """The files with lines of more than 100 columns: their number, and what to print."""
    found = {}
    for path in tracked("*.rs", "*.py", "*.pyi", "*.md"):
        lines = (ROOT / path).read_text().splitlines()
        long = [
            n for n, line in enumerate(lines, 1) if len(line) > COLUMNS and not FREE.search(line)
        ]
        if long:
            text = f"{len(long)} lines over {COLUMNS} columns: {long[:5]}"
            found[str(path)] = len(long), text
    return found


def prose() -> Iterator[tuple[Path, str]]:
    """The comments, documentation and strings of code, and the documents."""
    for path in tracked("crates/*.rs", "benches/*.rs"):
        parts = RUST_TEXT.finditer((ROOT / path).read_text())
        strings = "\n".join(part[1] or part[3] or part[4] or "" for part in parts)
        yield path, re.sub(r"\{\w+[:}]", "", strings)  # names of variables
    for path in tracked("*.py"):
        with (ROOT / path).open("rb") as file:
            tokens = tokenize.tokenize(file.readline)
            comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
        nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
        if path.parts[0] == "tests":  # whose other strings are data
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            strings = [ast.get_docstring(at) or "" for at in nodes if isinstance(at, documented)]
        else:
            constants = (node.value for node in nodes if isinstance(node, ast.Constant))
            strings = [value for value in constants if isinstance(value, str)]
        yield path, "\n".join(comments + strings)
    for path in tracked("*.md"):
        yield path, (ROOT / path).read_text()


def words(banned: list[str]) -> tuple[int, dict[str, Counter[str]]]:
    """The number of words of prose, and the private ones among them by file."""
    pattern = re.compile(r"\b(" + "|".join(banned) + r")\b", re.IGNORECASE)
    total, where = 0, {}
    for path, lines in prose():
        text = " ".join(re.sub(r"^#:? ", "", lines, flags=re.MULTILINE).split())
        total += len(re.findall(r"[A-Za-z']+", text))
        if found := Counter(word.lower() for word in pattern.findall(text)):
            where[str(path)] = found
    return total, where


def density(sources: dict[Path, list[str]]) -> str:
    """How many combinators and moving closures stand in 1000 lines, in all and by crate."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path, lines in sources.items():
        text = "\n".join(lines)
        for name in ("Rust", path.parts[1]):
            counts[name]["lines"] += sum(map(bool, lines))
            counts[name]["combinators"] += len(COMBINATOR.findall(text))
            counts[name]["closures"] += text.count("move |")
    return "combinators and `move |` a 1000 lines: " + ", ".join(
        f"{name} {1000 * n['combinators'] / n['lines']:.1f} {1000 * n['closures'] / n['lines']:.1f}"
        for name, n in counts.items()
        if n["lines"]
    )


def wrong(
    gate: str, found: dict[str, tuple[int, str]], allowed: dict[str, str | int]
) -> Iterator[str]:
    """The places that no exception allows, and the exceptions that are too large. An exception with
    a reason instead of a number allows any number."""
    for place, (number, text) in found.items():
        most = allowed.get(place, 0)
        if isinstance(most, int) and number > most:
            yield f"{gate}: {place}: {text}" + (f", at most {most}" if most else "")
        elif isinstance(most, int) and number < most:
            yield f"{gate}: {place}: {most} in tools/gates.toml, {number} is enough"
    for place in allowed.keys() - found.keys():
        yield f"{gate}: {place}: no longer needed in tools/gates.toml"


def main() -> int:
    """Run every gate; 1 if one fails."""
    known = tomllib.loads((ROOT / "tools/gates.toml").read_text())
    sources = rust()
    total, private = words(known["private words"])
    found = {
        gate: {place: (1, text) for place, text in places}
        for gate, places in {
            "impls": impls(sources),
            "names": names(sources),
            "circle": [*circles(rust_imports(sources)), *circles(python_imports())],
        }.items()
    }
    found["width"] = width()
    found["words"] = {
        path: (some.total(), ", ".join(f"{word} {n}" for word, n in some.most_common()))
        for path, some in private.items()
    }
    problems = [
        text
        for gate, places in found.items()
        for text in sorted(wrong(gate, places, known.get(gate, {})))
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    print(density(sources))
    count = sum(some.total() for some in private.values())
    print(
        f"{1000 * count / max(total, 1):.2f} private words a 1000 of {total}; "
        + ", ".join(f"{gate} {len(places)}" for gate, places in found.items())
        + " known"
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
