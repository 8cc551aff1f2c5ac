"""The programs and configurations in ``examples`` run as a user starts them.

``offline.py`` runs once for every configuration, in a process that has imported vLLM already. The
addresses of the configurations are replaced by those of servers that are started here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ends_with_us import Group
from harness import EngineHost, machine_lock, run_program
from models import llama_config, write_model
from plain_profile import events_of
from ports import free_port
from served import write_tokenizer
from specs import PATIENT

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Tokens of a prompt, and those of them in whole blocks that vLLM does not compute.
TOKENS, REUSED = 500, 480
#: On a busy machine a load takes longer than the tiny model computes.
UNHURRIED = {"deadlines": PATIENT, "admission": "always"}
#: What ``offline.py`` passes to an engine of the tiny model.
ENGINE = {"dtype": "float32", "enforce_eager": "true", "kv_cache_memory_bytes": 256 << 20}

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _alone(host: EngineHost) -> None:
    """Examples start their own engines."""
    host.stop()


def environment(tmp_path: Path) -> dict[str, str]:
    """That of a user."""
    others = ("VLLM_", "UCM_", "TRITON_", "PYTEST_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return env | {
        "UCM_STATE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


@pytest.fixture(scope="module")
def demo_model(work: Path) -> Path:
    """The model of the demo, which ``offline.py`` takes by default."""
    sys.path.append(str(EXAMPLES.parent / "demo"))
    import model

    model.write(work / "demo-model")
    return work / "demo-model"


def offline(
    demo_model: Path,
    tmp_path: Path,
    config: str = "",
    env: dict[str, str] | None = None,
    tokens: int = TOKENS,
    **keys: object,
) -> list[dict[str, Any]]:
    """The answers of ``offline.py`` with a configuration and other values of some of its keys."""
    arguments = ["--tokens", str(tokens), "--answer", "8", "--model", str(demo_model)]
    arguments += [f"--engine={key}={value}" for key, value in ENGINE.items()]
    arguments += ["--config", str(EXAMPLES / config)] if config else []
    for key, value in (UNHURRIED | keys).items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    log = tmp_path / "engine.log"
    answers: list[dict[str, Any]] = run_program(
        "programs:example", env or {}, log, file=str(EXAMPLES / "offline.py"), arguments=arguments
    )
    return answers


def assert_reused(answers: list[dict[str, Any]], first: int = 0, then: int = REUSED) -> None:
    assert [answer["cached_tokens"] for answer in answers] == [first, then]
    assert answers[0]["answer"] == answers[1]["answer"]


def assert_reused_in_time(run: Callable[[], list[dict[str, Any]]]) -> None:
    """The same of a medium that may still be writing some blocks when the second answer begins: it
    has some from the store, and the next engine all, since none ends before its blocks are
    stored."""
    first, second = run()
    assert first["cached_tokens"] == 0 < second["cached_tokens"] <= REUSED
    assert first["answer"] == second["answer"]
    if second["cached_tokens"] < REUSED:
        assert_reused(run(), first=REUSED)


def program(name: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON of a program that is started as a user does it."""
    with machine_lock():
        done = subprocess.run(
            [sys.executable, EXAMPLES / name, *arguments],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_offline(tmp_path: Path) -> None:
    given = [f"--tokens={TOKENS}", f"--set=storage_backends={tmp_path}/blocks"]
    profile = {"enabled": True, "output": str(tmp_path / "profile.json")}
    keys = UNHURRIED | {"profile": profile}
    given += [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
    assert_reused(program("offline.py", tmp_path, *given))
    events = events_of(tmp_path / "profile.json")
    spans = {event["name"] for event in events if event["ph"] == "b"}
    loaded = {f"load {stage}" for stage in ("queue", "read", "verify", "scatter")}
    assert spans >= {"lookup", "queue", "load", "gather", "dump queue", "dump copy"} | loaded


def test_two_hosts_of_a_share(demo_model: Path, tmp_path: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "trust"))
    from nfs import NfsClient

    with ExitStack() as stack:
        for host in ("left", "right"):
            client = NfsClient(tmp_path / "export", tmp_path / host)
            stack.callback(client.close)
            root = str(tmp_path / host / "root")
            keys = {"storage_path": root, "storage_capacity": "1GiB"}
            run = partial(offline, demo_model, tmp_path, "nfs_cluster.yaml", **keys)
            if host == "left":
                assert_reused_in_time(run)
            else:
                assert_reused(run(), first=REUSED)


@pytest.mark.parametrize("kind", ["redis", "s3", "mooncake"])
def test_a_server(kind: str, demo_model: Path, tmp_path: Path) -> None:
    for beside in ("tests/remote", "tests/mooncake", "tests/store", "demo"):
        sys.path.append(str(EXAMPLES.parent / beside))
    from remote_columns import MOONCAKE, MOTO, REDIS, started

    column = {"redis": REDIS, "s3": MOTO, "mooncake": MOONCAKE}[kind]
    with started(column, tmp_path / "server") as server:
        given = yaml.safe_load((EXAMPLES / f"{kind}.yaml").read_text())
        keys = {"storage_backends": re.sub(r"127.0.0.1:\d+", server.at, given["storage_backends"])}
        env = {"PYTHONPATH": os.pathsep.join(column.pythonpath)} if column.pythonpath else {}
        if kind == "s3":
            from servers import KEYS

            keys["object_endpoint"] = f"http://{server.at}"
            env |= KEYS
        assert_reused_in_time(partial(offline, demo_model, tmp_path, f"{kind}.yaml", env, **keys))


def test_sparse_attention(demo_model: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"storage_backends": str(tmp_path / "blocks"), "tokens": 2000}
    method = {"GSAOnDevice": {"ratio": 0.2, "min_tokens": 0}}
    sparse = offline(demo_model, tmp_path, "sparse.yaml", ucm_sparse_config=method, **keys)
    assert_reused(sparse, then=1984)
    dense = offline(demo_model, tmp_path, **keys)
    assert dense[0]["cached_tokens"] == 1984, "both kinds of engines share blocks"
    assert dense[0]["answer"] != sparse[0]["answer"], "omitted blocks change the answer"


def test_a_store_of_ones_own(demo_model: Path, tmp_path: Path) -> None:
    given = yaml.safe_load((EXAMPLES / "own_store.yaml").read_text())["ucm_connectors"]
    given[0]["ucm_connector_config"]["storage_backends"] = str(tmp_path / "blocks")
    assert_reused(offline(demo_model, tmp_path, "own_store.yaml", ucm_connectors=given))
    names = [path.name for path in (tmp_path / "blocks").iterdir()]
    assert len(names) >= REUSED // 32
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """A tiny model with a tokenizer."""
    made = write_model(tmp_path / "model", llama_config(3))
    write_tokenizer(made)
    return made


def script(name: str, model: Path, tmp_path: Path) -> str:
    """What a script prints."""
    command = [EXAMPLES / name, model, tmp_path / "blocks", "--dtype=float32", "--enforce-eager"]
    ports = ("PORT", "PREFILL_PORT", "DECODE_PORT")
    env = environment(tmp_path) | {port: str(free_port()) for port in ports}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    command += ["--block-size=32", "--num-gpu-blocks-override=64"]
    with machine_lock():
        pipe = subprocess.PIPE
        with Group(command, env=env, stdout=pipe, stderr=pipe, text=True) as group:
            output, log = group.process.communicate(timeout=1500)
    print(log)  # shown when a test fails
    assert group.process.returncode == 0
    return str(output)


def loaded_blocks(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^ucm_loaded_blocks_total.* (\S+)$", text, re.M)]


def test_a_server_that_starts_again(model: Path, tmp_path: Path) -> None:
    text = script("server.sh", model, tmp_path)
    first, again = re.findall(r'"text":"(.*?)"', text)
    assert first == again
    assert loaded_blocks(text)[-1] >= 11


def test_prefill_and_decode(model: Path, tmp_path: Path) -> None:
    text = script("pd.sh", model, tmp_path)
    assert re.search(r'"text":"( ?w\d+)+"', text), text[-3000:]
    assert loaded_blocks(text) == [12]


def test_a_selector_of_ones_own(tmp_path: Path) -> None:
    lines = program("own_selector.py", tmp_path)
    dense, sparse = lines
    assert (dense["engine"], sparse["engine"]) == ("dense", "sparse")
    assert dense["blocks_read"] == 1
    assert 0.2 < sparse["blocks_read"] < 0.4  # a fifth, and the windows
    assert len(sparse["tokens"]) == len(dense["tokens"]) == 32
    assert sparse["tokens"] != dense["tokens"], "omitted blocks of a random model change its answer"
