"""Why the cache stays off: each sentence says what is wrong, where, and what to do."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from ucm.config import parse
from ucm.errors import ConfigError
from ucm.integration.vllm.attention.setup import refuse_unsupported
from ucm.integration.vllm.connector import factory
from ucm.integration.vllm.connector.factory import why_off
from ucm.integration.vllm.connector.groups import SERVED
from ucm.integration.vllm.connector.identity.engine_identity import engine_identity
from ucm.reasons import MissReason


def off(
    engines: Any, tiny: Path, settings: dict[str, Any], environ: dict[str, str] | None = None
) -> tuple[MissReason, str] | None:
    """Why an engine for the tiny model with this configuration is not served."""
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    return why_off(
        parse({"storage_backends": "/nowhere", **settings}, environ or {}), config, scheduler
    )


def test_a_switch_is_named_with_the_place_that_it_stands_in(
    engines: Any, tiny: Path, tmp_path: Path
) -> None:
    assert off(engines, tiny, {}) is None
    for key in ("enabled", "enable_prefix_cache"):
        assert off(engines, tiny, {key: False}) == (
            MissReason.DISABLED,
            (
                f'"{key}" is false in kv_connector_extra_config; write true or leave it out to use'
                " the cache"
            ),
        )
    file = tmp_path / "ucm.yaml"
    file.write_text("enabled: false\n")
    assert off(engines, tiny, {"ucm_config_path": str(file)}) == (
        MissReason.DISABLED,
        f'"enabled" is false in file {file}; write true or leave it out to use the cache',
    )
    assert off(engines, tiny, {}, {"UCM_DISABLE": "1"}) == (
        MissReason.DISABLED,
        "UCM_DISABLE is set in the environment; unset it to use the cache",
    )


def windowed(engines: Any, config: Any, layers: int) -> dict[str, Any]:
    """The specs of the tiny model, where the first layers have windows."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = dict(engines.layer_specs(config))
    for name in list(specs)[:layers]:
        full = specs[name]
        assert isinstance(full, FullAttentionSpec)
        specs[name] = SlidingWindowSpec(
            block_size=full.block_size,
            num_kv_heads=full.num_kv_heads,
            head_size=full.head_size,
            dtype=full.dtype,
            sliding_window=64,
        )
    return specs


def served(engines: Any, tiny: Path, specs: Any, **args: Any) -> str:
    """The sentence for an engine with these layers, empty where it is served."""
    config = engines.engine_config(tiny, **args)
    scheduler, _ = engines.kv_configs(config, [specs(config)])
    found = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
    assert found is None or found[0] == MissReason.UNSUPPORTED
    return "" if found is None else found[1]


def test_windows_are_served_alone_and_beside_full_attention(engines: Any, tiny: Path) -> None:
    """As Mistral and Gemma 3 have them."""
    for count in (1, 2):

        def layers(config: Any, count: int = count) -> dict[str, Any]:
            return windowed(engines, config, count)

        for one_group in (False, True):
            args = {"disable_hybrid_kv_cache_manager": one_group}
            assert served(engines, tiny, layers, **args) == ""


def test_a_connector_beside_ours_that_makes_vllm_keep_one_group_is_logged(
    engines: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of such an engine have another identity than those of ucm alone."""
    monkeypatch.setattr(logging.getLogger("ucm"), "propagate", True)
    identities = []
    for others in ([], [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]):
        ours = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
        several = {"kv_connector_extra_config": {"connectors": [ours, *others]}}
        transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **several}
        config = engines.engine_config(tiny, kv_transfer_config=transfer)
        scheduler, _ = engines.kv_configs(config, [windowed(engines, config, 1)])
        caplog.clear()
        factory._say_one_group(config, scheduler)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == len(others)
        assert all("another connector without SupportsHMA" in text for text in said)
        identities.append(engine_identity(config, scheduler, "w"))
    assert identities[0]["kv_groups"] != identities[1]["kv_groups"]
    plain, _ = engines.kv_configs(config)  # no layer has a window
    factory._say_one_group(config, plain)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", matrix.OTHERS)
def test_kv_that_is_not_served_is_named_with_what_to_do(
    engines: Any, tiny: Path, kind: str
) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    group = scheduler.kv_cache_groups[0]
    other = type(kind, (type(group.kv_cache_spec),), {})
    fields = {
        field.name: getattr(group.kv_cache_spec, field.name)
        for field in dataclasses.fields(group.kv_cache_spec)
    }
    scheduler.kv_cache_groups.append(dataclasses.replace(group, kv_cache_spec=other(**fields)))
    found = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
    _, instead = matrix.OTHERS[kind]
    expected = f"KV of kind {kind} is not cached: nothing is claimed or stored"
    assert instead
    assert found == (MissReason.UNSUPPORTED, f"{expected}; {instead}")


def test_every_kind_of_vllm_is_in_the_table() -> None:
    """Of the installed version; it is served, or refused by its name."""
    from vllm.v1 import kv_cache_interface as interface

    bases = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
    found = {
        name
        for name, kind in vars(interface).items()
        if isinstance(kind, type) and issubclass(kind, interface.KVCacheSpec)
    }
    cached = {spec for kind in matrix.KINDS for spec in kind.specs}
    assert cached == set(SERVED)
    assert found - bases <= cached | matrix.OTHERS.keys()
    assert not cached & matrix.OTHERS.keys()


def test_kv_that_vllm_replays_is_not_served() -> None:
    """Blocks that a step computes again from a window on (``Request.replay_start``) would be
    offered: vLLM has such a step for one kind alone."""
    from vllm.v1 import kv_cache_interface as interface

    bases = {"KVCacheSpec", "UniformTypeKVCacheSpecs"}
    kinds = {name: kind for name, kind in vars(interface).items() if isinstance(kind, type)}
    replayed = {name for name, kind in kinds.items() if "prefix_replay_tokens" in vars(kind)}
    assert replayed - bases <= {"SlidingWindowMLASpec"}  # vLLM 0.30 replays nothing
    assert "SlidingWindowMLASpec" in matrix.OTHERS
    assert "SlidingWindowMLASpec" not in SERVED


def test_vllm_refuses_windows_over_context_parallel_ranks(engines: Any, tiny: Path) -> None:
    """It lays its KV cache out before it makes a connector."""
    config = engines.engine_config(tiny)
    layers = windowed(engines, config, 2)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(AssertionError, match=matrix.WINDOWS_DCP.refused):
        engines.kv_configs(config, [layers])


def test_several_groups_are_not_cached_over_context_parallel_ranks(
    engines: Any, tiny: Path
) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config, [windowed(engines, config, 1)])
    config.parallel_config.decode_context_parallel_size = 2
    found = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
    assert found == (MissReason.UNSUPPORTED, matrix.NO_DCP.refused)


def test_nothing_is_cached_with_prefill_context_parallelism(engines: Any, tiny: Path) -> None:
    for windows in range(3):
        config = engines.engine_config(tiny)
        scheduler, _ = engines.kv_configs(config, [windowed(engines, config, windows)])
        config.parallel_config.prefill_context_parallel_size = 2
        found = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
        assert found == (MissReason.UNSUPPORTED, matrix.NO_PCP.refused)


def test_every_refusal_of_the_page_says_what_to_do() -> None:
    refused = {cell.refused for kind in matrix.KINDS for cell in kind.cells if cell.refused}
    of_cache = refused - {
        one.refused for one in (matrix.NO_SPARSE, matrix.WINDOWS_SPARSE, matrix.WINDOWS_DCP)
    }
    assert of_cache == {one.refused for one in (matrix.NO_DCP, matrix.NO_PCP, matrix.NO_DRAFTS)}
    assert all("; start vLLM with" in text for text in of_cache)


def test_blocks_of_several_groups_are_not_selected(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config, [windowed(engines, config, 1)])
    with pytest.raises(ConfigError, match=re.escape(matrix.NO_SPARSE.refused)):
        refuse_unsupported(config, scheduler)


def test_states_are_served_where_they_lie_at_the_ends_of_blocks(engines: Any, tiny: Path) -> None:
    def found(mode: str = "align", unit: int | None = None, drafts: object = None) -> str:
        config = engines.engine_config(tiny)
        layers = dict(engines.layer_specs(config))
        layers["model.layers.9.mamba"] = MambaSpec(
            block_size=32,
            shapes=((next(iter(layers.values())).page_size_bytes // 4,),),
            dtypes=(torch.float32,),
            mamba_type=MambaAttentionBackendEnum.MAMBA2,
            mamba_cache_mode=mode,
        )
        scheduler, _ = engines.kv_configs(config, [layers])
        config.cache_config.prefix_match_unit = unit
        config.speculative_config = drafts
        off = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
        assert off is None or off[0] == MissReason.UNSUPPORTED
        return "" if off is None else off[1]

    nothing = "is not cached: nothing is claimed or stored"
    assert found() == ""
    assert found("none") == (
        f"KV of kind MambaSpec without vLLM's own prefix caching {nothing}; start vLLM with"
        " --enable-prefix-caching"
    )
    assert found("all") == (
        f'KV of kind MambaSpec with mamba_cache_mode "all" {nothing}; start vLLM with'
        " --mamba-cache-mode align"
    )
    assert found(unit=16) == (
        f"KV of kind MambaSpec with hits inside of its blocks (every 16 tokens) {nothing}; start"
        " vLLM with --prefix-match-unit 32"
    )
    assert found(drafts=object()) == matrix.NO_DRAFTS.refused
