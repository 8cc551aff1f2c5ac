"""Keys of the sparse algorithms: every spelling has one meaning, and an error names its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_cases import fails

import ucm.config.sparse as known
from ucm.config import load, parse
from ucm.config.sparse import (
    AlgorithmConfig,
    BlendConfig,
    algorithms,
    chooses_blocks,
    keys_of,
)
from ucm.config.words import SPARSE_ALIASES as ALIASES
from ucm.config.words import SPARSE_MEANINGLESS as MEANINGLESS
from ucm.config.words import SPARSE_NEEDS as NEEDS

pytest.importorskip("ucm._core")


def chosen(extra: dict[str, Any], environ: dict[str, str] | None = None) -> AlgorithmConfig:
    config = load({"storage_path": "/d", **extra}, environ or {})
    assert isinstance(config.sparse.settings, AlgorithmConfig)
    return config.sparse.settings


@pytest.mark.parametrize(
    ("extra", "environ"),
    [
        ({"ucm_sparse_config": {"GSA": {"topk_ratio": 0.2}}}, {}),
        (
            {"ucm_sparse_config": {"sparse_type": "gsa", "GSA": {"sparse_ratio": 0.2}, "ESA": {}}},
            {},
        ),
        ({"ucm_sparse_config": {"ESA": {}, "GSA": {"ratio": 0.2}}, "ucm_sparse_method": "GSA"}, {}),
        ({"sparse": {"enabled": True, "type": "GSA", "config": {"topk_ratio": 0.2}}}, {}),
        ({"sparse": {"type": "GSA"}, "GSA": {"topk_ratio": 0.2}}, {}),
        ({"sparse": {"config": {"topk_ratio": 0.2}}}, {"UCM_SPARSE_TYPE": "GSA"}),
        ({"GSA": {"topk_ratio": 0.2}}, {"ENABLE_SPARSE": "true"}),
        ({"sparse_type": "GSA", "gsa": {"topk_ratio": 0.2}}, {}),
        ({"sparse.type": "GSA", "GSA": {"topk_ratio": 0.2}}, {}),
    ],
)
def test_every_place_an_algorithm_may_stand(extra: dict[str, Any], environ: dict[str, str]) -> None:
    settings = chosen(extra, environ)
    assert isinstance(settings, keys_of("GSA"))
    assert settings.budget == ("ratio", 0.2)


@pytest.mark.parametrize(
    "spelled", ["GSAOnDevice", "gsa_on_device", "gsa-on-device", "GsaOnDevice"]
)
def test_algorithms_are_found_however_they_are_spelled(spelled: str) -> None:
    assert isinstance(chosen({"sparse_type": spelled}), keys_of("GSAOnDevice"))


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_another_spelling_is_the_same_key(alias: str) -> None:
    key = ALIASES[alias]
    values = {
        "dense_layers": [0, 3],
        "reuse_from": [False, True],
        "ratio": 0.25,
        "prune_ratio": 0.25,
    }
    value = values.get(key, 8)
    found = 0
    for name in filter(chooses_blocks, algorithms()):
        if key not in keys_of(name).model_fields:
            continue
        written, meant = chosen({name: {alias: value}}), chosen({name: {key: value}})
        assert getattr(written, key) == getattr(meant, key)
        assert key in written.model_fields_set
        found += 1
    assert found or key == "min_hit_blocks"  # Blend's


def test_defaults_of_the_seeds() -> None:
    esa, gsa, kvstar, hashed = (
        chosen({name: {}}) for name in ("ESA", "GSA", "KVStar", "GSAOnDevice")
    )
    assert isinstance(esa, keys_of("ESA")) and (esa.init_blocks, esa.budget, esa.stride) == (
        1,
        ("ratio", 0.3),
        16,
    )
    assert (gsa.init_blocks, gsa.local_blocks, gsa.min_blocks, gsa.budget) == (
        4,
        8,
        4,
        ("ratio", 0.3),
    )
    assert isinstance(kvstar, keys_of("KVStarMultiStep"))
    assert (
        kvstar.init_blocks,
        kvstar.local_blocks,
        kvstar.stride,
        kvstar.prune_ratio,
        kvstar.merge,
    ) == (
        2,
        4,
        8,
        0.5,
        4,
    )
    assert isinstance(hashed, keys_of("GSAOnDevice")) and hashed.budget == ("topk_tokens", 4096)
    assert (hashed.window("init", 16), hashed.window("local", 16)) == (4, 32)
    assert {one.lag for one in (esa, gsa, kvstar, hashed)} == {0}


@pytest.mark.parametrize(
    ("tokens", "size", "blocks"),
    [(64, 16, 4), (65, 16, 5), (1, 128, 1), (0, 128, 0), (512, 128, 4), (513, 128, 5)],
)
def test_windows_in_tokens_are_rounded_up_to_blocks(tokens: int, size: int, blocks: int) -> None:
    assert chosen({"GSAOnDevice": {"sink_token": tokens}}).window("init", size) == blocks


def test_a_window_in_blocks_takes_the_place_of_a_default_in_tokens() -> None:
    settings = chosen({"GSAOnDevice": {"init_window_sz": 3, "local_window_sz": 7}})
    assert (settings.window("init", 16), settings.window("local", 16)) == (3, 7)


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ([0, 1, 61], (0, 1, 61)),
        ("0-2, 61", (0, 1, 2, 61)),
        ("", ()),
        ([], ()),
        (3, (3,)),
        (["0-1", 5], (0, 1, 5)),
    ],
)
def test_layers_may_be_ranges(written: Any, layers: tuple[int, ...]) -> None:
    assert chosen({"Quest": {"dense_layers": written}}).dense_layers == layers


def test_layers_that_take_a_choice_over_are_a_mapping_or_the_originals_flags() -> None:
    assert chosen({"Quest": {"reuse_from": {"3": 2}}}).reuse_from == {3: 2}
    flags = [False, True, True, False, True]
    assert chosen({"GSAOnDevice": {"vllm_hash_attention_skip_layers": flags}}).reuse_from == {
        1: 0,
        2: 0,
        4: 3,
    }


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"topk_rati": 0.3},
            'unknown key "GSA.topk_rati" in kv_connector_extra_config; did you mean "topk_ratio"?',
        ),
        ({"ratio": 0}, '"GSA.ratio" in kv_connector_extra_config'),
        ({"ratio": "much"}, '"GSA.ratio"'),
        ({"ratio": 0.2, "sparse_ratio": 0.3}, '"GSA.ratio" and "GSA.sparse_ratio"'),
        (
            {"ratio": 0.2, "topk_tokens": 64},
            "ratio and topk_tokens are budgets, of which one is written",
        ),
        ({"init_blocks": 1, "sink_token": 64}, "init_blocks and init_tokens are one window"),
        ({"local_blocks": 0}, '"GSA.local_blocks"'),
        ({"stride": 0}, '"GSA.stride"'),
        ({"lag": -1}, '"GSA.lag"'),
        ({"k_min": 5, "k_max": 4}, "k_max (4) lies below k_min (5)"),
        ({"dense_layers": "first"}, '"first" is neither'),
        ({"dense_layers": "9-2"}, '"9-2" is no range'),
        ({"dense_layers": [0.5]}, '"0.5" is neither'),
        ({"reuse_from": {"a": 1}}, "it maps layers to earlier layers"),
        ({"reuse_from": [True]}, "layer 0 comes before every layer that chooses"),
        ({"reuse_from": {2: 3}}, "layer 2 takes the choice of an earlier layer"),
        (
            {"reuse_from": {3: 2}, "dense_layers": [2]},
            "layer 3 takes the choice of an earlier layer",
        ),
        ({"eviction": "fifo"}, '"GSA.eviction"'),
        ({"pool": "median"}, '"GSA.pool"'),
        ({"hash_bits": 128}, 'unknown key "GSA.hash_bits"'),
    ],
)
def test_what_is_wrong_is_named_where_it_stands(section: dict[str, Any], sentence: str) -> None:
    assert sentence in fails({"storage_path": "/d", "GSA": section})


def test_a_wrong_key_below_a_type_is_named_as_it_was_written() -> None:
    text = fails({"storage_path": "/d", "sparse": {"type": "GSA", "config": {"topk_rati": 0.3}}})
    assert '"sparse.config.topk_rati"' in text and '"topk_ratio"' in text


def test_a_section_that_is_not_chosen_is_checked_as_well() -> None:
    assert '"ESA.strid"' in fails({"storage_path": "/d", "sparse_type": "GSA", "ESA": {"strid": 3}})


def test_keys_of_the_original_without_meaning_are_said_once() -> None:
    config = load({"storage_path": "/d", "GSAOnDevice": dict.fromkeys(MEANINGLESS, 1)}, {})
    for key, instead in MEANINGLESS.items():
        assert sum(f'"GSAOnDevice.{key}"' in warning for warning in config.warnings) == 1
        assert any(instead.removeprefix("nothing: ") in warning for warning in config.warnings)


@pytest.mark.parametrize("key", sorted(NEEDS))
def test_a_key_that_does_nothing_without_another_one_says_so(key: str) -> None:
    value: Any = {"eviction": "lru", "prefetch_enabled": True, "select_stored": True}.get(key, 3)
    (warning,) = load({"storage_path": "/d", "GSA": {key: value}}, {}).warnings
    assert f'"GSA.{key}"' in warning and f"`{NEEDS[key][0]}" in warning
    for needed in NEEDS[key]:
        beside: Any = {"offload": True} if needed == "offload" else {"lag": 2}
        assert load({"storage_path": "/d", "GSA": {key: value, **beside}}, {}).warnings == ()


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("storage_path: /d\nGSA: {topk_ratio: 0.2, stride: 3}\nESA: {stride: 9}\n")
    config = load({"ucm_config_path": str(file), "GSA": {"retrieval_stride": 5}}, {})
    settings = config.sparse.settings
    assert isinstance(settings, keys_of("GSA")) and (settings.ratio, settings.stride) == (0.2, 5)
    assert config.origin("sparse.config.GSA.stride") == "kv_connector_extra_config"
    assert config.origin("sparse.config.GSA.ratio") == f"file {file}"
    lines = config.describe()
    assert f"sparse.config.GSA.ratio = 0.2  (file {file})" in lines
    assert "sparse.config.GSA.lag = 0  (default)" in lines
    assert not any(".Quest." in line for line in lines)


def test_blend_has_typed_keys_and_selects_no_blocks() -> None:
    meta = {"model.layers.1.self_attn.attn": {"ratio": 0.2}}
    config = parse(
        {"storage_path": "/d", "Blend": {"compute_meta": meta, "chunk_end_token_id": 7}}, {}
    )
    blend = config.sparse.blend
    assert isinstance(blend, BlendConfig) and config.sparse.enabled and not config.sparse.selects
    assert blend.compute_meta["model.layers.1.self_attn.attn"].ratio == 0.2
    assert blend.select == "hkvd"  # the only rule that reads it, and the only one of the original
    assert not config.problems
    assert '"Blend.compute_meta"' in fails(
        {"storage_path": "/d", "Blend": {"compute_meta": {"layer": {"rate": 1}}}}
    )


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"blend": {}}, BlendConfig()),
        ({"enable_blending": True}, BlendConfig()),
        ({"enable_blending": True, "blend": {"ratio": 0.3}}, BlendConfig(ratio=0.3)),
        ({"enable_blending": False}, None),
        ({"blend": {"ratio": 0.3}, "sparse": {"enabled": False}}, None),
        (
            {"ucm_sparse_config": {"Blend": {"min_blend_threshold": 4}}},
            BlendConfig(min_hit_blocks=4),
        ),
        ({"blend": {"separators": ["<sep>", [1, 2]]}}, BlendConfig(separators=("<sep>", (1, 2)))),
        (
            {"blend": {"select": "epic", "chunk_size": 64, "chunk_alone": True}},
            BlendConfig(select="epic", chunk_size=64, chunk_alone=True),
        ),
    ],
)
def test_ways_to_write_blend(written: dict[str, Any], found: BlendConfig | None) -> None:
    config = load({"storage_path": "/d", **written}, {})
    assert config.sparse.blend == found and not config.sparse.selects


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"ratio": 1.5}, '"Blend.ratio"'),
        ({"select": "all"}, '"Blend.select"'),
        ({"select": "union", "hkvd_threshold": 0.1}, "hkvd_threshold is of the rule hkvd"),
        ({"separators": [""]}, '"Blend.separators'),
        ({"separators": [[]]}, '"Blend.separators'),
        ({"separators": 7}, '"Blend.separators"'),
        ({"chunk_alone": 7}, '"Blend.chunk_alone"'),
    ],
)
def test_what_blend_refuses(keys: dict[str, Any], sentence: str) -> None:
    assert sentence in fails({"storage_path": "/d", "Blend": keys})


def test_the_switch_of_the_environment_keeps_the_keys_of_a_file_and_switches_off() -> None:
    config = load({"storage_path": "/d", "GSA": {"ratio": 0.2}}, {"ENABLE_SPARSE": "0"})
    assert config.sparse.settings is None
    assert "GSA" in config.sparse.config


def test_without_pytorch_keys_are_kept_unchecked_and_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that only keeps blocks may read the configuration of an engine."""
    sections = {name: cls for name, cls in known._SECTIONS.items() if name != "InfLLM"}
    monkeypatch.setattr(known, "_SECTIONS", sections)
    monkeypatch.setitem(known._MODULES, "InfLLM", "ucm.sparse.selectors.without_torch")

    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'torch' (for {name})", name="torch")

    monkeypatch.setattr(known.importlib, "import_module", fail)
    config = load({"storage_path": "/d", "InfLLM": {"rep_tokens": 3, "topk": 5}}, {})
    assert config.sparse.type == "InfLLM"
    assert "sparse.config.InfLLM.topk_blocks = 5  (kv_connector_extra_config)" in config.describe()
    assert any('"InfLLM"' in warning and "PyTorch" in warning for warning in config.warnings)


@pytest.mark.parametrize(
    ("dump", "offload", "refused"),
    [("none", True, True), ("none", False, False), ("prompt", True, False)],
)
def test_offload_needs_stored_blocks(dump: str, offload: bool, refused: bool) -> None:
    config = parse(
        {"storage_path": "/d", "dump": dump, "ucm_sparse_config": {"Quest": {"offload": offload}}},
        {},
    )
    assert [why for why in config.problems if "stores nothing" in why] == list(config.problems)
    assert bool(config.problems) == refused
