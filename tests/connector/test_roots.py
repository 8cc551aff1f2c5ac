"""Which directories are no roots: the model's own, and what lies in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ucm.config import parse
from ucm.errors import ConfigError
from ucm.integration.vllm.connector import UCMConnector, stores
from ucm.integration.vllm.connector.stores import RootFile, refuse_model_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "below").mkdir(parents=True)
    return model


def config_of(*roots: Path, **keys: Any) -> Any:
    return parse({"storage_backends": [str(root) for root in roots], **keys})


@pytest.mark.parametrize("below", ["", "below", "not/there"])
def test_the_directory_of_the_model_is_no_root(model: Path, below: str) -> None:
    root = model / below
    with pytest.raises(ConfigError) as refused:
        refuse_model_directory(config_of(root), [str(model)])
    text = refused.value.message
    assert (
        str(root) in text
        and "directory of the model" in text
        and "choose another directory" in text
    )


def test_a_relative_model_on_a_file_system_that_does_not_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(stores, "real_path", lambda path: path)
    refuse_model_directory(config_of(model.parent / "root"), ["model"])
    with pytest.raises(ConfigError, match="lies in the directory of the model"):
        refuse_model_directory(config_of(model / "below"), ["model"])


def test_the_model_directory_is_found_behind_links_in_every_stage_and_alternative(
    model: Path, tmp_path: Path
) -> None:
    link, good = tmp_path / "link", tmp_path / "good"
    link.symlink_to(model)
    piped = parse({"store_pipeline": ["Cache", {"type": "posix", "storage_backends": str(link)}]})
    with pytest.raises(ConfigError, match="choose another directory"):
        refuse_model_directory(piped, ["gpt2", str(model)])
    with pytest.raises(ConfigError, match="choose another directory"):
        refuse_model_directory(config_of(good, link), [str(model)])


def test_other_directories_are_roots(model: Path, tmp_path: Path) -> None:
    for root in (tmp_path / "root", tmp_path, tmp_path / "model-cache"):
        refuse_model_directory(config_of(root), [str(model), "some/name"])
    refuse_model_directory(parse({"storage_backends": "redis://host"}), [str(model)])


def test_a_file_beside_the_marker_that_is_a_link_is_not_read_and_makes_way(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    before = '{"version":1,"kind":{"theirs":{}}}'
    outside.write_text(before)
    (root / "kept.json").symlink_to(outside)
    file = RootFile(str(root), "kept.json", "kind", 8)
    assert file.read() == {}
    assert file.merge({"ours": {"a": 1}}) == {"ours": {"a": 1}} == file.read()
    assert not (root / "kept.json").is_symlink()
    assert outside.read_text() == before


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_both_sides_refuse_the_model_directory_as_a_root(
    model: Path, role: KVConnectorRole
) -> None:
    extra = {"storage_backends": str(model)}
    engine: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(model=str(model)),
    )
    with pytest.raises(ConfigError, match=f"{model} is the directory of the model"):
        UCMConnector(engine, role, SimpleNamespace())
