"""One arm in a process of its own: ``python child.py MODULE CLASS OPTIONS``, driven by ``run.py``.

Requests and replies are lines of JSON on standard input and the original standard output; output of
the arm itself goes to standard error. A round opens a store in an empty directory, dumps and loads
the same number of other blocks (to warm up threads, buffers and directories), then dumps, loads and
looks up the measured blocks. Every round compares the loaded with the dumped bytes.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np
from peer import Blocks, Peer, UnavailableError

#: A lookup takes microseconds: the median of this number of calls counts.
LOOKUPS = 7
#: Time before them: a store may scan a directory again that has just been changed.
REST_S = 0.2


def pages(count: int, block_bytes: int) -> Blocks:
    """Touched memory on page boundaries, one block a row."""
    blocks = np.frombuffer(mmap.mmap(-1, count * block_bytes), dtype=np.uint8).reshape(
        count, block_bytes
    )
    blocks[:] = 0
    return blocks


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    answer = call(*arguments)
    return time.perf_counter() - start, answer


def lookup_us(peer: Peer, names: Any, expected: bool, count: int) -> float | None:
    """Microseconds per id, or None for a store without lookup."""
    time.sleep(REST_S)
    took = []
    for _ in range(LOOKUPS):
        try:
            seconds, found = timed(peer.lookup, names)
        except UnavailableError:
            return None
        if [bool(answer) for answer in found] != [expected] * count:
            raise RuntimeError(
                f"lookup found {sum(map(bool, found))} of {count}, expected {expected}"
            )
        peer.after_lookup(names)
        took.append(seconds / count * 1e6)
    return statistics.median(took)


def one_ms(
    peer: Peer, ids: list[bytes], source: Any, target: Any
) -> tuple[float | None, float | None]:
    """Milliseconds of a dump and a load of one block, the medians over these ids; None without
    any."""
    if not ids:
        return None, None
    names = peer.name_blocks(ids)
    each = [slice(number, number + 1) for number in range(len(ids))]
    dumps = [timed(peer.dump, names[one], source[one])[0] * 1e3 for one in each]
    loads = [timed(peer.load, names[one], target[one])[0] * 1e3 for one in each]
    return statistics.median(dumps), statistics.median(loads)


def one_round(
    peer: Peer,
    directory: str,
    block_bytes: int,
    count: int,
    direct: bool,
    seed: int,
    singles: int = 0,
) -> dict[str, Any]:
    """The figures of one round: GB/s (10^9 bytes) of dump and load, microseconds per id of lookups;
    milliseconds for one block over ``singles`` blocks, for a peer whose names and memory are
    sequences of blocks."""
    random = np.random.default_rng(seed)
    warm, ids, absent, alone = ([random.bytes(16) for _ in range(count)] for _ in range(4))
    source, target = pages(count, block_bytes), pages(count, block_bytes)
    source.view(np.uint64)[:] = random.integers(0, 2**63, source.nbytes // 8, np.uint64).reshape(
        count, -1
    )
    peer.prepare(directory, block_bytes, count, direct)
    try:
        names_warm, names, names_absent = (
            peer.name_blocks(warm),
            peer.name_blocks(ids),
            peer.name_blocks(absent),
        )
        from_memory, to_memory = peer.wrap(source), peer.wrap(target)
        peer.dump(names_warm, from_memory)
        peer.load(names_warm, to_memory)
        target[:] = 0
        os.sync()  # no write-back falls into the timed part
        dump_s, _ = timed(peer.dump, names, from_memory)
        os.sync()
        load_s, _ = timed(peer.load, names, to_memory)
        peer.fetch(names, to_memory)
        if not np.array_equal(source, target):
            raise RuntimeError("loaded bytes differ from the dumped ones")
        present_us = lookup_us(peer, names, True, count)
        absent_us = lookup_us(peer, names_absent, False, count)
        dump_ms, load_ms = one_ms(peer, alone[:singles], from_memory, to_memory)
    finally:
        peer.close()
    figures = {
        "dump": source.nbytes / dump_s / 1e9,
        "load": source.nbytes / load_s / 1e9,
        "lookup_present": present_us,
        "lookup_absent": absent_us,
        "dump_one": dump_ms,
        "load_one": load_ms,
    }
    return {
        name: figure if name.removesuffix("_one") in peer.figures else None
        for name, figure in figures.items()
    }


def answer(out: TextIO, message: dict[str, Any]) -> None:
    """One line for the driver."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def main() -> None:
    """Serves requests until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is no reply
    module, name, options = sys.argv[1:]
    try:
        peer: Peer = getattr(importlib.import_module(module), name)(json.loads(options))
        answer(out, {"version": peer.version(), "threads": peer.threads})
    except UnavailableError as reason:
        answer(out, {"unavailable": str(reason)})
        return
    except ImportError as error:
        answer(out, {"unavailable": f"not installed: {error}"})
        return
    except Exception as error:
        answer(out, {"unavailable": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        try:
            answer(out, one_round(peer, **json.loads(line)))
        except UnavailableError as reason:
            answer(out, {"unavailable": str(reason)})
        except Exception as error:
            answer(out, {"failed": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
