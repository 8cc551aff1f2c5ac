"""The V0 interface against a model: a dict of created blocks and one of committed blocks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from other_stores import FailingV1

from ucm.errors import NotFoundError, TaskError
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore import DUPLICATE_KEY
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1
from ucm.store.v0_over_v1 import V0OverV1
from ucm.store.v1_over_v0 import V1OverV0

SHARD, SHARDS = 256, 3
NAMES = [f"{number:032x}" for number in range(5)]
STEPS = 120


def made(kind: str, common: dict[str, Any]) -> V0OverV1:
    sizes = {"tensor_size": SHARD, "shard_size": SHARD, "block_size": SHARD * SHARDS}
    store: UcmKVStoreBaseV1 = UcmPosixStore(common | sizes) if kind == "files" else FailingV1(sizes)
    if kind == "twice":
        store = V1OverV0(V0OverV1(store), sizes | {"deadlines": {"load_unknown_s": 30.0}})
    return V0OverV1(store)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["files", "memory", "twice"])
def test_it_does_what_the_model_does(kind: str, seed: int, common: dict[str, Any]) -> None:
    chance = random.Random(seed)
    created: dict[str, dict[int, bytes]] = {}
    committed: dict[str, list[bytes]] = {}
    with made(kind, common) as store:
        for _ in range(STEPS):
            some = chance.sample(NAMES, chance.randint(1, len(NAMES)))
            match chance.choice(
                ["create", "dump", "dump", "dump", "commit", "drop", "lookup", "load"]
            ):
                case "create":
                    known = [name in created or name in committed for name in some]
                    assert store.create(some) == [DUPLICATE_KEY if there else 0 for there in known]
                    created |= {
                        name: {} for name, there in zip(some, known, strict=True) if not there
                    }
                case "dump":
                    rows = [
                        (name, chance.randrange(SHARDS), chance.randbytes(SHARD)) for name in some
                    ]
                    if any(name not in created for name, _, _ in rows):
                        with pytest.raises(NotFoundError):
                            dump(store, rows)
                        rows = [row for row in rows if row[0] in created]
                    dump(store, rows)
                    for name, shard, content in rows:
                        created[name][shard] = content
                case "commit":
                    whole = [name for name in some if len(created.get(name, ())) == SHARDS]
                    bad = [
                        at
                        for at, name in enumerate(some)
                        if name not in whole and name not in committed
                    ]
                    try:
                        store.commit(some)
                        assert not bad
                    except TaskError as error:
                        assert sorted(error.failures) == bad
                    for name in whole:
                        parts = created.pop(name)
                        committed[name] = [parts[shard] for shard in range(SHARDS)]
                case "drop":
                    store.commit(some, False)
                    for name in some:
                        created.pop(name, None)
                case "lookup":
                    assert store.lookup(some) == [name in committed for name in some]
                case "load":
                    check_load(store, chance.choice(NAMES), committed)


def dump(store: V0OverV1, rows: list[tuple[str, int, bytes]]) -> None:
    names, shards, contents = zip(*rows, strict=True) if rows else ((), (), ())
    sources = [np.frombuffer(content, np.uint8).copy() for content in contents]
    assert store.wait(store.dump(list(names), [shard * SHARD for shard in shards], sources)) == 0


def check_load(store: V0OverV1, name: str, committed: dict[str, list[bytes]]) -> None:
    targets = [np.zeros(SHARD, np.uint8) for _ in range(SHARDS)]
    code = store.wait(
        store.load([name] * SHARDS, [shard * SHARD for shard in range(SHARDS)], targets)
    )
    assert (code == 0) == (name in committed)
    if code == 0:
        assert [target.tobytes() for target in targets] == committed[name]
