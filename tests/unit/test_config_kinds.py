"""The configuration reads, checks, shows and documents the kinds of tiers of the core's
registry."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from config_cases import REPOSITORY
from pydantic import ValidationError

from ucm.config import Capacity, UcmConfig
from ucm.config.fields import plain, section_of
from ucm.config.words import (
    BUILT_STORES,
    COMMON,
    KINDS,
    KNOWN_STORES,
    PIPELINE,
    STORES,
    options_of,
)


def test_the_tables_of_the_page_are_made_from_the_registry() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "kinds.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "store", [name for name, found in STORES.items() if found.kind.role != "layer"]
)
def test_every_default_is_read_and_told_to_the_core_as_it_stands_there(store: str) -> None:
    kind = STORES[store].kind
    section = section_of("All", kind.options, kind.defaults)()
    told = {
        key: value
        for key, value in STORES[store].described(lambda key: getattr(section, key)).items()
        if key != "kind"
    }
    assert told == {**kind.defaults, **STORES[store].fixed}
    assert list(told) == list(kind.defaults)


def test_what_is_built_declared_and_written_in_python_stands_in_one_registry() -> None:
    roles = {kind.word: kind.role for kind in KINDS}
    assert roles["posix"] == roles["cache"] == "medium"
    assert roles["compress"] == "layer"
    assert STORES["UcmCompressStage"].fixed == {"codec": "zstd"}
    assert roles["empty"] == roles["fake"] == "python"
    assert not [word for word, role in roles.items() if role == "declared"]
    assert all(kind.instead for kind in KINDS if kind.role == "declared")
    assert {STORES[name].kind.word for name in ("UcmPosixStore", "UcmNfsStore", "UcmPcStore")} == {
        "posix"
    }
    assert BUILT_STORES < KNOWN_STORES == {PIPELINE, *STORES}


def test_keys_of_the_default_kind_stand_at_the_top_and_the_others_are_options() -> None:
    assert set(COMMON.defaults) <= set(UcmConfig.model_fields)
    assert set(options_of("UcmCacheStore").model_fields) == {"cache_size", "cache_policy"}
    assert not options_of("UcmPcStore").model_fields


OPTIONS: dict[str, dict[str, Any]] = {
    "where": {"type": "array", "format": "directories"},
    "bytes": {"type": "integer", "format": "size", "minimum": 10, "maximum": 1 << 40},
    "limit": {"type": ["integer", "string", "null"], "format": "amount"},
    "floor": {"type": ["integer", "string"], "format": "amount", "minimum": 0},
    "after": {"type": ["integer", "null"], "format": "age"},
    "mode": {"type": "integer", "format": "mode", "needs": 0o600},
    "count": {"type": ["integer", "null"], "format": "uint32", "minimum": 1},
    "part": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "how": {"type": "string", "enum": ["one", "s3fifo"]},
    "on": {"type": "boolean"},
    "text": {"type": ["string", "null"]},
    "inner": {"type": "object", "properties": {"deep": {"type": "integer"}}},
}
DEFAULTS: dict[str, Any] = {
    "where": [],
    "bytes": 100,
    "limit": None,
    "floor": "5%",
    "after": None,
    "mode": 0o640,
    "count": None,
    "part": 0.5,
    "how": "one",
    "on": False,
    "text": None,
    "inner": {"deep": 7},
}


def test_types_of_options() -> None:
    model = section_of("Made", OPTIONS, DEFAULTS)
    assert plain(model()) == DEFAULTS
    made: Any = model(
        where="/a:/b",
        bytes="1KiB",
        limit="20%",
        floor=0,
        after="2h",
        mode="0600",
        count=3,
        part=1,
        how=" S3-FIFO ",
        on="yes",
        text="t",
        inner={"deep": 1},
    )
    assert (made.where, made.bytes, made.limit, made.floor) == (
        ("/a", "/b"),
        1024,
        Capacity(percent=20),
        Capacity(0),
    )
    assert (made.after, made.mode, made.count, made.part, made.how) == (
        7200,
        0o600,
        3,
        1.0,
        "s3fifo",
    )
    assert (made.on, made.text, made.inner.deep) == (True, "t", 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"where": 7}, "is not a directory"),
        ({"bytes": 9}, "greater than or equal to 10"),
        ({"limit": 0}, "keep nothing"),
        ({"after": 5}, "is not an age"),
        ({"mode": "0400"}, "locks its owner out"),
        ({"count": 0}, "greater than or equal to 1"),
        ({"count": True}, "a number is expected"),
        ({"part": 0}, "greater than 0"),
        ({"part": 2}, "less than or equal to 1"),
        ({"part": float("nan")}, "greater than 0"),
        ({"how": "two"}, "'one' or 's3fifo'"),
        ({"on": "perhaps"}, "neither true"),
        ({"text": 5}, "valid string"),
        ({"inner": {"deap": 1}}, "Extra inputs"),
    ],
)
def test_wrong_values_of_options(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section_of("Made", OPTIONS, DEFAULTS)(**wrong)


def test_an_option_that_no_configuration_can_hold_is_found_at_the_start() -> None:
    with pytest.raises(TypeError, match="no configuration can hold"):
        section_of("Made", {"list": {"type": "array"}}, {"list": [1]})
