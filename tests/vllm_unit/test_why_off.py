"""Why the cache stays off: each sentence says what is wrong, where, and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ucm.config import parse
from ucm.integration.vllm.connector.factory import why_off
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


def test_kv_that_is_not_served_is_named_with_what_to_do(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    kinds = {
        "SlidingWindowMLASpec": "; start vLLM with --disable-hybrid-kv-cache-manager, if it can"
        " then",
        "CrossAttentionSpec": "",
        "RSWASpec": "",
    }
    for kind, instead in kinds.items():
        scheduler, _ = engines.kv_configs(config)
        group = scheduler.kv_cache_groups[0]
        other = type(kind, (type(group.kv_cache_spec),), {})
        fields = {
            field.name: getattr(group.kv_cache_spec, field.name)
            for field in dataclasses.fields(group.kv_cache_spec)
        }
        spec = other(**fields)
        scheduler.kv_cache_groups.append(dataclasses.replace(group, kv_cache_spec=spec))
        found = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
        expected = f"KV of kind {kind} is not cached: nothing is claimed or stored{instead}"
        assert found == (MissReason.UNSUPPORTED, expected)
