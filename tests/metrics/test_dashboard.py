"""``ucm dashboard``: the JSON of dashboards, its place in the package, and rules of alerts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from real_prometheus import of_dashboard, of_rules, panels_of, program

from ucm.cli import main
from ucm.errors import ConfigError
from ucm.metrics import file
from ucm.metrics.names import rows

HERE = Path(__file__).parent
#: Made by ``make picture``; the server there has no sparse attention, no proxy and no GPU.
PICTURE = HERE.parents[1] / "docs" / "dashboard.svg"
ABSENT = {"Sparse Ratio", "Prefill and Decode", "GPU"}
TEXT = {"type": "string", "minLength": 1}
SOURCE = {
    "type": "object",
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "required": ["type", "uid"],
}
TARGET = {
    "type": "object",
    "properties": {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "expr": TEXT,
        "datasource": SOURCE,
    },
    "required": ["refId", "expr", "datasource", "legendFormat"],
}
PANEL = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "gauge", "stat", "piechart", "table", "bargauge"]},
        "title": TEXT,
        "datasource": SOURCE,
        "gridPos": {
            "type": "object",
            "properties": {key: {"type": "integer", "minimum": 0} for key in "hwxy"},
            "required": list("hwxy"),
        },
        "fieldConfig": {
            "type": "object",
            "properties": {"defaults": {"type": "object"}, "overrides": {"type": "array"}},
            "required": ["defaults", "overrides"],
        },
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
    },
    "required": ["id", "type", "title", "gridPos", "fieldConfig", "options", "targets"],
}
#: What Grafana reads of a dashboard.
SCHEMA = {
    "type": "object",
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-z0-9-]{1,40}$"},
        "title": TEXT,
        "schemaVersion": {"type": "integer", "minimum": 36},
        "refresh": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
        "templating": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"required": ["name", "type"]}}},
        },
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
    },
    "required": ["uid", "title", "schemaVersion", "templating", "panels", "time"],
}
#: Panels that the seeds name, or the issue of operation.
PANELS = {
    *("Cache Hit Rate", "I/O Throughput", "Load and Dump Latency", "Memory Distribution"),
    *("Sparse Ratio", "Time to First Token", "Time per Output Token", "Throughput", "Breaker"),
    *("Misses by Reason", "Used Share of Capacity", "Saved Prefill", "GPU"),
}
SAMPLE = """
prometheus:
  scrape_interval: 30s
  metrics_path: /metrics
  port: 9090
grafana:
  dashboards:
    - name: Mine & Yours
      panels:
        - title: Cache Hit Rate
          type: gauge
          query: ucm_cache_hit_rate
        - title: Memory
          type: piechart
          query: ucm_memory_usage_bytes
"""


def printed(*words: str) -> str:
    """The output of ``ucm dashboard``."""
    done = CliRunner().invoke(main, ["dashboard", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_json_has_grafanas_shape_and_its_panels_do_not_overlap() -> None:
    board: dict[str, Any] = json.loads(printed())
    jsonschema.validate(board, SCHEMA)
    assert board["title"] == "UCM Overview"
    assert {panel["title"] for panel in board["panels"]} >= PANELS
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)


def test_the_file_in_the_package_is_what_the_command_prints() -> None:
    assert file.OVERVIEW_JSON.read_text() == printed(), (
        "run: ucm dashboard > python/ucm/metrics/overview.json"
    )


def test_grafanas_own_model_knows_every_key_and_value() -> None:
    from grafana_model import mistakes

    assert mistakes(json.loads(printed())) == []


@pytest.mark.parametrize(
    ("path", "value", "mistake"),
    [
        (("titel",), "x", "dashboard.panels.5.titel: not a key of Grafana's"),
        (("gridPos", "w"), "6", "dashboard.panels.5.grid_pos.w: '6' is no <class 'int'>"),
        (("fieldConfig", "defaults", "custom", "stacking"), {"mode": "norml"}, "'norml' is none"),
        (("fieldConfig", "defaults", "custom", "fillOpacity"), "30", "'30' is no <class 'float'>"),
        (("targets", 0, "expression"), "up", "dashboard.panels.5.targets.0.expression: not a key"),
        (("targets", 0, "format"), "tabel", "'tabel' is none of"),
        (("options", "legend"), {"showLegend": 1}, "show_legend: 1 is no <class 'bool'>"),
    ],
)
def test_the_check_by_grafanas_model_finds(
    path: tuple[str | int, ...], value: object, mistake: str
) -> None:
    from grafana_model import mistakes

    board = json.loads(printed())
    place: Any = board["panels"][5]
    assert place["type"] == "timeseries"
    *above, last = path
    for key in above:
        place = place[key]
    place[last] = value
    assert [text for text in mistakes(board) if mistake in text], mistakes(board)


def test_the_picture_of_the_page_has_the_panels_of_the_dashboard() -> None:
    drawn = panels_of(PICTURE)
    assert list(drawn) == [panel["title"] for panel in json.loads(printed())["panels"]]
    assert {panel for panel, text in drawn.items() if ">No data<" in text} == ABSENT
    assert PICTURE.stat().st_size < 100_000


def test_every_series_of_an_expression_is_one_of_ours_or_of_a_named_exporter() -> None:
    ours = {row.name: row.kind for _, found in rows() for row in found}
    recorded = {name for rule, name in of_rules() if rule == name}
    for text in [expr for _, expr in of_dashboard()] + [file.RULES.read_text()]:
        for name in re.findall(r"\bucm_(?!pd_first)[a-z_]+", text):
            known = {name, name.removesuffix("_bucket")} & set(ours)
            assert known, f"{name} is no metric"
        for name in re.findall(r"\bucm:[\w:]+", text):
            assert name in recorded, f"{name} is not recorded"


def test_a_metrics_file_of_the_seeds_makes_its_dashboard(tmp_path: Path) -> None:
    path = tmp_path / "metrics_configs.yaml"
    path.write_text(SAMPLE)
    board = json.loads(printed("--metrics-file", str(path)))
    jsonschema.validate(board, SCHEMA)
    assert (board["title"], board["uid"], board["refresh"]) == (
        "Mine & Yours",
        "mine-yours",
        "30s",
    )
    assert [panel["targets"][0]["expr"] for panel in board["panels"]] == [
        "ucm_cache_hit_rate",
        "ucm_memory_usage_bytes",
    ]
    assert file.read(path).prometheus.port == 9090


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grafana: {dashboards: [{name: a}]}", "grafana.dashboards.0.panels: Field required"),
        ("prometheus: {port: 0}", "prometheus.port"),
        ("prometheus: {prot: 1}", "prometheus.prot: Extra inputs are not permitted"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_wrong_metrics_file_is_refused_by_its_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "metrics.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        file.read(path)


def test_one_of_several_dashboards_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    panel = "panels: [{title: t, query: up}]"
    path.write_text(f"grafana: {{dashboards: [{{name: a, {panel}}}, {{name: b, {panel}}}]}}")
    assert json.loads(printed("--metrics-file", str(path), "--name", "b"))["title"] == "b"
    for words, said in (([], "one of: a, b"), (["--name", "c"], "there are: a, b")):
        done = CliRunner().invoke(main, ["dashboard", "--metrics-file", str(path), *words])
        assert done.exit_code == 2
        assert said in done.stderr


def test_rules_are_those_of_the_package_and_promtool_agrees() -> None:
    assert printed("--rules") == file.RULES.read_text()
    promtool = program("promtool")
    for words in (["check", "rules", str(file.RULES)], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *words], cwd=HERE, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test() -> None:
    tested = set(re.findall(r"alertname: (\w+)\n", (HERE / "alerts_test.yml").read_text()))
    alerts = {rule for rule, name in of_rules() if rule != name}
    assert alerts == tested
    assert len(alerts) == 6
