"""Stores by name: registered, lazy, refused with helpful messages."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ucm._core", reason="the core is not compiled here")

from ucm.config.words import BUILT_STORES
from ucm.errors import BusyError, ConfigError, UnknownConnectorError
from ucm.store.factory_v1 import UcmConnectorFactoryV1 as Factory

MODULE = "factory_stores"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Factory, "_registry", dict(Factory._registry))


def test_a_registered_store_is_created_by_name() -> None:
    Factory.register_connector("Least", MODULE, "LeastStore")
    Factory.register_connector("Least", MODULE, "LeastStore")  # a repetition has no effect
    with Factory.create_connector("Least", {"endpoint": "here"}) as store:
        assert store.config == {"endpoint": "here"}
        assert store.lookup_on_prefix([bytes(16)]) == -1
    assert "Least" in Factory.registered()


def test_a_store_is_created_by_module_path() -> None:
    store = Factory.create_connector("LeastStore", {}, module_path=MODULE)
    assert type(store).__name__ == "LeastStore"


@pytest.mark.parametrize("name", sorted(BUILT_STORES))
def test_what_is_built_is_registered_under_its_name(name: str) -> None:
    assert Factory.resolve(name).__name__ == name


def test_registering_and_importing_the_factory_imports_no_store() -> None:
    code = (
        "import sys\nfrom ucm.store.factory_v1 import UcmConnectorFactoryV1 as"
        " F\nF.register_connector('Mine', 'no.such.module', 'Mine')\nassert not [m for m in"
        " sys.modules if m.startswith(('ucm.store.engine', 'ucm.store.presets', 'torch',"
        " 'vllm'))]\nprint(F.registered())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    words = (
        "Cache",
        "Ds3fs",
        "Empty",
        "Fake",
        "Mooncake",
        "Nfs",
        "Object",
        "Pc",
        "Pipeline",
        "Posix",
        "Redis",
    )
    assert done.stdout == f"{('Mine', *(f'Ucm{word}Store' for word in words))}\n"


def test_an_unknown_name_shows_what_there_is_and_the_nearest() -> None:
    with pytest.raises(UnknownConnectorError) as caught:
        Factory.create_connector("UcmPosixStor", {})
    text = str(caught.value)
    assert 'did you mean "UcmPosixStore"?' in text
    assert "(registered: UcmCacheStore, " in text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("UcmS3Store", "UcmObjectStore"),
        ("disk", "UcmPosixStore"),
        ("UcmMemoryStore", "UcmCacheStore"),
    ],
)
def test_a_name_of_a_medium_shows_the_store_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(UnknownConnectorError) as caught:
        Factory.create_connector(name, {})
    assert f'no store is registered as {name!r}; did you mean "{meant}"?' in str(caught.value)


def test_a_stage_that_is_no_store_says_where_it_belongs() -> None:
    with pytest.raises(
        UnknownConnectorError,
        match="Compress keeps nothing itself; write it before the stage it is for",
    ):
        Factory.create_connector("UcmCompressStage", {})


def test_keys_of_stages_reach_a_pipeline_that_is_made_for_v0() -> None:
    from ucm.store.factory import _in_our_words

    given = {"cache_size": "1MiB", "ior_depth": 4}
    assert _in_our_words("UcmPipelineStore", given) == given, (
        "the pipeline itself says what none of its stages has"
    )
    assert _in_our_words("UcmCacheStore", given) == {"cache_size": "1MiB"}
    assert _in_our_words("UcmPosixStore", given) == {}


def test_one_name_cannot_stand_for_two_classes() -> None:
    Factory.register_connector("Least", MODULE, "LeastStore")
    with pytest.raises(ConfigError, match="registered already as LeastStore"):
        Factory.register_connector("Least", MODULE, "HalfStore")
    assert type(Factory.create_connector("Least", {})).__name__ == "LeastStore"


@pytest.mark.parametrize("wrong", [("", "m", "C"), ("N", " ", "C"), ("N", "m", "")])
def test_registration_wants_texts(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        Factory.register_connector(*wrong)


def test_missing_modules_and_classes() -> None:
    with pytest.raises(UnknownConnectorError, match="no_such_module"):
        Factory.create_connector("X", {}, module_path="no_such_module")
    with pytest.raises(UnknownConnectorError, match='did you mean "LeastStore"'):
        Factory.create_connector("LeastStor", {}, module_path=MODULE)


def test_a_class_that_is_no_store_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="derive it from"):
        Factory.resolve("NoStore", MODULE)
    with pytest.raises(ConfigError, match="does not define dump_data, load_data, wait"):
        Factory.resolve("HalfStore", MODULE)


def test_what_a_constructor_raises_gets_the_stores_name() -> None:
    with pytest.raises(
        ConfigError, match=r"BrokenStore could not be made: KeyError: 'endpoint'"
    ) as caught:
        Factory.create_connector("BrokenStore", {}, module_path=MODULE)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(BusyError):
        Factory.create_connector("BusyStore", {}, module_path=MODULE)
