"""Every form of a pipeline has its documented meaning, and an invalid one is refused with a
reason."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from config_cases import fails

from ucm.config import load, rules
from ucm.config.fields import Capacity
from ucm.store.engine import read_pipeline_settings

Extra = dict[str, Any]


def stages(extra: Extra) -> list[tuple[str, tuple[str, ...], str]]:
    config = load(extra, {})
    return [
        (stage.store, stage.storage_backends, stage.write_policy) for stage in config.store_pipeline
    ]


CACHE = ("UcmCacheStore", (), "through")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"store_pipeline": "Cache|Posix", "path": "/d"},
            [CACHE, ("UcmPosixStore", (), "through")],
        ),
        (
            {"pipeline": "cache | nfs", "storage_path": "/d"},
            [CACHE, ("UcmNfsStore", (), "through")],
        ),
        (
            {"store_pipeline": ["Cache", {"type": "Posix", "path": "/d", "write_policy": "back"}]},
            [CACHE, ("UcmPosixStore", ("/d",), "back")],
        ),
        (
            {"store_pipeline": [{"type": "posix", "path": "/a"}, {"type": "posix", "path": "/b"}]},
            [("UcmPosixStore", ("/a",), "through"), ("UcmPosixStore", ("/b",), "through")],
        ),
        (
            {
                "store_pipeline": "Cache|Posix",
                "posix": {"path": "/d", "write_policy": "never"},
                "cache": {},
            },
            None,
        ),
    ],
)
def test_forms(extra: Extra, expected: list[tuple[str, tuple[str, ...], str]] | None) -> None:
    if expected is None:
        assert stages(extra)[1] == ("UcmPosixStore", ("/d",), "never")
    else:
        assert stages(extra) == expected


def test_directories_beside_a_pipeline_go_to_its_files_in_order() -> None:
    from ucm.config.rules import with_roots

    config = load({"store_pipeline": "Cache|Posix|Posix", "storage_backends": "/fast:/far"}, {})
    resolved = with_roots(config.store_pipeline, config.storage_backends)
    assert [stage.storage_backends for stage in resolved] == [(), ("/fast",), ("/far",)]
    assert config.root == "/fast"


def test_cache_and_empty_is_memory_alone() -> None:
    for pipeline in ("Cache|Empty", ["cache", "empty"], [{"type": "cache", "size_gb": 2}, "Empty"]):
        config = load({"store_pipeline": pipeline}, {})
        assert (config.ucm_connector_name, config.store_pipeline, config.root) == (
            "UcmCacheStore",
            (),
            None,
        )
    assert config.store_config()["cache_size"] == 2 << 30


def test_an_empty_stage_at_the_end_is_nothing() -> None:
    config = load({"store_pipeline": "Cache|Posix|Empty", "path": "/d"}, {})
    assert [stage.store for stage in config.store_pipeline] == ["UcmCacheStore", "UcmPosixStore"]


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ({"cache_size": "40GiB"}, 40 << 30),
        ({"cache_size": 1 << 20}, 1 << 20),
        ({"cache_size": "25%"}, Capacity(percent=25.0)),
        ({"cache_buffer_capacity_gb": 3}, 3 << 30),
        ({"size_gb": 0.5}, 1 << 29),
        ({}, 1 << 30),
    ],
)
def test_sizes_of_memory(written: Extra, size: int | Capacity) -> None:
    config = load({"store_pipeline": "Cache|Posix", "path": "/d"} | written, {})
    assert config.store_pipeline[0].options == {"cache_size": size, "cache_policy": "lru"}
    told = config.store_config()["store_pipeline"][0]
    assert told == {
        "type": "UcmCacheStore",
        "cache_size": size if isinstance(size, int) else "25%",
        "cache_policy": "lru",
    }
    assert any("cache_size" in line for line in config.describe())


def test_keys_of_a_stage_are_its_own_and_the_others_hold_for_all() -> None:
    pipeline = [
        {"type": "posix", "path": "/a", "storage_capacity": "1GiB"},
        {"type": "posix", "path": "/b"},
    ]
    told = load({"store_pipeline": pipeline, "storage_capacity": "5GiB"}, {}).store_config()
    assert told["storage_capacity"] == 5 << 30
    first, second = told["store_pipeline"]
    assert first == {
        "type": "UcmPosixStore",
        "storage_backends": ["/a"],
        "storage_capacity": 1 << 30,
    }
    assert second == {"type": "UcmPosixStore", "storage_backends": ["/b"]}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"store_pipeline": "Cache|Posx", "path": "/d"}, 'did you mean "posix"'),
        (
            {"store_pipeline": "Cache|Compress|Posix", "path": "/d", "layout": "file"},
            "segments only",
        ),
        (
            {"store_pipeline": "Cache|Posix", "path": "/d", "layout": "file", "codec": "zstd"},
            "codec: zstd and layout: file",
        ),
        (
            {"storage_backend": "posix", "path": "/d", "layout": "file", "codec": "zstd"},
            "segments only",
        ),
        ({"storage_backend": "posix", "path": "/d", "codec": "zst"}, "'off' or 'zstd'"),
        (
            {"store_pipeline": ["compress", {"type": "pc", "codec": "off"}], "path": "/d"},
            "leave one of the two out",
        ),
        (
            {"store_pipeline": [{"type": "compress", "codec": "off"}, "pc"], "path": "/d"},
            "leave one of the two out",
        ),
        (
            {"store_pipeline": [{"type": "cache", "codec": "zstd"}, "pc"], "path": "/d"},
            "zstd of Cache, which has none",
        ),
        ({"store_pipeline": "Cache|Delegator|Posix", "path": "/d"}, "no stage that ucm has"),
        (
            {"store_pipeline": "Compress|Cache|Pc", "path": "/d"},
            "write it below: Cache|Compress|Pc",
        ),
        ({"store_pipeline": "Pc|Compress", "path": "/d"}, "Compress is the last stage"),
        ({"store_pipeline": "Compress|Compress|Pc", "path": "/d"}, "twice before one stage"),
        ({"store_pipeline": "Compress|Empty"}, "Compress keeps nothing itself"),
        ({"storage_backend": "compress", "path": "/d"}, "Compress keeps nothing itself"),
        (
            {"store_pipeline": "Compress|Fake", "fake": {"allow_wrong_tokens": True}},
            "UcmFakeStore as a stage",
        ),
        (
            {"store_pipeline": [{"type": "compress", "write_policy": "never"}, "pc"], "path": "/d"},
            "write_policy of Compress",
        ),
        (
            {"store_pipeline": "Cache|Redis", "path": "/d"},
            "/d is no place for UcmRedisStore; give redis://",
        ),
        (
            {"store_pipeline": "Cache|Posix", "path": "redis://h"},
            "redis://h is no place for UcmPosixStore",
        ),
        ({"store_pipeline": "Cache|Mooncake", "path": "/d"}, "all have a directory of their own"),
        ({"store_pipeline": "Posix|Cache", "path": "/d"}, "write it first: Cache|Posix"),
        ({"store_pipeline": "Cache|Cache|Posix", "path": "/d"}, "two Cache stages"),
        ({"store_pipeline": "Cache"}, "Cache|Empty"),
        ({"store_pipeline": "Empty|Posix", "path": "/d"}, "below Empty"),
        ({"store_pipeline": "Cache|Posix"}, "stages without a directory (Posix)"),
        ({"store_pipeline": "Cache|Posix|Posix", "path": "/d"}, "2 stages without a directory"),
        (
            {"store_pipeline": "Cache|Posix|Nfs", "storage_backends": "/a:/b:/c"},
            "2 stages without a directory",
        ),
        (
            {"store_pipeline": "Posix|Nfs", "posix": {"path": "/d"}, "nfs": {"path": "/d/"}},
            "same directory",
        ),
        (
            {"store_pipeline": ["cache", {"type": "posix", "path": "/d"}], "path": "/e"},
            "leave one of the two out",
        ),
        (
            {
                "store_pipeline": ["nfs", {"type": "posix", "path": ["/d", "/e"]}],
                "nfs": {"path": "/e"},
            },
            "same directory",
        ),
        (
            {
                "store_pipeline": [
                    {"type": "posix", "write_policy": "back"},
                    {"type": "nfs", "path": "/e"},
                ],
                "path": "/d",
            },
            "the top stage",
        ),
        (
            {
                "store_pipeline": ["posix", {"type": "nfs", "write_policy": "back"}],
                "storage_backends": "/d:/e",
            },
            "only Cache gives blocks up",
        ),
        (
            {
                "store_pipeline": [
                    {"type": "cache", "write_policy": "never"},
                    {"type": "posix", "path": "/d", "write_policy": "never"},
                ]
            },
            "no stage of the pipeline has write_policy: through",
        ),
        (
            {"store_pipeline": ["cache", {"type": "posix", "path": "/d", "write_policy": "later"}]},
            "write_policy",
        ),
        (
            {"store_pipeline": "Posix|Posix|Posix|Posix|Posix", "path": "/a:/b:/c:/d:/e"},
            "4 are the most",
        ),
        ({"store_pipeline": "Cache|Posix", "path": "/d", "cache_size": "101%"}, "cache_size"),
        ({"store_pipeline": "Cache|Posix", "path": "/d", "cache_size": 0}, "cache_size"),
        ({"store_pipeline": []}, "from top to bottom"),
        ({"store_pipeline": "Cache|Posix|Redis", "path": "/d"}, "Posix, Redis"),
    ],
)
def test_nonsense_is_refused_with_a_reason(extra: Extra, words: str) -> None:
    assert words in fails(extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"store_pipeline": "Compress|Pc", "path": "/d"},
        {"store_pipeline": "Cache|Compress|Pc", "path": "/d"},
        {"store_pipeline": "Cache|Compress|Posix", "path": "/d", "layout": "segment"},
        {"store_pipeline": "Cache|Compress|Posix", "path": "/d"},
        {"store_pipeline": ["compress", {"type": "nfs", "path": "/d", "layout": "segment"}]},
        {
            "store_pipeline": [
                "cache",
                "compress",
                {"type": "pc", "path": "/d", "write_policy": "back"},
            ]
        },
        {"store_pipeline": "Cache|Compress|Pc|Compress|Pc|Posix", "storage_backends": "/a:/b:/c"},
    ],
)
def test_compress_stands_before_segments(extra: Extra) -> None:
    config = load(extra, {})
    assert config.problems == ()
    assert config.warnings == ()
    compress = next(stage for stage in config.store_pipeline if stage.store == "UcmCompressStage")
    assert compress.options == {}


@pytest.mark.parametrize(
    ("extra", "codecs"),
    [
        ({"store_pipeline": "Pc|Posix"}, ["off", "off"]),
        ({"store_pipeline": "Compress|Pc|Posix"}, ["zstd", "off"]),
        ({"store_pipeline": "Compress|Pc|Posix", "codec": "lz4"}, ["zstd", "zstd"]),
        ({"store_pipeline": "Compress|Pc|Posix", "codec": False}, ["zstd", "off"]),
        (
            {
                "store_pipeline": [{"type": "compress", "codec": "lz4"}, "pc", "posix"],
                "codec": "zstd",
            },
            ["zstd", "zstd"],
        ),
        (
            {"store_pipeline": ["compress", {"type": "pc", "codec": "LZ4"}, "posix"]},
            ["zstd", "off"],
        ),
        (
            {"store_pipeline": ["pc", {"type": "posix", "codec": "off"}], "codec": "zstd"},
            ["zstd", "off"],
        ),
    ],
)
def test_which_codec_the_core_is_told_of_each_stage(extra: Extra, codecs: list[str]) -> None:
    sizes = {"tensor_size": 8, "shard_size": 8, "block_size": 8}
    stages = read_pipeline_settings({"storage_backends": "/a:/b", **sizes, **extra}).stages()
    assert [(stage["kind"], stage["write_policy"]) for stage in stages] == [
        ("posix", "through")
    ] * 2
    assert [stage["codec"] for stage in stages] == codecs


@pytest.mark.parametrize(
    ("extra", "written"),
    [
        ({"codec": "lz4"}, "codec"),
        ({"store_pipeline": [{"type": "pc", "codec": "LZ4"}]}, "store_pipeline[0].codec"),
    ],
)
def test_lz4_means_zstd_with_a_warning(extra: Extra, written: str) -> None:
    config = load({"path": "/d", **extra}, {})
    (warning,) = config.warnings
    assert f'"{written}: lz4"' in warning and "zstd" in warning
    assert "lz4" not in str(config.store_config())


def test_off_is_read_as_yaml_has_it() -> None:
    for written in ("off", False, "OFF"):
        assert load({"path": "/d", "codec": written}, {}).store_config()["codec"] == "off"
    assert "'off' or 'zstd'" in fails({"path": "/d", "codec": True})


def test_compress_has_no_keys_and_those_of_the_original_mean_nothing() -> None:
    old = {
        "compress_ratio": 22,
        "data_type": 1,
        "decompress_thread_num": 8,
        "compress_mode": "always",
    }
    config = load({"store_pipeline": "Compress|Pc", "path": "/d", **old}, {})
    assert config.store_config()["store_pipeline"][0] == {"type": "UcmCompressStage"}
    told = " ".join(config.warnings)
    assert all(f'"{key}"' in told for key in old)
    assert "`posix_data_trans_concurrency`" in told and "use `codec`" in told


def test_the_same_directory_by_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "ANSWER_S", 60)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "one")
    both = f"{tmp_path / 'one'}:{tmp_path / 'other'}"
    assert "same directory" in fails({"store_pipeline": "Posix|Posix", "storage_backends": both})


def test_directories_of_a_file_system_that_does_not_answer_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()

    def hang(path: str) -> str:
        assert answers.wait(100)
        return path

    monkeypatch.setattr(rules, "ANSWER_S", 0.01)
    monkeypatch.setattr("os.path.realpath", hang)
    try:
        load({"store_pipeline": "Compress|Pc", "path": "/d"}, {})
        load({"store_pipeline": "Cache|Posix|Posix", "storage_backends": "/a:/b"}, {})
        twice: Extra = {
            "store_pipeline": "Posix|Nfs",
            "posix": {"path": "/d"},
            "nfs": {"path": "/d/"},
        }
        assert "same directory" in fails(twice)
    finally:
        answers.set()
