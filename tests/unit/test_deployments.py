"""Compose files, the Deployment for Kubernetes and the image name what exists, and the engines in
them have configurations that ucm reads.

`make lint` checks the form of compose files, workflows and the Dockerfile.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ucm.config import load

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = sorted((REPOSITORY / "examples" / "compose").glob("*.yaml"))
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yaml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def configuration(command: list[str]) -> dict[str, Any]:
    """The section of ucm in the command of an engine."""
    given = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert (given["kv_connector"], given["kv_role"]) == ("UCMConnector", "kv_both")
    extra = given["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    return extra


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.stem)
def test_engines_of_a_compose_file(file: Path) -> None:
    services = yaml.safe_load(file.read_text())["services"]
    engines = {name: one for name, one in services.items() if name.startswith("engine-")}
    extras = [configuration(engine["command"]) for engine in engines.values()]
    assert len(extras) == 2
    assert extras[0] == extras[1]
    load(extras[0], {})
    words = services["balancer"]["command"]
    servers = [words[n + 1] for n, word in enumerate(words) if word == "--mixed"]
    assert servers == [f"http://{name}:8000" for name in engines]


def test_the_deployment() -> None:
    text = (REPOSITORY / "examples" / "kubernetes" / "engine.yaml").read_text()
    settings, deployment = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (engine,) = pod["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    file = Path(configuration(engine["args"])["UCM_CONFIG_FILE"])
    assert str(file.parent) == mounts["config"]
    given = yaml.safe_load(settings["data"][file.name])
    assert load(given, {}).store_config()
    assert given["storage_backends"] == mounts["kv"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_targets_that_exist(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text())["jobs"]
    assert list(jobs) == ["lint", "unit", "engines", "e2e", "wheels"]
    assert [job.get("needs") for job in jobs.values()] == [None, *list(jobs)[:-1]]
    run = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {word for line in run if line.startswith("make ") for word in line.split()[1:]}
    assert targets <= TARGETS


def test_files_that_the_image_copies_exist() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    named = re.findall(r"requirements/[\w.]+", text)
    assert named
    assert all((REPOSITORY / name).exists() for name in named)
