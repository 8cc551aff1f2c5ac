"""Addresses in ``storage_backends``: their stores, their errors, and that secrets in them are never
shown."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import fails

from ucm.config import load, parse


@pytest.mark.parametrize(
    ("place", "store"),
    [
        ("redis://host:6379", "UcmRedisStore"),
        ("rediss://user:secret@host", "UcmRedisStore"),
        (["redis://one", "redis://two"], "UcmRedisStore"),
        ("s3://bucket/prefix", "UcmObjectStore"),
        ("az://container", "UcmObjectStore"),
        ("gs://bucket", "UcmObjectStore"),
        ("mooncake://host:50051", "UcmMooncakeStore"),
        ("/some/directory", "UcmPosixStore"),
    ],
)
def test_an_address_names_its_store(place: Any, store: str) -> None:
    config = parse({"storage_backends": place}, {})
    assert config.ucm_connector_name == store
    if isinstance(place, str):
        assert parse({}, {"UCM_STORAGE_PATH": place}).ucm_connector_name == store
    wanted = [place] if isinstance(place, str) else place
    assert list(config.storage_backends) == wanted


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (
            {"storage_backends": "ftp://u:p@host/prefix"},
            "ftp://u:***@host/prefix is no place for UcmPosixStore",
        ),
        ({"storage_backends": ["redis://host", "/b"]}, "/b is no place for UcmRedisStore"),
        ({"storage_backends": ["/b", "redis://u:p@host"]}, "UcmRedisStore, which takes it"),
        (
            {"storage_backend": "object", "path": "/data"},
            "/data is no place for UcmObjectStore; give s3://...",
        ),
        ({"storage_backend": "redis"}, "UcmRedisStore is given no address"),
        (
            {"storage_backend": "mooncake", "path": "/data"},
            "/data is no place for UcmMooncakeStore; give mooncake://",
        ),
        (
            {"store_pipeline": "Cache|Mooncake", "path": "redis://h"},
            "all have a directory of their own",
        ),
        (
            {"store_pipeline": "Posix|Mooncake", "path": "mooncake://h"},
            "stages without a directory (Posix)",
        ),
        (
            {"store_pipeline": "Cache|Posix", "path": "mooncake://h"},
            "UcmMooncakeStore, which takes it",
        ),
        ({"store_pipeline": "Cache|Object"}, "stages without a directory (Object)"),
        (
            {"store_pipeline": "Redis|Redis", "path": ["redis://a", "redis://a"]},
            "names 1; give each its own",
        ),
    ],
)
def test_an_address_is_only_for_its_store(extra: dict[str, Any], sentence: str) -> None:
    assert sentence in fails(extra, {})


def test_each_stage_has_the_place_that_is_its_own() -> None:
    config = parse(
        {"store_pipeline": "Cache|Posix|Redis|Object", "path": ["/d", "redis://h", "s3://b/p"]}, {}
    )
    assert not config.problems
    config = parse({"store_pipeline": "Cache|Redis", "path": ["redis://h:1", "redis://h:2"]}, {})
    assert not config.problems, "several nodes of one cluster"


def test_a_pool_of_mooncake_may_have_an_address_and_needs_none() -> None:
    for told in (
        {"storage_backend": "mooncake", "master_server_address": "h:1"},
        {"store_pipeline": "Cache|Mooncake", "master_server_address": "h:1"},
        {"store_pipeline": "Cache|Mooncake", "path": "mooncake://h:1"},
        {"store_pipeline": "Cache|Posix|Mooncake", "path": ["/d", "mooncake://h:1"]},
        {"store_pipeline": "Cache|Posix|Mooncake", "path": "/d", "master_server_address": "h:1"},
        {"store_pipeline": ["cache", {"type": "mooncake", "path": "mooncake://h:1"}]},
    ):
        assert not parse(told, {}).problems


def test_a_password_is_shown_nowhere() -> None:
    config = load(
        {"storage_backends": "redis://me:secret@host", "redis_password": "hidden-too"}, {}
    )
    shown = str(config)
    assert "secret" not in shown and "hidden-too" not in shown
    assert "redis://me:***@host" in shown
