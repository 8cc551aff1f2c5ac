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


def test_windows_beside_full_attention_name_the_option_and_are_served_with_it(
    engines: Any, tiny: Path
) -> None:
    """As Gemma 3 has them."""

    def mixed(config: Any) -> dict[str, Any]:
        return windowed(engines, config, 1)

    assert (
        served(engines, tiny, mixed)
        == "a model with 2 KV cache groups (FullAttentionSpec, SlidingWindowSpec) is not supported"
        " yet: nothing is claimed or stored; start vLLM with --disable-hybrid-kv-cache-manager,"
        " which keeps the KV of layers with windows whole, in one group with the others, so that"
        " it can be stored (it takes more memory of the device)"
    )
    assert served(engines, tiny, mixed, disable_hybrid_kv_cache_manager=True) == ""


def test_windows_alone_and_other_state_are_not_sent_after_an_option_that_does_not_help(
    engines: Any, tiny: Path
) -> None:
    def windows(config: Any) -> dict[str, Any]:
        return windowed(engines, config, len(engines.layer_specs(config)))

    sentence = (
        "KV of kind SlidingWindowSpec is not supported yet: nothing is claimed or stored; "
        "--disable-hybrid-kv-cache-manager does not help a model whose layers all have windows"
    )
    assert served(engines, tiny, windows) == sentence
    assert served(engines, tiny, windows, disable_hybrid_kv_cache_manager=True) == sentence
    config = engines.engine_config(tiny)
    scheduler, _ = engines.kv_configs(config)
    group = scheduler.kv_cache_groups[0]
    other = type("MambaSpec", (type(group.kv_cache_spec),), {})
    fields = {
        f.name: getattr(group.kv_cache_spec, f.name)
        for f in dataclasses.fields(group.kv_cache_spec)
    }
    scheduler.kv_cache_groups.append(dataclasses.replace(group, kv_cache_spec=other(**fields)))
    found = why_off(parse({"storage_backends": "/nowhere"}, {}), config, scheduler)
    assert found is not None
    assert (
        found[1]
        == "a model with 2 KV cache groups (FullAttentionSpec, MambaSpec) is not supported yet:"
        " nothing is claimed or stored"
    )
