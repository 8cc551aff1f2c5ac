"""A real Prometheus over endpoints of a test, with the rules of the wheel; and the expressions of
the dashboard and of the rules."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import unescape
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import yaml
from ends_with_us import Group
from ports import free_port
from required_servers import missing_server

from ucm.metrics.file import OVERVIEW, RULES, read

#: Seconds; only a hang reaches it.
DEADLINE = 60.0


def program(name: str) -> str:
    """The path of a program of Debian's package ``prometheus``."""
    found = shutil.which(name)
    if found is None:
        missing_server(f"{name} is not installed (apt-get install prometheus)")
    return found


def of_dashboard() -> list[tuple[str, str]]:
    """Panels and their expressions, with Grafana's variables replaced."""
    return [
        (panel.title, query.expr.replace("$model", ".*").replace("$__rate_interval", "1m"))
        for board in read(OVERVIEW).grafana.dashboards
        for panel in board.panels
        for query in panel.query
    ]


def of_rules() -> list[tuple[str, str]]:
    """Recorded series, and the recorded series that alerts compare."""
    found = []
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            name = rule.get("record") or re.split(r" [<>=]+ ", rule["expr"])[0]
            found.append((rule.get("alert", name), name))
    return found


def panels_of(picture: Path) -> dict[str, str]:
    """The parts of a picture of ``tools/panels.py``, by the titles of panels."""
    parts = picture.read_text().split("<g ")[1:]
    return {unescape(re.findall(r"<text[^>]*>([^<]+)", part)[0]): part for part in parts}


class Prometheus:
    """A running one."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url, self._client = url, client

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        answer = self._client.get(f"{self.url}/api/v1/{path}", params=parameters)
        return answer.raise_for_status().json()["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an expression now, one for each series."""
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]

    def wait_for(
        self, expressions: dict[str, str], work: Callable[[], object], deadline: float = DEADLINE
    ) -> None:
        """Wait until each expression returns a series; ``work`` is done again and again."""
        missing, end = dict(expressions), time.monotonic() + deadline
        while missing := {one: name for one, name in missing.items() if not self.values(one)}:
            assert time.monotonic() < end, f"without a series: {missing}"
            work()
            Event().wait(0.05)


def until(so: Callable[[], bool], what: str) -> None:
    """Wait until something is so. An endpoint that answers late has no series until its next
    answer."""
    end = time.monotonic() + DEADLINE
    while not so():
        assert time.monotonic() < end, f"never: {what}"
        Event().wait(0.05)


@contextmanager
def prometheus(directory: Path, *targets: str, every: str = "200ms") -> Iterator[Prometheus]:
    """Prometheus, scraping ``host:port`` this often, with the rules of the wheel."""
    command = program("prometheus")
    directory.mkdir(parents=True, exist_ok=True)
    often = {"scrape_interval": every, "evaluation_interval": every}
    config = {
        "global": often | {"scrape_timeout": every},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "ucm", "static_configs": [{"targets": list(targets)}]}],
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    words = [
        command,
        f"--config.file={path}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        group = Group(words, stdout=log, stderr=log)
    with group, httpx.Client(trust_env=False, timeout=DEADLINE) as client:
        made = Prometheus(f"http://127.0.0.1:{port}", client)

        def answers() -> bool:
            text = (directory / "prometheus.log").read_text()
            assert group.process.poll() is None, text[-3000:]
            with suppress(httpx.HTTPError):
                made.get("status/buildinfo")
                return True
            return False

        until(answers, "Prometheus answers")
        yield made
