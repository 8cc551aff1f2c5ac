"""Broken files, the printed effective configuration, and its documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import REPOSITORY, fails

from ucm.config import UcmConfig, load
from ucm.config.model import flatten
from ucm.config.words import ENVIRONMENT, MEANINGLESS


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
    assert (
        load({"ucm_config_path": str(file), "path": "/d"}, {}).describe()
        == load({"path": "/d"}, {}).describe()
    )


# Printing
# --------------------------------------------------------------------------------------------------


def test_every_value_is_shown_with_its_origin() -> None:
    config = load(
        {"path": "/d", "deadlines": {"lookup_ms": 9}, "storage_capacity": "40GiB"},
        {"UCM_IO_DIRECT": "1"},
    )
    lines = config.describe()
    assert 'storage_backends = ["/d"]  (kv_connector_extra_config)' in lines
    assert 'storage_capacity = "40GiB"  (kv_connector_extra_config)' in lines
    assert "deadlines.lookup_ms = 9  (kv_connector_extra_config)" in lines
    assert "io_direct = true  (environment UCM_IO_DIRECT)" in lines
    assert "staging_capacity = for two steps of the engine  (default)" in lines
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
    assert "redis://user:***@host/0" in str(config)
    assert config.store_config() == own


# Documentation
# -----------------------------------------------------------------------------------------------


def test_the_documentation_lists_every_key_and_variable() -> None:
    text = "".join(page.read_text() for page in (REPOSITORY / "docs").glob("configuration*.md"))
    keys = (
        {key for key, _ in flatten(UcmConfig())}
        | {"UCM_CONFIG_FILE", "UCM_DISABLE"}
        | set(ENVIRONMENT)
    )
    from ucm.config.words import ALIASES, KNOWN_STORES, MEANINGLESS_ENVIRONMENT, OPTION_OWNER

    keys |= (
        set(OPTION_OWNER)
        | set(ALIASES)
        | set(MEANINGLESS)
        | set(MEANINGLESS_ENVIRONMENT)
        | KNOWN_STORES
    )
    missing = sorted(key for key in keys - {"options"} if f"`{key}`" not in text)
    assert missing == []
