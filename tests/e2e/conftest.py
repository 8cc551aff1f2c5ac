"""End-to-end tests: a server as its clients see it, by default a tiny one that is started here.

``--url`` names any other server; CONTRIBUTING has the stages and options. The tiny server has the
recall model (``benches/quality``), which was trained to look tokens up, so that wrong KV gives
wrong answers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# the modules beside this one, and those with engines and the recall model
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "quality"))

from e2e_selection import stages, why_not
from e2e_target import Target, wait_until

if TYPE_CHECKING:
    from harness import EngineHost

HERE = Path(__file__).parent
#: Tokens of a request of the tiny server.
LENGTH = 2048


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of other stages, features and platforms."""
    text = config.getoption("--stage")
    wanted = stages(text) if text else None
    ours = [item for item in items if HERE in item.path.parents]
    left_out = []
    for item in ours:
        item.add_marker(pytest.mark.timeout(1800))
        why = why_not(item, wanted, config.getoption("--feature"), config.getoption("--platform"))
        if why is not None:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: _stage(item) if HERE in item.path.parents else -1)


def _stage(item: pytest.Item) -> int:
    mark = item.get_closest_marker("stage")
    return int(mark.args[0]) if mark else 99


def write_recall_model(directory: Path) -> None:
    """The recall model as a Llama: transformers has a tokenizer of its own for every Qwen2."""
    from recall_model import WEIGHTS
    from served import write_tokenizer

    shutil.copytree(WEIGHTS, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": True}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)


@contextmanager
def tiny_server(work: Path, name: str, more: dict[str, Any]) -> Iterator[Target]:
    """A vLLM server of the recall model with ucm over a new directory."""
    from harness import machine_lock
    from served import vllm_server
    from specs import ROOM, EngineSpec, StoreSpec

    model = work / "recall-model"
    if not model.exists():
        write_recall_model(model)
    (work / name).mkdir()
    spec = EngineSpec(
        model,
        store=StoreSpec(work / name, "UcmPosixStore", options=ROOM),
        extra_config=more,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with machine_lock(), ExitStack() as stack:
        log = work / f"{name}.log"
        server = vllm_server(spec, log, "--enable-prompt-tokens-details", length=LENGTH)
        stack.callback(server.close)
        wait_until(server.started, f"{log} starts")
        words = [f"w{token}" for token in range(3, 500)]
        yield stack.enter_context(Target(server.at, words))


@pytest.fixture(scope="session")
def given(request: pytest.FixtureRequest) -> Callable[[str], str | None]:
    """An option of the run."""
    return lambda name: request.config.getoption(name)


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, work: Path
) -> Iterator[Callable[[str, dict[str, Any]], Target]]:
    """Starts tiny servers by name, one at a time."""
    with ExitStack() as stack:
        live: dict[str, Target] = {}

        def start(name: str, more: dict[str, Any]) -> Target:
            if name not in live:
                host: EngineHost = request.getfixturevalue("host")
                host.stop()
                stack.close()
                live.clear()
                live[name] = stack.enter_context(tiny_server(work, name, more))
            return live[name]

        yield start


@pytest.fixture
def target(
    servers: Callable[[str, dict[str, Any]], Target], given: Callable[[str], str | None]
) -> Iterator[Target]:
    """The server under test."""
    if url := given("--url"):
        with Target(url, key=os.environ.get("OPENAI_API_KEY", "")) as other:
            yield other
    else:
        yield servers("dense", {})


@pytest.fixture
def block(target: Target) -> int:
    """Tokens of a block of the server."""
    return int(target.label("vllm:cache_config_info", "block_size") or 16)
