"""Several entries of `ucm_connectors`: each is a store of its own, all other keys are the
engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_cases import fails

from ucm.config import load, parse


def entry(name: str = "UcmPosixStore", **keys: Any) -> dict[str, Any]:
    return {"ucm_connector_name": name, "ucm_connector_config": keys}


def test_each_entry_is_a_store_with_its_own_keys() -> None:
    config = load(
        {
            "ucm_connectors": [
                entry(storage_backends="/fast", io_direct=True),
                entry(storage_backends="/slow", storage_capacity="7GiB"),
                entry("Mine", endpoint="here") | {"ucm_connector_module_path": "my.module"},
                entry("UcmEmptyStore"),
            ],
            "staging_capacity": "8MiB",
            "min_hit_tokens": 5,
        },
        {},
    )
    stores = [config, *config.alternatives]
    assert [store.ucm_connector_name for store in stores] == [
        "UcmPosixStore",
        "UcmPosixStore",
        "Mine",
        "UcmEmptyStore",
    ]
    assert [store.storage_backends for store in stores] == [("/fast",), ("/slow",), (), ()]
    assert [store.io_direct for store in stores] == [True, False, False, False]
    assert stores[1].store_config()["storage_capacity"] == 7 << 30
    assert stores[2].store_config() == {"endpoint": "here", "staging_capacity": 8 << 20}
    assert all(store.staging_capacity == 8 << 20 for store in stores), (
        "a key at the top holds for all"
    )
    assert config.warnings == ()
    assert any(
        line.startswith("alternative 2: storage_backends") and "/slow" in line
        for line in config.describe()
    )


def test_one_entry_has_no_alternatives() -> None:
    assert load({"ucm_connectors": [entry(storage_backends="/a")]}, {}).alternatives == ()
    assert load({"storage_backends": "/a"}, {}).alternatives == ()


def test_a_later_choice_of_a_store_replaces_the_whole_list(tmp_path: Path) -> None:
    several = {
        "ucm_connectors": [entry("UcmEmptyStore"), entry("UcmFakeStore", allow_wrong_tokens=True)]
    }
    config = load(several, {"UCM_STORAGE_BACKEND": "posix", "UCM_STORAGE_PATH": "/env"})
    assert (config.ucm_connector_name, config.alternatives) == ("UcmPosixStore", ())
    file = tmp_path / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n- {ucm_connector_name: UcmEmptyStore}\n- {ucm_connector_name:"
        " UcmPosixStore}\n"
    )
    inline = {"ucm_config_path": str(file), "ucm_connectors": [entry(storage_backends="/inline")]}
    assert load(inline, {}).storage_backends == ("/inline",)
    assert load(inline, {}).alternatives == ()


def test_entries_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n"
        "- {ucm_connector_name: UcmPosixStore, ucm_connector_config: {storage_backends: /one}}\n"
        "- {ucm_connector_name: UcmPosixStore, ucm_connector_config: {storage_backends: /two}}\n"
    )
    config = load({}, {"UCM_CONFIG_FILE": str(file)})
    assert [store.storage_backends for store in (config, *config.alternatives)] == [
        ("/one",),
        ("/two",),
    ]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (
            entry("UcmRedisStore", storage_backends="/b"),
            "store 2 of `ucm_connectors`: /b is no place for",
        ),
        (entry("UcmPosixStore"), "store 2 of `ucm_connectors`: no directory is given"),
        (
            entry(storage_backends="/b", iodirect=True),
            'unknown key "ucm_connectors[1].ucm_connector_config.iodirect"',
        ),
        (
            {"ucm_connector_config": {}},
            '"ucm_connectors[1]" in kv_connector_extra_config has no `ucm_connector_name`',
        ),
        (entry("UcmFakeStore"), "wrong tokens"),
        ("UcmPosixStore", "a list of one to 8"),
    ],
)
def test_what_is_wrong_with_any_entry_is_told_at_the_start(second: Any, sentence: str) -> None:
    assert sentence in fails({"ucm_connectors": [entry(storage_backends="/a"), second]})


def test_too_many_entries() -> None:
    assert "a list of one to 8" in fails(
        {"ucm_connectors": [entry(storage_backends=f"/{n}") for n in range(9)]}
    )


def test_keys_of_the_engine_in_a_later_entry_are_said_to_do_nothing() -> None:
    config = parse(
        {
            "ucm_connectors": [
                entry(storage_backends="/a", block_size=16, min_hit_tokens=3),
                entry(storage_backends="/b", min_hit_tokens=4, deadlines={"probe_s": 1}),
            ]
        },
        {},
    )
    (warning,) = [warning for warning in config.warnings if "min_hit_tokens" in warning]
    assert warning.startswith(
        "store 2 of `ucm_connectors` sets min_hit_tokens: keys of the engine are taken from the"
    )
    assert config.alternatives[0].store_config()["deadlines"]["probe_s"] == 1
