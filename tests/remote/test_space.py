"""A damaged document of the space in a bucket: nothing is written, blocks are read, and writing goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import Memory, ids
from remote_columns import MOTO, PREFIX, started
from server_contents import Objects
from test_matrix import dumped, loaded, opened, soon

from servers import Server

SPACE = f"{PREFIX}/ucm-space.json"


@pytest.fixture
def moto(tmp_path: Path) -> Iterator[Server]:
    """A server of this test alone."""
    with started(MOTO, tmp_path / "server") as server:
        yield server


@pytest.mark.parametrize("damage", [b"{", b'{"format": 99}', b" " * (17 << 20)])
def test_a_damaged_document_ends_writing_and_not_reading(
    moto: Server, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    source, contents = Memory(8), Objects(moto)
    with opened(MOTO, moto.at) as store:
        assert dumped(store, source, 0, 4)
    contents.put(SPACE, damage)
    with opened(MOTO, moto.at) as store:
        assert store.lookup_on_prefix(ids(4)) == 4
        for _ in range(3):
            assert loaded(store, source, 0, 4)
            assert not dumped(store, source, 4, 2)
        assert store.healthy()
        said = [record.message for record in caplog.records if "nothing is written to" in record.message]
        assert len(said) == 1 and "ucm-space.json" in said[0], said
        contents.remove(SPACE)
        soon("it is written to again", lambda: dumped(store, source, 4, 2))
        assert loaded(store, source, 4, 2)
    contents.close()
