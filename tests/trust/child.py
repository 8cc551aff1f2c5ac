"""A store in a process of its own, for rows where a process dies, runs beside another, or exhausts
a resource.

Run as ``child.py <work> <root> <seed>``. Results are written to standard output, line by line,
without buffering.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
sys.path.insert(0, str(Path(__file__).parent))

from ground import Ground, Memory, block_ids, counted, wait_until

from ucm.errors import BusyError, NoSpaceError, TaskError, UnhealthyError

#: Blocks in flight at any time, so that a kill hits some in every state.
WINDOW = 6
BLOCKS, MANY = 160, 640
#: Space for half of them, and the amount of work in it.
SMALL, STEPS = "2MiB", 120
#: Bytes that a hungry process may still take.
SPARE = 16 << 20


def say(*words: object) -> None:
    """One line, whole."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def write(root: Path, seed: int, count: int = BLOCKS, salt: str = "shared") -> None:
    """Dumps block after block in its own order and reports the published ones."""
    ground = Ground(root)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    names = block_ids(count, salt)
    ground.fill([names[order[0]]])  # from here on there is space
    under_way: deque[tuple[int, Memory, object]] = deque()

    def finish() -> None:
        number, _memory, task = under_way.popleft()
        try:
            ground.store.wait(task)
        except TaskError as error:  # hanging storage grants no space for a while
            short = (BusyError, NoSpaceError)
            if not all(isinstance(each, short) for each in error.failures.values()):
                raise
            ground.fill([names[number]])
        say("published", number)

    for number in order:
        if len(under_way) == WINDOW:
            finish()
        memory = Memory([names[number]], filled=True)
        under_way.append(
            (number, memory, ground.store.dump_data([names[number]], [0], memory.addresses()))
        )
    while under_way:
        finish()
    ground.close()
    say("end")


def write_many(root: Path, seed: int) -> None:
    """The same for so large a number of blocks that only a kill ends it: power cuts wait for up to
    636."""
    write(root, seed, MANY, "many")


def write_as_host(root: Path, seed: int) -> None:
    """A few blocks of its own, then the common ones."""
    ground = Ground(root)
    ground.fill(block_ids(3, f"of {seed}"))
    ground.close()
    write(root, seed)


def starve(root: Path, seed: int) -> None:
    """Uses the store without free descriptors, then with some again."""
    names = block_ids(6, f"starved {seed}")
    ground = Ground(root)
    ground.fill(names[:3])
    before = ground.counts()
    # The lowest ones are in use: none is available, even if the store's own threads close some.
    usual, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    states, failures = ground.load(names[:1])
    if ground.column.memory:
        assert states == ["right"], "blocks in memory need no descriptor"
    else:
        assert failures and states == ["blank"], "a load without a descriptor worked"
    assert ground.dump(names[3:4]), "a dump without a descriptor worked"
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
    say("counted", *counted(before, ground.counts()))
    # a check of the root in the background may have failed too
    wait_until(lambda: ground.is_healthy(names), "blocks are stored and found again")
    ground.assert_hits(names)
    ground.close()
    say("end")


def mix(root: Path, seed: int) -> None:
    """Dumps, looks up and loads a few blocks at a time with too little space for all, so that some
    are removed."""
    source, ground = random.Random(seed), Ground(root, storage_capacity=SMALL)
    names = block_ids(BLOCKS, "shared")
    for step in range(STEPS):
        some = source.sample(names, source.randrange(1, 9))
        if source.random() < 0.6:
            with suppress(UnhealthyError):  # a busy machine may delay the storage
                ground.dump(some)  # published, or refused for lack of space
        else:
            ground.store.lookup(some)
            ground.load(some)  # each one right, or failed and blank
        say("step", step)
    ground.close()
    say("end")


def hunger(root: Path, seed: int) -> None:
    """Uses the store without memory for a buffer or a thread, and then with some again."""
    names = block_ids(6, f"hungry {seed}")
    ground = Ground(root)
    ground.fill(names[:3])
    memory = [Memory([name], filled=False) for name in names]
    filled = [Memory([name], filled=True) for name in names]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, hard))
    try:
        bytearray(16 * SPARE)  # more than an allocator may have reserved
    except MemoryError:
        say("hungry")
    for name, into in zip(names[:3], memory, strict=False):
        ground.store.wait(ground.store.load_data([name], [0], into.addresses()))
    for name, source in zip(names[3:], filled[3:], strict=True):
        ground.store.wait(ground.store.dump_data([name], [0], source.addresses()))
    # A second store has no memory for its buffers: an error with that reason, and nothing else
    # fails.
    try:
        Ground(root, staging_capacity="256MiB").close()
        say("opened")
    except Exception as error:
        say("refused", type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))
    assert [m.states() for m in memory[:3]] == [["right"]] * 3
    ground.assert_hits(names)
    assert not set(ground.counts()) & {"timeout", "bad_checksum"}
    ground.close()
    say("end")


def hang(root: Path, seed: int) -> None:
    """Opens, uses and closes a store on a hanging root."""
    deadlines = {
        "lookup_ms": 200,
        "load_unknown_s": 0.2,
        "dump_s": 0.5,
        "probe_s": 0.5,
        "shutdown_s": 0.5,
    }
    names = block_ids(3, f"never {seed}")
    ground = Ground(root, deadlines=deadlines)
    assert ground.store.lookup(names) == [False] * 3
    assert ground.load(names)[0] == ["blank"] * 3
    try:
        assert set(ground.dump(names)) == {0, 1, 2}
    except UnhealthyError:  # by now the breaker is open: refused at once
        pass
    say("used")
    ground.close()
    say("closed")
    say("end")


if __name__ == "__main__":
    works = (write, write_many, write_as_host, starve, mix, hunger, hang)
    {work.__name__: work for work in works}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
