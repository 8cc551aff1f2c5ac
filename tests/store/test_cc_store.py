"""The C table of a store: the header matches the library, a C program works through it, and errors
of a caller are only error codes."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ucm
from ucm.errors import BY_KIND, ClosedError
from ucm.store.empty import UcmEmptyStore
from ucm.store.posix import UcmPosixStore
from ucm.store.v0_over_v1 import V0OverV1
from ucm.utils import include_dir

HEADER = Path(include_dir()) / "ucm_store.h"
PROGRAM = Path(__file__).parent / "c" / "table_test.c"
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]


def compiler(*names: str) -> str:
    """A compiler of this machine; without one the test is skipped, or fails if all tests must
    run."""
    for name in names:
        if found := shutil.which(name):
            return found
    words = f"needs a C compiler: none of {', '.join(names)} is installed"
    if os.environ.get("UCM_REQUIRE_ROOT_TESTS"):
        pytest.fail(words)
    pytest.skip(words)


def run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C program, as a library in this process."""
    library = tmp_path_factory.mktemp("c") / "table_test.so"
    options = ["-std=c11", "-O1", *STRICT, "-fPIC", "-shared", f"-I{HEADER.parent}"]
    run(compiler("cc", "gcc", "clang"), *options, PROGRAM, "-o", library)
    loaded = ctypes.CDLL(str(library))
    for name in ("layout", "round_trip", "errors", "until_busy", "all_return", "until_closed"):
        function = getattr(loaded, f"table_{name}")
        function.restype = ctypes.c_int
        function.argtypes = [ctypes.c_void_p, ctypes.c_int32][
            : 2 if name in ("round_trip", "all_return") else 1
        ]
    return loaded


@pytest.fixture(params=["one shard", "a shard per layer"])
def store(request: pytest.FixtureRequest, common: dict[str, Any]) -> Iterator[UcmPosixStore]:
    pieces = [4096, 512]
    shard = sum(pieces) * (1 if request.param == "a shard per layer" else 3)
    with UcmPosixStore(
        common | {"tensor_size_list": pieces, "shard_size": shard, "block_size": 3 * sum(pieces)}
    ) as made:
        yield made


@pytest.mark.parametrize(
    ("names", "language", "standard"),
    [(("cc", "gcc"), "c", "c11"), (("c++", "g++"), "c++", "c++17")],
)
def test_the_header_compiles_by_itself(
    names: tuple[str, str], language: str, standard: str, tmp_path: Path
) -> None:
    source = tmp_path / "only.c"
    source.write_text(
        '#include "ucm_store.h"\n#include "ucm_store.h"\nint nothing(void);\nint nothing(void) {'
        " return 0; }\n"
    )
    run(
        compiler(*names),
        f"-std={standard}",
        *STRICT,
        "-x",
        language,
        "-fsyntax-only",
        f"-I{HEADER.parent}",
        source,
    )


def test_the_header_and_the_errors_agree() -> None:
    """Every code of the header is that of the Python error of the same kind, and none is
    missing."""
    text = HEADER.read_text()
    named = {
        name.lower(): int(code) for name, code in re.findall(r"#define UCM_(\w+) \((-\d+)\)", text)
    }
    kinds = {
        kind: error.code for kind, error in BY_KIND.items() if kind != "config"
    }  # the same number as invalid_input
    assert named == kinds


def test_the_library_is_what_the_header_says(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    table = store.cc_store()
    assert table == store.cc_store() != 0
    assert program.table_layout(table) == 0


def test_a_c_program_dumps_finds_and_loads(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    assert program.table_round_trip(store.cc_store(), 1) == 0
    first = (1).to_bytes(4, "little") + b"\x01" * 12
    assert store.lookup([first]) == [True], "Python sees what C stored"
    assert store.stats()["healthy"]


def test_many_threads_at_once(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    table = store.cc_store()
    with ThreadPoolExecutor(8) as pool:
        assert (
            list(pool.map(lambda seed: program.table_round_trip(table, seed), range(2, 18)))
            == [0] * 16
        )


def test_every_error_path(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    assert program.table_errors(store.cc_store()) == 0


def test_no_free_slot_is_busy(common: dict[str, Any], program: ctypes.CDLL) -> None:
    sizes = {
        "tensor_size": 65536,
        "shard_size": 65536,
        "block_size": 2 * 65536,
        "staging_capacity": "1MiB",
    }
    with UcmPosixStore(common | sizes) as store:
        assert program.table_until_busy(store.cc_store()) == BY_KIND["busy"].code


def test_calls_after_the_end_are_refused(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    table = store.cc_store()
    store.close()
    assert program.table_all_return(table, ClosedError.code) == 0
    with pytest.raises(ClosedError):
        store.cc_store()


def test_the_table_outlives_the_python_object(common: dict[str, Any], program: ctypes.CDLL) -> None:
    sizes = {"tensor_size": 64, "shard_size": 64, "block_size": 64}
    store = UcmPosixStore(common | sizes)
    table = store.cc_store()
    assert program.table_round_trip(table, 3) == 0
    del store  # it was not closed
    assert program.table_all_return(table, ClosedError.code) == 0
    with UcmPosixStore(common | sizes) as other:
        assert other.cc_store() != table, "an old table never becomes that of another store"
        assert program.table_all_return(table, ClosedError.code) == 0
        assert program.table_layout(other.cc_store()) == 0


def test_closing_while_others_call(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    table, codes = store.cc_store(), []
    threads = [
        threading.Thread(target=lambda: codes.append(program.table_until_closed(table)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join(60)
    assert codes == [ClosedError.code] * 4


def _in_child(program: ctypes.CDLL, table: int, answer: Any) -> None:
    answer.put(program.table_all_return(table, BY_KIND["forked"].code))


def test_a_forked_child_is_refused(store: UcmPosixStore, program: ctypes.CDLL) -> None:
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(program, store.cc_store(), answer))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answer.get() == 0
    assert program.table_layout(store.cc_store()) == 0


def test_statistics_are_json(store: UcmPosixStore) -> None:
    """By hand, as another language would: the field's place follows from the header."""
    words = ctypes.cast(store.cc_store(), ctypes.POINTER(ctypes.c_void_p))
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_size_t),
    )
    before = 6  # version and size, store, two sizes, two counts, piece_sizes
    stats, length = kind(words[before + 8] or 0), ctypes.c_size_t()
    text = ctypes.create_string_buffer(1 << 16)
    assert stats(words[1], text, len(text), ctypes.byref(length)) == 0
    assert length.value == len(text.value)
    assert set(json.loads(text.value)) == set(store.stats())


def test_who_has_a_table(store: UcmPosixStore) -> None:
    assert V0OverV1(store).cc_store() == store.cc_store()
    assert UcmEmptyStore({}).cc_store() == 0
    assert HEADER.is_relative_to(Path(ucm.__file__).parent), "it is in the wheel"
