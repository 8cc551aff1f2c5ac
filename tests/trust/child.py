"""A store in a process of its own, for rows where a process dies, runs beside another, or runs out of something.

Run as ``child.py <work> <root> <seed>``. What happened is written to standard output, a line at a time and at once.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ground import Ground, Memory, block_ids, counted

#: Blocks that are on their way at any time, so that a kill meets some in every state.
WINDOW = 6
BLOCKS = 160


def say(*words: object) -> None:
    """One line, whole."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def write(root: Path, seed: int) -> None:
    """Dumps block after block in an order of its own and says which ones were published."""
    ground = Ground(root)
    order = list(range(BLOCKS))
    random.Random(seed).shuffle(order)
    names = block_ids(BLOCKS, "shared")
    under_way: deque[tuple[int, Memory, object]] = deque()

    def finish() -> None:
        number, _memory, task = under_way.popleft()
        ground.store.wait(task)
        say("published", number)

    for number in order:
        if len(under_way) == WINDOW:
            finish()
        memory = Memory([names[number]], filled=True)
        under_way.append((number, memory, ground.store.dump_data([names[number]], [0], memory.addresses())))
    while under_way:
        finish()
    ground.close()
    say("end")


def starve(root: Path, seed: int) -> None:
    """Takes every descriptor there is, uses the store, gives them back, uses it again."""
    names = block_ids(6, f"starved {seed}")
    ground = Ground(root)
    assert not ground.dump(names[:3])
    before = ground.counts()
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    states, failures = ground.load(names[:1])
    assert failures and states == ["blank"], "a load without a descriptor worked"
    assert ground.dump(names[3:4]), "a dump without a descriptor worked"
    for descriptor in taken:
        os.close(descriptor)
    say("counted", *counted(before, ground.counts()))
    assert not ground.dump(names[3:])
    ground.assert_hits(names)
    ground.close()
    say("end")


if __name__ == "__main__":
    {"write": write, "starve": starve}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
