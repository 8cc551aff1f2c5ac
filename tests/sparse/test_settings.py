"""From keys to what runs: selectors and policies, presets of models, and what `auto` means."""

from __future__ import annotations

import logging

import pytest
from formulas import GEOMETRY

from ucm.config.sparse import Preset, keys_of
from ucm.errors import ConfigError
from ucm.sparse.policy import method_of, policy_of, preset_for, resolve_auto, settings_of
from ucm.sparse.selector import Geometry
from ucm.sparse.selectors.hash import Hash
from ucm.sparse.selectors.kvstar import KVStar
from ucm.sparse.selectors.mean_k import MeanK
from ucm.sparse.selectors.quest import Quest

WIDE = Geometry(block_size=128, kv_heads=8, head_dim=128)


def test_presets_reproduce_the_seeds() -> None:
    """ESA, GSA, GSA On-Device and KVStar at blocks of 128 tokens and 32K tokens."""
    blocks = 256
    esa = method_of(settings_of("ESA"), WIDE)
    assert isinstance(esa.selector, MeanK) and esa.policy.kept(blocks, 32768) == 3 + -(
        -253 * 3 // 10
    )
    assert esa.policy.stride == 16 and esa.policy.is_dense(3, 10**6)
    gsa = method_of(settings_of("GSA"), WIDE)
    assert isinstance(gsa.selector, MeanK) and gsa.policy.kept(blocks, 32768) == 12 + -(
        -244 * 3 // 10
    )
    assert (gsa.policy.k_min, gsa.policy.min_blocks) == (4, 0)
    hashed = method_of(settings_of("GSAOnDevice"), WIDE)
    assert isinstance(hashed.selector, Hash) and hashed.policy.kept(blocks, 32768) == 4096 // 128
    assert (hashed.policy.init, hashed.policy.local) == (1, 4)
    low_latency = settings_of(
        "GSAOnDevice", {"hash_topk_tokens": 2048, "sink_token": 32, "recent_token": 256}
    )
    assert policy_of(low_latency, 16).kept(2048, 32768) == 128
    kvstar = method_of(settings_of("KVStar"), WIDE)
    assert isinstance(kvstar.selector, KVStar) and kvstar.selector.channels == 64
    assert kvstar.policy.stride == 8


def test_the_clamp_of_the_original_can_be_written() -> None:
    keys = {
        "init_window_sz": 1,
        "local_window_sz": 2,
        "ratio": 0.3,
        "k_min": 32,
        "k_max": 48,
        "windows_inside": True,
    }
    policy = policy_of(settings_of("GSA", keys), 128)
    assert [policy.kept(n, n * 128) for n in (20, 100, 120, 300)] == [20, 32, 36, 48]


@pytest.mark.parametrize("preset", Hash.Keys.presets, ids=lambda preset: preset.name)
def test_a_known_model_has_its_settings(preset: Preset) -> None:
    policy = policy_of(
        settings_of("GSAOnDevice"), 128, f"/models/org--{preset.name.upper()}-Instruct", layers=64
    )
    assert policy.topk == preset.topk_tokens // 128
    assert policy.min_tokens == preset.min_tokens
    assert policy.dense_layers == frozenset(preset.dense_layers)
    assert policy.min_concurrency == 1  # a batch decides nothing unless the user says so


def test_configured_keys_override_those_of_the_model() -> None:
    keys = {"topk_tokens": 1024, "min_tokens": 5, "rollback_layers": [2]}
    policy = policy_of(settings_of("GSAOnDevice", keys), 128, "Qwen/Qwen3-32B", layers=64)
    assert (policy.topk, policy.min_tokens, policy.dense_layers) == (8, 5, frozenset({2}))
    by_ratio = policy_of(
        settings_of("GSAOnDevice", {"ratio": 0.1}), 128, "Qwen/Qwen3-32B", layers=64
    )
    assert (by_ratio.ratio, by_ratio.topk) == (0.1, None)
    none = policy_of(
        settings_of("GSAOnDevice", {"dense_layers": []}), 128, "Qwen/Qwen3-32B", layers=64
    )
    assert none.dense_layers == frozenset()


def test_a_model_with_fewer_layers_has_no_layers_beyond() -> None:
    policy = policy_of(settings_of("GSAOnDevice"), 128, "Qwen3-32B-pruned", layers=40)
    assert policy.dense_layers == frozenset(range(7))


def test_an_unknown_model_gets_the_defaults_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="ucm.sparse"):
        assert preset_for(Hash.Keys.presets, "someone/some-model") is None
        policy = policy_of(settings_of("GSAOnDevice"), 128, "QwQ-32B", layers=64)
    assert policy.topk == 32 and policy.min_tokens == 0 and policy.dense_layers == frozenset()
    assert '"someone/some-model": defaults are used' in caplog.text


def test_presets_are_for_the_method_that_they_were_made_for() -> None:
    policy = policy_of(settings_of("Quest"), 128, "Qwen/Qwen3-32B", layers=64)
    assert policy.dense_layers == frozenset() and policy.min_tokens == 0


def test_auto_is_the_hash_method_with_what_is_written() -> None:
    settings = resolve_auto(settings_of("auto", {"topk_tokens": 512, "lag": 1}), "m")
    assert isinstance(settings, keys_of("GSAOnDevice"))
    assert (settings.topk_tokens, settings.lag, settings.init_tokens) == (512, 1, 64)
    assert isinstance(method_of(settings_of("auto"), GEOMETRY).selector, Hash)
    assert method_of(settings_of("auto"), WIDE, "Qwen/Qwen3-4B", 36).policy.topk == 16
    assert resolve_auto(quest := settings_of("Quest"), "m") is quest
    assert isinstance(method_of(quest, GEOMETRY).selector, Quest)


def test_keys_may_be_given_in_any_spelling_and_wrong_ones_are_named() -> None:
    assert settings_of("kvstar", {"retrieval_stride": 4}).stride == 4
    with pytest.raises(ConfigError, match="topk_ratio"):
        settings_of("GSA", {"topk_rati": 0.3})
    with pytest.raises(ConfigError, match='did you mean "GSA"'):
        settings_of("GSB")
    with pytest.raises(ConfigError, match="chooses no blocks"):
        settings_of("blend")


def test_settings_and_shape_must_fit() -> None:
    with pytest.raises(ConfigError, match="merge"):
        method_of(settings_of("KVStar", {"merge": 3}), WIDE)
