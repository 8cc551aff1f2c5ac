"""A wrong configuration is refused early, in one sentence, and only where it is ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sparse_parts import sparse_engine
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ucm.config import parse
from ucm.errors import ConfigError
from ucm.integration.vllm import early, plugin
from ucm.integration.vllm.attention import registering
from ucm.integration.vllm.connector import UCMConnector, stores

TYPO = {"storage_path": "/nowhere", "storage_capacty": "1GiB"}
SENTENCE = 'unknown key "storage_capacty" in kv_connector_extra_config'


def transfer(extra: Any, name: str = "UCMConnector") -> str:
    return json.dumps({"kv_connector": name, "kv_connector_extra_config": extra})


INSIDE = json.dumps(
    {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [json.loads(transfer(TYPO))]},
    }
)
DOTTED = "--kv-transfer-config.kv_connector_extra_config"


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--kv-transfer-config", transfer(TYPO)],
        ["vllm", "serve", f"--kv_transfer_config={transfer(TYPO, 'UCMDirectConnector')}", "m"],
        ["vllm", "--kv-transfer-config", INSIDE],
        ["--kv-transfer-config.kv_connector", "UCMConnector", f"{DOTTED}.storage_capacty=1GiB"],
    ],
)
def test_a_server_ends_with_one_sentence(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        early.refuse_wrong_arguments(argv)
    assert str(ended.value).startswith(f"ucm: {SENTENCE}")
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m"],
        ["vllm", "--kv-transfer-config", transfer({"storage_backends": "/nowhere"})],
        ["vllm", "--kv-transfer-config", transfer(TYPO, "NixlConnector")],
        ["vllm", "--kv-transfer-config", '{"kv_connector": "UCMConnector"'],  # vLLM refuses it
        ["vllm", "--kv-transfer-config"],
        ["vllm", "--kv-transfer-config", '["UCMConnector"]'],
        [f"{DOTTED}.storage_capacty", "1GiB", f"{DOTTED}=3", f"{DOTTED}.a.b", "c"],
    ],
)
def test_every_other_engine_starts(argv: list[str]) -> None:
    early.refuse_wrong_arguments(argv)


def test_a_server_is_refused_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("storage_backends: /nowhere\nadmision: always\n")
    code = "import sys; from ucm.integration.vllm.early import *; refuse_wrong_arguments(sys.argv)"
    arguments = ["--kv-transfer-config", '{"kv_connector": "UCMConnector", "kv_role": "kv_both"}']
    other = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
    answers = [
        subprocess.run(
            [sys.executable, "-c", code, *argv],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        for argv, environ in (
            (arguments, {"UCM_CONFIG_FILE": str(file)}),
            (arguments, {"UCM_STORAGE_PATH": "/nowhere", "UCM_IO_DIRECT": "perhaps"}),
            (other, {"UCM_CONFIG_FILE": str(file)}),
            ([], {"UCM_CONFIG_FILE": str(file)}),
        )
    ]
    wrong = [(answer.returncode, answer.stderr.splitlines()[-1]) for answer in answers[:2]]
    assert [code for code, _ in wrong] == [1, 1]
    assert f'ucm: unknown key "admision" in file {file}; did you mean "admission"?' == wrong[0][1]
    assert wrong[1][1].startswith("ucm: environment UCM_IO_DIRECT: ")
    assert not any("Traceback" in answer.stderr for answer in answers)
    assert [answer.returncode for answer in answers[2:]] == [0, 0]


def test_the_plug_in_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    monkeypatch.setattr(sys, "argv", ["vllm", "--kv-transfer-config", transfer(TYPO)])
    with pytest.raises(SystemExit, match="storage_capacty"):
        plugin.register()


def test_a_program_gets_an_error_from_each_of_vllms_early_calls(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    config = sparse_engine(engines, tiny, tmp_path)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert not UCMConnector.requires_piecewise_for_cudagraph(extra)
    assert UCMConnector.supports_sleep_mode(config.kv_transfer_config)
    with set_current_vllm_config(config):
        assert registering.CPU_ATTN is not None
    extra["storage_capacty"] = "1GiB"
    with pytest.raises(ConfigError, match="storage_capacty"):
        UCMConnector.requires_piecewise_for_cudagraph(extra)
    with pytest.raises(ConfigError, match="storage_capacty"):
        UCMConnector.supports_sleep_mode(config.kv_transfer_config)
    with set_current_vllm_config(config), pytest.raises(ConfigError, match="storage_capacty"):
        _ = registering.CPU_ATTN


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_required_store_that_cannot_be_used_ends_the_start(
    engines: Any, tiny: Path, tmp_path: Path, role: KVConnectorRole
) -> None:
    config = sparse_engine(engines, tiny, tmp_path)
    scheduler, (worker,) = engines.kv_configs(config)
    kv_cache = scheduler if role == KVConnectorRole.SCHEDULER else worker
    (tmp_path / "file").write_text("in the way")
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra["storage_path"] = str(tmp_path / "file" / "root")
    extra["require_store"] = True
    with pytest.raises(ConfigError, match=r"require_store is true.*file is a file") as error:
        UCMConnector(config, role, kv_cache)
    assert "remove it" in str(error.value)


def test_a_required_store_needs_a_cache(engines: Any, tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    config = sparse_engine(engines, tiny, root, require_store=True)
    scheduler, _ = engines.kv_configs(config)
    UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler).shutdown()
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config.enable_chunked_prefill = False
    with pytest.raises(ConfigError, match="require_store is true, and the cache would be off"):
        UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler)
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra["require_store"] = False
    UCMConnector(config, KVConnectorRole.SCHEDULER, scheduler).shutdown()


def test_a_required_store_that_does_not_answer_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits, ends = Event(), Event()

    def hangs(root: str) -> str:
        ends.wait()
        waits.set()
        return ""

    monkeypatch.setattr(stores, "why_unusable", hangs)
    config = parse({"storage_backends": str(tmp_path), "deadlines": {"probe_s": 0.01}}, {})
    with pytest.raises(ConfigError, match=f"{tmp_path}: no answer within 0.01 s"):
        stores.refuse_missing_store(config)
    ends.set()
    assert waits.wait(60)
