"""Every input is read as a configuration or refused with our error; sizes survive printing."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.config import UcmConfig, parse, parse_size
from ucm.config.fields import show_size
from ucm.config.words import ENVIRONMENT, MEANINGLESS
from ucm.errors import ConfigError

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

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
def test_whatever_is_written_is_read_or_refused_in_our_words(
    extra: dict[str, Any], environ: dict[str, str]
) -> None:
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
    assert (
        parse_size(f"{number}{letter}iB")
        == parse_size(f"{number} {letter.lower()}")
        == number * 1024**power
    )
    assert parse_size(f"{number}{letter}B") == number * 1000**power
