"""``ucm inspect``: its output for roots and single records; it changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_damage import flip, seed_form
from cli_roots import RECORD, Written
from click.testing import Result

from ucm.cli.records import Manifest, differences
from ucm.store.engine import EngineSettings

Run = Callable[..., Result]
Json = Callable[..., dict[str, Any]]


def test_a_root_for_people(root: Written, ucm: Run) -> None:
    root.fill("one").fill("two", 3)
    before = root.tree()
    done = ucm("inspect", root.path)
    assert done.exit_code == 0
    assert root.tree() == before
    lines = done.stdout.splitlines()
    marker = json.loads((root.path / "ucm-root.json").read_text())
    assert any(marker["uuid"] in line for line in lines)
    assert any("of 64.0 MiB" in line for line in lines)
    assert any(
        root.namespace("two") in line and " 3 " in line and "g0p0t0" in line for line in lines
    )
    assert "/models/one" in done.stdout
    at = lines.index("identities differ in")
    assert [line.split()[0] for line in lines[at + 1 :]] == ["key", "weights"], "only what differs"


@pytest.mark.parametrize("layout", ["file", "segment"])
def test_records_and_bytes_are_counted_by_tenant(
    root: Written, ucm_json: Json, ucm: Run, layout: str
) -> None:
    tag = bytes(range(32))
    with root.open(layout=layout) as store:
        ids = root.dump(store, 1)
        more = [bytes([n * 37 % 256]) * 8 + n.to_bytes(8, "little") for n in (1, 2)]
        store.describe(more, tenant=tag)
        root.dump(store, 2, first=1)
    assert ids[0] not in more
    (found,) = ucm_json("inspect", root.path, "--tenants")["roots"]
    assert found["tenants"] == [
        {"tenant": tag.hex(), "records": 2, "bytes": 2 * RECORD},
        {"tenant": "", "records": 1, "bytes": RECORD},
    ]
    assert tag.hex() in ucm("inspect", root.path, "--tenants").stdout
    assert "tenants" not in ucm_json("inspect", root.path)["roots"][0]


def test_a_root_of_two_builds_of_an_engine(root: Written, ucm: Run) -> None:
    """Versions may be longer than the column; the different part is shown."""
    one, two = (f"vllm 0.33.1rc2.dev1207+g0123456789abcdef.d2026112{day}.cpu" for day in (1, 2))
    anonymous = json.loads(EngineSettings.model_construct(identity="w").identity_json)
    for engine in (one, two):
        root.fill(
            json.dumps(anonymous | {"kv_packing": {"engine": engine}}, separators=(",", ":")), 1
        )
    lines = ucm("inspect", root.path).stdout.splitlines()
    differ = lines[lines.index("identities differ in") + 2 :]
    assert [line.split()[0] for line in differ] == ["kv_packing.engine"], "only what differs"
    assert {value[-5:] for value in differ[0].split()[1:]} == {"1.cpu", "2.cpu"}


def test_the_layout_that_was_decided(root: Written, ucm: Run, ucm_json: Json) -> None:
    root.fill("one", 1)
    assert "layout     not decided" in ucm("inspect", root.path).stdout
    path = root.path / "ucm-root.json"
    marker = json.loads(path.read_text())
    marker["layout"] = {"kind": "segment", "why": "default", "decided": 1}
    path.write_text(json.dumps(marker))
    assert "layout     segment (default)" in ucm("inspect", root.path).stdout
    assert ucm_json("inspect", root.path)["roots"][0]["layout"] == marker["layout"]
    marker["layout"] = {"kind": "file", "why": "records", "decided": 1}
    path.write_text(json.dumps(marker))
    assert "layout     file (records)" in ucm("inspect", root.path).stdout


def test_what_engines_remember_in_a_root_is_not_foreign_and_stays(
    root: Written, ucm: Run, ucm_json: Json
) -> None:
    root.fill("one", 1)
    files = [root.path / name for name in ("ucm-digests.json", "ucm-rates.json")]
    for file in files:
        file.write_text('{"version":1}')
    assert ucm_json("inspect", root.path)["roots"][0]["foreign"] == 0
    assert ucm("verify", root.path).exit_code == 0
    assert ucm("gc", root.path, "--to", "0", "--yes").exit_code == 0
    assert all(file.exists() for file in files)


def test_a_root_for_programs(root: Written, ucm_json: Json) -> None:
    root.fill("one").fill("two", 3)
    document = ucm_json("inspect", root.path)
    (found,) = document["roots"]
    assert found["storage_capacity"] == 64 << 20
    assert (found["records"], found["record_bytes"], found["used_bytes"]) == (
        9,
        9 * RECORD,
        9 * RECORD,
    )
    one, two = root.namespace("one"), root.namespace("two")
    assert found["differences"] == {"weights": {one: "one", two: "two"}}
    by_name = {space["namespace"]: space for space in found["namespaces"]}
    assert by_name[one]["parts_present"] == {"g0p0t0": 6}
    assert by_name[one]["manifest"] == "ok"
    assert by_name[one]["labels"] == {"model": "/models/one"}
    uses = [int(path.stat().st_mtime) for path in root.records(one)]
    assert (by_name[one]["oldest_use"], by_name[one]["newest_use"]) == (min(uses), max(uses))
    assert by_name[two]["records"] == 3


def test_what_is_not_a_record(root: Written, ucm_json: Json, ucm: Run, tmp_path: Path) -> None:
    root.fill("one")
    space = root.path / root.namespace("one")
    (space / "tmp" / f"{1:016x}-{2:016x}.tmp").write_bytes(b"x" * 100)
    (root.path / f".{'ab' * 16}.tmp").write_bytes(b"marker")
    (space / "quarantine").mkdir()
    (space / "quarantine" / f"{'cd' * 16}.bad_checksum.1700000000.bin").write_bytes(b"y" * 50)
    (space / "quarantine" / f"{'cd' * 16}.no_such_reason.1700000000.bin").write_bytes(b"not ours")
    agreed = root.path / "space"
    agreed.mkdir(exist_ok=True)
    for name in (f"writer-{7:016x}.json", f"{1:016x}-{3:016x}.tmp", "writer-x.json"):
        (agreed / name).write_bytes(b"{}")
    (root.path / "notes.txt").write_text("mine")
    (space / "blocks" / "zz").mkdir()
    (space / "blocks" / "00" / f"{'11' * 16}.bin").write_bytes(b"in the directory of another byte")
    (root.path / "link").symlink_to(tmp_path)
    old = root.path / "blocks" / "11" / f"{'11' * 16}.bin"
    old.parent.mkdir(parents=True)
    shutil.copy(root.records()[0], old)
    seed_form(old)
    (found,) = ucm_json("inspect", root.path)["roots"]
    assert (found["private"], found["private_bytes"]) == (4, 158)
    assert (found["seed_form"], found["seed_form_bytes"]) == (1, RECORD)
    listed = {
        one["path"].removeprefix(f"{space.name}/"): one["what"] for one in found["foreign_files"]
    }
    assert listed == {
        "blocks": "directory",
        "link": "link",
        "notes.txt": "file",
        "space/writer-x.json": "file",
        "blocks/zz": "directory",
        f"blocks/00/{'11' * 16}.bin": "file",
        f"quarantine/{'cd' * 16}.no_such_reason.1700000000.bin": "file",
    }
    assert found["foreign"] == 7
    assert found["space_documents"]["writer"] >= 1
    text = ucm("inspect", root.path).stdout
    assert "notes.txt" in text
    assert "seed form  1," in text
    assert "directory, 1 file of the seed's form" in text


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (None, "missing"),
        ("{", "damaged"),
        ('{"format": 1, "identity": 3}', "damaged"),
        ('{"identity": {}}', "damaged"),
        ('{"format": 2, "identity": {}}', "newer"),
        ('{"format": 1, "identity": {}}', "other digest"),
    ],
)
def test_a_manifest_is_read_with_suspicion(
    root: Written, ucm_json: Json, ucm: Run, content: str | None, state: str
) -> None:
    root.fill("one")
    manifest = root.path / root.namespace("one") / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    (found,) = ucm_json("inspect", root.path)["roots"]
    assert found["namespaces"][0]["manifest"] == state
    assert found["records"] == 6
    assert state in ucm("inspect", root.path).stdout


def test_a_changed_identity_in_the_manifest_shows(root: Written, ucm_json: Json) -> None:
    root.fill("one")
    manifest = root.path / root.namespace("one") / "manifest.json"
    document = json.loads(manifest.read_text())
    document["identity"]["weights"] = "others"
    manifest.write_text(json.dumps(document))
    (found,) = ucm_json("inspect", root.path)["roots"]
    assert found["namespaces"][0]["manifest"] == "other digest"


def test_an_identity_of_an_engine_in_words() -> None:
    identity = {
        "architecture": "LlamaForCausalLM",
        "kv_dtype": {"names": ["float32"], "skip_layers": []},
        "attention_backend": [["CPU_ATTN"], ["CPU_ATTN"]],
        "weights": "sha256:" + "a" * 64,
        "position": {},
        "kv_groups": [
            {
                "kind": "FullAttentionSpec",
                "layers": ["a", "b"],
                "spec": {"num_kv_heads": 2, "head_size": 64},
            },
            {"kind": "MambaSpec"},
            "unknown",
        ],
        "tensor_parallel": {"size": 2, "kv_replicas": 1},
        "pipeline_parallel": {"size": 1},
    }
    assert Manifest("ok", identity=identity, labels={"model": "/models/one"}).words() == [
        ("model", "/models/one"),
        ("architecture", "LlamaForCausalLM"),
        ("kv_dtype", "names float32"),
        ("attention_backend", "CPU_ATTN"),
        ("weights", "sha256:" + "a" * 64),
        ("kv group 0", "2 layers, heads 2, head size 64, FullAttentionSpec"),
        ("kv group 1", "MambaSpec"),
        ("tensor_parallel", "2"),
    ]


def test_differences_name_keys_of_any_depth() -> None:
    one: dict[str, Any] = {
        "a": 1,
        "model": {"rope": {"base": 1.0}},
        "groups": [{"x": 1}, {"x": 2}],
        "sizes": [1, 2],
    }
    two: dict[str, Any] = {
        "a": 1,
        "model": {"rope": {"base": 2.0}},
        "groups": [{"x": 1}],
        "sizes": [1, 3],
        "b": None,
    }
    assert differences({"one": one, "two": two}) == {
        "model.rope.base": {"one": 1.0, "two": 2.0},
        "groups[1].x": {"one": 2},
        "sizes": {"one": [1, 2], "two": [1, 3]},
        "b": {"two": None},
    }
    assert differences({"one": one, "same": dict(one)}) == {}


def test_strange_names_do_not_reach_the_terminal(root: Written, ucm: Run, ucm_json: Json) -> None:
    root.fill("one", 1)
    Path(os.fsdecode(os.fsencode(root.path) + b"/\xff\x1b[2J")).write_text("x")
    done = ucm("inspect", root.path)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert r"\udcff\x1b[2J" in done.stdout
    assert ucm_json("inspect", root.path)["roots"][0]["foreign"] == 1


def test_several_roots_and_records_at_once(
    root: Written, tmp_path: Path, ucm_json: Json, ucm: Run
) -> None:
    root.fill("one")
    other = Written(tmp_path / "other").fill("two", 2)
    paths = (root.path, other.path, other.records()[0])
    document = ucm_json("inspect", *paths)
    assert [found["records"] for found in document["roots"]] == [6, 2]
    assert [found["verdict"] for found in document["records"]] == ["good"]
    assert ucm("inspect", *paths).stdout.count("\nroot ") == 1


def test_one_record(root: Written, ucm_json: Json, ucm: Run) -> None:
    root.fill("one")
    path = root.records()[0]
    (record,) = ucm_json("inspect", path)["records"]
    assert record["verdict"] == "good"
    assert record["name_checked"]
    assert record["header"]["record_id"] == path.stem
    assert record["header"]["record_bytes"] == record["bytes"] == RECORD
    assert record["header"]["part"] == "g0p0t0"
    assert (record["header"]["layers"], record["header"]["layer_bytes"]) == (3, 6144)
    assert "every checksum is right" in ucm("inspect", path).stdout
    flip(5000)(path)
    (record,) = ucm_json("inspect", path)["records"]
    assert (record["verdict"], record["reason"]) == ("refused", "bad_checksum")
    assert record["header"]["record_id"] == path.stem, "the header is right still"
    assert "refused, bad_checksum: checksum is" in ucm("inspect", path).stdout


def test_a_record_somewhere_else_is_judged_without_its_name(
    root: Written, tmp_path: Path, ucm: Run
) -> None:
    root.fill("one")
    shutil.copy(root.records()[0], tmp_path / "saved.bin")
    done = ucm("inspect", tmp_path / "saved.bin")
    assert "good" in done.stdout
    assert "not compared" in done.stdout.replace("were not", "not")


def test_headers_that_are_refused_are_counted(root: Written, ucm_json: Json, ucm: Run) -> None:
    root.fill("one")
    flip(0)(root.records()[0])
    (found,) = ucm_json("inspect", root.path)["roots"]
    assert found["namespaces"][0]["headers_refused"] == {"not_a_record": 1}
    assert found["namespaces"][0]["parts_present"] == {"g0p0t0": 5}
    assert "1 not_a_record of 6 headers read" in ucm("inspect", root.path).stdout
