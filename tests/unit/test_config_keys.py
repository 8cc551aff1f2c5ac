"""Every key: with a meaning, without one, unknown, not built yet; its spellings, values and
variables."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from config_cases import fails

from ucm.config import Capacity, UcmConfig, load, parse
from ucm.config.loading import known_keys
from ucm.config.words import (
    BACKEND_WORDS,
    ENVIRONMENT,
    KNOWN_STORES,
    MEANINGLESS,
    MEANT_KEYS,
    MEANT_STORES,
    UNUSED,
    meant_store,
    nearest_key,
)


@pytest.mark.parametrize("key", sorted(set(MEANINGLESS) - {"use_scatter_gather"}))
def test_a_key_without_meaning_gives_exactly_one_warning(key: str) -> None:
    config = load({"storage_path": "/data", key: 1}, {})
    found = [warning for warning in config.warnings if f'"{key}"' in warning]
    assert len(found) == len(config.warnings) == 1
    assert MEANINGLESS[key].removeprefix("nothing: ") in found[0]


def test_warnings_are_logged_once_however_often_it_is_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucm.config.loading._said", set())
    with caplog.at_level(logging.WARNING, "ucm.config"):
        for _ in range(3):
            load({"storage_path": "/data", "stream_number": 8}, {})
    assert sum("stream_number" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ({"storage_bakends": "/x"}, "storage_backends"),
        ({"min_hit_token": 1}, "min_hit_tokens"),
        ({"deadlines": {"lookup_m": 1}}, "lookup_ms"),
        ({"identity.weight": "full"}, "weights"),
        ({"ucm_connectors": [{"ucm_connector_nam": "UcmPosixStore"}]}, "ucm_connector_name"),
        (
            {
                "ucm_connectors": [
                    {"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": {"iodirect": 1}}
                ]
            },
            "io_direct",
        ),
        ({"storage_backend": "possix"}, "posix"),
        ({"pipeline": "Cach|Posix"}, "cache"),
        ({"ucm_sparse_method": "GSAOnDevise"}, "GSAOnDevice"),
        ({"pipeline": [{"type": "posix", "pth": "/x"}]}, "path"),
    ],
)
def test_an_unknown_key_or_word_names_the_nearest(wrong: dict[str, Any], near: str) -> None:
    assert f'did you mean "{near}"?' in fails(wrong)


def test_an_unknown_variable_is_only_a_warning() -> None:
    config = load(
        {"storage_path": "/data"}, {"UCM_STORAGE_PAHT": "/x", "UCM_SOMETHING_ELSE_ENTIRELY": "1"}
    )
    first, second = sorted(config.warnings, key=lambda warning: "PAHT" not in warning)
    assert 'did you mean "UCM_STORAGE_PATH"?' in first
    assert "UCM_SOMETHING_ELSE_ENTIRELY" in second


def test_keys_of_another_store_have_no_meaning() -> None:
    config = load({"storage_path": "/data", "ior_depth": 4}, {})
    (warning,) = config.warnings
    assert (
        warning
        == '"ior_depth": without effect here; use UcmDs3fsStore, whose key it is, or leave it out: '
        "UcmPosixStore has no such key"
    )


@pytest.mark.parametrize(
    ("configured", "below", "used"),
    [
        ({"storage_path": "/data"}, "Posix", "UcmPosixStore"),
        ({"storage_path": "redis://server"}, "Redis", "UcmRedisStore"),
        ({"store_pipeline": "Compress|Pc", "storage_path": "/data"}, "Compress|Pc", "Compress|Pc"),
    ],
)
def test_a_size_of_memory_where_there_is_none_says_how_to_get_it(
    configured: dict[str, Any], below: str, used: str
) -> None:
    (warning,) = load({**configured, "cache_size": "1GiB"}, {}).warnings
    assert (
        warning
        == f'"cache_size": without effect here; use `store_pipeline: "Cache|{below}"` to keep'
        f" blocks in memory above it, or leave it out: {used} has no such key"
    )


@pytest.mark.parametrize(
    ("word", "store"),
    [
        ("s3", "object"),
        ("gs", "object"),
        ("minio", "object"),
        ("disk", "posix"),
        ("SSD", "posix"),
        ("local", "posix"),
        ("file", "posix"),
        ("memory", "cache"),
        ("ram", "cache"),
        ("valkey", "redis"),
        ("3fs", "ds3fs"),
        ("nas", "nfs"),
        ("possix", "posix"),
    ],
)
def test_an_unknown_store_names_the_one_that_is_meant(word: str, store: str) -> None:
    said = fails({"storage_backend": word, "storage_path": "/data"})
    assert f'names the backend "{word}", which ucm does not know; did you mean "{store}"?' in said
    assert f'did you mean "{store}"?' in fails({"store_pipeline": f"Cache|{word}", "path": "/data"})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("directory", "storage_backends"),
        ("cache_dir", "storage_backends"),
        ("url", "storage_backends"),
        ("max_size", "storage_capacity"),
        ("disk_size", "storage_capacity"),
        ("memory_size", "cache_size"),
        ("compression", "codec"),
        ("timeout", "deadlines"),
        ("ttl", "expire_after"),
        ("disable", "enabled"),
    ],
)
def test_a_key_of_another_cache_names_the_one_that_is_meant(key: str, meant: str) -> None:
    assert f'unknown key "{key}" in kv_connector_extra_config; did you mean "{meant}"?' in fails(
        {key: "1"}
    )
    assert meant in known_keys()


def test_no_hint_leads_to_a_key_without_effect() -> None:
    for key in {*MEANINGLESS, *UNUSED}:
        assert nearest_key(f"{key}s", known_keys()) not in {*MEANINGLESS, *UNUSED}
    assert {*MEANT_KEYS.values()} <= known_keys()
    assert not {*MEANT_KEYS} & known_keys()


def test_every_word_for_a_medium_means_a_store() -> None:
    for word in MEANT_STORES:
        assert meant_store(word) in KNOWN_STORES
        assert word not in BACKEND_WORDS


@pytest.mark.parametrize("key", ["io_engine", "posix_io_engine"])
def test_there_is_one_way_of_reading_and_writing_files(key: str) -> None:
    (warning,) = load({"storage_path": "/data", key: "aio"}, {}).warnings
    assert f'"{key}": without effect here' in warning and "posix_data_trans_concurrency" in warning


@pytest.mark.parametrize(
    ("extra", "environ", "sentence"),
    [
        ({"use_layerwise": True}, {}, "use_layerwise"),
        ({"sparse": {"enabled": True}}, {}, "sparse.enabled: true names no algorithm"),
    ],
)
def test_what_is_not_built_parses_and_then_says_so(
    extra: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    full = {"storage_path": "/data", **extra}
    assert isinstance(parse(full, environ), UcmConfig)
    assert sentence in fails(full, environ)


@pytest.mark.parametrize(
    ("extra", "environ", "sentence"),
    [
        ({"rerope": True, "sparse_type": "Quest"}, {}, "do not work together"),
        ({"ESA": {}}, {"VLLM_USE_REROPE": "true"}, "do not work together"),
        ({"rerope": {"window": 64}, "blend": {}}, {}, "do not work together"),
        ({"enable_blending": True}, {"VLLM_USE_REROPE": "true"}, "do not work together"),
        ({"rerope": True}, {"UCM_SPARSE_TYPE": "Blend"}, "do not work together"),
        ({"rerope": {"log_scale": True, "training_length": 1}}, {}, "training_length is 1"),
    ],
)
def test_rerope_is_refused_where_it_cannot_compute(
    extra: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    assert sentence in fails({"storage_path": "/data", **extra}, environ)


def test_rerope_by_the_environment_of_the_seeds() -> None:
    names = {"VLLM_USE_REROPE": "true", "REROPE_WINDOW": "64", "TRAINING_LENGTH": "128"}
    found = load({"storage_path": "/data"}, names).rerope
    assert (found.enabled, found.window, found.training_length) == (True, 64, 128)
    assert not load({"storage_path": "/data"}, {"REROPE_WINDOW": "64"}).rerope.enabled


def test_seed_defaults_of_other_stores() -> None:
    rings = parse({"storage_backend": "ds3fs", "path": "/3fs"}, {}).options
    assert (rings["ior_entries"], rings["ior_depth"], rings["numa_id"]) == (1024, 32, 0)
    mooncake = parse({"storage_backend": "mooncake", "metadata_server": "http://m"}, {}).options
    assert mooncake["global_segment_size"] == int(3.125 * (1 << 30))
    assert (mooncake["local_buffer_size"], mooncake["protocol"]) == (1 << 30, "tcp")


def test_what_the_prefix_cache_store_of_the_seeds_is_tuned_by_does_nothing_and_is_said_once() -> (
    None
):
    tuned = {
        "stream_number": 8,
        "buffer_number": 4096,
        "scatter_gather_enable": True,
        "unique_id": "x",
    }
    config = load({"storage_backend": "pc", "path": "/pc", **tuned}, {})
    assert config.options == {}
    assert [sum(f'"{key}"' in warning for warning in config.warnings) for key in tuned] == [
        1,
        1,
        1,
        1,
    ]


# Other spellings, values, contradictions
# ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "key", "value"),
    [
        ({"posix_capacity_gb": 40}, "storage_capacity", Capacity(bytes=40 << 30)),
        ({"posix_capacity_gb": "1.5"}, "storage_capacity", Capacity(bytes=3 << 29)),
        ({"storage_capacity": "40GiB"}, "storage_capacity", Capacity(bytes=40 << 30)),
        ({"storage_capacity": "20%"}, "storage_capacity", Capacity(percent=20)),
        ({"storage_capacity": 123}, "storage_capacity", Capacity(bytes=123)),
        ({"free_space_floor": "10GiB"}, "free_space_floor", Capacity(bytes=10 << 30)),
        ({"free_space_floor": "0%"}, "free_space_floor", Capacity(bytes=0)),
        ({"free_space_floor": 0}, "free_space_floor", Capacity(bytes=0)),
        ({"namespace_quota": "50%"}, "namespace_quota", Capacity(percent=50)),
        ({"tenant_quota": "1.5GiB"}, "tenant_quota", Capacity(bytes=3 << 29)),
        ({"tenant_quota": "12.5%"}, "tenant_quota", Capacity(percent=12.5)),
        ({"tenant_quota": 4096}, "tenant_quota", Capacity(bytes=4096)),
        ({"tenant_quota": None}, "tenant_quota", None),
        ({"expire_after": "1.5h"}, "expire_after", 5400),
        ({"expire_after": "30d"}, "expire_after", 30 * 86400),
        ({"expire_after": 90}, "expire_after", 90),
        ({"file_mode": "0660"}, "file_mode", 0o660),
        ({"file_mode": 0o640}, "file_mode", 0o640),
        ({"dir_mode": "770"}, "dir_mode", 0o770),
        ({"use_direct": "yes"}, "io_direct", True),
        ({"load_tokens_threshold": 2048}, "min_hit_tokens", 2048),
        ({"min_dump_tokens": 512}, "min_dump_tokens", 512),
        ({"persist_token_threshold": 512}, "min_dump_tokens", 512),
        ({"staging_capacity": "1GiB"}, "staging_capacity", 1 << 30),
        ({"block_size": "2MiB"}, "block_size", 2 << 20),
        ({"hash_method": "MD5"}, "hash_method", "md5"),
        ({"dump": "prompt"}, "dump", "prompt"),
        ({"dump": "None"}, "dump", "none"),
        ({"on_reset": "Forget"}, "on_reset", "forget"),
        ({"window_records": "Boundaries"}, "window_records", "boundaries"),
        ({"hold_share": 0}, "hold_share", 0.0),
        ({"enable_prefix_cache": "no"}, "enable_prefix_cache", False),
        ({"load_only_first_rank": True}, "load_only_first_rank", True),
        ({"hash_method": None}, "hash_method", "sha256"),  # `hash_method:` with nothing behind it
    ],
)
def test_values(extra: dict[str, Any], key: str, value: object) -> None:
    config = load({"storage_path": "/data", **extra}, {})
    assert getattr(config, key) == value
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"storage_capacity": "40QiB"}, "is not a size"),
        ({"storage_capacity": "120%"}, "at most 100%"),
        ({"storage_capacity": -1}, "is not a size"),
        ({"storage_capacity": True}, "is not a size"),
        ({"free_space_floor": True}, "is not a size"),
        ({"namespace_quota": 0}, "keep nothing"),
        (
            {"tenant_quota": 0},
            '"tenant_quota" in kv_connector_extra_config: a capacity of 0 would keep nothing',
        ),
        (
            {"tenant_quota": "much"},
            "\"tenant_quota\" in kv_connector_extra_config: 'much' is not a size",
        ),
        ({"tenant_quota": True}, '"tenant_quota" in kv_connector_extra_config: True is not a size'),
        (
            {"tenant_quota": "101%"},
            "\"tenant_quota\" in kv_connector_extra_config: '101%' is not a share of a file system",
        ),
        ({"tenant_quot": "1GiB"}, "tenant_quota"),
        ({"expire_after": "soon"}, "is not an age"),
        ({"expire_after": 59}, "is not an age"),
        ({"file_mode": 660}, "in octal and in quotes"),
        ({"file_mode": "rw"}, "in octal and in quotes"),
        ({"file_mode": "0400"}, "locks its owner out"),
        ({"dir_mode": "0600"}, "locks its owner out"),
        ({"expire_after": True}, "is not an age"),
        ({"staging_capacity": "1KiB"}, "greater than or equal to 1048576"),
        ({"min_hit_tokens": -1}, "greater than or equal to 0"),
        ({"min_hit_tokens": True}, "a number is expected"),
        ({"min_dump_tokens": -1}, "greater than or equal to 0"),
        ({"hold_share": 1.5}, "less than or equal to 1"),
        ({"hold_share": True}, "a number is expected"),
        ({"admission": "sometimes"}, "'measured', 'always' or 'never'"),
        ({"admission_share": 0}, "greater than 0"),
        ({"admission_share": 1.5}, "less than or equal to 1"),
        ({"admission_share": True}, "a number is expected"),
        ({"io_direct": "maybe"}, "neither true"),
        ({"verify": False}, "cannot be switched off"),
        ({"hash_method": "sha1"}, "'sha256', 'blake3' or 'md5'"),
        ({"dump": "output"}, "'all', 'prompt' or 'none'"),
        ({"on_reset": "empty"}, "'keep' or 'forget'"),
        ({"identity": {"weights": "declared:"}}, "pattern"),
        ({"identity": {"weights": "declared:  "}}, "pattern"),
        ({"deadlines": {"lookup_ms": 0}}, "greater than or equal to 1"),
        ({"deadlines": {"dump_s": float("inf")}}, "dump_s"),
        ({"deadlines": {"load_min_ms": 5000, "load_max_s": 1}}, "above load_max_s"),
        ({"deadlines": 5}, "is a section"),
        ({"log": {"level": "LOUD"}}, "'DEBUG'"),
        ({"log": {"format": "%(nonsense"}}, "format"),
        ({"metrics": {"port": 70000}}, "less than or equal to 65535"),
        ({"storage_backends": []}, "names no directory"),
        ({"storage_backends": 7}, "is not a directory"),
        ({"storage_backends": "server:/export"}, "mount it"),
        ({"storage_backends": ["server:/export"]}, "mount it"),
        ({"ucm_connectors": []}, "a list of one to 8"),
        ({"ucm_connectors": [{"ucm_connector_config": {}}]}, "no `ucm_connector_name`"),
        ({"ucm_connector_name": "UcmPipelineStore"}, "`store_pipeline` is missing"),
        ({"pipeline": "Cache|Posix", "storage_backend": "posix"}, "keep one of them"),
        ({"pipeline": "Cache|Posix", "nfs": {"path": "/x"}}, "has no stage"),
        ({"storage_path": "/a", "path": "/b"}, "mean the same and differ"),
        ({1: 2}, "is not a text"),
    ],
)
def test_wrong_values_say_what_and_where(extra: dict[Any, Any], sentence: str) -> None:
    path = {} if {"storage_backends", "path"} & set(extra) else {"storage_backends": "/data"}
    text = fails({**path, **extra})
    assert sentence in text
    assert "kv_connector_extra_config" in text


def test_every_wrong_value_is_named_at_once() -> None:
    text = fails(
        {"storage_path": "/data", "dump": "x", "hash_method": "y"}, {"UCM_BLOCK_SIZE": "z"}
    )
    assert '"dump" in kv_connector_extra_config' in text
    assert '"hash_method"' in text
    assert "environment UCM_BLOCK_SIZE" in text


def test_two_spellings_that_agree_are_fine() -> None:
    assert load({"storage_path": "/a", "path": "/a"}, {}).storage_backends == ("/a",)


@pytest.mark.parametrize("key", ["posix_capacity_gb", "storage_capacity"])
def test_a_capacity_of_zero_is_not_boundless(key: str) -> None:
    config = load({"storage_path": "/data", key: 0}, {})
    assert config.storage_capacity is None
    assert len(config.warnings) == 1
    assert "always bounded" in config.warnings[0]


def test_paths_are_absolute_and_unique(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse({"path": "here:~/there:/a:/a"}, {}).storage_backends == (
        f"{tmp_path}/here",
        "/home/someone/there",
        "/a",
    )


def test_no_directory_says_where_to_write_one() -> None:
    text = fails(None)
    assert "storage_backends" in text
    assert "UCM_STORAGE_PATH" in text


def test_debug_means_the_level_unless_one_is_given() -> None:
    assert load({"path": "/d"}, {"UCM_DEBUG": "1"}).log.level == "DEBUG"
    assert load({"path": "/d", "log_level": "warning"}, {"UCM_DEBUG": "1"}).log.level == "WARNING"
    assert load({"path": "/d"}, {"UCM_DEBUG": "0"}).log.level == "INFO"


def test_platform_that_is_not_ours_is_ignored() -> None:
    config = load({"path": "/d"}, {"PLATFORM": "linux/amd64"})
    assert config.platform is None
    assert len(config.warnings) == 1
    assert load({"path": "/d"}, {"PLATFORM": "simu"}).platform == "host"


@pytest.mark.parametrize("given", [({}, {"PLATFORM": "cuda"}), ({"platform": "ascend"}, {})])
def test_another_platform_is_left_to_the_connector_to_decline(
    given: tuple[dict[str, str], dict[str, str]],
) -> None:
    config = load({"path": "/d", **given[0]}, given[1])
    assert config.platform in ("cuda", "ascend")
    assert config.problems == config.warnings == ()


def test_disabled_reads_nothing() -> None:
    config = load({"no such key": 1, "ucm_config_path": "/no/such/file"}, {"UCM_DISABLE": "1"})
    assert config.enabled is False
    assert config.origin("enabled") == "environment UCM_DISABLE"
    assert "neither true" in fails({}, {"UCM_DISABLE": "perhaps"})


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_empty_variables_count_as_unset(name: str) -> None:
    assert load({"path": "/d"}, {name: " "}).describe() == load({"path": "/d"}, {}).describe()


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "Yes", "on"])
def test_flags_in_the_environment(word: str) -> None:
    assert load({"path": "/d"}, {"UCM_IO_DIRECT": word}).io_direct is True


def test_two_names_of_one_variable_must_agree() -> None:
    assert "differ" in fails({"path": "/d"}, {"UCM_METRICS_ENABLE": "1", "UCM_ENABLE_METRICS": "0"})
