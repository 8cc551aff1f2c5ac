"""A kind of tier is one file and one line: a toy, only in builds for tests, is configured, checked,
opened and documented although no Python code, and no other Rust code, names it.

``make test-kinds`` builds such a core and runs these; the behaviour suite of the crates runs over
the toy as well.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ucm._core", reason="the core is not compiled here")

from blocks import BLOCK, PATIENT, PIECES, Memory, await_room, ids
from config_cases import fails

from ucm.config import load
from ucm.config.words import STORES
from ucm.errors import ConfigError
from ucm.store import UcmConnectorFactoryV1
from ucm.store.posix import UcmPosixStore

if "UcmToyStore" not in STORES:
    pytest.skip("this core has no toy; run: make test-kinds", allow_module_level=True)

REPOSITORY = Path(__file__).parents[2]
SHAPE = {
    "tensor_size_list": PIECES,
    "shard_size": BLOCK,
    "block_size": BLOCK,
    "staging_capacity": "4MiB",
}


@pytest.fixture
def patient() -> dict[str, Any]:
    return {"deadlines": PATIENT}


def round_trip(config: dict[str, Any], patient: dict[str, Any]) -> UcmPosixStore:
    """Opens the configured store as the connector does; dumps, looks up and loads three blocks."""
    read = load(config | patient, {})
    store = UcmConnectorFactoryV1.create_connector(
        read.ucm_connector_name, read.store_config() | SHAPE
    )
    assert isinstance(store, UcmPosixStore)
    await_room(store)
    source, target = Memory(3), Memory(3, fill=0)
    store.wait(store.dump_data(ids(3), [0] * 3, source.rows(0, 1, 2)))
    assert store.lookup(ids(4)) == [True, True, True, False]
    store.wait(store.load_data(ids(3), [0] * 3, target.rows(0, 1, 2)))
    assert all(source.equals(target, block) for block in range(3))
    return store


@pytest.mark.parametrize(
    "config",
    [
        {"storage_backend": "toy", "toy_records": 5},
        {"ucm_connector_name": "UcmToyStore", "toy_size": 5},
        {
            "ucm_connectors": [
                {"ucm_connector_name": "UcmToyStore", "ucm_connector_config": {"toy_records": 5}}
            ]
        },
        {"toy": {"toy_records": 5}},
        {"pipeline": [{"type": "toy", "toy_records": 5}]},
    ],
)
def test_every_shape_of_a_configuration_names_it(
    config: dict[str, Any], patient: dict[str, Any]
) -> None:
    read = load(config, {})
    assert (read.ucm_connector_name, read.warnings) == ("UcmToyStore", ())
    assert read.options == {"toy_records": 5, "toy_name": ""}
    assert any(line.startswith("toy_records = 5") for line in read.describe())
    with round_trip(config, patient) as store:
        assert type(store).__name__ == "UcmToyStore"
        too_many = store.dump_data(ids(9)[3:], [0] * 6, Memory(6).rows(*range(6)))
        with pytest.raises(Exception, match="the map is full"):
            store.wait(too_many)


def test_it_is_a_stage_of_a_pipeline(tmp_path: Path, patient: dict[str, Any]) -> None:
    for pipeline in ("Cache|Toy", "Toy|Posix", "Cache|Toy|Posix"):
        root = {
            "storage_backends": str(tmp_path / pipeline),
            "storage_capacity": "64MiB",
            "free_space_floor": 0,
        }
        directory = root if "Posix" in pipeline else {}
        with round_trip(
            {"store_pipeline": pipeline, "cache_size": "1MiB", **directory}, patient
        ) as store:
            assert "toy" in store.tier_names
            assert dict(zip(store.tier_names, store.tier_media, strict=True))["toy"] == ""
    assert "below Toy" in fails({"store_pipeline": "Toy|Cache"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"storage_backend": "toy", "toy_record": 5},
        {"toy": {"toy_record": 5}},
        {"pipeline": [{"type": "toy", "toy_record": 5}, {"type": "posix", "path": "/d"}]},
    ],
)
def test_a_wrong_key_names_the_nearest(wrong: dict[str, Any]) -> None:
    assert 'did you mean "toy_records"?' in fails(wrong)


def test_a_wrong_key_of_the_class_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="UcmToyStore has no key 'toy_nam'; did you mean 'toy_name'"
    ):
        UcmConnectorFactoryV1.create_connector("UcmToyStore", {**SHAPE, "toy_nam": "x"})


def test_a_wrong_word_names_the_nearest() -> None:
    assert 'did you mean "toy"?' in fails({"storage_backend": "toyy"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "greater than or equal to 1"),
        (2_000_000, "less than or equal to 1000000"),
        (True, "a number is expected"),
    ],
)
def test_a_wrong_value_says_what_and_where(value: Any, words: str) -> None:
    text = fails({"storage_backend": "toy", "toy_records": value})
    assert words in text and '"toy_records" in kv_connector_extra_config' in text


def test_its_keys_mean_nothing_beside_another_store() -> None:
    (warning,) = load({"storage_path": "/d", "toy_records": 5}, {}).warnings
    assert "use UcmToyStore, whose key it is" in warning


def test_the_page_of_the_configuration_is_out_of_date_without_it() -> None:
    sys.path.insert(0, str(REPOSITORY / "tools"))
    import kinds

    with pytest.raises(LookupError, match="keys of toy"):
        kinds.written("")
    assert "| `toy_records` | 1000 | records, at most 1000000 |" in kinds.tables()["keys of toy"]
    assert "| toy | `UcmToyStore` |" in kinds.tables()["stores"]


def sources() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "crates", "python"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("no working tree of git")
    yield from (REPOSITORY / name for name in listed.stdout.split() if "/tests/" not in name)


def _names_it(line: str) -> bool:
    """True if a line names the store, not one of the toy proxies of vLLM."""
    return re.search(r"toy(?![ _]prox)", line.lower()) is not None


def test_it_is_one_file_and_one_line() -> None:
    knowing = {
        str(path.relative_to(REPOSITORY)): [
            line.strip() for line in path.read_text().splitlines() if _names_it(line)
        ]
        for path in sources()
        if path.suffix in (".rs", ".py", ".pyi")
    }
    assert knowing.pop("crates/ucm-testkit/src/toy.rs")
    assert knowing.pop("crates/ucm-testkit/src/lib.rs"), "which exports it"
    assert {path: lines for path, lines in knowing.items() if lines} == {
        "crates/ucm-py/src/lib.rs": ["ucm_testkit::register_toy();"]
    }
