"""A damaged space document in a bucket: nothing is written, blocks are read, and writing continues
after its removal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blocks import PATIENT, Memory, ids
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


def newer(text: bytes) -> bytes:
    """The document of a newer version."""
    return json.dumps(json.loads(text) | {"format": 99}).encode()


@pytest.mark.parametrize(
    "damage", [lambda _: b"{", newer, lambda _: b" " * (17 << 20)], ids=["cut", "newer", "long"]
)
def test_a_damaged_document_ends_writing_and_not_reading(
    moto: Server, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    source, contents = Memory(8), Objects(moto)
    with opened(MOTO, moto.at, deadlines=PATIENT) as store:
        assert dumped(store, source, 0, 4)
    contents.put(SPACE, damage(contents.get(SPACE)))
    with opened(MOTO, moto.at, deadlines=PATIENT) as store:
        assert all(store.lookup(ids(4)))
        for _ in range(3):
            assert loaded(store, source, 0, 4)
            assert not dumped(store, source, 4, 2)
        assert store.healthy()
        said = [
            record.message for record in caplog.records if "nothing is written to" in record.message
        ]
        assert len(said) == 1 and "ucm-space.json" in said[0], said
        contents.remove(SPACE)
        soon("it is written to again", lambda: dumped(store, source, 4, 2))
        assert loaded(store, source, 4, 2)
    contents.close()
