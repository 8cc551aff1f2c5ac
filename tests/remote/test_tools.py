"""``ucm inspect``, ``ucm verify`` and ``ucm gc`` over the address of a server: their output matches
the contents, removals are complete, and everything else stays. The first line of a test is the name
of its row in the table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from blocks import PATIENT, Memory, ids
from click.testing import CliRunner, Result
from remote_columns import COLUMNS, MOTO, PREFIX, REDIS, Column, redis_asks, redis_says
from server_contents import Objects, Values, contents_of
from test_matrix import is_well, loaded, opened, soon

from servers import Server
from ucm.cli import main, terminal
from ucm.cli.gc import Wish, carry_out, make_plan
from ucm.cli.roots import RemoteRoot
from ucm.config import Capacity
from ucm.errors import BusyError, NoSpaceError, TaskError, UcmError

#: Media on which the name of a record has its time, so that a test can make it older.
BUCKETS = [column for column in COLUMNS if column.http]
HOUR = 3600
COMMANDS = ("inspect", "verify", "gc")
#: Bytes of a block's record before its payload.
HEADER = 4096
EVERYTHING = Wish(Capacity(bytes=0), None, chosen=False, stale=True)


class Tools:
    """The command line over the server of a column."""

    def __init__(self, column: Column, at: str) -> None:
        keys = dict(column.keys(at))
        self.address = str(keys.pop("storage_backends"))
        #: Keys of the store, as the command line takes them.
        self.told = {key: str(value) for key, value in keys.items()}

    def run(self, command: str, *words: object) -> Result:
        """Runs a command; an exception is reported with its text."""
        options = [part for key, value in self.told.items() for part in ("-o", f"{key}={value}")]
        result = CliRunner().invoke(main, [command, self.address, *map(str, words), *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, command: str, *words: object) -> dict[str, Any]:
        """Its document, with the exit status as ``exit``."""
        result = self.run(command, *words, "--json")
        assert result.stdout, result.stderr
        document: dict[str, Any] = json.loads(result.stdout)
        return document | {"exit": result.exit_code}

    def root(self, *words: str) -> dict[str, Any]:
        """The document of ``ucm inspect`` for the address."""
        (root,) = self.json("inspect", *words)["roots"]
        assert isinstance(root, dict)
        return root

    def namespace(self, identity: str = "tests") -> str:
        """The namespace of an identity."""
        (name,) = [
            space["namespace"]
            for space in self.root()["namespaces"]
            if space["words"]["weights"] == identity
        ]
        return str(name)

    def open(self) -> RemoteRoot:
        """The address as the commands open it."""
        return RemoteRoot(self.address, self.told)


@pytest.fixture
def source() -> Memory:
    """What is stored."""
    return Memory(16)


@pytest.fixture
def tools(column: Column, server: Server) -> Tools:
    """The command line over it."""
    return Tools(column, server.at)


@pytest.fixture
def contents(column: Column, server: Server) -> Iterator[Values | Objects]:
    """What lies on it."""
    contents = contents_of(column, server)
    yield contents
    contents.close()


@pytest.fixture
def stored(column: Column, server: Server, source: Memory) -> Callable[..., None]:
    """Stores blocks of the source, each by a separate dump, so that each is a segment of its own in
    a bucket."""

    def store(count: int, identity: str = "tests") -> None:
        with opened(column, server.at, deadlines=PATIENT, identity=identity) as store:
            for block in range(count):
                dump_once_counted(store, ids(count)[block], source.rows(block))

    return store


def dump_once_counted(store: Any, block: bytes, rows: Any) -> None:
    """Dumps a block when there is space: a server is counted first, and a dump does not wait long
    for that."""
    end = time.monotonic() + 60
    while True:
        try:
            store.wait(store.dump_data([block], [0], rows))
            return
        except TaskError as error:
            if time.monotonic() > end or not all(
                isinstance(each, (BusyError, NoSpaceError)) for each in error.failures.values()
            ):
                raise


@pytest.fixture
def come_back(column: Column, server: Server, source: Memory) -> Callable[..., list[bool]]:
    """True if a new store loads the blocks, each by itself."""

    def load(count: int, identity: str = "tests") -> list[bool]:
        with opened(column, server.at, deadlines=PATIENT, identity=identity) as store:
            return [loaded(store, source, block, 1) for block in range(count)]

    return load


def everything(contents: Values | Objects) -> dict[str, bytes]:
    """All contents, to detect a change of any byte."""
    return {name: contents.get(name) for name in contents.sizes()}


def test_inspect(tools: Tools, contents: Values | Objects, stored: Callable[..., None]) -> None:
    """ucm inspect: namespaces, records and bytes are those on the server"""
    stored(3)
    stored(2, identity="another")
    contents.put(contents.foreign, b"mine")
    before = everything(contents)
    root = tools.root("--tenants")
    assert root["records"] + root["segment_records"] == 5
    assert (
        root["record_bytes"] + root["segment_bytes"]
        == root["used_bytes"]
        == sum(contents.records().values())
    )
    assert (root["foreign"], root["foreign_bytes"]) == (1, len(b"mine"))
    assert [found["path"] for found in root["foreign_files"]] == [contents.foreign]
    (tenant,) = root["tenants"]
    assert (tenant["tenant"], tenant["records"]) == ("", 5)

    spaces = {space["words"]["weights"]: space for space in root["namespaces"]}
    assert spaces.keys() == {"tests", "another"}
    for identity, count in (("tests", 3), ("another", 2)):
        space = spaces[identity]
        assert (space["records"], space["manifest"]) == (count, "ok")
        assert space["bytes"] == sum(contents.records(space["namespace"]).values())
        assert space["parts_present"] == {"g0p0t0": count}
        assert (space["headers_refused"], space["footers_refused"]) == ({}, {})
    names = {identity: space["namespace"] for identity, space in spaces.items()}
    assert root["differences"]["weights"] == {names[identity]: identity for identity in names}

    text = tools.run("inspect")
    assert text.exit_code == 0
    assert f"root {tools.address}" in text.stdout and all(
        name in text.stdout for name in names.values()
    )
    assert everything(contents) == before
    contents.set_limit(256 << 20)
    root = tools.root()
    assert (root["storage_capacity"], root["low_watermark"]) == (256 << 20, int((256 << 20) * 0.85))


def test_verify(
    tools: Tools,
    contents: Values | Objects,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
) -> None:
    """ucm verify: all well, and then a byte of one record is another"""
    stored(4)
    stored(2, identity="another")
    well = tools.json("verify", "--rate", "unlimited")
    assert (well["exit"], well["records"], well["good"], well["bad"], well["bad_records"]) == (
        0,
        6,
        6,
        0,
        [],
    )
    assert well["bytes"] == sum(contents.records().values()) and well["bytes_read"] > 0

    damaged = contents.find(tools.namespace(), ids(4)[2])
    data = bytearray(contents.get(damaged.name))
    data[damaged.offset + HEADER + 7] ^= 0x10
    contents.put(damaged.name, bytes(data))
    before = everything(contents)
    found = tools.json("verify", "--rate", "unlimited")
    assert (found["exit"], found["good"], found["bad"], found["unreadable"]) == (1, 5, 1, 0)
    assert found["reasons"] == {"bad_checksum": 1}
    (bad,) = found["bad_records"]
    assert (bad["path"], bad["reason"]) == (damaged.record, "bad_checksum")
    text = tools.run("verify")
    assert text.exit_code == 1 and damaged.record in text.stdout
    assert tools.json("verify", "--namespace", tools.namespace("another")[:12])["exit"] == 0
    assert everything(contents) == before
    assert come_back(4) == [True, True, False, True], "a store says the same"
    assert come_back(2, identity="another") == [True] * 2


def test_a_dry_run(
    tools: Tools,
    contents: Values | Objects,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
) -> None:
    """ucm gc without --yes: nothing is removed, whatever is asked for"""
    stored(3)
    contents.put(contents.foreign, b"mine")
    contents.set_limit(sum(contents.records().values()))
    before = everything(contents)
    name = tools.namespace()
    for wish, most in (
        ((), 1),
        (("--to", 0), 3),
        (("--to", "50%"), 2),
        (("--namespace", name), 3),
        (("--namespace", name, "--to", 0), 3),
        (("--stale",), 0),
    ):
        planned = tools.json("gc", *wish, "--list")
        assert (planned["exit"], planned["dry_run"], planned["planned"]) == (0, True, most), wish
        assert (len(planned["files"]), planned["removed"]) == (most, 0), wish
        text = tools.run("gc", *wish)
        assert text.exit_code == 0
        assert ("--yes removes them" if most else "nothing to remove") in text.stdout
    assert everything(contents) == before
    contents.lift_limit()
    assert come_back(3) == [True] * 3


def test_down_to_a_size(
    tools: Tools,
    contents: Values | Objects,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
) -> None:
    """ucm gc --to: what it removes is absent, the rest is loaded"""
    stored(6)
    contents.put(contents.foreign, b"mine")
    namespace, each = tools.namespace(), max(contents.records().values())
    where = [contents.find(namespace, block) for block in ids(6)]
    done = tools.json("gc", "--to", 4 * each, "--yes", "--list")
    assert (done["exit"], done["dry_run"], done["planned"], done["removed"]) == (0, False, 2, 2)
    assert (done["failed"], done["skipped"], done["removed_bytes"]) == (0, 0, 2 * each)
    there = [place.name in contents.records() for place in where]
    assert {place.file for place, kept in zip(where, there, strict=True) if not kept} == set(
        done["files"]
    )
    assert there.count(False) == 2
    if isinstance(contents, Objects):
        assert there == [False] * 2 + [True] * 4, "the oldest use first"
    assert come_back(6) == there
    again = tools.run("gc", "--to", 4 * each, "--yes")
    assert again.exit_code == 0 and "nothing to remove" in again.stdout

    contents.set_limit(5 * each)
    assert tools.json("gc")["planned"] == 0, "below the low watermark, 85 %"
    contents.set_limit(4 * each)
    default = tools.json("gc", "--yes")
    assert (default["target_bytes"], default["removed"]) == (int(4 * each * 0.85), 1)
    half = tools.json("gc", "--to", "50%", "--yes")
    assert (half["target_bytes"], half["removed"]) == (2 * each, 1)
    contents.lift_limit()
    there = [place.name in contents.records() for place in where]
    assert there.count(True) == 2 and come_back(6) == there
    assert contents.get(contents.foreign) == b"mine"


@pytest.mark.parametrize("column", [REDIS], ids=[REDIS.name])
def test_without_a_limit(
    tools: Tools, contents: Values | Objects, stored: Callable[..., None]
) -> None:
    """ucm gc of a server that has no limit: it requires a size"""
    stored(1)
    for wish in ((), ("--to", "50%")):
        refused = tools.run("gc", *wish, "--yes")
        assert refused.exit_code == 2 and "say a size: --to 10GiB" in refused.stderr
    assert len(contents.records()) == 1


@pytest.mark.parametrize("column", [REDIS], ids=[REDIS.name])
def test_a_password(
    tools: Tools, server: Server, stored: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ucm of a server with a password: found as an engine finds it, and not shown"""
    stored(2)
    secret = "very-secret-word"
    redis_says(server, "CONFIG", "SET", "requirepass", secret)
    for command in COMMANDS:
        refused = tools.run(command)
        assert refused.exit_code == 2 and "redis_password" in refused.stderr
    monkeypatch.setenv("UCM_REDIS_PASSWORD", secret)
    assert tools.json("verify")["good"] == 2
    monkeypatch.delenv("UCM_REDIS_PASSWORD")
    tools.address = f"redis://:{secret}@{server.at}"
    done = tools.run("gc", "--to", 0, "--yes")
    assert done.exit_code == 0 and "removed 2 files" in done.stdout
    assert secret not in done.output


@pytest.mark.parametrize("column", BUCKETS, ids=lambda column: column.name)
def test_older_than(
    tools: Tools,
    contents: Objects,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
) -> None:
    """ucm gc --older-than: what was not used for so long"""
    stored(4)
    namespace = tools.namespace()
    old = [contents.find(namespace, ids(4)[block]) for block in (1, 3)]
    for place in old:
        contents.make_older(place.name, 2 * HOUR)
    (space,) = tools.root()["namespaces"]
    assert space["newest_use"] - space["oldest_use"] >= 2 * HOUR - 1
    assert tools.json("gc", "--older-than", "3h", "--yes")["removed"] == 0
    done = tools.json("gc", "--older-than", "1h", "--yes", "--list")
    assert (done["exit"], done["removed"], set(done["files"])) == (
        0,
        2,
        {place.file for place in old},
    )
    assert come_back(4) == [True, False, True, False]


@pytest.mark.parametrize("column", [REDIS], ids=[REDIS.name])
def test_older_than_on_redis(
    tools: Tools,
    server: Server,
    contents: Values,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
) -> None:
    """ucm gc --older-than of Redis: only where `expire_after` is given"""
    stored(2)
    place = contents.find(tools.namespace(), ids(2)[1])
    life = 10 * HOUR
    for name, left in zip(contents.records(), (life, life), strict=True):
        redis_asks(server, "EXPIRE", name, str(left))
    redis_asks(server, "EXPIRE", place.name, str(life - 2 * HOUR))
    refused = tools.run("gc", "--older-than", "1h", "--yes")
    assert refused.exit_code == 2 and "-o expire_after=" in refused.stderr
    tools.told["expire_after"] = f"{life}s"
    assert tools.json("gc", "--older-than", "3h", "--yes")["removed"] == 0
    assert tools.json("gc", "--older-than", "1h", "--yes")["removed"] == 1
    assert come_back(2) == [True, False]


@pytest.mark.parametrize("column", [MOTO], ids=[MOTO.name])
def test_used_since(tools: Tools, contents: Objects, stored: Callable[..., None]) -> None:
    """ucm gc: what was used since it was listed stays"""
    stored(1)
    (name,) = contents.records()
    with tools.open() as root:
        plan = make_plan(root, root.namespaces(), EVERYTHING)
        used = {"format": 1, "used": {name.rpartition("/")[2]: time.time_ns()}}
        contents.put(f"{PREFIX}/uses/00000000000000aa.json", json.dumps(used).encode())
        outcome = carry_out(root, plan)
    assert (outcome.skipped, len(outcome.removed)) == (1, 0)
    assert tools.root()["space_documents"]["uses"] >= 1


def test_foreign_in_a_namespace(
    column: Column,
    tools: Tools,
    contents: Values | Objects,
    stored: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ucm gc --namespace: with something foreign in it, it stays known"""
    stored(1)
    name = tools.namespace()
    foreign = f"{PREFIX}/{name}/notes" if column.http else f"ucm:{name}:notes"
    contents.put(foreign, b"mine")
    monkeypatch.setattr(terminal, "wall_ns", lambda: time.time_ns() + 2 * HOUR * 10**9)
    done = tools.json("gc", "--namespace", name, "--yes")
    assert (done["removed"], done["namespaces_removed"]) == (1, [])
    assert contents.get(foreign) == b"mine"
    assert tools.namespace() == name


@pytest.mark.parametrize("column", [REDIS], ids=[REDIS.name])
def test_what_is_said_where_there_is_no_limit(tools: Tools, stored: Callable[..., None]) -> None:
    """ucm of a server that has no limit: none is made up"""
    stored(1)
    assert "no limit is known" in tools.run("inspect").stdout
    assert "no limit" in tools.run("gc", "--to", 0).stdout
    assert "nothing to read" not in tools.run("verify").stdout


def test_a_namespace(
    column: Column,
    server: Server,
    source: Memory,
    tools: Tools,
    contents: Values | Objects,
    stored: Callable[..., None],
    come_back: Callable[..., list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ucm gc --namespace under a store: its blocks are misses, the others' stay, and it stores
    again"""
    stored(3)
    stored(2, identity="another")
    name = tools.namespace()
    with opened(column, server.at, deadlines=PATIENT) as store:
        soon("they are found", lambda: store.lookup(ids(3)) == [True] * 3)
        done = tools.json("gc", "--namespace", name[:12], "--yes")
        assert (done["exit"], done["removed"], done["failed"]) == (0, 3, 0)
        assert done["namespaces_removed"] == [], "somebody writes here"
        assert not contents.records(name)
        assert [loaded(store, source, block, 1) for block in range(3)] == [False] * 3
        assert store.lookup(ids(3)) == [False] * 3
        assert come_back(2, identity="another") == [True] * 2
        soon("it stores again", lambda: is_well(store, source, 0, 3))
    with monkeypatch.context() as patch:
        patch.setattr(terminal, "wall_ns", lambda: time.time_ns() + 2 * HOUR * 10**9)
        done = tools.json("gc", "--namespace", name, "--yes")
    assert (done["exit"], done["failed"], done["namespaces_removed"]) == (0, 0, [name])
    assert [space["words"]["weights"] for space in tools.root()["namespaces"]] == ["another"]
    assert not any(name in left for left in contents.sizes())
    assert come_back(2, identity="another") == [True] * 2
    stored(3)
    assert come_back(3) == [True] * 3
    assert tools.namespace() == name


def test_changed_since(
    tools: Tools, contents: Values | Objects, stored: Callable[..., None]
) -> None:
    """ucm gc: what was removed or replaced since it was listed is not touched"""
    stored(3)
    names = list(contents.records())
    with tools.open() as root:
        plan = make_plan(root, root.namespaces(), EVERYTHING)
        contents.remove(names[0])
        if isinstance(contents, Objects):
            contents.put(names[1], contents.get(names[1]) + b"x")
        outcome = carry_out(root, plan)
    replaced = [names[1]] if isinstance(contents, Objects) else []
    assert (outcome.failed, outcome.skipped, len(outcome.removed)) == (
        0,
        1 + len(replaced),
        2 - len(replaced),
    )
    assert list(contents.records()) == replaced


def test_a_server_that_is_gone(tools: Tools, server: Server, stored: Callable[..., None]) -> None:
    """ucm gc ends if the server ends"""
    stored(2)
    with tools.open() as root:
        plan = make_plan(root, root.namespaces(), EVERYTHING)
        assert len(plan.removals) == 2
        server.kill()
        with pytest.raises(UcmError):
            carry_out(root, plan)
    for command in COMMANDS:
        done = tools.run(command, "--json")
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("column", [MOTO], ids=[MOTO.name])
def test_an_empty_bucket(tools: Tools) -> None:
    """ucm of a bucket that no store was in: refused"""
    for command in COMMANDS:
        done = tools.run(command, "--json")
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{tools.address} is no root of ucm: it has no ucm-root.json" in done.stderr
