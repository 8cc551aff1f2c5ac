"""ReRoPE in an engine: which backend it gets, what this computes over pages that vLLM's operators
wrote, what is in the identity, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_parts import BLOCK, HEADS, KV_HEADS, NAME, SIZE, Layer, Rows
from tiny_models import KEYS, Loaded, load_model, write_model
from torch import Tensor
from vllm.config import set_current_vllm_config

from ucm.errors import ConfigError
from ucm.integration.vllm import plugin
from ucm.integration.vllm.attention import registering, rerope
from ucm.integration.vllm.connector.identity.engine_identity import engine_identity
from ucm.integration.vllm.early import UNROTATED
from ucm.sparse.rerope.rule import RotationTable, Rule, attention

LLAMA = "UcmReRopeLlamaForCausalLM"


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()


def engine(
    engines: Any,
    model: Path,
    tmp_path: Path,
    rule: Any = None,
    architecture: str | None = LLAMA,
    **args: Any,
) -> Any:
    """The configuration of an engine with this section ``rerope``, and this model class."""
    extra = {"storage_path": str(tmp_path / "disk")} | ({} if rule is None else {"rerope": rule})
    transfer = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
    overrides = {} if architecture is None else {"architectures": [architecture]}
    return engines.engine_config(
        model,
        kv_transfer_config=transfer | {"kv_connector_extra_config": extra},
        hf_overrides=overrides,
        **args,
    )


def backend(config: Any, name: str = "CPU_ATTN") -> Any:
    with set_current_vllm_config(config):
        return getattr(registering, name)


def test_only_an_engine_with_both_gets_our_backend(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    own = registering.vllms_own("CPU_ATTN")
    found = backend(engine(engines, tiny, tmp_path, {"window": 64}))
    assert issubclass(found, own) and found is not own and found.get_name() == "CPU_ATTN"
    assert "ucm_packs_like" not in vars(found)
    assert backend(engine(engines, tiny, tmp_path)) is own
    flash = backend(engine(engines, tiny, tmp_path, {"window": 64}), "FLASH_ATTN")
    assert flash is registering.vllms_own("FLASH_ATTN")


def test_it_is_switched_off_with_ucm(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCM_DISABLE", "1")
    config = engine(engines, tiny, tmp_path, {"window": 64})
    assert backend(config) is registering.vllms_own("CPU_ATTN")
    assert not rerope.serve(None, None, {}, config)


@pytest.mark.parametrize("how", ["variable", "key", "another connector", "none"])
def test_an_engine_without_ucm_is_not_refused(
    how: str, engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model rotates its keys, which ReRoPE refuses."""
    config = engine(engines, tiny, tmp_path, {"window": 64}, architecture=None)
    monkeypatch.setenv("VLLM_USE_REROPE", "1")
    if how == "variable":
        monkeypatch.setenv("UCM_DISABLE", "1")
    elif how == "key":
        config.kv_transfer_config.kv_connector_extra_config["enabled"] = False
    elif how == "another connector":
        config.kv_transfer_config.kv_connector = "ExampleConnector"
    else:
        config.kv_transfer_config = None
    for name in ("CPU_ATTN", "FLASH_ATTN"):
        assert backend(config, name) is registering.vllms_own(name)


def test_attention_of_a_step_is_that_of_the_rule(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """Of the real implementation, over pages that vLLM's own operator wrote."""
    config = engine(
        engines, tiny, tmp_path, {"window": 40, "training_length": 64, "log_scale": True}
    )
    rows, rule = Rows.of([200, 130, 90, 33], [200, 30, 1, 1]), Rule(40, 64, log_scale=True)
    kind = backend(config).get_impl_cls()
    with set_current_vllm_config(config):
        impl = kind(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        rotary = _rotary(1024)
    cache = torch.zeros(rows.blocks, KV_HEADS, BLOCK, 2 * SIZE)
    layer = Layer(NAME, impl, cache, "amx")  # whatever vLLM packs for
    assert rerope.serve(SimpleNamespace(impl=impl), rotary, {}, config)
    for row in range(4):
        impl.do_kv_cache_update(layer, rows.keys[row], rows.values[row], cache, rows.slots(row))
    query = torch.cat(rows.queries)
    metadata = SimpleNamespace(
        num_actual_tokens=len(query),
        block_table=rows.table,
        query_start_loc=rows.starts(),
        seq_lens=torch.tensor(rows.lengths, dtype=torch.int32),
    )
    padded, output = torch.cat([query, query[:3]]), torch.zeros(len(query) + 3, HEADS, SIZE)
    impl.forward(layer, padded, None, None, cache, metadata, output)
    rotation = RotationTable(rotary._compute_cos_sin_cache())
    right = torch.cat(
        [
            attention(q, k, v, rotation, rule, SIZE**-0.5)
            for q, k, v in zip(rows.queries, rows.keys, rows.values, strict=True)
        ]
    )
    assert (output[: len(query)] - right).abs().max() <= 2e-5
    assert not output[len(query) :].any()


def _rotary(places: int, **parameters: Any) -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    given = {"rope_type": "default", "rope_theta": 10_000.0} | parameters
    return get_rope(SIZE, max_position=places, rope_parameters=given)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ],
)
def test_the_rotation_is_vllms(
    parameters: dict[str, Any], engines: Any, tiny: Path, tmp_path: Path
) -> None:
    config = engine(engines, tiny, tmp_path, {"window": 40})
    with set_current_vllm_config(config):
        rotary = _rotary(1024, **parameters)
        impl = backend(config).get_impl_cls()(HEADS, SIZE, 1.0, KV_HEADS, None, None, "auto")
    assert rerope.serve(SimpleNamespace(impl=impl), rotary, {}, config)
    assert impl.rotation.places == 1024
    theirs = rotary._compute_cos_sin_cache()[:1024]
    assert (impl.rotation.table - theirs).abs().max() <= 2e-4
    assert impl.rotation.amplitude == pytest.approx(float(theirs[0, 0]))


def test_layers_share_a_rotation(engines: Any, tiny: Path, tmp_path: Path) -> None:
    config = engine(engines, tiny, tmp_path, {"window": 40})
    kind = backend(config).get_impl_cls()
    with set_current_vllm_config(config):
        impls = [kind(HEADS, SIZE, 1.0, KV_HEADS, None, None, "auto") for _ in range(2)]
        rotary = _rotary(1024)
    made: dict[int, RotationTable] = {}
    for impl in impls:
        rerope.serve(SimpleNamespace(impl=impl), rotary, made, config)
    assert impls[0].rotation is impls[1].rotation


@pytest.fixture
def selection() -> Iterator[None]:
    """vLLM keeps the backends that it selected in this process, whatever the configuration."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    yield
    _cached_get_attn_backend.cache_clear()


@pytest.mark.usefixtures("selection")
def test_the_rule_is_part_of_the_identity(engines: Any, tiny: Path, tmp_path: Path) -> None:
    def identity(rule: Any, architecture: str | None = LLAMA) -> dict[str, Any]:
        config = engine(engines, tiny, tmp_path, rule, architecture)
        return engine_identity(config, engines.kv_configs(config)[0], "w")

    one = identity({"window": 64, "training_length": 128})
    assert {key: one["position"][key] for key in ("rule", "keys", "window")} == {
        "rule": "rerope",
        "keys": "unrotated",
        "window": 64,
    }
    assert one["position"]["training_length"] == 128 and one["position"]["log_scale"] is False
    assert one["architecture"] == LLAMA
    assert "ReRopeCPUAttentionBackend" in one["attention_backend"][0][0]
    assert identity({"window": 64, "training_length": 128}) == one
    for other in (
        {"window": 65, "training_length": 128},
        {"window": 64, "training_length": 127},
        {"window": 64, "training_length": 128, "log_scale": True},
    ):
        assert identity(other)["position"] != one["position"]
    assert "rule" not in identity(None, None)["position"]


# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "args", "sentence"),
    [
        (None, {}, f'rotates its keys: start vLLM with --hf-overrides .*"{LLAMA}"'),
        (
            "MistralForCausalLM",
            {},
            "MistralForCausalLM is not served, only LlamaForCausalLM, Qwen2",
        ),
        (LLAMA, {"kv_cache_dtype": "fp8"}, "quantised"),
    ],
)
def test_an_engine_that_cannot_compute_by_the_rule_is_refused(
    architecture: str | None,
    args: dict[str, Any],
    sentence: str,
    engines: Any,
    tiny: Path,
    tmp_path: Path,
) -> None:
    config = engine(engines, tiny, tmp_path, {"window": 64}, architecture)
    for name, value in args.items():
        setattr(config.cache_config, "cache_dtype" if name == "kv_cache_dtype" else name, value)
    with pytest.raises(ConfigError, match=sentence):
        rerope.refuse_unsupported(config)
    for name in ("CPU_ATTN", "FLASH_ATTN"):  # before the weights are loaded
        with pytest.raises(ConfigError, match=sentence):
            backend(config, name)


def test_a_process_of_an_engine_ends_with_the_sentence(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", object)
    config = engine(engines, tiny, tmp_path, {"window": 64}, architecture=None)
    with pytest.raises(SystemExit, match=r"^ucm: rerope: LlamaForCausalLM rotates its keys"):
        backend(config)


def test_a_selector_beside_it_is_refused_before_the_model_is_built(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    config = engine(engines, tiny, tmp_path, {"window": 64})
    config.kv_transfer_config.kv_connector_extra_config["ucm_sparse_method"] = "Quest"
    with pytest.raises(
        ConfigError, match="rerope and sparse attention or Blend do not work together"
    ):
        backend(config)


def test_every_model_class_exists_under_the_name_that_vllm_knows() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for name in UNROTATED.values():
        assert name in ModelRegistry.models
        kind = ModelRegistry.models[name].load_model_cls()
        assert kind.__name__ == name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_model_computes_as_vllms_up_to_the_window(
    kind: str, engines: Any, tmp_path: Path
) -> None:
    """A prompt, the rest of it, and single tokens: keys are normed first, and turned after that.
    Where distances are longer than the window the answers are others."""
    model = write_model(tmp_path / "model", engines.LLAMA | KEYS[kind])
    (architecture,) = KEYS[kind]["architectures"]
    tokens = torch.randint(3, 500, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    table = [5, 3, 7, 1, 2, 6, 4]

    def logits(rule: Any, name: str | None) -> Tensor:
        config = engine(engines, model, tmp_path, rule, name, dtype="float32")
        loaded = load_model(engines, config, Loaded)
        assert type(loaded.model).__name__ == (name or architecture)
        metadata, _ = loaded.metadata(0, 3, table)
        assert getattr(metadata, "use_rerope", False) == (rule is not None)
        ends = [130, 197, *range(198, len(tokens) + 1)]
        found, known = list[Tensor](), 0
        for end in ends:
            found.append(loaded.prefill(tokens[:end], table, known))
            known = end
        return torch.cat(found)

    right = logits(None, None)
    for window, low, high in ((len(tokens), 0.0, 1e-5), (16, 1e-2, 2.0)):
        found = logits({"window": window}, UNROTATED[architecture])
        assert low <= float((found - right).norm() / right.norm()) <= high


def test_a_model_of_ours_needs_the_rule_and_a_backend(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    with set_current_vllm_config(engine(engines, tiny, tmp_path, {"window": 64})):
        rotary = _rotary(1024)
        partial = _rotary(1024, partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match="which is not configured: add rerope"):
        rerope.serve(None, rotary, {}, engine(engines, tiny, tmp_path))
    config = engine(engines, tiny, tmp_path, {"window": 64})
    theirs = SimpleNamespace(
        impl=object(), get_attn_backend=lambda: registering.vllms_own("FLASH_ATTN")
    )
    with pytest.raises(ConfigError, match="FLASH_ATTN is not served; choose one of CPU_ATTN"):
        rerope.serve(theirs, rotary, {}, config)
    with pytest.raises(ConfigError, match="RotaryEmbedding of 16 of 32 channels"):
        rerope.serve(theirs, partial, {}, config)
    partial.rotary_dim, partial.is_neox_style = partial.head_size, False
    with pytest.raises(ConfigError, match="in pairs of neighbours"):
        rerope.serve(theirs, partial, {}, config)


@pytest.mark.parametrize(("method", "refused"), [("ngram", False), ("eagle", True)])
def test_what_drafts_without_keys_is_served(
    method: str, refused: bool, engines: Any, tiny: Path, tmp_path: Path
) -> None:
    config = engine(engines, tiny, tmp_path, {"window": 64})
    config.speculative_config = SimpleNamespace(method=method)
    with pytest.raises(ConfigError, match="draft") if refused else nullcontext():
        rerope.refuse_unsupported(config)


def test_graphs_of_a_model_that_rotates_again_have_another_name(
    engines: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps compiled graphs by its configuration, where `UCM_DISABLE` does not count."""
    from ucm.integration.vllm.attention.rerope_models import _LeavesUnrotated

    class Model(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str) -> None:
            super().__init__()
            self.rotary_emb = self.attn = torch.nn.Identity()

    class Ours(_LeavesUnrotated, Model):
        pass

    monkeypatch.setenv("UCM_DISABLE", "1")
    config = engine(engines, tiny, tmp_path, {"window": 64})
    before = config.compute_hash()
    assert isinstance(Ours(vllm_config=config).rotary_emb, torch.nn.Identity)
    assert config.compute_hash() != before
