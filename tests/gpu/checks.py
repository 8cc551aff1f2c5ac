"""Checks that a machine with a GPU copies correctly: ``python tests/gpu/checks.py`` with torch,
NumPy and the wheel of ucm.

Needs neither Rust nor a network, and no test runner. Without a GPU it prints that and exits with 0.
``--device host`` and ``--device softcuda`` run the same over replacements.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from places import HOOK, WORDS, Bytes, MissingError, Place, place

from ucm import trans
from ucm.errors import UcmError
from ucm.store.cache.connector import UcmCacheStore
from ucm.store.posix import UcmPosixStore
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1

METHODS = ("dma", "sm", "staging", "auto")
#: Bytes of a piece and their number: whole vectors, tails, odd lengths, one that is copied
#: separately.
SHAPES = [
    (1, 5),
    (16, 300),
    (31, 64),
    (256, 1000),
    (4096, 256),
    (5000, 40),
    (65_536, 64),
    (1_048_576, 6),
]
QUICK = [(1, 5), (31, 64), (4096, 40), (300_000, 3)]
POISON = 0xEE
GAP = 13

PIECE, PIECES = 24_576, 8
SIZES = {"tensor_size": PIECE, "shard_size": PIECE * PIECES, "block_size": PIECE * PIECES}
BLOCKS = 16
#: Deadlines long enough for a busy machine.
PATIENT = {"lookup_ms": 20_000, "load_unknown_s": 60.0, "load_max_s": 60.0, "probe_s": 60.0}


def random_bytes(seed: int, size: int) -> Bytes:
    """The same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def poison(size: int) -> Bytes:
    """Bytes that every copy must overwrite."""
    return np.full(size, POISON, np.uint8)


def bytes_of(memory: trans.Memory) -> Bytes:
    """The bytes of a buffer on the host."""
    return np.frombuffer(memoryview(memory), np.uint8)


def opened(where: Place) -> trans.Device:
    """The device of a place."""
    device = trans.Device(where.platform)
    device.setup(0)
    return device


def every_copy_shape(where: Place, quick: bool) -> str:
    """Each shape by each method, at once and later, from pinned, registered and ordinary memory."""
    device, copies = opened(where), 0
    for size, count in QUICK if quick else SHAPES:
        stride = size + GAP
        data, order = (
            random_bytes(size, count * stride),
            np.random.default_rng(count).permutation(count),
        )
        there, buffers = where.allocate(data.size), device.make_buffer()
        ordinary, registered = poison(data.size), poison(data.size)
        buffers.register_host_buffer(registered.ctypes.data, registered.size)
        pinned = buffers.make_host_buffer(data.size)
        sides = [bytes_of(pinned), registered, ordinary]
        at, packed, back = order * stride, np.arange(count) * size, order[::-1] * stride
        for method in METHODS:
            stream = device.make_stream(method)
            for side in sides:
                first = side.ctypes.data
                device_at = np.uint64(there) + at.astype(np.uint64)
                host_at = np.uint64(first) + back.astype(np.uint64)

                def moved(from_: Any, to: Any, data: Bytes = data, size: int = size) -> Bytes:
                    result = poison(data.size)
                    for a, b in zip(from_, to, strict=True):
                        result[b : b + size] = data[a : a + size]
                    return result

                for later in ("", "_async"):
                    what = f"{count} x {size} bytes by {method}{later}"
                    for shape, argument, to in [
                        ("_batch", host_at, back),
                        ("_gather", first, packed),
                    ]:
                        where.write(there, data)
                        side[:] = POISON
                        getattr(stream, f"device_to_host{shape}{later}")(device_at, argument, size)
                        stream.synchronize(60)
                        assert np.array_equal(side, moved(at, to)), f"to the host{shape}: {what}"
                    for shape, argument, from_ in [
                        ("_batch", host_at, back),
                        ("_scatter", first, packed),
                    ]:
                        where.write(there, poison(data.size))
                        side[:] = data
                        getattr(stream, f"host_to_device{shape}{later}")(argument, device_at, size)
                        stream.synchronize(60)
                        after = where.read(there, data.size)
                        assert np.array_equal(after, moved(from_, at)), (
                            f"to the device{shape}: {what}"
                        )
                    side[:] = POISON
                    where.write(there, data)
                    getattr(stream, f"device_to_host{later}")(there + 3, first + 5, size)
                    stream.synchronize(60)
                    assert np.array_equal(side, moved([3], [5])), f"to the host: {what}"
                    copies += 5
        buffers.unregister_host_buffer(registered.ctypes.data)
    return f"{copies} copies"


class Blocks:
    """Blocks of a store on a device, in separate pieces."""

    def __init__(self, where: Place) -> None:
        self.where, self.size = where, BLOCKS * PIECES * (PIECE + 4096)
        self.first = where.allocate(self.size)
        offsets = np.arange(BLOCKS * PIECES, dtype=np.uint64).reshape(BLOCKS, PIECES) * np.uint64(
            PIECE + 4096
        )
        self.rows = np.uint64(self.first) + offsets
        self.inside = np.zeros(self.size, bool)
        for offset in offsets.ravel():
            self.inside[int(offset) : int(offset) + PIECE] = True

    def holds(self, data: Bytes) -> bool:
        """True if the pieces are those of ``data``, and the bytes between them are unchanged."""
        found = self.where.read(self.first, self.size)
        return np.array_equal(found, np.where(self.inside, data, POISON))


def store_of(where: Place, root: Path, **keys: Any) -> UcmPosixStore:
    """A store on files whose blocks lie on the device of a place."""
    config = {"storage_backends": str(root), "identity": "checks", "platform": where.platform}
    room = {
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
    }  # independent of other files on this disk
    return UcmPosixStore(config | room | SIZES | {"deadlines": PATIENT} | keys)


def memory_of(where: Place, root: Path) -> UcmCacheStore:
    """A store in memory shared by the processes of this run: each reads the memory of the
    others."""
    config = {"cache_size": "64MiB", "identity": f"checks of {root}", "platform": where.platform}
    return UcmCacheStore(config | SIZES)


#: Two shared stores: on files below a directory, and in memory.
SHARED: dict[str, Callable[[Place, Path], UcmPosixStore]] = {"root": store_of, "memory": memory_of}


def ids(seed: int) -> list[bytes]:
    """Names of blocks."""
    return [bytes([seed]) * 8 + number.to_bytes(8, "little") for number in range(BLOCKS)]


def a_dump_waits_for_its_event(where: Place, quick: bool) -> str:
    """Blocks that a busy stream still writes are dumped as they are after it."""
    rounds = 2 if quick else 6
    with tempfile.TemporaryDirectory() as root:
        for number in range(rounds):
            method = METHODS[number % len(METHODS)]
            with store_of(where, Path(root), transfer=method) as store:
                source, target = Blocks(where), Blocks(where)
                data = random_bytes(number, source.size)
                where.write(source.first, poison(source.size))
                where.write(target.first, poison(target.size))
                event, finish = where.busy_write(source.first, data)
                task = store.dump_data(ids(number), [0] * BLOCKS, source.rows, event)
                store.wait(task)
                finish()
                store.wait(store.load_data(ids(number), [0] * BLOCKS, target.rows))
                assert target.holds(data), f"round {number}, by {method}"
    return f"{rounds} rounds"


def two_processes_on_one_root(where: Place, quick: bool) -> str:
    """Each loads the other's dumps from files, while both dump and load."""
    return two_processes(where, "root")


def two_processes_on_one_memory(where: Place, quick: bool) -> str:
    """Each loads from the memory of the other, which both map."""
    return two_processes(where, "memory")


def two_processes(where: Place, shared: str) -> str:
    """This process and another one, over shared stores."""
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable,
            __file__,
            "--device",
            where.word,
            "--peer",
            root,
            "--shared",
            shared,
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as peer:
            assert peer.stdin is not None and peer.stdout is not None
            with SHARED[shared](where, Path(root)) as store:
                dump(store, where, 1)
                assert peer.stdout.readline() == "dumped\n", "the other process dumped nothing"
                peer.stdin.write("load\n")
                peer.stdin.flush()
                load_and_check(store, where, 2)
                assert peer.stdout.readline() == "loaded\n", (
                    "the other process did not load this one's dumps"
                )
            peer.stdin.write("end\n")
            peer.stdin.flush()
    assert peer.returncode == 0
    return f"{2 * BLOCKS} blocks"


def dump(store: UcmKVStoreBaseV1, where: Place, seed: int) -> None:
    """Dumps the blocks of a process."""
    source = Blocks(where)
    where.write(source.first, random_bytes(seed, source.size))
    store.wait(store.dump_data(ids(seed), [0] * BLOCKS, source.rows))


def load_and_check(store: UcmKVStoreBaseV1, where: Place, seed: int) -> None:
    """Loads the blocks of a process when they are found: memory of others is discovered about once
    a second."""
    until = time.monotonic() + 60
    while not all(store.lookup(ids(seed))):
        assert time.monotonic() < until, "the other process's dumps are not found"
        time.sleep(0.01)
    target = Blocks(where)
    where.write(target.first, poison(target.size))
    store.wait(store.load_data(ids(seed), [0] * BLOCKS, target.rows))
    assert target.holds(random_bytes(seed, target.size))


def be_the_peer(where: Place, root: Path, shared: str) -> None:
    """The other process of :func:`two_processes`."""
    with SHARED[shared](where, root) as store:
        dump(store, where, 2)
        print("dumped", flush=True)
        assert sys.stdin.readline() == "load\n"
        load_and_check(store, where, 1)
        print("loaded", flush=True)
        assert sys.stdin.readline() == "end\n"  # until then this process has its memory


def errors_are_told(where: Place, quick: bool) -> str:
    """A missing device, null addresses, and freed memory."""
    told = []
    if where.platform != "host":
        told.append(refused(lambda: trans.Device(where.platform).setup(4096)))
    device = opened(where)
    stream, buffers, host = device.make_stream(), device.make_buffer(), np.zeros(64, np.uint8)
    told.append(refused(lambda: stream.device_to_host(0, host.ctypes.data, 64)))
    told.append(refused(lambda: stream.device_to_host(where.allocate(64), 0, 64)))
    gone = buffers.make_device_buffer(1 << 20)
    gone.close()
    told.append(refused(lambda: stream.device_to_host(gone, host.ctypes.data, 64)))
    told.append(refused(lambda: buffers.make_device_buffer(1 << 60)))
    assert not host.any()
    if where.refuses_wild_addresses:
        # Last, and in a process of its own: an address of freed memory may end the driver's
        # context.
        command = [sys.executable, __file__, "--device", where.word, "--freed"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"freed memory: {done.returncode} {done.stderr[-2000:]}"
        told.append(done.stdout.strip())
    return f"{len(told)} errors, as {told[-1]}"


def refused(call: Callable[[], object]) -> str:
    """The error of a call that must fail."""
    try:
        call()
    except UcmError as error:
        return str(error)
    raise AssertionError("a call was not refused")


def copy_what_was_freed(where: Place) -> None:
    """Copies from the address of freed memory."""
    device = opened(where)
    gone, host = device.allocate_memory(64 << 20), np.zeros(64, np.uint8)
    address = gone.address
    gone.close()
    print(refused(lambda: device.make_stream().device_to_host(address, host.ctypes.data, 64)))


def a_missing_driver_is_told(where: Place, quick: bool) -> str:
    """Without a visible device the error states it, and the default device is the host."""
    program = (
        "from ucm import trans\n"
        "from ucm.errors import UnsupportedError\n"
        "try: trans.Device('cuda').setup(0)\n"
        "except UnsupportedError as error: print(error)\n"
        "device = trans.Device()\n"
        "device.setup(0)\n"
        "print(device.name)\n"
    )
    environment = {"CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean(environment), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    error, name = done.stdout.splitlines()
    assert name == "host"
    return error


def clean(more: dict[str, str]) -> dict[str, str]:
    """This process's environment, without a platform or a driver of tests."""
    return {key: value for key, value in os.environ.items() if key not in {HOOK, "PLATFORM"}} | more


def callbacks_and_threads(where: Place, quick: bool) -> str:
    """Streams of several threads at once, each with callbacks."""
    device, wrong = opened(where), []

    def work(number: int) -> None:
        try:
            stream, buffers = device.make_stream(METHODS[number]), device.make_buffer()
            page, host = buffers.make_device_buffer(100_000), buffers.make_host_buffer(100_000)
            called: list[bool] = []
            for turn in range(5 if quick else 50):
                bytes_of(host)[:] = (17 * number + turn) % 256
                stream.host_to_device_async(host, page, 100_000)
                stream.append_callback(called.append)
                stream.synchronize(60)
                bytes_of(host)[:] = POISON
                stream.device_to_host(page, host, 100_000)
                assert (bytes_of(host) == (17 * number + turn) % 256).all()
            assert all(called) and len(called) == turn + 1
        except BaseException:
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(METHODS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    return f"{len(threads)} threads"


CHECKS: list[Callable[[Place, bool], str]] = [
    every_copy_shape,
    a_dump_waits_for_its_event,
    two_processes_on_one_root,
    two_processes_on_one_memory,
    callbacks_and_threads,
    errors_are_told,
    a_missing_driver_is_told,
]


def main() -> int:
    """Runs all checks; 0 if none failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=WORDS, default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--peer", metavar="ROOT", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shared", choices=SHARED, default="root", help=argparse.SUPPRESS)
    parser.add_argument("--freed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        where = place(arguments.device)
    except MissingError as missing:
        print(f"skipped, all of it: {missing}")
        return 0
    if arguments.peer is not None:
        be_the_peer(where, arguments.peer, arguments.shared)
        return 0
    if arguments.freed:
        copy_what_was_freed(where)
        return 0
    failed = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            print(f"ok      {name}: {check(where, arguments.quick)}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
