"""Every shape of a user's file loads with its meaning, or the error names the replacement."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import FIXTURES, fails, shape

from ucm.config import load, parse
from ucm.config.sparse import AlgorithmConfig, keys_of


def test_shape_a_with_three_algorithms() -> None:
    config = parse({"ucm_config_path": str(FIXTURES / "a_connectors.yaml")}, {})
    assert config.ucm_connector_name == "UcmNfsStore"
    assert config.storage_backends == ("/mnt/nfs/kv_cache",)
    assert (config.io_direct, config.block_size) == (False, 16)
    assert (config.load_only_first_rank, config.enable_prefix_cache) == (False, True)
    assert config.metrics.config_path == "/etc/ucm/metrics.yaml"
    assert config.sparse.type == "ESA"  # the first of three, with a warning
    assert set(config.sparse.config) == {"ESA", "GSA", "GSAOnDevice"}
    gsa, esa = config.sparse.config["GSA"], config.sparse.settings
    assert isinstance(gsa, AlgorithmConfig) and gsa.ratio == 0.3
    assert isinstance(esa, AlgorithmConfig) and (esa.algorithm, esa.stride) == ("ESA", 16)
    assert (
        sum("ESA is taken because it stands first" in warning for warning in config.warnings) == 1
    )
    assert load({"ucm_config_path": str(FIXTURES / "a_connectors.yaml")}, {}).sparse.enabled


def test_shape_a_with_what_is_built_loads() -> None:
    content = shape("a_connectors.yaml")
    config = load(content, {"ENABLE_SPARSE": "false"})
    assert config.store_config()["storage_backends"] == ["/mnt/nfs/kv_cache"]
    assert config.sparse.enabled is False


def test_shape_b_sizes_mean_nothing_and_are_said_once() -> None:
    config = parse({"UCM_CONFIG_FILE": str(FIXTURES / "b_pipeline_store.yaml")}, {})
    assert config.ucm_connector_name == "UcmPipelineStore"
    assert [stage.store for stage in config.store_pipeline] == ["UcmCacheStore", "UcmPosixStore"]
    assert config.store_pipeline[0].options == {"cache_size": 1 << 30, "cache_policy": "lru"}
    assert config.storage_backends == ("/data/ucm_cache",)
    assert config.block_size == 16
    assert config.sparse.type == "GSA"
    sizes = [warning for warning in config.warnings if "shard_size" in warning]
    assert len(sizes) == 1
    assert "tensor_size" in sizes[0]
    assert "KV layout" in sizes[0]
    assert load({"UCM_CONFIG_FILE": str(FIXTURES / "b_pipeline_store.yaml")}, {}).store_pipeline


def test_shape_c_sections() -> None:
    path = str(FIXTURES / "c_sections.yaml")
    config = parse({"ucm_config_path": path}, {})
    assert config.ucm_connector_name == "UcmPosixStore"
    assert config.storage_backends == ("/data/kv_cache",)
    assert config.io_direct is True
    assert config.kv_connector == "UCMDirectConnector"
    assert config.sparse.type == "GSAOnDevice"
    settings = config.sparse.settings
    assert isinstance(settings, keys_of("GSAOnDevice"))
    assert (settings.topk_tokens, settings.init_tokens, settings.local_tokens) == (4096, 64, 512)
    assert sum("enable_prefix_caching" in warning for warning in config.warnings) == 1
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
    assert load(local, {}).ucm_connector_name == "UcmNfsStore"


def test_shape_f_stages() -> None:
    assert "mount -t nfs nfs-server:/kv_cache" in fails(shape("f_stages.json"))
    content = shape("f_stages.json")
    content["pipeline"][2]["path"] = "/mnt/kv_cache"
    config = load(content, {})
    cache, posix, nfs = config.store_pipeline
    assert (cache.store, posix.store, nfs.store) == (
        "UcmCacheStore",
        "UcmPosixStore",
        "UcmNfsStore",
    )
    assert cache.options["cache_size"] == 50 << 30
    assert (posix.storage_backends, nfs.storage_backends) == (
        ("/nvme/kv_cache",),
        ("/mnt/kv_cache",),
    )
    assert (config.io_direct, config.block_size) == (True, 32)


def test_a_pipeline_of_one_stage_is_that_store() -> None:
    for pipeline in ("Posix", ["posix"], [{"type": "posix"}]):
        config = load({"store_pipeline": pipeline, "storage_backends": "/data"}, {})
        assert (config.ucm_connector_name, config.store_pipeline) == ("UcmPosixStore", ())
    config = load({"pipeline": [{"type": "posix", "path": "/data", "io_direct": True}]}, {})
    assert (config.storage_backends, config.io_direct) == (("/data",), True)


def test_shape_g_sections_of_stages() -> None:
    config = load(shape("g_pipeline_sections.yaml"), {})
    cache, posix = config.store_pipeline
    assert cache.options["cache_size"] == 1 << 30
    assert (posix.storage_backends, posix.io_direct) == (("/data/ucm_cache",), True)
    assert sum('"cache.device"' in warning for warning in config.warnings) == 1


def test_shape_g_cache_above_a_backend() -> None:
    config = load(shape("g_cache_store.yaml"), {})
    cache, posix = config.store_pipeline
    assert (cache.store, cache.options["cache_size"]) == ("UcmCacheStore", 2 << 30)
    assert (posix.store, posix.storage_backends) == ("UcmPosixStore", ("/data/ucm_cache",))


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


# A choice of store replaces an earlier one
# --------------------------------------------------------------------


def test_the_environment_replaces_the_store_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n  - ucm_connector_name: UcmPipelineStore\n    ucm_connector_config:\n"
        "      store_pipeline: Cache|Posix\n      cache_size: 4096\n      storage_backends: /data\n"
    )
    config = load({"ucm_config_path": str(file)}, {"UCM_STORAGE_BACKEND": "posix"})
    assert (config.ucm_connector_name, config.store_pipeline, config.options) == (
        "UcmPosixStore",
        (),
        {},
    )
    assert config.storage_backends == ("/data",)


def test_a_users_store_gets_its_own_keys_as_written() -> None:
    own = {"endpoint": "here", "stream_number": 3, "storage_path": "kept as it is"}
    extra = {
        "ucm_connectors": [
            {
                "ucm_connector_name": "Mine",
                "ucm_connector_module_path": "my.module",
                "ucm_connector_config": own,
            }
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
    assert store["staging_capacity"] is None, "the core says how much"
    assert store["deadlines"] == {
        "lookup_ms": 50,
        "load_min_ms": 200,
        "load_max_s": 30,
        "load_unknown_s": 5,
        "dump_s": 30,
        "probe_s": 5,
        "shutdown_s": 3,
    }
    assert (
        load({"path": "/d", "storage_capacity": "1GiB"}, {}).store_config()["storage_capacity"]
        == 1 << 30
    )
