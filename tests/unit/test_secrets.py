"""A secret in any place of a configuration is never shown, and reaches the core unchanged."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from ucm.config import load
from ucm.config.fields import Address, concealed, for_core, revealed, without_login
from ucm.errors import UcmError
from ucm.store.engine import read_settings, settings_of

MARK = "qf7-marked-secret"
LOGIN = f"redis://user:{MARK}@127.0.0.1:1"
SIZES = {"tensor_size": 64, "shard_size": 64, "block_size": 64}

#: All places of secrets in the inline dictionary.
PLACES: dict[str, dict[str, Any]] = {
    "address": {"storage_backends": LOGIN},
    "addresses": {"storage_backends": [LOGIN, f"redis://:{MARK}@127.0.0.1:2"]},
    "key": {"storage_backends": "redis://127.0.0.1:1", "redis_password": MARK},
    "stage": {
        "store_pipeline": ["cache", {"type": "redis", "path": LOGIN, "redis_password": MARK}]
    },
    "beside a pipeline": {"store_pipeline": "Cache|Redis", "path": LOGIN, "redis_password": MARK},
    "alternatives": {
        "ucm_connectors": [
            {
                "ucm_connector_name": "UcmRedisStore",
                "ucm_connector_config": {"storage_backends": address},
            }
            for address in (LOGIN, LOGIN.replace("user", "other"))
        ]
    },
    "a user's store": {
        "ucm_connector_name": "Mine",
        "ucm_connector_config": {
            "url": LOGIN,
            "secret_key": MARK,
            "session_token": MARK,
            "deep": [{"api_key": MARK}],
        },
    },
}


def texts_of(value: Any) -> Iterator[str]:
    """Texts that may be in a log, a report or a dump."""
    yield repr(value)
    yield str(value)
    yield f"{value}"
    if hasattr(value, "model_dump"):
        yield value.model_dump_json()
        yield json.dumps(value.model_dump(), default=str)
        yield repr(value.model_dump())


@pytest.mark.parametrize("written", PLACES.values(), ids=PLACES)
def test_no_text_of_a_configuration_has_a_secret(
    written: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = load(written, {})
    for one in (config, *config.alternatives):
        for text in texts_of(one):
            assert MARK not in text
        if not one.user_store:
            for text in texts_of(one.store_config()):
                assert MARK not in text
        assert MARK in json.dumps(revealed(one.store_config()), default=str)
    assert MARK not in caplog.text


def test_a_secret_of_a_file_and_of_the_environment_is_shown_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(f"storage_backends: {LOGIN}\nredis_password: {MARK}\n")
    for config in (
        load({"ucm_config_path": str(file)}, {}),
        load({"storage_backends": "redis://127.0.0.1:1"}, {"UCM_REDIS_PASSWORD": MARK}),
    ):
        for text in texts_of(config):
            assert MARK not in text
        assert revealed(config.store_config())["redis_password"] == MARK


@pytest.mark.parametrize(
    "wrong",
    [
        {"storage_backends": f"ftp://u:{MARK}@host"},
        {"storage_backends": {"at": LOGIN}},
        {"storage_backends": [LOGIN, 7]},
        {"storage_backends": [LOGIN, ""]},
        {"storage_backends": f"/some/directory:{LOGIN}"},
        {"storage_backend": "posix", "storage_backends": LOGIN},
        {"storage_backends": LOGIN, "redis_password": [MARK]},
        {"storage_backends": LOGIN, "redis_pasword": MARK},
        {"storage_backends": LOGIN, "redis_password": MARK, "redis_connections": 0},
        {"store_pipeline": ["cache", {"type": "redis", "path": LOGIN, "redis_pasword": MARK}]},
        {"storage_backends": LOGIN, "path": LOGIN.replace("user", "other")},
    ],
    ids=lambda wrong: "+".join(wrong) if isinstance(wrong, dict) else None,
)
def test_no_error_has_a_secret(wrong: dict[str, Any]) -> None:
    config = None
    try:
        config = load(wrong, {})
    except UcmError as error:
        for text in ("".join(traceback.format_exception(error)), repr(error), str(error.context)):
            assert MARK not in text
    if config is not None:
        assert MARK not in " ".join((*config.warnings, *config.problems))


@pytest.mark.parametrize(
    "written",
    [
        {"storage_backends": [LOGIN]},
        {"storage_backends": LOGIN, "redis_password": MARK},
        {"storage_backends": [Address(LOGIN)], "redis_password": SecretStr(MARK)},
    ],
    ids=["address", "key", "as the connector passes them"],
)
def test_settings_of_a_store_show_no_secret_and_the_core_gets_it(written: dict[str, Any]) -> None:
    settings = read_settings(written | SIZES, settings_of("UcmRedisStore"), "UcmRedisStore")
    for text in (*texts_of(settings), settings.label, repr(settings.stages())):
        assert MARK not in text
    (stage,) = json.loads(settings.setup())["stages"]
    assert stage["storage_backends"] == [LOGIN]
    assert stage["redis_password"] == (MARK if "redis_password" in written else None)


def test_an_address_shows_its_user_and_no_password() -> None:
    for written, shown in (
        (LOGIN, "redis://user:***@127.0.0.1:1"),
        (f"redis://:{MARK}@h", "redis://:***@h"),
        (f"rediss://{MARK}@h/1", "rediss://***@h/1"),
        (f"redis://u:{MARK}/@:x@h", "redis://u:***@h"),
        (f"redis://u:a {MARK}@h:6379/0", "redis://u:***@h:6379/0"),
        (f"redis://u:{MARK} @h", "redis://u:***@h"),
        (f"redis://a {MARK}@h", "redis://***@h"),
        ("redis://h", "redis://h"),
    ):
        assert without_login(written) == shown
    address = Address(LOGIN)
    for same in (copy.deepcopy(address), pickle.loads(pickle.dumps(address))):  # noqa: S301
        assert (same, str(same), revealed(same)) == (address, "redis://user:***@127.0.0.1:1", LOGIN)
    assert address != Address(LOGIN.replace(MARK, "another")), "two passwords are two addresses"


def test_what_is_concealed_comes_back_as_it_was_written() -> None:
    written = {
        "password": MARK,
        "urls": (LOGIN,),
        "n": 1,
        "credentials": {"id": MARK, "more": [MARK]},
    }
    assert MARK not in repr(concealed(written))
    assert revealed(concealed(concealed(written))) == written
    assert json.loads(for_core(concealed(written)))["urls"] == [LOGIN]
