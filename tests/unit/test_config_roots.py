"""Several directories of one store: their forms, their errors, and the core's description."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import fails

from ucm.config import load, parse
from ucm.config.fields import parse_heats
from ucm.store.engine import read_pipeline_settings

SIZES = {"tensor_size": 8, "shard_size": 8, "block_size": 8}


@pytest.mark.parametrize("written", ["/a:/b:/c", ["/a", "/b", "/c"], "/a:/b/:/c:/a"])
def test_several_directories_in_each_spelling(written: Any) -> None:
    for key in ("storage_backends", "storage_path", "path"):
        config = load({"storage_backend": "nfs", key: written, "storage_policy": "Round_Robin"}, {})
        assert config.storage_backends == ("/a", "/b", "/c")
        assert config.store_config()["storage_backends"] == ["/a", "/b", "/c"]
    assert load({}, {"UCM_STORAGE_PATH": "/a:/b"}).storage_backends == ("/a", "/b")


def test_what_is_hot_and_what_is_cold() -> None:
    tiers = {"/mnt/ssd/": "HOT", "/mnt/nfs": "cold"}
    config = load(
        {"storage_path": "/mnt/ssd:/mnt/nfs:/mnt/x", "storage_policy": "tiered", "tiers": tiers}, {}
    )
    assert config.tiers == (("/mnt/ssd", "hot"), ("/mnt/nfs", "cold"))
    written = config.store_config()["tiers"]  # as a store is given it
    again = load(
        {"storage_path": "/mnt/ssd:/mnt/nfs", "storage_policy": "tiered", "tiers": written}, {}
    )
    assert again.tiers == config.tiers


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"storage_path": "/a:/b", "tiers": {"/a": "hot"}}, "storage_policy is round_robin"),
        (
            {"storage_path": "/a:/b", "storage_policy": "tiered", "tiers": {"/c": "hot"}},
            "none of the directories",
        ),
        (
            {"storage_path": "/a:/b", "storage_policy": "tiered", "tiers": {"/a": "lukewarm"}},
            "hot, warm, cold",
        ),
        ({"storage_path": "/a:/b", "storage_policy": "tiered", "tiers": "hot"}, "of no directory"),
        (
            {
                "storage_path": "/a:/b",
                "storage_policy": "tiered",
                "tiers": [["/a", "hot"], ["/a/", "cold"]],
            },
            "keep one",
        ),
        ({"storage_path": "/a:/b", "storage_policy": "mirrored"}, "storage_policy"),
        ({"storage_path": [f"/{n}" for n in range(17)]}, "16 are the most"),
        ({"storage_path": "/a:server:/b"}, "server"),
        (
            {
                "store_pipeline": "Cache|Nfs",
                "path": "/a:/b",
                "storage_policy": "tiered",
                "tiers": {"/z": "cold"},
            },
            "none of the directories",
        ),
    ],
)
def test_nonsense_is_refused_with_a_reason(extra: dict[str, Any], words: str) -> None:
    assert words in fails(extra)


def test_keys_of_moves_between_directories_have_no_meaning() -> None:
    keys = {"promote_hits": 3, "promote_window": "10m", "move_rate": "1MiB"}
    config = load({"storage_path": "/a:/b", "storage_policy": "tiered", **keys}, {})
    (warning,) = config.warnings
    assert all(f'"{key}"' in warning for key in keys)
    assert not keys.keys() & config.store_config().keys()


def test_one_stage_without_directories_gets_all_of_them() -> None:
    for pipeline in ("Cache|Nfs", "Cache|Posix", "Cache|Pc"):
        given = {
            "store_pipeline": pipeline,
            "storage_backends": "/a:/b:/c",
            "storage_policy": "random",
            **SIZES,
        }
        cache, files = read_pipeline_settings(given).stages()
        assert (files["storage_backends"], files["storage_policy"]) == (
            ["/a", "/b", "/c"],
            "random",
        )
        assert "storage_policy" not in cache


def test_stages_have_policies_of_their_own() -> None:
    above = {"type": "posix", "path": "/x:/y", "storage_policy": "tiered", "tiers": {"/x": "hot"}}
    given = {"store_pipeline": ["cache", above, {"type": "nfs", "path": "/z"}], **SIZES}
    _, upper, lower = read_pipeline_settings(given).stages()
    assert (upper["storage_policy"], upper["tiers"]) == ("tiered", [("/x", "hot")])
    assert (lower["storage_policy"], lower["tiers"], lower["storage_backends"]) == (
        "round_robin",
        [],
        ["/z"],
    )


def test_what_was_said_is_shown() -> None:
    config = parse(
        {"storage_path": "/a:/b", "storage_policy": "tiered", "tiers": {"/a": "hot"}}, {}
    )
    assert any(line.startswith('tiers = [["/a", "hot"]]') for line in config.describe())


def test_heats_are_read_from_a_mapping_or_pairs() -> None:
    assert parse_heats({"/a": "hot"}) == parse_heats([["/a", "Hot "]]) == (("/a", "hot"),)
    for wrong in (3, ["/a"], {"/a": 3}, [["/a", "hot", "x"]], {"server:/a": "hot"}):
        with pytest.raises(ValueError, match=r".+"):
            parse_heats(wrong)
