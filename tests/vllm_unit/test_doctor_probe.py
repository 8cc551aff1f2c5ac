"""``ucm doctor`` has the installed vLLM read arguments, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "vllm"))

from models import llama_config

from ucm.cli.checks import Arguments, ask


def test_the_known_part_of_an_identity(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(llama_config(2)))
    transfer = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
    words = ["vllm", "serve", str(model), "--block-size", "32", "--dtype=float32", "--port=1"]
    words += ["--max-model-len", "256", "--kv-transfer-config", json.dumps(transfer)]
    words += ["--skip-tokenizer-init"]
    found = ask(Arguments.read(words), {"storage_backends": str(tmp_path), "enabled": False})
    assert found["block_tokens"] == 32
    assert found["identity"]["architecture"] == "LlamaForCausalLM"
    assert found["identity"]["dtype"] == "float32"
    assert found["identity"]["tensor_parallel"]["size"] == 1
    assert "weights" not in found["identity"]
    assert '"enabled" is false' in found["why_off"]


def test_a_wrong_argument_is_reported(tmp_path: Path) -> None:
    found = ask(Arguments.read([str(tmp_path), "--block-size", "many"]), {})
    assert "block-size" in found["error"]


def test_a_backend_that_ucm_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (tmp_path / "config.json").write_text(json.dumps(llama_config(2)))
    words = [str(tmp_path), "--attention-backend", "TRITON_MLA", "--skip-tokenizer-init"]
    found = ask(Arguments.read(words), {"storage_backends": str(tmp_path / "root")})
    assert "choose another" in found["why_off"], found
