"""The metrics file: where ``/metrics`` is served without vLLM, and panels of dashboards. ``ucm
dashboard`` makes Grafana's JSON of the panels.

Our own is ``overview.yaml`` beside this module; ``metrics.config_path`` names another.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ucm.errors import ConfigError

HERE = Path(__file__).parent
#: The dashboard "UCM Overview" as a metrics file and as Grafana imports it, and rules of alerts.
OVERVIEW, OVERVIEW_JSON, RULES = (
    HERE / name for name in ("overview.yaml", "overview.json", "alerts.yml")
)
#: Columns of Grafana's grid, and height of a panel.
COLUMNS, HEIGHT = 24, 8
#: Widths of the types that are small; others have half a row.
WIDTHS = {"gauge": 6, "stat": 6, "piechart": 6, "table": 12}
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Query(_Section):
    """One expression, and the name of its series; ``{{label}}`` in it is a label's value."""

    expr: str = Field(min_length=1)
    legend: str = ""


def _queries(value: Any) -> Any:
    return [{"expr": value}] if isinstance(value, str) else value


class Panel(_Section):
    """A panel: its title, Grafana's type, and a query or several."""

    title: str
    type: Literal["timeseries", "gauge", "stat", "piechart", "table", "bargauge"] = "timeseries"
    query: Annotated[tuple[Query, ...], BeforeValidator(_queries), Field(min_length=1)]
    unit: str = "short"
    max: float | None = None
    stack: bool = False
    description: str = ""


class Dashboard(_Section):
    """A dashboard."""

    name: str = Field(min_length=1)
    panels: tuple[Panel, ...]


class Grafana(_Section):
    """The dashboards of a metrics file."""

    dashboards: tuple[Dashboard, ...] = ()


class Prometheus(_Section):
    """Where and how often metrics are read."""

    scrape_interval: Annotated[str, Field(pattern=r"^[0-9]+(ms|s|m|h)$")] = "15s"
    metrics_path: Annotated[str, Field(pattern="^/")] = "/metrics"
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class MetricsFile(_Section):
    """A metrics file."""

    prometheus: Prometheus = Prometheus()
    grafana: Grafana = Grafana()


def read(path: str | Path) -> MetricsFile:
    """The metrics file at ``path``. Raises :class:`~ucm.errors.ConfigError` with what is wrong in
    it."""
    try:
        raw = yaml.safe_load(Path(path).read_text())
        return MetricsFile.model_validate(raw or {})
    except OSError as error:
        raise ConfigError(f"the metrics file {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the metrics file {path} is no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise ConfigError(f"the metrics file {path}: {where}: {first['msg']}") from error


def dashboard(of: Dashboard, refresh: str) -> dict[str, Any]:
    """Grafana's JSON of a dashboard. Grafana requests a Prometheus when it imports it."""
    panels, x, y = [], 0, 0
    for number, panel in enumerate(of.panels, 1):
        width = WIDTHS.get(panel.type, COLUMNS // 2)
        if x + width > COLUMNS:
            x, y = 0, y + HEIGHT
        place = {"h": HEIGHT, "w": width, "x": x, "y": y}
        panels.append(_panel(panel, number, place))
        x += width
    return {
        "uid": re.sub(r"[^a-z0-9]+", "-", of.name.lower()).strip("-")[:40],
        "title": of.name,
        "tags": ["ucm", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": refresh,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _VARIABLES},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


_VARIABLES: list[dict[str, Any]] = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": PROMETHEUS,
        "query": {"query": "label_values(ucm_asked_blocks_total, model_name)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    },
]


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    instant = panel.type != "timeseries"
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": PROMETHEUS,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if panel.type == "table" else {}),
        }
        for at, query in enumerate(panel.query)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {}}
    if panel.max is not None:
        defaults["max"] = panel.max
    if panel.stack:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    options: dict[str, Any] = {}
    if panel.type in ("gauge", "stat", "piechart", "bargauge"):
        options["reduceOptions"] = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        "description": panel.description,
        "datasource": PROMETHEUS,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }
