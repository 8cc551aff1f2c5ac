"""Every shape a user may have written loads to what it means, or fails with a sentence that says what to write."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.config import Capacity, UcmConfig, load, parse, parse_size
from ucm.config.effective import flatten
from ucm.config.sizes import show_size
from ucm.config.words import ENVIRONMENT, MEANINGLESS
from ucm.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures" / "config"


def shape(name: str) -> dict[str, Any]:
    text = (FIXTURES / name).read_text()
    found = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


def fails(extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(extra, environ or {})
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# Shapes a to h -----------------------------------------------------------------------------------------------


def test_shape_a_parses_and_names_what_is_not_built() -> None:
    config = parse({"ucm_config_path": str(FIXTURES / "a_connectors.yaml")}, {})
    assert config.ucm_connector_name == "UcmNfsStore"
    assert config.storage_backends == ("/mnt/nfs/kv_cache",)
    assert (config.io_direct, config.block_size) == (False, 16)
    assert (config.load_only_first_rank, config.enable_prefix_cache) == (False, True)
    assert config.metrics.config_path == "/etc/ucm/metrics.yaml"
    assert config.sparse.type == "ESA"  # the first of three, and said so
    assert set(config.sparse.config) == {"ESA", "GSA", "GSAOnDevice"}
    assert config.sparse.config["GSA"]["topk_ratio"] == 0.3
    assert sum("ESA is taken because it stands first" in warning for warning in config.warnings) == 1
    text = fails({"ucm_config_path": str(FIXTURES / "a_connectors.yaml")})
    assert "UcmNfsStore is not built yet" in text
    assert "mount point" in text
    assert "sparse attention (ESA) is not built yet" in text


def test_shape_a_with_what_is_built_loads() -> None:
    content = shape("a_connectors.yaml")
    content["ucm_connectors"][0]["ucm_connector_name"] = "UcmPosixStore"
    config = load(content, {"ENABLE_SPARSE": "false"})
    assert config.store_config()["storage_backends"] == ["/mnt/nfs/kv_cache"]
    assert config.sparse.enabled is False


def test_shape_b_sizes_mean_nothing_and_are_said_once() -> None:
    config = parse({"UCM_CONFIG_FILE": str(FIXTURES / "b_pipeline_store.yaml")}, {})
    assert config.ucm_connector_name == "UcmPipelineStore"
    assert [stage.store for stage in config.store_pipeline] == ["UcmCacheStore", "UcmPosixStore"]
    assert config.store_pipeline[0].options == {"cache_size": 1 << 30}
    assert config.storage_backends == ("/data/ucm_cache",)
    assert config.block_size == 16
    assert config.sparse.type == "GSA"
    sizes = [warning for warning in config.warnings if "shard_size" in warning]
    assert len(sizes) == 1
    assert "tensor_size" in sizes[0]
    assert "KV layout" in sizes[0]
    text = fails({"UCM_CONFIG_FILE": str(FIXTURES / "b_pipeline_store.yaml")})
    assert "UcmPipelineStore (UcmCacheStore|UcmPosixStore) is not built yet" in text


def test_shape_c_sections() -> None:
    path = str(FIXTURES / "c_sections.yaml")
    config = parse({"ucm_config_path": path}, {})
    assert config.ucm_connector_name == "UcmPosixStore"
    assert config.storage_backends == ("/data/kv_cache",)
    assert config.io_direct is True
    assert config.kv_connector == "UCMDirectConnector"
    assert config.sparse.type == "GSAOnDevice"
    assert config.sparse.config["GSAOnDevice"] == {"hash_topk_tokens": 4096, "sink_token": 64, "recent_token": 512}
    assert sum("enable_prefix_caching" in warning for warning in config.warnings) == 1
    assert "sparse attention (GSAOnDevice) is not built yet" in fails({"ucm_config_path": path})
    assert load({"ucm_config_path": path}, {"ENABLE_SPARSE": "0"}).sparse.enabled is False


def test_shape_d_inline_loads() -> None:
    config = load(shape("d_inline.json"), {})
    assert config.ucm_connector_name == "UcmPosixStore"
    assert config.storage_backends == ("/data/kv_cache",)
    assert config.warnings == ()


def test_shape_e_says_mount_it() -> None:
    text = fails(shape("e_nfs_address.json"))
    assert "mount -t nfs nfs-server:/kv_cache" in text
    assert "mount point" in text
    local = shape("e_nfs_address.json") | {"nfs_path": "/mnt/kv"}
    assert parse(local, {}).storage_backends == ("/mnt/kv",)
    assert "UcmNfsStore is not built yet" in fails(local)


def test_shape_f_stages() -> None:
    assert "mount -t nfs nfs-server:/kv_cache" in fails(shape("f_stages.json"))
    content = shape("f_stages.json")
    content["pipeline"][2]["path"] = "/mnt/kv_cache"
    config = parse(content, {})
    cache, posix, nfs = config.store_pipeline
    assert (cache.store, posix.store, nfs.store) == ("UcmCacheStore", "UcmPosixStore", "UcmNfsStore")
    assert cache.options == {"cache_size": 50 << 30}
    assert (posix.storage_backends, nfs.storage_backends) == (("/nvme/kv_cache",), ("/mnt/kv_cache",))
    assert (config.io_direct, config.block_size) == (True, 32)
    assert "not built yet" in fails(content)


def test_a_pipeline_of_one_stage_is_that_store() -> None:
    for pipeline in ("Posix", ["posix"], [{"type": "posix"}]):
        config = load({"store_pipeline": pipeline, "storage_backends": "/data"}, {})
        assert (config.ucm_connector_name, config.store_pipeline) == ("UcmPosixStore", ())
    config = load({"pipeline": [{"type": "posix", "path": "/data", "io_direct": True}]}, {})
    assert (config.storage_backends, config.io_direct) == (("/data",), True)


def test_shape_g_sections_of_stages() -> None:
    config = parse(shape("g_pipeline_sections.yaml"), {})
    cache, posix = config.store_pipeline
    assert cache.options == {"cache_size": 1 << 30}
    assert (posix.storage_backends, posix.io_direct) == (("/data/ucm_cache",), True)
    assert sum('"cache.device"' in warning for warning in config.warnings) == 1
    assert "not built yet" in fails(shape("g_pipeline_sections.yaml"))


def test_shape_g_cache_above_a_backend() -> None:
    config = parse(shape("g_cache_store.yaml"), {})
    cache, posix = config.store_pipeline
    assert (cache.store, cache.options) == ("UcmCacheStore", {"cache_size": 2 << 30})
    assert (posix.store, posix.storage_backends) == ("UcmPosixStore", ("/data/ucm_cache",))
    assert "not built yet" in fails(shape("g_cache_store.yaml"))


def test_shape_h_file_named_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    config = load(shape("h_file_keys.json"), {"UCM_STORAGE_PATH": "/data/from_environment"})
    assert config.storage_backends == ("/data/from_environment",)
    assert config.io_direct is True
    assert config.min_hit_tokens == 64  # inline is later than the file
    assert config.origin("storage_backends") == "environment UCM_STORAGE_PATH"
    assert config.origin("io_direct") == f"file {FIXTURES / 'h_named.yaml'}"
    assert config.origin("min_hit_tokens") == "kv_connector_extra_config"
    assert config.origin("hash_method") == "default"


def test_shape_h_environment_alone() -> None:
    config = load(None, shape("h_environment.json"))
    assert config.storage_backends == ("/data/kv_cache",)
    assert (config.block_size, config.io_direct) == (16, True)
    assert (config.log.level, config.log.file) == ("DEBUG", "/var/log/ucm/ucm.log")
    assert config.log.format == "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
    assert (config.metrics.enabled, config.metrics.port) == (True, 9090)
    assert (config.profile.enabled, config.profile.output) == (True, "/tmp/ucm_profile.json")


def test_two_files_named_at_once_is_an_error_and_the_environment_wins(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("storage_path: /one\n")
    two.write_text("storage_path: /two\n")
    both = {"ucm_config_path": str(one), "UCM_CONFIG_FILE": str(two)}
    assert "name different files" in fails(both)
    config = load({"ucm_config_path": str(one)}, {"UCM_CONFIG_FILE": str(two)})
    assert config.storage_backends == ("/two",)


# Classes of keys ---------------------------------------------------------------------------------------------


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
            {"ucm_connectors": [{"ucm_connector_name": "UcmPosixStore", "ucm_connector_config": {"iodirect": 1}}]},
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
    config = load({"storage_path": "/data"}, {"UCM_STORAGE_PAHT": "/x", "UCM_SOMETHING_ELSE_ENTIRELY": "1"})
    first, second = sorted(config.warnings, key=lambda warning: "PAHT" not in warning)
    assert 'did you mean "UCM_STORAGE_PATH"?' in first
    assert "UCM_SOMETHING_ELSE_ENTIRELY" in second


def test_keys_of_another_store_have_no_meaning() -> None:
    config = load({"storage_path": "/data", "ior_depth": 4}, {})
    assert config.warnings == (
        '"ior_depth": without effect here, and nothing is needed instead: it is a key of UcmDs3fsStore',
    )


@pytest.mark.parametrize(
    ("extra", "environ", "sentence"),
    [
        ({"use_layerwise": True}, {}, "use_layerwise"),
        ({"vllm": {"kv_connector": "UCMBlendConnector"}}, {}, "UCMBlendConnector is not built yet"),
        ({"verify": "paranoid"}, {}, "verify: paranoid is not built yet"),
        ({"posix_io_engine": "aio"}, {}, "posix_io_engine: aio is not built yet"),
        ({"rerope": {"window": 1024}}, {}, "ReRoPE is not built yet"),
        ({}, {"VLLM_USE_REROPE": "1"}, "ReRoPE is not built yet"),
        ({}, {"UCM_SPARSE_TYPE": "kvstar"}, "sparse attention (KVStarMultiStep) is not built yet"),
        ({}, {"PLATFORM": "cuda"}, "platform cuda is not built yet"),
        ({}, {"UCM_STORAGE_BACKEND": "mooncake"}, "UcmMooncakeStore is not built yet"),
        ({"storage_backend": "ds3fs"}, {}, "UcmDs3fsStore is not built yet"),
        ({"storage_backend": "pc"}, {}, "UcmPcStore is not built yet"),
        ({"storage_backend": "object"}, {}, "UcmObjectStore is not built yet"),
        ({"storage_path": "/a:/b"}, {}, "several storage_backends"),
    ],
)
def test_what_is_not_built_parses_and_then_says_so(
    extra: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    full = {"storage_path": "/data", **extra}
    assert isinstance(parse(full, environ), UcmConfig)
    assert sentence in fails(full, environ)


def test_seed_defaults_of_stores_to_come() -> None:
    assert parse({"storage_backend": "ds3fs", "path": "/3fs"}, {}).options == {
        "ior_entries": 1024,
        "ior_depth": 32,
        "numa_id": 0,
    }
    mooncake = parse({"storage_backend": "mooncake", "metadata_server": "http://m"}, {}).options
    assert mooncake["global_segment_size"] == int(3.125 * (1 << 30))
    assert (mooncake["local_buffer_size"], mooncake["protocol"]) == (1 << 30, "tcp")
    pc = parse({"storage_backend": "pc", "path": "/pc", "unique_id": "x"}, {})
    assert (pc.options["stream_number"], pc.options["buffer_number"], pc.options["unique_id"]) == (8, 4096, "x")
    assert pc.warnings == ()


# Other spellings, values, contradictions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "key", "value"),
    [
        ({"posix_capacity_gb": 40}, "storage_capacity", Capacity(bytes=40 << 30)),
        ({"posix_capacity_gb": "1.5"}, "storage_capacity", Capacity(bytes=3 << 29)),
        ({"storage_capacity": "40GiB"}, "storage_capacity", Capacity(bytes=40 << 30)),
        ({"storage_capacity": "20%"}, "storage_capacity", Capacity(percent=20)),
        ({"storage_capacity": 123}, "storage_capacity", Capacity(bytes=123)),
        ({"use_direct": "yes"}, "io_direct", True),
        ({"load_tokens_threshold": 2048}, "min_hit_tokens", 2048),
        ({"staging_capacity": "1GiB"}, "staging_capacity", 1 << 30),
        ({"block_size": "2MiB"}, "block_size", 2 << 20),
        ({"hash_method": "MD5"}, "hash_method", "md5"),
        ({"dump": "prompt"}, "dump", "prompt"),
        ({"verify": True}, "verify", "on"),  # what YAML makes of a bare `on`
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
        ({"staging_capacity": "1KiB"}, "greater than or equal to 1048576"),
        ({"min_hit_tokens": -1}, "greater than or equal to 0"),
        ({"min_hit_tokens": True}, "a number is expected"),
        ({"io_direct": "maybe"}, "neither true"),
        ({"verify": False}, "cannot be switched off"),
        ({"hash_method": "sha1"}, "'sha256', 'blake3' or 'md5'"),
        ({"dump": "output"}, "'all' or 'prompt'"),
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
        ({"storage_backends": "s3://bucket/prefix"}, "object stores are not built yet"),
        ({"storage_backends": "server:/export"}, "mount it"),
        ({"storage_backends": ["server:/export"]}, "mount it"),
        ({"ucm_connectors": []}, "exactly one"),
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
    text = fails({"storage_path": "/data", "dump": "x", "hash_method": "y"}, {"UCM_BLOCK_SIZE": "z"})
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


# A choice of store replaces an earlier one -------------------------------------------------------------------


def test_the_environment_replaces_the_store_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n  - ucm_connector_name: UcmPipelineStore\n    ucm_connector_config:\n"
        "      store_pipeline: Cache|Posix\n      cache_size: 4096\n      storage_backends: /data\n"
    )
    config = load({"ucm_config_path": str(file)}, {"UCM_STORAGE_BACKEND": "posix"})
    assert (config.ucm_connector_name, config.store_pipeline, config.options) == ("UcmPosixStore", (), {})
    assert config.storage_backends == ("/data",)


def test_a_users_store_gets_its_own_keys_as_written() -> None:
    own = {"endpoint": "here", "stream_number": 3, "storage_path": "kept as it is"}
    extra = {
        "ucm_connectors": [
            {"ucm_connector_name": "Mine", "ucm_connector_module_path": "my.module", "ucm_connector_config": own}
        ],
        "deadlines": {"lookup_ms": 20},
        "min_hit_tokens": 5,
    }
    config = load(extra, {"UCM_IO_DIRECT": "1"})
    assert config.user_store
    assert (config.ucm_connector_name, config.ucm_connector_module_path) == ("Mine", "my.module")
    given_to_store = config.store_config()
    assert given_to_store["deadlines"]["lookup_ms"] == 20
    assert given_to_store["io_direct"] is True
    assert {key: given_to_store[key] for key in own} == own
    assert set(given_to_store) == {*own, "deadlines", "io_direct"}
    assert config.warnings == ()


def test_a_users_store_by_registered_name_alone() -> None:
    config = load({"ucm_connector_name": "Mine", "ucm_connector_config": {"a": 1}}, {})
    assert (config.user_store, config.store_config()) == (True, {"a": 1})
    replaced = load(
        {"ucm_connector_name": "Mine", "ucm_connector_config": {"a": 1}},
        {"UCM_STORAGE_BACKEND": "posix", "UCM_STORAGE_PATH": "/d"},
    )
    assert not replaced.user_store
    assert "a" not in replaced.store_config()


def test_our_store_gets_all_of_its_keys() -> None:
    config = load({"path": "/d", "storage_capacity": "10%"}, {})
    store = config.store_config()
    assert store["storage_backends"] == ["/d"]
    assert store["storage_capacity"] == "10%"
    assert store["staging_capacity"] == 256 << 20
    assert store["deadlines"] == {
        "lookup_ms": 50,
        "load_min_ms": 200,
        "load_max_s": 30,
        "load_unknown_s": 5,
        "dump_s": 30,
        "probe_s": 5,
        "shutdown_s": 3,
    }
    assert load({"path": "/d", "storage_capacity": "1GiB"}, {}).store_config()["storage_capacity"] == 1 << 30


# Files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"storage_path: [", "is not YAML"),
        (b"storage_path: /a\nstorage_path: /b\n", "written twice"),
        (b"- a\n- b\n", "holds keys at its top"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"a: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        (b"ucm_config_path: other.yaml\n", "names another file"),
        (b"x: " + b"y" * (1 << 20), "larger than"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_bytes(content)
    text = fails({"ucm_config_path": str(file)})
    assert sentence in text
    assert str(file) in text


def test_a_missing_file_says_who_named_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.yaml")
    assert "kv_connector_extra_config.UCM_CONFIG_FILE" in fails({"UCM_CONFIG_FILE": missing})
    assert "environment UCM_CONFIG_FILE" in fails({}, {"UCM_CONFIG_FILE": missing})


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("# nothing yet\n")
    assert load({"ucm_config_path": str(file), "path": "/d"}, {}).describe() == load({"path": "/d"}, {}).describe()


# Printing ----------------------------------------------------------------------------------------------------


def test_every_value_is_shown_with_its_origin() -> None:
    config = load({"path": "/d", "deadlines": {"lookup_ms": 9}, "storage_capacity": "40GiB"}, {"UCM_IO_DIRECT": "1"})
    lines = config.describe()
    assert 'storage_backends = ["/d"]  (kv_connector_extra_config)' in lines
    assert 'storage_capacity = "40GiB"  (kv_connector_extra_config)' in lines
    assert "deadlines.lookup_ms = 9  (kv_connector_extra_config)" in lines
    assert "io_direct = true  (environment UCM_IO_DIRECT)" in lines
    assert 'staging_capacity = "256MiB"  (default)' in lines
    shown = {line.partition(" = ")[0] for line in lines}
    assert {key for key, _ in flatten(config)} - {"options", "ucm_connector_config"} <= shown


def test_secrets_are_never_shown() -> None:
    own = {
        "access_key": "hunter2a",
        "secret_key": "hunter2b",
        "nested": {"password": "hunter2c", "list": [{"api-key": "hunter2d"}]},
        "url": "redis://user:hunter2e@host/0",
        "auth_token": "hunter2f",
        "visible": "seen",
    }
    config = load({"ucm_connector_name": "Mine", "ucm_connector_config": own}, {})
    for text in (str(config), repr(config)):
        assert "hunter2" not in text
    assert "seen" in str(config)
    assert "redis://<hidden>@host/0" in str(config)
    assert config.store_config() == own


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Properties --------------------------------------------------------------------------------------------------

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_NAMES = st.sampled_from(
    [
        *MEANINGLESS,
        *UcmConfig.model_fields,
        "ucm_connectors",
        "pipeline",
        "storage_backend",
        "backend",
        "cache",
        "posix",
        "storage",
        "vllm",
        "nfs_path",
        "ucm_sparse_config",
        "GSA",
        "type",
        "path",
        "size_gb",
        "name",
        "config",
        "cache_size",
    ]
) | st.text(max_size=6)
_VALUES = st.recursive(
    _SCALARS | st.sampled_from(["Posix", "Cache|Posix", "UcmPosixStore", "/d", "1GiB"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=8,
)


@PATIENT
@given(
    st.dictionaries(_NAMES, _VALUES, max_size=5),
    st.dictionaries(st.sampled_from(sorted(ENVIRONMENT)), st.text(max_size=8)),
)
def test_whatever_is_written_is_read_or_refused_in_our_words(extra: dict[str, Any], environ: dict[str, str]) -> None:
    try:
        config = parse(extra, environ)
    except ConfigError as error:
        assert str(error)
    else:
        assert config.describe()
        config.store_config()


@PATIENT
@given(st.integers(0, 2**63 - 1))
def test_sizes_survive_being_shown(size: int) -> None:
    assert parse_size(show_size(size)) == parse_size(size) == parse_size(str(size)) == size


@PATIENT
@given(st.integers(1, 9999), st.sampled_from(["K", "M", "G", "T"]))
def test_units(number: int, letter: str) -> None:
    power = "KMGT".index(letter) + 1
    assert parse_size(f"{number}{letter}iB") == parse_size(f"{number} {letter.lower()}") == number * 1024**power
    assert parse_size(f"{number}{letter}B") == number * 1000**power


# Documentation -----------------------------------------------------------------------------------------------


def test_the_documentation_lists_every_key_and_variable() -> None:
    text = (REPOSITORY / "docs" / "configuration.md").read_text()
    keys = {key for key, _ in flatten(UcmConfig())} | {"UCM_CONFIG_FILE", "UCM_DISABLE"} | set(ENVIRONMENT)
    from ucm.config.stores import KNOWN_STORES, OPTION_OWNER
    from ucm.config.words import ALIASES, MEANINGLESS_ENVIRONMENT

    keys |= set(OPTION_OWNER) | set(ALIASES) | set(MEANINGLESS) | set(MEANINGLESS_ENVIRONMENT) | KNOWN_STORES
    missing = sorted(key for key in keys - {"options"} if f"`{key}`" not in text)
    assert missing == []
