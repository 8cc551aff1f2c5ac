"""Several directories side by side, through the public interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks import SHAPE, Memory, ids, record_files
from click.testing import CliRunner

from ucm.cli import main
from ucm.errors import ConfigError
from ucm.store.nfsstore.nfsstore_connector import UcmNfsStore
from ucm.store.posix import UcmPosixStore

Open = Callable[..., UcmPosixStore]
#: Enough that each of three roots has some, however they are spread.
COUNT = 64


@pytest.fixture
def opened(common: dict[str, Any], tmp_path: Path, open_store: Open) -> Open:
    """Opens a store over ``a``, ``b`` and ``c``."""

    def make(name: str = "UcmNfsStore", **keys: Any) -> UcmPosixStore:
        roots = ":".join(str(tmp_path / root) for root in "abc")
        config = {**common, **SHAPE, "identity": str(tmp_path), "storage_backends": roots, **keys}
        return open_store(name, config)

    return make


def dump(store: UcmPosixStore) -> Memory:
    source = Memory(COUNT)
    store.wait(store.dump_data(ids(COUNT), [0] * COUNT, source.rows(*range(COUNT))))
    return source


def check(store: UcmPosixStore, source: Memory) -> None:
    assert store.lookup(ids(COUNT)) == [True] * COUNT
    target = Memory(COUNT, fill=0)
    store.wait(store.load_data(ids(COUNT), [0] * COUNT, target.rows(*range(COUNT))))
    assert all(source.equals(target, block) for block in range(COUNT))


def shares(tmp_path: Path) -> list[int]:
    return [len(record_files(tmp_path / root)) for root in "abc"]


@pytest.mark.parametrize("policy", ["round_robin", "random"])
def test_blocks_are_spread_and_found_again(opened: Open, tmp_path: Path, policy: str) -> None:
    with opened(storage_policy=policy) as store:
        assert isinstance(store, UcmNfsStore)
        assert store.tier_names == ("posix", "posix2", "posix3")
        assert store.tier_media == ("disk", "disk", "disk")
        source = dump(store)
        check(store, source)
        tiers = store.stats()["tiers"]
        assert [tier["level"] for tier in tiers] == [0, 0, 0]
        assert sum(tier["blocks_written"] for tier in tiers) == COUNT
        assert store.prefetch_room() == 0, "there is no upper tier for the blocks"
    assert sum(shares(tmp_path)) == COUNT
    assert all(shares(tmp_path))
    check(opened(storage_policy=policy), source)


def test_tiered_is_tiers_one_below_the_other(opened: Open, tmp_path: Path) -> None:
    keys = {
        "storage_policy": "tiered",
        "tiers": {str(tmp_path / "b"): "hot", str(tmp_path / "c"): "cold"},
        "move_rate": "1MiB",  # without meaning
    }
    with opened(**keys) as store:
        source = dump(store)
        assert [tier["level"] for tier in store.stats()["tiers"]] == [0, 1, 2]
        check(store, source)
    assert shares(tmp_path)[2] == COUNT, "the coldest has every block"
    for record in record_files(tmp_path / "b"):
        record.unlink()
    with opened(**keys) as store:
        check(store, source)


def test_memory_above_several(opened: Open, tmp_path: Path) -> None:
    with opened("UcmPipelineStore", store_pipeline="Cache|Nfs", cache_size="4MiB") as store:
        source = dump(store)
        assert [tier["level"] for tier in store.stats()["tiers"]] == [0, 1, 1, 1]
        assert store.prefetch_room() > 0
    with opened("UcmPipelineStore", store_pipeline="Cache|Nfs", cache_size="4MiB") as store:
        check(store, source)


def test_one_root_that_cannot_be_used_costs_its_own_blocks(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "b").write_text("no directory")
    with opened() as store:
        assert store.healthy()
        source = dump(store)
        check(store, source)
        healthy = [tier["healthy"] for tier in store.stats()["tiers"]]
        assert healthy == [True, False, True]


def test_the_core_refuses_what_the_configuration_lets_pass(opened: Open) -> None:
    with pytest.raises(ConfigError, match="tiers"):
        opened(storage_policy="tiered", tiers={"/elsewhere": "hot"})


def test_the_tools_take_them_all(opened: Open, tmp_path: Path) -> None:
    with opened() as store:
        dump(store)
    roots = ":".join(str(tmp_path / root) for root in "abc")
    for command in ("inspect", "verify", "gc"):
        told = CliRunner().invoke(main, [command, roots])
        assert told.exit_code == 0, told.output
        assert all(str(tmp_path / root) in told.output for root in "abc")
