"""The identity of an engine changes with everything that shapes KV bytes, and with nothing else."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ucm.errors import InvalidInputError
from ucm.integration.vllm.connector.identity.engine_identity import (
    FIELDS,
    attention_backends,
    block_tokens,
    differences,
    engine_identity,
    identity_digest,
    identity_text,
    identity_without_weights,
    namespace,
    transferable_groups,
    unidentifiable,
    with_weights,
)

#: The first import of vLLM takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 2048,
}


def paths(lines: list[str]) -> set[str]:
    """The fields named by a differences."""
    return {line.split(" ")[0].split(".")[0].split("[")[0] for line in lines}


def test_fields_and_text(engines: Any, tiny: Path) -> None:
    identity = engines.identity_of(tiny, "sha256:ab")
    text = identity_text(identity)
    assert tuple(json.loads(text)) == FIELDS
    assert text.isascii()
    assert ": " not in text
    assert list(identity["model_config"]["hf"]) == sorted(identity["model_config"]["hf"])
    assert identity["weights"] == "sha256:ab"
    assert identity["architecture"] == "LlamaForCausalLM"
    assert identity["attention_backend"] == [["CPU_ATTN"]]
    assert identity["kv_layout"] == "LBHNC"
    assert identity["block_tokens"] == 32
    assert identity["kv_groups"][0]["layers"] == [
        f"model.layers.{i}.self_attn.attn" for i in range(2)
    ]
    assert identity["position"]["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "default",
    }
    assert "isa" in identity["kv_packing"]["groups"][0]
    assert len(identity_digest(identity)) == 32
    assert namespace(identity) == identity_digest(identity).hex()[:32]


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        pytest.param(
            {"hf_overrides": {"rope_parameters": LINEAR}},
            {"model_config", "position"},
            id="rope scaling",
        ),
        pytest.param(
            {"hf_overrides": {"rope_parameters": YARN}}, {"model_config", "position"}, id="yarn"
        ),
        pytest.param(
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
            {"model_config", "position"},
            id="rope base",
        ),
        pytest.param({"hf_overrides": {"rms_norm_eps": 1e-6}}, {"model_config"}, id="norm"),
        pytest.param(
            {"dtype": "float32"}, {"dtype", "kv_dtype", "kv_packing", "kv_groups"}, id="dtype"
        ),
        pytest.param(
            {"block_size": 64}, {"block_tokens", "kv_packing", "kv_groups"}, id="block size"
        ),
        pytest.param(
            {"kv_cache_dtype": "fp8"}, {"kv_dtype", "kv_packing", "kv_groups"}, id="kv dtype"
        ),
        pytest.param(
            {"tensor_parallel_size": 2},
            {"world_size", "tensor_parallel", "kv_packing", "kv_groups"},
            id="tensor parallel",
        ),
        pytest.param(
            {"pipeline_parallel_size": 2},
            {"world_size", "pipeline_parallel", "kv_groups"},
            id="pipeline parallel",
        ),
        pytest.param(
            {"additional_config": {"layout": "other"}}, {"model_config"}, id="platform settings"
        ),
    ],
)
def test_what_shapes_the_bytes_changes_the_digest(
    engines: Any, tiny: Path, args: dict[str, Any], fields: set[str]
) -> None:
    base, other = engines.identity_of(tiny, "w"), engines.identity_of(tiny, "w", **args)
    assert identity_digest(base) != identity_digest(other)
    assert paths(differences(base, other)) == fields


@pytest.mark.parametrize(
    "args",
    [
        {"max_model_len": 512},
        {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True},
        {"max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"served_model_name": "another"},
        {"seed": 7},
        {"num_gpu_blocks_override": 64},
    ],
    ids=lambda args: next(iter(args)),
)
def test_what_does_not_shape_them_leaves_it(engines: Any, tiny: Path, args: dict[str, Any]) -> None:
    assert identity_text(engines.identity_of(tiny, "w")) == identity_text(
        engines.identity_of(tiny, "w", **args)
    )


def test_the_number_of_blocks_does_not_matter(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    texts = set()
    for memory in (16 << 20, 64 << 20):
        scheduler, _ = engines.kv_configs(config, memory=memory)
        texts.add(identity_text(engine_identity(config, scheduler, "w")))
    assert len(texts) == 1


def test_the_context_limit_counts_where_the_rope_looks_at_it(engines: Any, tiny: Path) -> None:
    identities = [
        engines.identity_of(tiny, "w", max_model_len=limit, hf_overrides={"rope_parameters": LONG})
        for limit in (1024, 4096)
    ]
    assert paths(differences(*identities)) == {"position"}
    assert [identity["position"]["max_model_len"] for identity in identities] == [1024, 4096]


def test_the_layout_changes_the_digest(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    here = engine_identity(config, scheduler, "w")
    scheduler.kv_cache_layout = "LBNHC"
    assert paths(differences(here, engine_identity(config, scheduler, "w"))) == {"kv_layout"}


def test_another_instruction_set_changes_the_digest(
    engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import cpu_attn

    here = engines.identity_of(tiny, "w")
    there_isa = "amx" if here["kv_packing"]["groups"][0]["isa"] != "amx" else "vec"
    # as older versions had it
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, block_size: there_isa)
    there = engines.identity_of(tiny, "w")
    assert [line.split(" is ")[0] for line in differences(here, there)] == [
        "kv_packing.groups[0].isa"
    ]


@pytest.mark.parametrize("version", ["0.99.7", "{}.1", "{}+cpu.patched", "{}.dev3+gabcdef"])
def test_another_build_of_the_engine_changes_the_digest(
    engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """A patch release, a nightly and a build of one's own may each compute something else."""
    import vllm

    here = engines.identity_of(tiny, "w")
    assert here["kv_packing"]["engine"] == f"vllm {vllm.__version__}"
    other = version.format(vllm.__version__.split("+")[0])
    monkeypatch.setattr(vllm, "__version__", other)
    assert differences(here, engines.identity_of(tiny, "w")) == [
        f'kv_packing.engine is "{here["kv_packing"]["engine"]}" here and "vllm {other}" there'
    ]


def test_transformers_counts_where_it_computes_the_model(
    engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    version = transformers.__version__
    own, backend = (
        engines.identity_of(tiny, "w", model_impl=impl) for impl in ("auto", "transformers")
    )
    assert "transformers" not in own["model_config"]
    assert backend["model_config"]["transformers"] == version
    monkeypatch.setattr(transformers, "__version__", "99.0")
    assert identity_text(engines.identity_of(tiny, "w")) == identity_text(own)
    assert differences(backend, engines.identity_of(tiny, "w", model_impl="transformers")) == [
        f'model_config.transformers is "{version}" here and "99.0" there'
    ]


def test_a_drafting_model_counts(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """Its layers keep KV in the same blocks."""
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    found = []
    for name, epsilon in (("a", 1e-5), ("b", 1e-6)):
        draft = engines.engine_config(
            engines.make_model(tmp_path / name, rms_norm_eps=epsilon)
        ).model_config
        config.speculative_config = SimpleNamespace(
            draft_model_config=draft, method="eagle", enable_adaptive_verification=False
        )
        found.append(engine_identity(config, scheduler, "w"))
    assert differences(*found) == [
        "model_config.draft.hf.rms_norm_eps is 1e-05 here and 1e-06 there"
    ]


def test_a_copy_elsewhere_has_the_same_identity(engines: Any, tiny: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tiny, tmp_path / "elsewhere" / "copy")
    assert identity_text(engines.identity_of(tiny, "w")) == identity_text(
        engines.identity_of(copied, "w")
    )


def test_the_name_in_the_configuration_does_not_count(engines: Any, tmp_path: Path) -> None:
    named = engines.make_model(
        tmp_path / "a", _name_or_path="org/model", transformers_version="4.0.0"
    )
    plain = engines.make_model(tmp_path / "b")
    assert identity_text(engines.identity_of(named, "w")) == identity_text(
        engines.identity_of(plain, "w")
    )


def test_another_process_and_hash_seed_give_the_same_text(engines: Any, tiny: Path) -> None:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "4242"
    env = os.environ | {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, engines.__file__, str(tiny)],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    assert done.stdout.splitlines()[-1] == identity_text(engines.identity_of(tiny, "sha256:00"))


def test_the_order_of_overrides_does_not_matter(engines: Any, tiny: Path) -> None:
    overrides = {"rope_parameters": LINEAR, "attention_bias": True, "hidden_act": "gelu"}
    backwards = dict(reversed(overrides.items())) | {
        "rope_parameters": dict(reversed(LINEAR.items()))
    }
    assert list(overrides) != list(backwards)
    texts = {
        identity_text(engines.identity_of(tiny, "w", hf_overrides=each))
        for each in (overrides, backwards)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("args", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_both_halves_agree(engines: Any, tiny: Path, args: dict[str, Any]) -> None:
    """Each worker has a copy of the configuration of its own, and with pipeline parallelism layers
    of its own."""
    config = engines.engine_config(tiny, **args)
    parts = config.parallel_config.pipeline_parallel_size
    layers = [range(rank * 2 // parts, (rank + 1) * 2 // parts) for rank in range(parts)]
    ranks = [
        rank // config.parallel_config.tensor_parallel_size
        for rank in range(config.parallel_config.world_size)
    ]
    scheduler, workers = engines.kv_configs(
        config, [engines.layer_specs(config, layers[rank]) for rank in ranks]
    )
    here = identity_without_weights(engine_identity(config, scheduler, "sha256:00"))
    for worker in workers:
        there = identity_without_weights(engine_identity(copy.deepcopy(config), worker, ""))
        assert differences(here, there) == []


def test_groups_that_keep_one_spec_per_layer_agree(engines: Any, tiny: Path) -> None:
    """vLLM's scheduler sees only the first spec of such a group; the strides still tell the layers
    apart."""
    from dataclasses import replace

    config = engines.engine_config(tiny)
    texts = []
    for head_size in (64, 96):
        specs = engines.layer_specs(config)
        second = list(specs)[1]
        specs[second] = replace(specs[second], head_size=head_size, head_size_v=head_size)
        scheduler, (worker,) = engines.kv_configs(config, [specs])
        assert hasattr(worker.kv_cache_groups[0].kv_cache_spec, "kv_cache_specs")
        here, there = (engine_identity(config, each, "w") for each in (scheduler, worker))
        assert differences(here, there) == []
        texts.append(identity_text(here))
    assert texts[0] != texts[1]


def test_an_attention_backend_from_outside_counts(engines: Any, tiny: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class Packed(CPUAttentionBackend):
        """Keeps the name, as a replacement must."""

    class Layer:
        def __init__(self, backend: type) -> None:
            self.backend = backend

        def get_attn_backend(self) -> type:
            return self.backend

    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    groups = transferable_groups(scheduler)
    names = scheduler.kv_cache_groups[0].layer_names
    context = config.compilation_config.static_forward_context
    context.update({name: Layer(CPUAttentionBackend) for name in names})
    assert attention_backends(config, groups) == [["CPU_ATTN"]]
    context[names[1]] = Layer(Packed)
    ((first, second),) = attention_backends(config, groups)
    assert first == "CPU_ATTN"
    assert second.startswith("CPU_ATTN (")
    assert second.endswith("Packed)")


def test_a_backend_that_packs_like_its_base_counts_as_that(engines: Any, tiny: Path) -> None:
    """Only where it says so itself: what is derived from it may pack differently again."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class Selecting(CPUAttentionBackend):
        ucm_packs_like = CPUAttentionBackend

    class Again(Selecting):
        ucm_packs_like = Selecting

    class Repacked(Selecting):
        """Claims nothing."""

    class Lying(CPUAttentionBackend):
        ucm_packs_like = dict

    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    groups = transferable_groups(scheduler)
    context = config.compilation_config.static_forward_context

    def names(backend: type) -> list[str]:
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        context.update(dict.fromkeys(scheduler.kv_cache_groups[0].layer_names, layer))
        return attention_backends(config, groups)[0]

    assert names(Selecting) == names(Again) == ["CPU_ATTN"]
    assert names(Repacked) != ["CPU_ATTN"]
    with pytest.raises(InvalidInputError, match="ucm_packs_like"):
        names(Lying)


def test_the_backend_of_chunked_attention_packs_as_the_one_that_it_is_made_of(
    engines: Any, tiny: Path
) -> None:
    """The scheduler does not know which layers have it, as with Llama 4. One with a builder that is
    not vLLM's counts as another backend."""
    from vllm.model_executor.layers.attention.chunked_local_attention import (
        create_chunked_local_attention_backend,
    )
    from vllm.v1.attention.backend import subclass_attention_backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class Builder(CPUAttentionBackend.get_builder_cls()):  # type: ignore[misc]
        """Of another package."""

    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    groups = transferable_groups(scheduler)
    context = config.compilation_config.static_forward_context
    chunked = create_chunked_local_attention_backend(CPUAttentionBackend, 64)
    foreign = subclass_attention_backend("Foreign_", CPUAttentionBackend, Builder)
    for backend, right in ((chunked, True), (foreign, False)):
        layer = SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        context.update(dict.fromkeys(scheduler.kv_cache_groups[0].layer_names, layer))
        assert (attention_backends(config, groups) == [["CPU_ATTN"]]) == right


def test_a_spec_with_the_pages_of_its_base_counts_as_that(engines: Any, tiny: Path) -> None:
    """One kind of group, the same fields, a whole prefix as before; a spec that claims nothing is
    not served."""
    from dataclasses import dataclass, fields
    from typing import ClassVar

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from ucm.integration.vllm.connector.factory import _unsupported

    @dataclass(frozen=True, kw_only=True)
    class Selected(FullAttentionSpec):  # type: ignore[misc]
        beside: int = 7
        ucm_packs_like: ClassVar[type] = FullAttentionSpec

    @dataclass(frozen=True, kw_only=True)
    class Unknown(FullAttentionSpec):  # type: ignore[misc]
        beside: int = 7

    config = engines.engine_config(tiny)
    dense = engines.layer_specs(config)

    def groups_of(kind: type) -> Any:
        def made(spec: Any) -> Any:
            return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)})

        scheduler, _ = engines.kv_configs(config)
        scheduler.kv_cache_groups[0].kv_cache_spec = made(next(iter(dense.values())))
        return scheduler

    texts = [
        identity_text(engine_identity(config, groups_of(kind), "w"))
        for kind in (FullAttentionSpec, Selected)
    ]
    assert texts[0] == texts[1]
    assert identity_text(engine_identity(config, groups_of(Unknown), "w")) != texts[0]
    assert _unsupported(config, groups_of(Selected)) == ""
    assert "Unknown" in _unsupported(config, groups_of(Unknown))


def test_weights_are_filled_in_and_left_out(engines: Any, tiny: Path) -> None:
    early, late = engines.identity_of(tiny, ""), engines.identity_of(tiny, "sha256:ab")
    assert identity_text(with_weights(early, "sha256:ab")) == identity_text(late)
    assert identity_without_weights(early) == identity_without_weights(late)
    assert differences(early, late) == ['weights is "" here and "sha256:ab" there']


def test_blocks_over_context_parallel_ranks_hold_more_tokens(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    plain = engine_identity(config, scheduler, "w")
    config.parallel_config.decode_context_parallel_size = 2
    assert block_tokens(config, scheduler) == 64
    over_two = engine_identity(config, scheduler, "w")
    assert differences(plain, over_two) == [
        "block_tokens is 32 here and 64 there",
        "decode_context_parallel.size is 1 here and 2 there",
    ]
    config.parallel_config.cp_kv_cache_interleave_size = 16
    assert differences(over_two, engine_identity(config, scheduler, "w")) == [
        "decode_context_parallel.interleave is 1 here and 16 there"
    ]


def test_scales_that_follow_from_the_first_request_have_no_identity(
    engines: Any, tiny: Path
) -> None:
    config = engines.engine_config(tiny)
    assert unidentifiable(config) == ""
    config.cache_config.calculate_kv_scales = True
    assert "KV scales" in unidentifiable(config)


def test_adapter_settings_count_only_where_they_change_the_result(engines: Any, tiny: Path) -> None:
    base = engines.identity_of(tiny, "w")
    assert (
        differences(base, engines.identity_of(tiny, "w", enable_lora=True, max_lora_rank=16)) == []
    )
    other = engines.identity_of(tiny, "w", enable_lora=True, lora_dtype="float16")
    assert other["model_config"]["lora"] == {"dtype": "float16"}
