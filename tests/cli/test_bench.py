"""``ucm bench``: what is sent to a server, what is measured, and when the status says "worse"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import Result
from stub_server import BLOCK, StubServer

from ucm.bench import BenchmarkMetrics
from ucm.bench.scenarios import SCENARIOS
from ucm.cli.bench import _value

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]
SMALL = ("--input", 64, "--output", 8, "--requests", 4, "--concurrency", 2)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def vllm(server: StubServer, *more: object, scenario: str = "short_high_concurrency") -> list[Any]:
    return ["bench", "vllm", "--url", server.url, "--scenario", scenario, *SMALL, *more]


def test_figures_of_a_run(server: StubServer, ucm_json: Json) -> None:
    found = ucm_json(*vllm(server, "--seed", "one"))
    assert found["exit"] == 0
    assert found["scenario"] | {"prompt_tokens": 64, "output_tokens": 8} == found["scenario"]
    assert [len(prompt) for prompt in server.prompts()] == [64] * 4
    assert len({tuple(prompt) for prompt in server.prompts()}) == 4
    (one,) = found["servers"]
    (run,) = one["runs"]
    assert (run["requests"], run["failed"]) == (4, 0)
    assert (run["prompt_tokens"], run["output_tokens"]) == (4 * 64, 4 * 8)
    metrics = found["metrics"]
    assert 0 < metrics["tpot_p50"] <= metrics["tpot_p99"]
    assert 0 < metrics["ttft_p50"] <= metrics["ttft_p99"]
    assert metrics["throughput"] / metrics["requests_per_second"] == pytest.approx(72)
    assert metrics["hit_rate"] == 0
    assert metrics["load_time_mean"] == 0.25
    assert metrics["dump_time_mean"] is None
    for request in server.requests:
        assert (request["stream"], request["ignore_eos"], request["temperature"]) == (True, True, 0)


def test_a_seed_determines_the_prompts_and_none_is_another(server: StubServer, ucm: Run) -> None:
    for more in (["--seed", "one"], ["--seed", "one"], [], []):
        assert ucm(*vllm(server, *more)).exit_code == 0
    first, again, *others = (
        {tuple(prompt) for prompt in server.prompts()[4 * n : 4 * n + 4]} for n in range(4)
    )
    assert first == again
    assert not first & others[0]
    assert not others[0] & others[1]


def test_requests_run_at_the_same_time(server: StubServer, ucm: Run) -> None:
    server.gate = 2  # answers begin when two requests are there
    assert ucm(*vllm(server)).exit_code == 0
    assert server.most_at_once == 2


def test_prefixes_are_shared(server: StubServer, ucm_json: Json) -> None:
    found = ucm_json(*vllm(server, "--input", 80, "--concurrency", 1, scenario="prefix_sharing"))
    assert len({tuple(prompt[:64]) for prompt in server.prompts()}) == 1
    assert len({tuple(prompt[64:]) for prompt in server.prompts()}) == 4
    hits = found["servers"][0]["runs"][0]["hits"]
    assert hits["all"] == found["metrics"]["hit_rate"] == pytest.approx(3 * 64 / (4 * 80))
    assert hits["device"] == pytest.approx(hits["all"] / 4)
    assert hits["store"] == pytest.approx(hits["all"] * 3 / 4)


def test_a_chat_has_the_answers_in_its_prompts(server: StubServer, ucm: Run) -> None:
    changes = ("--turns", 3, "--requests", 1, "--concurrency", 1)
    assert ucm(*vllm(server, *changes, scenario="multi_turn")).exit_code == 0
    first, second, third = server.prompts()
    assert [len(prompt) for prompt in (first, second, third)] == [64, 136, 208]
    assert second[:72] == [*first, *range(8)]
    assert third[:144] == [*second, *range(8)]


def test_questions_follow_the_same_document(server: StubServer, ucm: Run) -> None:
    changes = ("--turns", 3, "--requests", 2, "--concurrency", 1)
    assert ucm(*vllm(server, *changes, scenario="document_qa")).exit_code == 0
    prompts = server.prompts()
    assert [len(prompt) for prompt in prompts] == [128] * 6
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 6


def test_four_fifths_are_computed_before(server: StubServer, ucm_json: Json) -> None:
    found = ucm_json(*vllm(server, "--input", 5 * BLOCK, scenario="hit80"))
    warmed, asked = server.prompts(output=1), server.prompts(output=8)
    assert [len(prompt) for prompt in warmed] == [4 * BLOCK] * 4
    assert {tuple(p) for p in warmed} == {tuple(p[: 4 * BLOCK]) for p in asked}
    assert found["metrics"]["hit_rate"] == pytest.approx(0.8)
    assert server.resets == 2  # the first try met a busy engine
    (run,) = found["servers"][0]["runs"]
    assert run["device_cache_emptied"] is True
    assert run["requests"] == 4  # the warming is not measured


def test_a_server_that_keeps_its_cache_is_named(server: StubServer, ucm: Run) -> None:
    server.may_reset = False
    done = ucm(*vllm(server, "--warm", 1))
    assert done.exit_code == 0
    assert "VLLM_SERVER_DEV_MODE=1" in done.stdout
    assert "100.0 %" in done.stdout


def test_without_metrics_hits_are_those_of_the_answers(server: StubServer, ucm_json: Json) -> None:
    server.has_metrics = False
    found = ucm_json(*vllm(server, "--input", 80, "--concurrency", 1, scenario="prefix_sharing"))
    assert found["metrics"]["hit_rate"] == pytest.approx(3 * 64 / (4 * 80))
    assert found["metrics"]["load_time_mean"] is None
    assert found["servers"][0]["runs"][0]["hits"]["store"] is None


def test_two_servers_take_turns(server: StubServer, tmp_path: Path, ucm_json: Json) -> None:
    order: list[str] = []

    def begun(name: str, one: StubServer) -> None:
        begin = one.begin

        def count(body: dict[str, Any]) -> int:
            order.append(name)
            return begin(body)

        one.begin = count  # type: ignore[method-assign]

    plot = tmp_path / "plot.svg"
    with StubServer() as other:
        begun("a", server)
        begun("b", other)
        found = ucm_json(*vllm(server, "--compare", other.url, "--rounds", 6, "--plot", plot))
        assert "".join(order) == "".join(4 * turn for turn in "abbaabbaabba")
        ours, theirs = ({tuple(p) for p in one.prompts()} for one in (server, other))
        assert not ours & theirs  # neither finds the other's in a store that both have
        assert [one["url"] for one in found["servers"]] == [server.url, other.url]
    assert [len(one["runs"]) for one in found["servers"]] == [6, 6]
    ratios = found["ratios"]
    assert ratios["load_time_mean"] == {"ratio": 1.0, "interval": [1.0, 1.0]}
    low, high = ratios["ttft_mean"]["interval"]
    assert low <= ratios["ttft_mean"]["ratio"] <= high
    tree = ET.parse(plot)  # noqa: S314 - our own file
    lines = tree.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4  # two panels, two servers
    assert other.url in plot.read_text()


def test_the_table_of_two_servers(server: StubServer, ucm: Run) -> None:
    with StubServer() as other:
        done = ucm(*vllm(server, "--compare", other.url, "--rounds", 1))
    assert done.exit_code == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()[2:]}
    assert rows["load_time_mean"][1:] == ["250.00", "ms", "250.00", "ms", "1.000", "-"]


def test_a_ratio_to_no_hits_is_unknown(
    server: StubServer, tmp_path: Path, ucm: Run, ucm_json: Json
) -> None:
    server.has_cache = False
    path = tmp_path / "saved.json"
    with StubServer() as other:
        more = ("--compare", other.url, "--rounds", 6, "--save", path)
        command = vllm(server, *more, scenario="prefix_sharing")
        found = ucm_json(*command)
        table = ucm(*command).stdout
    rates = [one["metrics"]["hit_rate"] for one in found["servers"]]
    assert rates[0] == 0 < rates[1]
    assert found["ratios"]["hit_rate"] == {"ratio": None, "interval": None}
    assert "Infinity" not in path.read_text()
    (row,) = (line.split() for line in table.splitlines() if line.startswith("  hit_rate"))
    assert row[1:3] == ["0.0", "%"]
    assert row[-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.25, "0.25 /s"), (31.4159, "31.42 /s"), (2540.4, "2,540 /s"), (12170.0, "12,170 /s")],
)
def test_speeds_are_printed_as_people_read_them(rate: float, shown: str) -> None:
    assert _value("throughput", rate) == shown


def test_a_baseline_names_what_is_worse(server: StubServer, tmp_path: Path, ucm_json: Json) -> None:
    path = tmp_path / "baseline.json"
    found = ucm_json(*vllm(server, "--save", path))
    saved = json.loads(path.read_text())
    assert saved == {key: value for key, value in found.items() if key != "exit"}
    metrics = saved["metrics"]
    for name in metrics:  # so that no figure is worse, whatever the machine does
        if name.startswith(("ttft", "tpot")):
            metrics[name] = 1e6
        elif name in ("throughput", "requests_per_second"):
            metrics[name] = 1e-6
    path.write_text(json.dumps(saved))
    better = ucm_json(*vllm(server, "--baseline", path))
    assert (better["exit"], better["worse"]) == (0, {})
    metrics["load_time_mean"] = 0.2  # and it is 0.25
    metrics["requests_per_second"] = 1e9
    path.write_text(json.dumps(saved))
    worse = ucm_json(*vllm(server, "--baseline", path))
    assert worse["exit"] == 1
    assert list(worse["worse"]) == ["requests_per_second", "load_time_mean"]
    assert worse["worse"]["load_time_mean"]["regression"] == pytest.approx(0.25)
    lenient = ucm_json(*vllm(server, "--baseline", path, "--threshold", 0.3))
    assert list(lenient["worse"]) == ["requests_per_second"]


def test_the_text_names_what_is_worse(server: StubServer, tmp_path: Path, ucm: Run) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"metrics": vars(BenchmarkMetrics(*[1e6] * 6, 1e-6, 1e-6, 0.5))}))
    done = ucm(*vllm(server, "--baseline", path))
    assert done.exit_code == 1
    assert "hit_rate is worse than the baseline by 100 %: 0.0 %, was 50.0 %" in done.stdout


def test_a_baseline_of_another_scenario_is_refused(
    server: StubServer, tmp_path: Path, ucm: Run
) -> None:
    path = tmp_path / "baseline.json"
    assert ucm(*vllm(server, "--save", path)).exit_code == 0
    asked = len(server.requests)
    done = ucm(*vllm(server, "--output", 9, "--baseline", path))
    assert done.exit_code == 2
    assert "output_tokens 8 (now 9)" in done.stderr
    path.write_text("{}")
    done = ucm(*vllm(server, "--baseline", path))
    assert done.exit_code == 2
    assert "no figures of `ucm bench vllm`" in done.stderr
    assert len(server.requests) == asked


def test_failed_requests_are_counted(ucm: Run) -> None:
    with StubServer(fails_after=3) as server:
        done = ucm(*vllm(server))
    assert done.exit_code == 1
    assert "1 failed: status 503" in done.stdout
    assert "no room" in done.stdout


def test_a_server_that_answers_nothing_is_one_sentence(ucm: Run) -> None:
    with StubServer(fails_after=0) as server:
        done = ucm(*vllm(server))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "status 503" in done.stderr
    gone = ucm(*vllm(server))
    assert gone.exit_code == 2
    assert "does not list its models" in gone.stderr


def test_a_scenario_that_does_not_fit_is_refused(server: StubServer, ucm: Run) -> None:
    done = ucm("bench", "vllm", "--url", server.url, "--scenario", "document_qa")
    assert done.exit_code == 2
    assert "needs 100192 tokens for a request and stub has 4096" in done.stderr
    assert not server.requests
    assert ucm(*vllm(server, "--model", "other")).exit_code == 2


def test_the_key_is_sent(server: StubServer, ucm: Run) -> None:
    assert ucm(*vllm(server, "--api-key", "secret")).exit_code == 0
    assert set(server.keys) == {"Bearer secret"}


def test_the_scenarios_have_the_promised_figures() -> None:
    figures = {
        name: (one.prompt_tokens, one.output_tokens, one.concurrency, one.prefix_ratio)
        for name, one in SCENARIOS.items()
    }
    assert figures["short_high_concurrency"] == (512, 128, 32, 0)
    assert figures["long_low_concurrency"] == (8192, 1024, 4, 0)
    assert figures["prefix_sharing"] == (4096, 512, 16, 0.8)
    chat = SCENARIOS["multi_turn"]
    assert (chat.turns, chat.prompt_tokens + chat.output_tokens) == (10, 500)
    assert SCENARIOS["document_qa"].prompt_tokens == 100_000
    assert (SCENARIOS["hit80"].prompt_tokens, SCENARIOS["hit80"].output_tokens) == (4000, 1024)
    assert (SCENARIOS["hit80"].concurrency, SCENARIOS["hit80"].warmed) == (8, 0.8)


def test_without_the_extra_it_is_one_sentence() -> None:
    code = "import sys\nsys.modules['httpx'] = None\nfrom ucm.cli import main\nmain(sys.argv[1:])\n"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "vllm", "--url", "localhost:1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'ucm-kv[bench]'" in done.stderr


# A store and a device
# --------------------------------------------------------------------------------------------------


def test_a_store_beside_files_and_memory(tmp_path: Path, ucm_json: Json) -> None:
    sizes = ("--blocks", 4, "--block", "64KiB", "--rounds", 6)
    found = ucm_json("bench", "store", tmp_path, *sizes, "-o", "layout=file")
    assert found["exit"] == 0
    assert (found["store"], found["pieces"], found["piece_bytes"]) == ("UcmPosixStore", 4, 65536)
    assert {row["name"]: row["beside"] for row in found["rows"]} == {
        "dump, staged": "memcpy",
        "load": "memcpy",
        "dump, published": "files written",
        "load again": "files read",
    }
    for row in found["rows"]:
        assert row["bytes_per_second"] > 0
        low, high = row["interval"]
        assert low <= row["ratio"] <= high
    assert not list(tmp_path.iterdir())  # nothing is left


def test_a_store_that_cannot_be_measured(tmp_path: Path, ucm: Run) -> None:
    done = ucm("bench", "store", tmp_path / "none")
    assert done.exit_code == 2
    assert "is no directory" in done.stderr
    done = ucm("bench", "store", tmp_path, "-o", "layuot=file", "--rounds", 1)
    assert done.exit_code == 2
    assert "layuot" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_store_that_loads_other_bytes_is_found(
    tmp_path: Path, ucm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucm.bench import local

    rows = local._addresses
    monkeypatch.setattr(local, "_addresses", lambda memory: rows(memory)[[1, 0]])
    given = iter([False, True])  # the dump is in order, the first load is not
    monkeypatch.setattr(
        local, "_addresses", lambda memory: rows(memory)[[1, 0]] if next(given) else rows(memory)
    )
    done = ucm("bench", "store", tmp_path, "--blocks", 2, "--block", "4KiB", "--rounds", 1)
    assert done.exit_code == 2
    assert "other bytes" in done.stderr


def test_the_host_is_a_device(ucm: Run, ucm_json: Json, tmp_path: Path) -> None:
    sizes = ("--platform", "cpu", "--pieces", 8, "--piece", "4KiB", "--rounds", 1)
    found = ucm_json("bench", "device", *sizes)
    assert (found["device"], found["pieces"]) == ("host", 8)
    names = [row["name"] for row in found["rows"]]
    assert names[:2] == ["one copy to the host", "one copy to the device"]
    assert {"gather, auto", "scatter, dma"} <= set(names)
    assert all(row["interval"] is None for row in found["rows"])
    text = ucm("bench", "device", *sizes).stdout
    assert text.startswith("host: 8 of 4,096 bytes each")
    command = [sys.executable, "-m", "ucm", "bench", "device", "--platform", "cuda"]
    missing = os.environ | {"UCM_TEST_DRIVER": str(tmp_path / "no driver")}
    done = subprocess.run(command, env=missing, capture_output=True, text=True, check=False)
    assert (done.returncode, "cannot be opened" in done.stderr) == (2, True)
