"""A store over an NFS client's semantics: two hosts with a mount each, and the protocol's effects
on programs.

By default the mounts are those of ``nfs.py``, a file system over FUSE. With ``UCM_NFS_ROOT``
(``make test-nfs ROOT=...``) they are real: one mount point, or two of one export
(``/mnt/a:/mnt/b``, mounted with ``nosharecache``); tests that need scripted failures of the server
are skipped there.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from columns import COLUMNS, Column, use
from ground import SHAPE, Ground, block_ids, counted, wait_until
from hosts import assert_usage, two_hosts
from kinds import LONG
from nfs import NfsClient
from processes import assert_all_exact, child

pytestmark = pytest.mark.timeout(600)

REAL = os.environ.get("UCM_NFS_ROOT", "")
#: Lifetime of the clients' caches in seconds.
AC = 0.7
#: The tested layouts: a file for each block, and many in one.
TRIED = [column for column in COLUMNS if column.name in ("file", "segment")]


@dataclass
class Mounts:
    """One export, mounted by two hosts."""

    export: Path
    seen: tuple[Path, Path]
    #: Its servers; none if it is real.
    clients: list[NfsClient]

    def again(self, host: int) -> None:
        """Replaces one client: that host's mount after its server was restarted."""
        self.clients[host].close()
        self.clients[host] = NfsClient(self.export, self.seen[host], AC)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Two hosts' mounts of one new export."""
    if REAL:
        first, second = [Path(path) for path in (*REAL.split(":"), REAL.split(":")[0])][:2]
        name = f"ucm-test-{uuid.uuid4().hex}"
        (first / name).mkdir()
        wait_until((second / name).exists, "the other mount shows what the first one has")
        yield Mounts(first / name, (first / name, second / name), [])
        shutil.rmtree(first / name)
        return
    seen = (tmp_path / "left", tmp_path / "right")
    clients = [NfsClient(tmp_path / "export", place, AC) for place in seen]
    made = Mounts(tmp_path / "export", seen, clients)
    yield made
    for client in made.clients:
        client.close()


@pytest.fixture(params=TRIED, ids=lambda column: column.name)
def column(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Column:
    """The kind of the test's stores."""
    found: Column = request.param
    use(found, monkeypatch)
    return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Cleanup at the end of the test."""
    with ExitStack() as stack:
        yield stack


def scripted(mounts: Mounts, host: int) -> NfsClient:
    """A host's client with scripted behaviour."""
    if not mounts.clients:
        pytest.skip("a real server does not fail by script")
    return mounts.clients[host]


def hosts(mounts: Mounts, stack: ExitStack) -> tuple[Ground, Ground]:
    """A store on each host."""
    left, right = (Ground(place / "root") for place in mounts.seen)
    stack.callback(left.close)
    stack.callback(right.close)
    return left, right


def await_hits(ground: Ground, names: list[bytes]) -> None:
    """Waits until a host finds blocks of the other, and checks their bytes."""
    wait_until(lambda: all(ground.store.lookup(names)), "the other host's blocks are found")
    ground.assert_hits(names)


def assert_bounded(news: dict[str, int]) -> None:
    """No wait exceeded a deadline, and no breaker opened."""
    waits = {
        name for name in ("timeout", "lookup_late", "unhealthy", "breaker_opened") if news.get(name)
    }
    assert not waits, f"counted: {news}"


def test_what_one_host_stores_the_other_finds(
    mounts: Mounts, column: Column, stack: ExitStack
) -> None:
    left, right = hosts(mounts, stack)
    names = block_ids(24, "theirs")
    assert right.store.lookup(names) == [False] * 24  # and this is cached for a while
    left.fill(names)
    await_hits(right, names)
    more = block_ids(24, "ours")
    right.fill(more)
    await_hits(left, more)
    assert_bounded(left.counts())
    assert_bounded(right.counts())


def test_what_was_removed_is_a_miss(mounts: Mounts, column: Column, stack: ExitStack) -> None:
    left, right = hosts(mounts, stack)
    names = block_ids(24, "removed")
    left.fill(names)
    await_hits(right, names)  # its kept descriptors stay open
    before = right.counts()
    for path in left.files():
        path.unlink()

    def is_gone() -> bool:
        right.load(names)  # each one right, or a miss
        return not any(right.store.lookup(names))

    wait_until(is_gone, "all are misses on the other host")
    assert_bounded(counted(before, right.counts()))
    wait_until(lambda: right.is_healthy(names), "they are stored again")
    await_hits(left, names)


def test_a_file_that_is_open_when_its_name_goes(
    mounts: Mounts, column: Column, stack: ExitStack
) -> None:
    """The removing host has them open: its client hides each file until it is closed, and then
    removes it."""
    left, _ = hosts(mounts, stack)
    names = block_ids(24, "silly")
    left.fill(names)
    left.assert_hits(names)
    with ExitStack() as open_files:
        for path in left.files():
            open_files.enter_context(path.open("rb"))
            path.unlink()
        assert REAL or list(mounts.export.rglob(".nfs*"))
        left.load(names)
        wait_until(lambda: left.is_healthy(names), "they are stored again beside the hidden files")
        assert_usage_of_names(left)
    left.close()
    wait_until(lambda: not list(mounts.export.rglob(".nfs*")), "nothing hidden is left over")


def assert_usage_of_names(ground: Ground) -> None:
    """The limit holds; hidden files have no name of ours and are removed by their client."""
    assert ground.bytes_stored() <= ground.store.stats()["storage_capacity_bytes"]


def test_a_damaged_block_is_replaced_for_both(
    mounts: Mounts, column: Column, stack: ExitStack
) -> None:
    left, right = hosts(mounts, stack)
    names = block_ids(8, "damaged")
    left.fill(names)
    await_hits(right, names)
    place = left.place(names[3])
    data = bytearray(place.read())
    data[-1] ^= 1
    place.write(data)
    for ground in (left, right):
        ground.load(names)  # the bad one fails, unless this host's cache has the old bytes
    wait_until(lambda: left.load([names[3]])[1] or left.is_healthy(names), "the damage was met")
    wait_until(lambda: left.is_healthy(names), "it is stored anew")

    def is_right() -> bool:
        return not right.load(names)[1] or right.is_healthy(names)

    wait_until(is_right, "the other host reads it again")


def test_calls_whose_answer_was_lost(mounts: Mounts, column: Column, stack: ExitStack) -> None:
    left, right = hosts(mounts, stack)
    names = block_ids(40, "replayed")
    scripted(mounts, 0).behave(replay=0.5)
    left.fill(names)
    left.assert_hits(names)
    scripted(mounts, 0).behave()
    await_hits(right, names)
    left.close()
    assert not [path for path in mounts.export.rglob("*/tmp/*") if path.is_file()], (
        "a private file is left over"
    )


@pytest.mark.parametrize(
    "number",
    [errno.EIO, errno.ENOSPC, errno.EDQUOT] if LONG else [errno.EDQUOT],
    ids=errno.errorcode.get,
)
def test_errors_that_arrive_with_the_close(
    mounts: Mounts, column: Column, stack: ExitStack, number: int
) -> None:
    left, right = hosts(mounts, stack)
    names = block_ids(6, "closed")
    left.fill(block_ids(3, "before"))
    scripted(mounts, 0).behave(error={"FLUSH": number})
    assert set(left.dump(names)) == set(range(6)), "a failed close counted as a success"
    assert not any(left.store.lookup(names))
    assert not any(right.store.lookup(names))
    scripted(mounts, 0).behave()

    def is_found() -> bool:
        # After a full medium space is freed for a while, also of newly stored blocks: then they are
        # stored again.
        return (
            left.is_healthy(names) and all(right.store.lookup(names)) and not right.load(names)[1]
        )

    wait_until(is_found, "blocks are stored again, and found")


def test_a_server_that_goes_and_comes_back(
    mounts: Mounts, column: Column, stack: ExitStack
) -> None:
    """During loads and dumps: misses and failed dumps, then everything as before, with the stored
    blocks."""
    left, right = hosts(mounts, stack)
    names, source = block_ids(60, "restarted"), random.Random(1)
    left.fill(names)
    await_hits(right, names)
    scripted(mounts, 1).close()
    for _ in range(5):
        right.load(source.sample(names, 8))  # each one right, or failed
        try:
            right.dump(block_ids(4, "meanwhile"))
        except Exception as error:
            assert getattr(error, "kind", "") == "unhealthy", error
        right.store.lookup(names)
    mounts.clients[1] = NfsClient(mounts.export, mounts.seen[1], AC)
    wait_until(lambda: right.is_healthy(block_ids(3, "after")), "blocks are stored again")
    await_hits(right, names)


def test_a_collector_that_dies_on_another_host(
    mounts: Mounts, column: Column, stack: ExitStack
) -> None:
    with child("mix", mounts.seen[0] / "root", 7) as (process, lines):
        wait_until(
            lambda: list(mounts.export.glob("root/space/collector-*.json")), "it is the collector"
        )
        for _ in range(5):
            assert lines.readline(), "the process ended early"
        process.kill()
        process.wait()
    right = Ground(mounts.seen[1] / "root", storage_capacity="2MiB")
    stack.callback(right.close)
    wait_until(lambda: right.store.stats()["storage_collector"] == 1, "another follows")
    wait_until(
        lambda: right.is_healthy(block_ids(16, "after")), "blocks are stored and found again"
    )
    assert_usage(right)
    assert_all_exact(right)


def test_two_hosts_with_other_clocks_share_a_root(column: Column, tmp_path: Path) -> None:
    if REAL or not LONG:
        pytest.skip("it has mounts of its own and takes long: make test-long")
    two_hosts(tmp_path, False, lambda export, place: closing(NfsClient(export, place, AC)))


def test_records_are_right_by_the_second_reader(
    mounts: Mounts, column: Column, stack: ExitStack
) -> None:
    left, right = hosts(mounts, stack)
    for number in range(4):
        names = block_ids(12, f"round {number}")
        (left if number % 2 else right).fill(names)
    left.close()
    right.close()
    found = Ground(mounts.export / "root")
    stack.callback(found.close)
    assert len(found.places()) >= 48
    assert all(place.is_right(SHAPE) for place in found.places())
