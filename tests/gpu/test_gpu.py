"""The checks of ``checks.py``: over a GPU if there is one, and over replacements, to test the
checks themselves.

In a run of its own (``make test-py``): a process loads its driver once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from checks import CHECKS  # noqa: E402
from places import WORDS, MissingError, Place, place  # noqa: E402

BENCH = HERE.parents[1] / "benches" / "python" / "gpu.py"


@pytest.fixture(scope="module", params=WORDS)
def where(request: pytest.FixtureRequest) -> Place:
    try:
        return place(request.param)
    except MissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(where: Place, check: Callable[[Place, bool], str]) -> None:
    assert check(where, where.word != "cuda")


@pytest.mark.timeout(300)
def test_the_bench_runs(where: Place, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH), "--device", where.word, "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["direction"] for row in rows} == {"to device", "to host"}
    assert {"dma", "sm", "staging", "auto"} <= set(rows[0]["ratios"])
    assert all(ratio > 0 for row in rows for ratio in row["ratios"].values())


def test_without_a_gpu_the_scripts_say_so() -> None:
    try:
        place("cuda")
    except MissingError as missing:
        for script in [HERE / "checks.py", BENCH]:
            done = subprocess.run(
                [sys.executable, str(script)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0 and f"skipped, all of it: {missing}" in done.stdout
    else:
        pytest.skip("there is a GPU")
