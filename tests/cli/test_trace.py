"""A trace of blocks: what is written, and what stores of other sizes hit of it."""

from __future__ import annotations

import itertools
import json
import random
import stat
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ucm.block_trace import POLICIES, BlockTrace, capacities, hit_rate, read_trace
from ucm.cli import main
from ucm.errors import ConfigError

Json = Callable[..., dict[str, Any]]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_trace_names_equal_blocks_equally_and_no_block_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first, second = BlockTrace(str(path)), BlockTrace(str(path))
    first.add(1.5, [key(1), key(2)])
    first.add(2.0, [key(1), key(3)])
    second.add(3.0, [key(1)])
    second.close()
    first.close()
    first.close()
    first.add(9.0, [key(4)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["t"] for line in lines] == [1.5, 2.0, 3.0]
    (one, two), (again, three), (other,) = (line["blocks"] for line in lines)
    assert one == again
    assert len({one, two, three, other}) == 4, "another process has other names"
    assert key(1).hex() not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_trace(path.read_text().splitlines()) == [[0, 1], [0, 2], [3]]


def test_a_line_that_is_cut_off_ends_a_trace(tmp_path: Path) -> None:
    good = '{"t":1,"blocks":["a","b"]}\n'
    assert read_trace([good, '{"t":2,"blo']) == [[0, 1]]
    for lines in (["x", good], ["x"], [good, '{"t": 1}\n', good]):
        with pytest.raises(ConfigError, match="is no request of a trace"):
            read_trace(lines)


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (tmp_path, "/dev/full"):
        trace = BlockTrace(str(path))
        trace.add(1.0, [key(1)])
        trace.add(1.0, [key(1)])
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"no trace of blocks is written: {tmp_path}: Is a directory",
        "the trace of blocks ends here: No space left on device",
    ]


def test_policies_differ_where_they_should() -> None:
    # A loop over one block more than fits: lru and fifo hit nothing, the best policy does.
    loop = [[0], [1], [2]] * 4
    assert (hit_rate(loop, 2, "lru"), hit_rate(loop, 2, "fifo")) == (0, 0)
    assert hit_rate(loop, 2, "best") == 6 / 12
    assert hit_rate(loop, 3, "lru") == hit_rate(loop, 3, "best") == 9 / 12
    # A block in steady use stays under lru alone.
    steady = [[0], [1], [0], [2], [0], [3], [0], [4], [0]]
    assert hit_rate(steady, 2, "lru") == 4 / 9 > hit_rate(steady, 2, "fifo")


def test_a_hit_is_a_prefix_and_beginnings_stay_longest() -> None:
    prompts = [[0, 1, 2, 3], [0, 1, 2, 3]]
    for policy in POLICIES:
        assert hit_rate(prompts, 3, policy) == 3 / 8, "of a prompt too long its end goes first"
    assert hit_rate([[0, 1], [2, 1]], 9) == 0, "what stands behind a miss is no hit"
    assert hit_rate([], 3) == 0


def test_no_policy_hits_more_than_the_best_and_room_never_hurts_it() -> None:
    draw = random.Random(7)
    for _ in range(60):
        trace = [[draw.randrange(6)] for _ in range(draw.randrange(1, 40))]
        rates = [hit_rate(trace, size, "best") for size in range(1, 7)]
        assert all(later >= earlier for earlier, later in itertools.pairwise(rates))
        for size, best in enumerate(rates, 1):
            assert all(hit_rate(trace, size, policy) <= best for policy in POLICIES)


def test_replay_prints_each_size_and_policy(tmp_path: Path, ucm: Any, ucm_json: Json) -> None:
    path, plot = tmp_path / "trace", tmp_path / "plot.svg"
    trace = BlockTrace(str(path))
    for number in [0, 1, 2, 3] * 3:
        trace.add(0.0, [key(number)])
    trace.close()
    out = ucm_json("trace", "replay", path, "--block-bytes", "1MiB", "--plot", plot)
    assert (out["requests"], out["asked"]) == (12, 12)
    assert [point["blocks"] for point in out["points"]] == [1, 2, 4] == capacities([[0, 1, 2, 3]])
    assert [point["bytes"] for point in out["points"]] == [1 << 20, 2 << 20, 4 << 20]
    assert [point["lru"] for point in out["points"]] == [0, 0, pytest.approx(8 / 12, abs=1e-6)]
    lines = ET.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")  # noqa: S314 - our own
    assert len(lines) == len(POLICIES)
    assert "66.7 %" in ucm("trace", "replay", path, "--capacity", "4").stdout
    assert ucm("trace", "replay", path, "--block-bytes", "many").exit_code == 2


def test_record_runs_the_command_with_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr("os.execvp", lambda program, words: calls.append((program, words)))
    monkeypatch.setenv("UCM_BLOCK_TRACE", "before")
    words = ["vllm", "serve", "m", "--port", "1"]
    result = CliRunner().invoke(main, ["trace", "record", str(tmp_path / "t"), *words])
    assert result.exit_code == 0, result.output
    assert calls == [("vllm", tuple(words))]
    import os

    assert os.environ["UCM_BLOCK_TRACE"] == str(tmp_path / "t")
