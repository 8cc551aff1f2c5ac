"""Stage 2: figures of `ucm bench vllm`, and none is worse than in a baseline if one is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from e2e_target import Target

from ucm.bench.scenarios import SCENARIOS
from ucm.cli import main

pytestmark = [pytest.mark.stage(2), pytest.mark.feature("performance")]

#: Figures for a server whose requests are shorter than those of the scenario.
SMALL = ["--input", "640", "--output", "16"]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_four_fifths_of_each_prompt_are_hits(
    target: Target, given: Callable[[str], str | None], tmp_path: Path, concurrency: int
) -> None:
    """``--report`` keeps the documents; ``--baseline`` is a directory of such documents."""
    directory = Path(given("--report") or tmp_path)
    directory.mkdir(parents=True, exist_ok=True)
    name = f"hit80-{concurrency}.json"
    command = ["bench", "vllm", "--url", target.url, "--scenario", "hit80"]
    command += ["--concurrency", str(concurrency), "--requests", str(concurrency)]
    most = target.max_model_len
    command += SMALL if most is not None and most < SCENARIOS["hit80"].longest else []
    command += ["--save", str(directory / name), "--plot", str(directory / f"{name}.svg")]
    if baseline := given("--baseline"):
        command += ["--baseline", str(Path(baseline) / name)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    print(done.stdout)
    found = json.loads((directory / name).read_text())
    for figure in ("ttft_mean", "tpot_mean", "throughput", "requests_per_second"):
        assert found["metrics"][figure] > 0
    (run,) = found["servers"][0]["runs"]
    assert run["requests"] == concurrency
    if run["hits"]["all"] is not None:
        assert 0.6 < run["hits"]["all"] < 0.9
    if run["device_cache_emptied"] and run["hits"]["device"] is not None:
        assert run["hits"]["device"] < 0.1
        assert found["metrics"]["load_time_mean"] > 0
