"""Loads and dumps of blocks by their numbers in KV that was registered once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from blocks import BLOCK, KV, PIECES, Memory, ids

from ucm.errors import BusyError, InvalidInputError, UcmError, UnsupportedError
from ucm.store import record_ids
from ucm.store.posix import UcmPosixStore
from ucm.store.posix.connector import PosixTask

SHAPE = {"tensor_size_list": PIECES, "shard_size": BLOCK, "block_size": BLOCK}


class OwnRows(UcmPosixStore):
    """A store of a user's, which counts the rows that pass."""

    rows = 0

    def load_data(self, block_ids: Sequence[bytes], *rest: Any, **more: Any) -> PosixTask:
        self.rows += len(block_ids)
        return super().load_data(block_ids, *rest, **more)


@pytest.mark.parametrize("layout", ["file", "segment"])
@pytest.mark.parametrize("kind", [UcmPosixStore, OwnRows])
def test_a_block_goes_out_of_one_number_and_comes_back_into_another(
    common: dict[str, Any], layout: str, kind: type[UcmPosixStore]
) -> None:
    source, target, blocks = KV(5), KV(5, fill=0), ids(3)
    with kind(common | SHAPE | {"layout": layout}) as store:
        store.register_kv_tensors(source.tensors)
        store.wait(store.dump_blocks(blocks, np.array([4, 0, 2], dtype=np.int64)))
        store.register_kv_tensors(target.tensors)
        store.wait(store.load_blocks(blocks, [1, 3, 0], timeout=20.0))
        assert isinstance(store, OwnRows) == bool(getattr(store, "rows", 0)), (
            "a class of its own moves its own rows"
        )
        assert [target.block(number) for number in (1, 3, 0)] == [
            source.block(number) for number in (4, 0, 2)
        ]
        assert not any(target.block(2)), "nothing else was written"
        addresses = Memory(1, fill=0)
        store.wait(store.load_data(blocks[:1], [0], addresses.rows(0)))
        assert b"".join(piece.tobytes() for piece in addresses.pieces[0]) == source.block(4), (
            "it is the same record"
        )


@pytest.mark.parametrize("kind", [UcmPosixStore, OwnRows])
def test_numbers_that_name_no_block_are_refused_before_anything_begins(
    common: dict[str, Any], kind: type[UcmPosixStore]
) -> None:
    kv, blocks = KV(2), ids(2)
    numbers: Any
    with kind(common | SHAPE) as store:
        with pytest.raises(InvalidInputError, match="register"):
            store.dump_blocks(blocks, np.array([0, 1], dtype=np.int64))
        store.register_kv_tensors(kv.tensors)
        for numbers in ([0, 2], [-1, 0], [0], [[0, 1]], [0.5, 1.0]):
            with pytest.raises(UcmError) as refused:
                store.dump_blocks(blocks, np.array(numbers))
            assert not isinstance(refused.value, BusyError)
            with pytest.raises(UcmError):
                store.load_blocks(blocks, np.array(numbers))
        with pytest.raises(UnsupportedError):
            store.dump_blocks(blocks, np.array([0, 1]), prerequisite_handle=1)
        assert store.lookup(blocks) == [False, False]
        assert store.stats()["dump_tasks"] == 0


def test_kv_of_another_form_is_refused_and_what_was_registered_stays(
    common: dict[str, Any],
) -> None:
    kv, other = KV(2), KV(2)
    other.tensors.popitem()
    with UcmPosixStore(common | SHAPE) as store:
        store.register_kv_tensors(kv.tensors)
        with pytest.raises(InvalidInputError, match="pieces"):
            store.register_kv_tensors(other.tensors)
        store.wait(store.dump_blocks(ids(1), np.array([1])))
        with pytest.raises(InvalidInputError, match="no KV cache"):
            store.register_kv_tensors({})


def test_blocks_that_are_split_into_shards_have_their_rows_named(common: dict[str, Any]) -> None:
    kv = KV(2)
    with UcmPosixStore(common | SHAPE | {"shard_size": sum(PIECES)}) as store:
        store.register_kv_tensors(kv.tensors)
        with pytest.raises(UcmError):
            store.dump_blocks(ids(1), np.array([1]))


def test_keys_end_to_end_are_the_same_keys(tmp_path: Path) -> None:
    keys, mask = ids(3), bytes(range(16))
    assert record_ids(b"".join(keys), mask) == record_ids(keys, mask)
    assert record_ids(b"", mask) == []
    with pytest.raises(InvalidInputError):
        record_ids(b"".join(keys)[:-1], mask)


def test_tensors_of_numpy_have_the_addresses_of_their_blocks() -> None:
    from ucm.store.kv_layout import KVLayout

    whole: npt.NDArray[np.uint16] = np.zeros((4, 3, 8), dtype=np.uint16)
    layout = KVLayout({"a.0": whole[:, :2], "a.1": whole[:, 2]})
    assert layout.sizes()["tensor_size_list"] == [32, 16]
    assert layout.addresses(np.array([3])).tolist() == [
        [whole[3].ctypes.data, whole[3, 2].ctypes.data]
    ]
    with pytest.raises(InvalidInputError, match="one after the other"):
        KVLayout({"a.0": whole[::-1]})
    with pytest.raises(InvalidInputError, match="expected a tensor"):
        KVLayout({"a.0": whole[0, 0]})
