"""Separate engines: blocks that must never be shared, and features that must not need vLLM's own
prefix cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import STORED
from checks import assert_same
from harness import EngineHost, wait_until
from lives import LAYERS, Life, new_disk
from models import change_weights, write_adapter
from specs import ON_GPU, EngineSpec, Result, StoreSpec


@pytest.fixture(scope="module")
def plugin(work: Path) -> Path:
    """A distribution with a vLLM plugin that registers PlainStore by name, like a user's
    package."""
    root = work / "site"
    info = root / "plain_store_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plain-store-plugin\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nplain_store = plain_store_plugin:register\n"
    )
    (root / "plain_store_plugin.py").write_text(
        "from ucm.store.factory_v1 import UcmConnectorFactoryV1\n\n\n"
        "def register() -> None:\n"
        '    """Called by vLLM in every process, perhaps more than once."""\n'
        '    UcmConnectorFactoryV1.register_connector("ByName", "stores", "PlainStore")\n'
    )
    return root


@pytest.mark.skipif(ON_GPU, reason="the store is one of the host's memory")
def test_store_by_name_without_prefix_caching_and_with_adapters(
    host: EngineHost, model: Path, work: Path, plugin: Path, reference: dict[str, Result]
) -> None:
    """Connector and Python store by name only, then the store by its module in another process.

    vLLM's own cache is off, and an adapter counts by its content, not its name or path.
    """
    disk = new_disk(work, "by-name")
    red = str(write_adapter(work / "red", LAYERS, 1))
    blue = str(write_adapter(work / "blue", LAYERS, 2))
    copy = str(shutil.copytree(red, work / "copy-of-red"))
    spec = EngineSpec(
        model,
        store=StoreSpec(disk.root, "ByName"),
        prefix_caching=False,
        lora=True,
        connector_module=None,
        pythonpath=(str(plugin),),
        label="no-prefix-caching",
    )
    engine = host.get(spec)
    case = STORED["middle"]

    def ask(lora: tuple[str, int, str] | None) -> Result:
        answer = engine.generate(case.ask(lora=lora))[0]
        engine.wait_idle()
        return answer

    def hits(lora: tuple[str, int, str] | None, right: Result) -> None:
        """The prompt is reused, once the adapter is hashed: the first request that has it waits for
        that only for a limited time, and is stored only then."""

        def reused() -> bool:
            again = ask(lora)
            assert_same(again, right)
            return again.cached_blocks == case.full_blocks

        wait_until(reused, "the prompt is reused")

    plain, with_red, with_blue = ask(None), ask(("red", 1, red)), ask(("blue", 2, blue))
    assert [answer.cached for answer in (plain, with_red, with_blue)] == [0, 0, 0]
    assert_same(plain, reference["middle"])
    assert len({tuple(answer.tokens) for answer in (plain, with_red, with_blue)}) == 3, (
        "the adapters change nothing"
    )
    for lora, right in (
        (None, plain),
        (("red", 1, red), with_red),
        (("blue", 2, blue), with_blue),
        (("other name", 3, copy), with_red),
    ):
        hits(lora, right)
    assert len(disk.files()) == 3 * (case.full_blocks)
    # The same store by its module, in another process: the first one's blocks are found.
    by_module = StoreSpec(disk.root, "PlainStore", module_path="stores")
    write_adapter(Path(red), LAYERS, 3)  # retrained: the same path and sizes, other weights
    engine = host.get(spec.but(store=by_module, pythonpath=(), label="by-module"))
    for lora, right in ((None, plain), (("blue again", 1, blue), with_blue)):
        hits(lora, right)
    assert len(disk.files()) == 3 * (case.full_blocks)
    retrained = ask(("red", 2, red))
    assert retrained.cached == 0, (
        "a retrained adapter at the same path got blocks of the previous one"
    )
    assert retrained.tokens != with_red.tokens, "the retraining changes nothing"


def test_an_engine_that_pools_whole_prompts_is_not_cached(
    host: EngineHost, model: Path, work: Path
) -> None:
    """A prompt may not continue from stored blocks there: sent twice, it gets the same answer and
    the engine survives."""
    disk = new_disk(work, "pooling")
    spec = EngineSpec(
        model,
        store=disk.store(),
        args={
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": {"pooling_type": "MEAN"},
            "enable_prefix_caching": None,
            "enable_chunked_prefill": None,
            "max_num_batched_tokens": None,
        },
        label="pooling",
    )
    engine = host.get(spec)
    first = engine.embed(STORED["middle"].tokens)
    engine.wait_idle()
    other = engine.embed(STORED["short"].tokens)
    assert other != first
    assert engine.embed(STORED["middle"].tokens) == first
    assert not disk.files()
    said = [line for line in engine.log_text().splitlines() if "the cache is off" in line]
    assert len(said) == 1, said
    assert "pooling MEAN" in said[0]


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_changed_weights_never_hit(
    host: EngineHost, model: Path, cold: Life, reference: dict[str, Result]
) -> None:
    """Same path, names and sizes, a few changed numbers: no earlier block is used."""
    kept = (model / "model.safetensors").read_bytes()
    change_weights(model)
    try:
        engine = host.get(cold.cold_spec.but(label="changed-weights"))
        answers = engine.generate(STORED["middle"].ask(), STORED["short"].ask())
    finally:
        host.stop()
        (model / "model.safetensors").write_bytes(kept)
    assert [answer.cached for answer in answers] == [0, 0]
    assert answers[0].tokens != reference["middle"].tokens, (
        "the change of the weights changes nothing"
    )
