"""Side shards over network stores: stores with and without them use each other's blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blocks import PATIENT, Memory, ids
from remote_columns import COLUMNS, Column, started
from test_matrix import loaded, opened, soon

SIDES = {"mean-k": 96, "codes": 6000}
COUNT = 4


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_engines_with_side_shards_and_without_use_each_others_blocks(
    column: Column, tmp_path: Path
) -> None:
    """side shards: who keeps some and who keeps none use each other's blocks

    Records of one store are longer than those of the other, which reads this in the manifest when
    it finds one."""
    random, source = np.random.default_rng(7), Memory(2 * COUNT)
    beside = {
        name: random.integers(0, 256, (COUNT, size), dtype=np.uint8) for name, size in SIDES.items()
    }
    first, second = ids(2 * COUNT)[:COUNT], ids(2 * COUNT)[COUNT:]
    with (
        started(column, tmp_path / "server") as server,
        opened(column, server.at, deadlines=PATIENT) as without,
        # The lookup-only side of an engine is configured without side shards.
        opened(column, server.at, deadlines=PATIENT, device_id=-1) as looks,
        opened(column, server.at, deadlines=PATIENT, sides=SIDES) as keeps,
    ):
        keeps.wait(keeps.dump_data(first, [0] * COUNT, source.rows(*range(COUNT)), sides=beside))
        for store in (looks, without):
            soon("they are found", lambda store=store: store.lookup(first) == [True] * COUNT)
        assert loaded(without, source, 0, COUNT)
        # They exist, so a new dump does not replace them.
        without.wait(without.dump_data(first, [0] * COUNT, source.rows(*range(COUNT))))
        for name, side in beside.items():
            task = keeps.load_sides(first, name)
            keeps.wait(task)
            data, found = task.result()
            assert found.all() and np.array_equal(data, side)
        without.wait(without.dump_data(second, [0] * COUNT, source.rows(*range(COUNT, 2 * COUNT))))
        soon("those without are found", lambda: keeps.lookup(second) == [True] * COUNT)
        assert loaded(keeps, source, COUNT, COUNT)
        with opened(column, server.at, deadlines=PATIENT, device_id=-1) as late:
            soon("all are found", lambda: late.lookup([*first, *second]) == [True] * 2 * COUNT)
