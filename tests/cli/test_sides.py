"""The command line over records with side shards, and over records with a side shard only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_roots import RECORD, Written, sided
from click.testing import Result
from plain_record import verify_file

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]


def harm(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "keys",
    [{}, {"layout": "segment"}, {"layout": "segment", "codec": "zstd", "dtype": "bfloat16"}],
    ids=str,
)
def test_a_good_root(keys: dict[str, Any], root: Written, ucm: Run, ucm_json: Json) -> None:
    sided(root, **keys)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["records"], document["good"], document["bad"]) == (
        0,
        5,
        5,
        0,
    )
    assert (document["sides"], document["sides_alone"], document["bad_sides"]) == (7, 1, [])
    done = ucm("verify", root.path)
    assert done.exit_code == 0
    assert "7, 1 of them alone, 0 bad" in done.stdout


def test_a_damaged_side_shard_is_told_and_its_kv_stays(
    root: Written, ucm: Run, ucm_json: Json
) -> None:
    sided(root)
    path = max(root.records(), key=lambda path: path.stat().st_size)
    harm(path, -1)
    before = root.tree()
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["good"], document["bad"]) == (1, 5, 0)
    (bad,) = document["bad_sides"]
    assert (bad["path"], bad["name"]) == (str(path.relative_to(root.path)), "codes")
    assert root.tree() == before
    text = ucm("verify", root.path).stdout
    assert "7, 1 of them alone, 1 bad" in text
    assert "bad side shards" in text


def test_damage_where_a_side_shard_lies_alone_is_that_of_a_record(
    root: Written, ucm_json: Json
) -> None:
    sided(root)
    path = min(root.records(), key=lambda path: path.stat().st_size)
    assert verify_file(path).without_kv
    harm(path, 4096)
    document = ucm_json("verify", root.path)
    assert (document["exit"], document["bad"]) == (1, 1)
    assert document["reasons"] == {"bad_checksum": 1}


def test_what_a_root_and_a_record_say_of_their_side_shards(
    root: Written, ucm: Run, ucm_json: Json
) -> None:
    ids = sided(root)
    (space,) = ucm_json("inspect", root.path)["roots"][0]["namespaces"]
    assert space["sides_present"] == {"codes": 4, "mean-k": 3}
    assert "sides present: 4 codes, 3 mean-k in 5 headers read" in ucm("inspect", root.path).stdout
    manifest = json.loads(next(root.path.glob("*/manifest.json")).read_text())
    lengths = manifest["parts"]["g0p0t0"]["record_lengths"]
    assert lengths == [2 * 4096, 3 * 4096, RECORD, RECORD + 3 * 4096]
    paths = {verify_file(path).record_id: path for path in root.records()}
    harm(paths[ids[1]], -1)
    (record,) = ucm_json("inspect", paths[ids[1]])["records"]
    assert record["verdict"] == "good"
    sides = {side["name"]: (side["bytes"], side["verdict"]) for side in record["header"]["sides"]}
    assert sides == {"mean-k": (96, "good"), "codes": (6000, "bad_checksum")}
    assert "6000 bytes, version 0, bad_checksum" in ucm("inspect", paths[ids[1]]).stdout
    alone = next(path for path in root.records() if verify_file(path).without_kv)
    (record,) = ucm_json("inspect", alone)["records"]
    assert (record["verdict"], record["header"]["without_kv"]) == ("good", True)
    assert record["header"]["block_record_id"] == ids[3].hex()
