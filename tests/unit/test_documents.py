"""Commits, commands, paths and links that the documents name exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def _git(*words: str) -> str:
    run = subprocess.run(
        ("git", *words), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return run.stdout if run.returncode == 0 else ""


TRACKED = _git("ls-files").split()
#: A released archive has no repository, a shallow clone not every commit.
NO_HISTORY = "true" in _git("rev-parse", "--is-shallow-repository") or not TRACKED
FILES = TRACKED or [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*")]
DOCUMENTS = {name: (REPOSITORY / name).read_text() for name in FILES if name.endswith(".md")}
DIRECTORIES = {str(parent) for name in FILES for parent in Path(name).parents}

TEXT = [pytest.param(text, id=name) for name, text in sorted(DOCUMENTS.items())]
#: Files of other projects.
FOREIGN = {
    *("acl_base_rt.h", "acl_rt.h"),
    *("driver_types.h", "hip_runtime_api.h", "rt_error_codes.h"),
}
#: Names that documents use for files of a user or of a run.
MADE_BY_A_RUN = re.compile(
    r"^(build|dist|target|log|\.venv|\.tools|<|~|/)|ucm-root\.json|manifest\.json|\.(bin|seg|json|svg)$"
)


def _code(text: str) -> list[str]:
    """Spans between backquotes and lines of fenced blocks, a continued line joined."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return spans + [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@cache
def _source(directory: str) -> str:
    """All Python and Rust below a directory, in which an option of a program must stand."""
    files = (name for name in FILES if name.startswith(directory) and name.endswith((".py", ".rs")))
    return "\n".join((REPOSITORY / name).read_text() for name in files)


@pytest.mark.skipif(
    NO_HISTORY, reason="no repository with its whole history: commits cannot be looked up"
)
@pytest.mark.parametrize("text", TEXT)
def test_commits_exist(text: str) -> None:
    named = set(re.findall(r"\bcommits? ([0-9a-f]{7,40})\b", text))
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(
        r"(?<![\w#-])(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,8}(?![\w-])", prose
    )
    missing = {
        commit
        for commit in named | set(words)
        if not _git("cat-file", "-t", commit).startswith("commit")
    }
    assert not missing


MAKEFILE = (REPOSITORY / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*)(?: [a-z-]+)*:(?!=)", MAKEFILE, re.MULTILINE)) | set(
    re.findall(r"^[a-z-]+ ([a-z-]+):", MAKEFILE, re.MULTILINE)
)
BENCHES = set(
    re.findall(
        r'^\[\[bench\]\]\nname = "(\w+)"',
        (REPOSITORY / "benches/Cargo.toml").read_text(),
        re.MULTILINE,
    )
)
CRATES = {
    Path(name).parent.name for name in FILES if re.fullmatch(r"crates/[^/]+/Cargo.toml", name)
} | {"ucm-benches"}
COMMANDS = set(
    re.findall(r"^def (\w+)\(|add_parser\(\s*\"(\w+)\"", _source("python/ucm/cli/"), re.MULTILINE)
)
SUBCOMMANDS = {name.rstrip("_") for names in COMMANDS for name in names if name}


def _wrong(command: str) -> str:
    """The part of a command that does not exist, or nothing."""
    words = command.split()
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=\S*", words[0]):
        words = words[1:]
    if len(words) < 2:
        return ""
    program, rest = words[0], words[1:]
    if program == "make":
        targets = [word for word in rest if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
        return next((f"make has no target {word}" for word in targets if word not in TARGETS), "")
    if program == "cargo" and rest[0] in ("bench", "nextest", "test"):
        crate = re.search(r"-p (\S+)", command)
        if crate and crate[1] not in CRATES:
            return f"there is no crate {crate[1]}"
        bench = re.search(r"--bench (\w+)|-- (?!-)(\w+)", command) if rest[0] == "bench" else None
        name = bench and (bench[1] or bench[2])
        return f"there is no bench {name}" if name and name not in BENCHES else ""
    if program.endswith("python"):
        files = [word for word in rest if re.fullmatch(r"[\w.]+(/[\w.-]+)+", word)]
        if files and files[0].endswith(".py"):
            if files[0] not in FILES:
                return f"there is no {files[0]}"
            if program == "python" and not files[0].startswith(("tools/", "examples/")):
                return f"{files[0]} needs the environment: .venv/bin/python"
            source = _source(str(Path(files[0]).parent))
            return next(
                (
                    f"{files[0]} has no option {word}"
                    for word in rest
                    if word.startswith("--") and word not in source
                ),
                "",
            )
        return next(
            (
                f"there is no {file}"
                for file in files
                if file.rstrip("/") not in {*FILES, *DIRECTORIES}
            ),
            "",
        )
    if program == "ucm" and re.fullmatch(r"[a-z]+", rest[0]):
        return "" if rest[0] in SUBCOMMANDS else f"ucm has no command {rest[0]}"
    return ""


@pytest.mark.parametrize("text", TEXT)
def test_commands_exist(text: str) -> None:
    assert [problem for span in _code(text) if (problem := _wrong(span.split(" #")[0]))] == []


def test_a_command_that_is_gone_is_found() -> None:
    assert (
        _wrong("cargo bench -- engines")
        and _wrong("make nothing-of-the-kind")
        and _wrong("ucm undo /data")
    )
    assert _wrong("python benches/python/gone.py") and _wrong("python benches/python/idle.py")
    assert _wrong(".venv/bin/python benches/python/idle.py --no-such-option") and _wrong(
        "cargo test -p ucm-gone"
    )
    assert not _wrong("make test-long") and not _wrong("cargo bench -p ucm-benches --bench store")
    assert not _wrong(".venv/bin/python benches/python/idle.py --json") and not _wrong(
        "ucm verify /data/ucm"
    )


@pytest.mark.parametrize("text", TEXT)
def test_paths_exist(text: str) -> None:
    missing = []
    for span in _code(text):
        path = span.split("::")[0].rstrip("/")
        if not re.fullmatch(
            r"[\w.-]+(/[\w.*-]+)*\.(py|rs|md|toml|cu|ptx|txt|h)|[\w.-]+(/[\w.-]+)+/?", path
        ):
            continue
        if "." not in Path(path).name and path.split("/")[0] not in {
            name.split("/")[0] for name in FILES
        }:
            continue  # no path of ours: a name of a model, a branch, a fraction
        if MADE_BY_A_RUN.search(path) or path in FOREIGN:
            continue
        pattern = re.compile(r"(^|/)" + re.escape(path).replace(r"\*", "[^/]*") + r"$")
        if not any(pattern.search(name) for name in (*FILES, *DIRECTORIES)):
            missing.append(path)
    assert missing == []


def _anchors(text: str) -> set[str]:
    """Anchors of headings as forges make them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", head.lower().replace("`", "")).strip().replace(" ", "-")
        for head in heads
    }


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", DOCUMENTS[name])):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (REPOSITORY / name).parent / file if file else REPOSITORY / name
        if not path.exists() or (anchor and anchor not in _anchors(path.read_text())):
            broken.append(target)
    assert broken == []


PAGES = sorted(name for name in DOCUMENTS if re.fullmatch(r"docs/[\w-]+\.md", name))
MOST_WORDS = 1500


def test_the_architecture_is_short_and_has_a_glossary_of_twenty_words() -> None:
    text = DOCUMENTS["ARCHITECTURE.md"]
    assert len(text.encode()) <= 10_000
    words = re.findall(r"^\| ([^|]+) \|", text.partition("## Glossary")[2], re.MULTILINE)
    assert len(words) == 20 + len(["word"])


SYSTEM_CALLS = {"pwrite", "preadv"}


def _way() -> list[tuple[list[str], list[str]]]:
    """The functions and the files of each row about the way of a block."""
    rows = re.findall(
        r"^\| ([^|]*→[^|]*) \| ([^|]*) \|$", DOCUMENTS["ARCHITECTURE.md"], re.MULTILINE
    )
    quoted = [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]
    return [
        ([name for name in names if not name.startswith("ucm-")], files) for names, files in quoted
    ]


def _defines(text: str, name: str) -> bool:
    """Whether a source has a function: ``fn``, or ``Type::fn`` and ``Type.fn`` with the type."""
    owner, _, function = name.replace("::", ".").rpartition(".")
    block = rf"^(?:impl|class)\b[^\n]*\b{owner}\b.*?(?=^\S|\Z)"
    places = re.findall(block, text, re.MULTILINE | re.DOTALL) if owner else [text]
    return any(re.search(rf"\b(def|fn) {function}\b", place) for place in places)


def test_the_way_of_a_block_names_the_files_of_its_functions() -> None:
    """Each function of a row stands in one of its files, that of a class beside the class, and
    each file has one of them."""
    sources = [
        *(REPOSITORY / "python/ucm").rglob("*.py"),
        *(REPOSITORY / "crates").glob("*/src/**/*.rs"),
    ]
    assert len(_way()) >= 14
    for names, files in _way():
        found = set[str]()
        for file in files:
            texts = [path.read_text() for path in sources if str(path).endswith(f"/{file}")]
            here = {name for name in names if any(_defines(text, name) for text in texts)}
            assert here, f"{file} defines none of {names}"
            found |= here
        missing = set(names) - found - SYSTEM_CALLS
        assert not missing, f"{sorted(missing)} are not in {files}"


def test_the_way_of_a_block_is_that_of_its_backtrace() -> None:
    """``way.rs`` compares backtraces with two lists of functions."""
    source = (REPOSITORY / "crates/ucm-store/tests/way.rs").read_text()
    lists = re.findall(r"const (?:OUT|BACK): [^=]+= \[([^\]]*)\]", source)
    assert len(lists) == 2
    named = iter(re.split(r"::|\.", name)[-1] for names, _ in _way() for name in names)
    for text in lists:
        for name in re.findall(r'"(\w+)"', text):
            assert name in named, f"{name} is missing in ARCHITECTURE.md, or at another place"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_its_question(name: str) -> None:
    assert re.match(r"# .*\?.*\n", DOCUMENTS[name])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name: str) -> None:
    assert len(DOCUMENTS[name].split()) <= MOST_WORDS


def test_the_site_has_every_page() -> None:
    found = re.findall(r": ([\w-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(f"docs/{name}" for name in found) == PAGES


def test_the_figures_of_blend_are_the_same_on_every_page() -> None:
    """The page of Blend has the measurement; the others quote it."""
    row = re.search(r"^\| Blend \| .*$", DOCUMENTS["docs/blend.md"], re.MULTILINE)
    assert row is not None
    *_, times, skipped, _ = (cell.strip() for cell in row[0].split("|"))
    (promised,) = [line for line in _rows("docs/seed-figures.md") if "(blend.md#" in line]
    assert f"| {skipped} of the tokens; " in promised and f" {times} times as soon" in promised
    (quoted,) = [line for line in _rows("docs/performance.md") if "(blend.md#" in line]
    assert quoted.split("|")[3].strip() == f"{1 / float(times):.2f}"


def _rows(name: str) -> list[str]:
    """The rows of the tables of a page."""
    return [line for line in DOCUMENTS[name].splitlines() if line.startswith("|")]
