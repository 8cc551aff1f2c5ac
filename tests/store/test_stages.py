"""The stages of a load and a dump in a profile, as the core measures them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import ids
from plain_profile import events_of

from ucm.profiling import Profile
from ucm.store.posix import UcmPosixStore

SIZE, BLOCKS = 1 << 16, 12


@pytest.fixture
def profile(tmp_path: Path) -> Iterator[Profile]:
    profile = Profile()
    profile.open(str(tmp_path / "profile.json"), "store")
    yield profile
    profile.close()


def spans(path: Path) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Begin, end and arguments of each span, in microseconds."""
    events = events_of(path)
    ends = {one["id"]: one["ts"] for one in events if one["ph"] == "e"}
    begun = (one for one in events if one["ph"] == "b")
    return {one["name"]: (one["ts"], ends[one["id"]], one["args"]) for one in begun}


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("layout", ["file", "segment"])
def test_a_load_and_a_dump_are_shown_by_stage(
    common: dict[str, Any], profile: Profile, tmp_path: Path, layout: str, layers: int
) -> None:
    shape = {"tensor_size": SIZE, "shard_size": SIZE, "block_size": SIZE * layers}
    shards = list(range(layers)) * BLOCKS
    names = [block for block in ids(BLOCKS) for _ in range(layers)]
    source = np.random.default_rng(1).integers(0, 256, (len(names), SIZE), np.uint8)
    target = np.zeros_like(source)
    to = np.array([[row.ctypes.data] for row in target], np.uint64)
    of = np.array([[row.ctypes.data] for row in source], np.uint64)
    with UcmPosixStore(common | shape | {"layout": layout, "segment_age": 0}) as store:
        for what, task in [
            ("dump", lambda: store.dump_data(names, shards, of)),
            ("load", lambda: store.load_data(names, shards, to)),
        ]:
            under_way = task()
            store.wait(under_way)
            profile.stages(what, store, under_way, 1.0, blocks=BLOCKS)
    assert (target == source).all()
    found = spans(tmp_path / "profile.json")
    wanted = {"dump": ["copy", "write"], "load": ["read", "verify", "scatter"]}
    assert set(found) == {
        f"{what} {one}" for what, all_ in wanted.items() for one in ["queue", *all_]
    }
    for what, stages in wanted.items():
        began, first, args = found[f"{what} queue"]
        assert (began, args) == (1_000_000, {"blocks": BLOCKS})
        for stage in stages:
            begin, end, args = found[f"{what} {stage}"]
            assert began <= first <= begin <= end
            assert args["busy_ms"] >= 0
        assert min(found[f"{what} {stage}"][0] for stage in stages) == first
    assert found["load read"][2]["busy_ms"] > 0
    assert found["load read"][0] <= found["load verify"][0] <= found["load scatter"][0]
    assert found["dump copy"][0] <= found["dump write"][0]
