"""``ucm vllm-args`` prints arguments that the installed vLLM parses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ucm.cli import main
from ucm.integration.vllm.early import UNROTATED


def parsed(model: Path, *words: str) -> AsyncEngineArgs:
    """What vLLM makes of the printed arguments, as a shell passes them on."""
    done = CliRunner().invoke(main, ["vllm-args", "--model", str(model), *words])
    assert done.exit_code == 0, done.output
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = shlex.split(done.stdout)
    return AsyncEngineArgs.from_cli_args(parser.parse_args(given))


def test_a_file(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "my ucm.yaml"
    file.write_text(f"storage_backends: {tmp_path}\n")
    transfer = parsed(tiny, "--config", str(file), "--role", "kv_consumer").kv_transfer_config
    assert transfer is not None
    assert (transfer.kv_connector, transfer.kv_role) == ("UCMConnector", "kv_consumer")
    assert transfer.kv_connector_extra_config == {"ucm_config_path": str(file)}


def test_the_arguments_of_the_original(tiny: Path, tmp_path: Path) -> None:
    given = {"storage_backend": "posix", "storage_path": str(tmp_path)}
    words = ["--tensor-parallel-size", "4"]
    words += ["--kv-connector", "UCMDirectConnector", "--kv-connector-config", json.dumps(given)]
    arguments = parsed(tiny, *words)
    assert (arguments.model, arguments.tensor_parallel_size) == (str(tiny), 4)
    assert arguments.kv_transfer_config is not None
    assert arguments.kv_transfer_config.kv_connector == "UCMDirectConnector"
    assert arguments.kv_transfer_config.kv_connector_extra_config == given


@pytest.mark.parametrize("architecture", sorted(UNROTATED))
def test_rerope(tiny: Path, tmp_path: Path, architecture: str) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(
        f"storage_backends: {tmp_path}\nrerope: {{window: 4096, training_length: 32768}}\n"
    )
    words = ("--config", str(file), "--architecture", architecture, "--max-model-len", "131072")
    arguments = parsed(tiny, *words)
    assert arguments.max_model_len == 131072
    assert arguments.hf_overrides["architectures"] == [UNROTATED[architecture]]
