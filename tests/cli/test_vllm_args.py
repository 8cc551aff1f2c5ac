"""``ucm vllm-args``: arguments that vLLM parses, of a configuration that was checked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my ucm.yaml").write_text(f"storage_backends: {tmp_path}\n")
    return tmp_path / "my ucm.yaml"


def transfer(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return found


def test_a_file_is_named_by_its_whole_path(ucm: Run, file: Path) -> None:
    done = ucm("vllm-args", "--config", file.name, "--role", "kv_consumer")
    assert "kv_connector" not in done.stderr
    assert transfer(shlex.split(done.stdout)) == {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"ucm_config_path": str(file)},
    }


def test_the_arguments_of_the_original_become_those_of_vllm(
    ucm_json: Callable[..., dict[str, Any]], file: Path
) -> None:
    given = {"storage_backend": "posix", "storage_path": "/data/kv_cache"}
    seeds = ("--kv-connector", "UCMDirectConnector", "--kv-connector-config")
    model = ("--model", "/path/to/model", "--tensor-parallel-size", "4")
    words = ucm_json("vllm-args", *model, *seeds, json.dumps(given))["arguments"]
    assert words[:4] == list(model)
    assert transfer(words)["kv_connector"] == "UCMDirectConnector"
    assert transfer(words)["kv_connector_extra_config"] == given
    of_file = ucm_json("vllm-args", *seeds, file)["arguments"]
    assert transfer(of_file)["kv_connector_extra_config"] == {"ucm_config_path": str(file)}


def test_rerope_gets_a_model_class_and_a_length(
    ucm_json: Callable[..., dict[str, Any]], file: Path
) -> None:
    model = file.parent / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    file.write_text(file.read_text() + "rerope: {window: 4096, training_length: 8192}\n")
    given = ("--config", file.name, "--max-model-len", "65536")
    override = ["--hf-overrides", '{"rope_theta": 5.0}']
    wanted = {"max_position_embeddings": 65536, "architectures": ["UcmReRopeQwen3ForCausalLM"]}
    for more, extra in (
        (["--model", str(model)], {}),
        (["--architecture", "Qwen3ForCausalLM"], {}),
        ([f"--model={model}", *override], {"rope_theta": 5.0}),
    ):
        words = ucm_json("vllm-args", *given, *more)["arguments"]
        assert words.count("--hf-overrides") == 1
        assert json.loads(words[words.index("--hf-overrides") + 1]) == wanted | extra
        assert words[words.index("--max-model-len") + 1] == "65536"
    assert (
        "--hf-overrides" not in ucm_json("vllm-args", "--kv-connector-config", LOCAL)["arguments"]
    )


LOCAL = '{"storage_path": "/data"}'
RULE = '{"storage_path": "/data", "rerope": true}'


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--kv-connector-config", RULE), "give --architecture NAME, one of Llama"),
        (("--kv-connector-config", RULE, "--architecture", "Phi3ForCausalLM"), "is not served"),
        (
            ("--kv-connector-config", RULE, "--architecture", "LlamaForCausalLM"),
            "give --max-model-len",
        ),
        (("--kv-connector-config", '{"storage_pth": "/data"}'), 'unknown key "storage_pth"'),
        (("--kv-connector-config", "{"), "is no JSON"),
        (("--kv-connector-config", "nowhere.yaml"), "neither a file nor a JSON object"),
        (("--config", "nowhere.yaml"), "cannot be read"),
        (("--kv-connector", "NixlConnector", "--config", "my ucm.yaml"), "kv_connector"),
        (
            ("--kv-connector-config", '{"storage_backend": "nfs", "nfs_path": "server:/kv_cache"}'),
            "mount",
        ),
    ],
)
def test_what_would_not_run_is_refused(
    words: tuple[str, ...], problem: str, ucm: Run, file: Path
) -> None:
    done = ucm("vllm-args", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert problem in " ".join(done.stderr.split())
