"""The matrix: every kind of harm, its action, its counted reason, and the expected result.

All rows (``kinds.py`` has the kinds, ``apart.py`` the exclusions) expect: right bytes or none
(through vLLM: right tokens), no failed request, no missed deadline, and a healthy cache afterwards;
the table has further expectations.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Literal

import harm
import harm_segments as segments
import hosts
import power
import processes
import roots
from kinds import LONG, EngineRow, FileRow, FuseRow, ProcessRow, RootRow, Through


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


HEADER = ("bad_header",)
CHECKSUM = ("bad_checksum",)
SHORT = ("truncated", "wrong_length")

_FLIPS = [
    FileRow("flip: magic", "one bit of the first bytes", ("not_a_record",), harm.flip(0)),
    FileRow("flip: version", "one bit of the version", HEADER, harm.flip(4), engine="long"),
    FileRow("flip: id", "one bit of the record id", HEADER, harm.flip(15), engine="long"),
    FileRow("flip: mark", "one bit of the mark", HEADER, harm.flip(36), engine="long"),
    FileRow(
        "flip: record length",
        "one bit of the record's length",
        HEADER,
        harm.flip(45),
        engine="long",
    ),
    FileRow(
        "flip: preamble checksum",
        "one bit of the first checksum",
        HEADER,
        harm.flip(61),
        engine="long",
    ),
    FileRow("flip: flags", "one bit of the flags", HEADER, harm.flip(64), engine="long"),
    FileRow("flip: identity", "one bit of the identity's digest", HEADER, harm.flip(100)),
    FileRow("flip: part", "one bit of the part", HEADER, harm.flip(128), engine="long"),
    FileRow(
        "flip: table, first shard",
        "one bit of the first offset",
        HEADER,
        harm.flip(576),
        engine="long",
    ),
    FileRow(
        "flip: table, last shard",
        "one bit of the last checksum in the table",
        HEADER,
        harm.flip(lambda header: 576 + 24 * (len(header.table) - 1) + 16),
        engine="long",
    ),
    FileRow(
        "flip: header padding", "one bit behind the table", HEADER, harm.flip(2048), engine="long"
    ),
    FileRow(
        "flip: header checksum",
        "one bit of the header's checksum",
        HEADER,
        harm.flip(lambda h: h.header_len - 2),
    ),
    FileRow(
        "flip: first shard",
        "one bit of the first byte",
        CHECKSUM,
        harm.flip(lambda h: h.table[0].offset),
    ),
    FileRow(
        "flip: middle shard",
        "one bit in the middle",
        CHECKSUM,
        harm.flip(lambda h: h.table[len(h.table) // 2].offset + h.table[0].length // 2),
        engine="long",
    ),
    FileRow(
        "flip: last shard",
        "one bit of the last byte",
        CHECKSUM,
        harm.flip(lambda h: h.table[-1].offset + h.table[-1].length - 1),
    ),
    FileRow(
        "flip: padding",
        "one bit of the last byte of the file",
        CHECKSUM,
        harm.flip(lambda h: h.kv_len - 1),
    ),
    *(
        FileRow(
            f"flip: anywhere #{seed}",
            "one bit behind the magic",
            HEADER + CHECKSUM,
            harm.flip_anywhere,
            engine="short" if seed == 0 else "long" if seed % 4 == 0 else "no",
        )
        for seed in range(100 if LONG else 3)
    ),
]

_BURSTS = [
    FileRow("noise: header", "512 bytes", HEADER, harm.noise(128, 512), engine="long"),
    FileRow("noise: payload", "512 bytes", CHECKSUM, harm.noise(lambda h: h.header_len + 700, 512)),
    FileRow("noise: everything", "every byte", ("not_a_record",), harm.noise(0, 1 << 30)),
    FileRow(
        "zeroed: everything", "every byte", ("not_a_record",), harm.zero(0, lambda h: h.record_len)
    ),
    FileRow(
        "zeroed: header", "the first page", ("not_a_record",), harm.zero(0, 4096), engine="long"
    ),
    FileRow("zeroed: page", "one page of the payload", CHECKSUM, harm.zero(8192, 12288)),
    FileRow(
        "zeroed: payload",
        "all of it",
        CHECKSUM,
        harm.zero(lambda h: h.header_len, lambda h: h.record_len),
        engine="long",
    ),
]


def _length(
    name: str, what: str, reasons: tuple[str, ...], how: harm.Harm, engine: Through = "long"
) -> FileRow:
    return FileRow(name, what, reasons, how, engine=engine, behind=name.startswith("longer"))


_LENGTHS = [
    _length("truncated: 0", "0 bytes are left", SHORT, harm.truncate(0), "short"),
    *(
        _length(f"truncated: {n}", f"{n} bytes are left", SHORT, harm.truncate(n))
        for n in (1, 63, 64, 4095, 4096)
    ),
    _length(
        "truncated: header only",
        "the payload is missing",
        SHORT,
        harm.truncate(lambda h: h.header_len),
    ),
    _length(
        "truncated: middle",
        "half of it",
        SHORT,
        harm.truncate(lambda h: h.record_len // 2),
        "short",
    ),
    _length(
        "truncated: last byte",
        "all but one byte",
        SHORT,
        harm.truncate(lambda h: h.record_len - 1),
        "short",
    ),
    *(
        _length(
            f"truncated: anywhere #{n}",
            "a part of it is left",
            SHORT,
            harm.truncate_share(n / 97),
            "no" if n % 4 else "long",
        )
        for n in (range(1, 97) if LONG else ())
    ),
    _length(
        "longer: a byte", "one byte behind the record", ("wrong_length",), harm.lengthen(1), "short"
    ),
    _length(
        "longer: a page", "4096 bytes behind the record", ("wrong_length",), harm.lengthen(4096)
    ),
]

_OTHERS = [
    FileRow(
        "swapped",
        "two blocks' files under each other's names",
        ("foreign_id",),
        harm.swap,
        both=True,
    ),
    FileRow("copy of another block", "under this block's name", ("foreign_id",), harm.copy_other),
    FileRow(
        "another identity",
        "another model's record",
        ("foreign_identity",),
        harm.forge((88, b"another model")),
        any_file=False,
    ),
    FileRow(
        "another part",
        "another rank's record of the block",
        ("foreign_part",),
        harm.forge_part,
        any_file=False,
    ),
    FileRow(
        "another shape",
        "a record of other sizes",
        ("foreign_shape",),
        harm.forge((28, _u32(999))),
        any_file=False,
    ),
    FileRow(
        "newer version",
        "version 2",
        ("newer_version",),
        harm.forge((4, _u32(2))),
        heals="left",
        any_file=False,
    ),
    FileRow(
        "newer version, longer",
        "version 2, a page more",
        ("newer_version", "wrong_length"),
        harm.newer_and_longer,
        heals="left",
        any_file=False,
        engine="long",
    ),
    FileRow(
        "newer flag",
        "an unknown flag",
        ("newer_version",),
        harm.forge((64, _u32(8))),
        heals="left",
        engine="long",
        any_file=False,
    ),
    FileRow(
        "newer codec",
        "an unknown codec",
        ("newer_version",),
        harm.forge((136, _u32(3))),
        heals="left",
        engine="long",
        any_file=False,
    ),
    FileRow("a stranger's file", "of this length, renamed", ("not_a_record",), harm.stranger),
    FileRow(
        "seed form", "the original's own block file", ("seed_form",), harm.seed_form, any_file=False
    ),
    FileRow("removed", "the file is missing", ("absent",), harm.remove, judged=False),
    FileRow(
        "directory",
        "under the block's name",
        ("absent", "io_error"),
        harm.directory,
        heals="left",
        judged=False,
    ),
    FileRow(
        "link to another block",
        "under the block's name",
        ("absent", "io_error"),
        harm.symlink_to_other,
        judged=False,
        engine="long",
        moved=True,
    ),
    FileRow(
        "link to nothing",
        "under the block's name",
        ("absent", "io_error"),
        harm.symlink_to_nothing,
        judged=False,
        engine="long",
    ),
    FileRow(
        "pipe", "under the block's name", ("wrong_length", "io_error"), harm.fifo, judged=False
    ),
]


def _segment(
    name: str, what: str, how: harm.Harm, *reasons: str, harmless: bool = False, moved: bool = False
) -> FileRow:
    reasons = reasons or ("absent",)
    return FileRow(
        name,
        what,
        () if harmless else reasons,
        how,
        judged=False,
        engine="no",
        any_file=False,
        of_segments=True,
        harmless=harmless,
        moved=moved,
    )


_SEGMENTS = [
    _segment(
        "footer: trailer", "one bit of the segment's trailer", segments.edit(segments.flip_trailer)
    ),
    _segment("footer: entry", "one bit of an entry", segments.edit(segments.flip_entry)),
    _segment("footer: zeroed", "zeros", segments.edit(segments.zeroed_footer)),
    _segment("footer: cut off", "the records are left", segments.edit(segments.no_footer)),
    _segment("footer: newer version", "version 2", segments.forge(segments.newer_version)),
    _segment(
        "footer: another identity", "another model's", segments.forge(segments.another_identity)
    ),
    _segment(
        "footer: another id", "an entry names another block", segments.forge(segments.another_id)
    ),
    _segment(
        "footer: another place",
        "an entry that is a page off",
        segments.forge(segments.other_place),
        "wrong_length",
        "not_a_record",
    ),
    _segment(
        "footer: shorter",
        "an entry that is a page short",
        segments.forge(segments.shorter),
        "wrong_length",
        "truncated",
    ),
    _segment("segment renamed", "to another writer's name", segments.renamed, moved=True),
    _segment("segment twice", "under another writer's name too", segments.doubled, harmless=True),
    _segment(
        "head: flip",
        "one bit of the segment's head",
        segments.edit(segments.flip_head),
        harmless=True,
    ),
]


def _codec(name: str, what: str, how: harm.Harm, *reasons: str) -> FileRow:
    return FileRow(
        f"codec: {name}", what, reasons, how, engine="no", any_file=False, of_codecs=True
    )


_CODECS = [
    _codec(
        "none",
        "compressed, and marked as uncompressed",
        harm.forge((136, _u32(0))),
        "foreign_shape",
    ),
    _codec("another width", "elements of one byte", harm.forge((136, _u32(0x101))), *CHECKSUM),
    _codec(
        "raw checksum",
        "right as stored, wrong as decoded",
        harm.forge((576 + 20, _u32(7))),
        *CHECKSUM,
    ),
    _codec("frame", "noise under a correct checksum", harm.forge_frame, *CHECKSUM),
]

FILE_ROWS = [*_FLIPS, *_BURSTS, *_LENGTHS, *_OTHERS, *_SEGMENTS, *_CODECS]

FAILED = ("publishes_failed",)

ROOT_ROWS = [
    RootRow("root read-only", "remounted", FAILED, roots.read_only, kind="tmpfs", reads=True),
    RootRow(
        "root moved away",
        "and back",
        ("absent",),
        roots.moved_away,
        dumps="untried",
        engine="no",
        whole=True,
    ),
    RootRow(
        "root removed",
        "with all in it",
        ("absent",),
        roots.removed,
        lost=True,
        dumps="made",
        engine="no",
    ),
    RootRow("root emptied", "only the marker comes back", ("absent",), roots.emptied, lost=True),
    RootRow(
        "namespace removed",
        "with all in it",
        ("absent",),
        roots.no_namespace,
        lost=True,
        dumps="made",
    ),
    RootRow(
        "no temporary directory",
        "removed",
        (),
        roots.no_temporary_directory,
        reads=True,
        dumps="made",
    ),
    RootRow("marker removed", "and put back", FAILED, roots.no_marker, reads=True),
    RootRow(
        "unmounted",
        "umount -l, later mounted again",
        ("absent",),
        roots.unmounted,
        kind="bind",
        whole=True,
    ),
    RootRow(
        "covered",
        "another file system mounted over it",
        ("absent",),
        roots.covered,
        kind="bind",
        whole=True,
    ),
    RootRow(
        "full",
        "no space on a file system of 8 MiB",
        FAILED,
        roots.full,
        kind="tmpfs",
        reads=True,
        lost=True,
    ),
    RootRow(
        "no inodes",
        "on a file system with 400",
        FAILED,
        roots.no_inodes,
        kind="tmpfs",
        reads=True,
        lost=True,
    ),
    RootRow(
        "wrong owner",
        "of the root",
        ("io_error",),
        roots.other_owner,
        kind="tmpfs",
        whole=True,
        nobody=True,
        engine="no",
    ),
    RootRow(
        "no permission",
        "mode 0 on the blocks",
        ("io_error",),
        roots.no_permission,
        kind="tmpfs",
        whole=True,
        nobody=True,
        engine="no",
    ),
]


def _stall(what: str, call: Literal["lookup", "load", "dump"], *requests: str) -> FuseRow:
    reason = {"lookup": "lookup_late", "load": "timeout", "dump": "publishes_failed"}[call]
    return FuseRow(
        f"stalled: {what}",
        "no answer for a while",
        (reason,),
        {"stall": requests},
        call,
        waits=True,
        engine="short" if what in ("lookup", "read") else "long",
    )


def _error(
    what: str, call: Literal["lookup", "load", "dump"], code: int, *requests: str
) -> FuseRow:
    reason = "publishes_failed" if call == "dump" else "io_error"
    name = errno.errorcode[code]
    return FuseRow(
        f"{name}: {what}",
        os.strerror(code),
        (reason,),
        {"error": dict.fromkeys(requests, code)},
        call,
        engine="short" if what in ("read", "write") and code == errno.EIO else "long",
    )


FUSE_ROWS = [
    _stall("lookup", "lookup", "LOOKUP"),
    _stall("open", "load", "OPEN"),
    _stall("read", "load", "READ"),
    _stall("create", "dump", "CREATE"),
    _stall("write", "dump", "WRITE"),
    _stall("close", "dump", "FLUSH"),
    _stall("rename", "dump", "RENAME", "RENAME2"),
    FuseRow(
        "slow: read",
        "answers after the deadline",
        ("timeout",),
        {"slow": {"READ": 2.0}},
        "load",
        waits=True,
    ),
    _error("lookup", "lookup", errno.EIO, "LOOKUP"),
    _error("open", "load", errno.EIO, "OPEN"),
    _error("read", "load", errno.EIO, "READ"),
    _error("create", "dump", errno.EIO, "CREATE"),
    _error("write", "dump", errno.EIO, "WRITE"),
    _error("write", "dump", errno.EDQUOT, "WRITE"),
    _error("close", "dump", errno.EIO, "FLUSH"),
    _error("rename", "dump", errno.EIO, "RENAME", "RENAME2"),
    FuseRow(
        "lie: read",
        "other bytes than there are",
        ("not_a_record",),
        {"lie": ["READ"]},
        "load",
        engine="short",
    ),
    FuseRow(
        "lie: write",
        "zeros are stored",
        ("not_a_record",),
        {"lie": ["WRITE"]},
        "dump",
        believed=True,
        engine="long",
    ),
    FuseRow(
        "disk stalled: read",
        "no answer for a while",
        ("timeout",),
        {"stall": ["READ"]},
        "load",
        waits=True,
        disk=True,
    ),
    FuseRow(
        "disk stalled: write",
        "no answer for a while",
        ("publishes_failed",),
        {"stall": ["WRITE"]},
        "dump",
        waits=True,
        disk=True,
    ),
    FuseRow(
        "disk EIO: read",
        os.strerror(errno.EIO),
        ("io_error",),
        {"error": {"READ": errno.EIO}},
        "load",
        disk=True,
    ),
]

PROCESS_ROWS = [
    ProcessRow(
        "kill -9 of a writer", "after random numbers of blocks", (), processes.killed_writers
    ),
    ProcessRow(
        "kill -9 in a call",
        "create, write, close, rename",
        (),
        processes.killed_in_calls,
        needs_root=True,
    ),
    ProcessRow("kill -9 of all kinds", "writers, readers, removers", (), hosts.random_kills),
    ProcessRow(
        "power cut",
        "images of ext4 copied under load",
        ("truncated",),
        power.power_cuts,
        needs_root=True,
    ),
    ProcessRow("two hosts", "mount namespaces, other clocks", (), hosts.two_hosts, needs_root=True),
    ProcessRow("two collectors", "one stops and goes on", (), hosts.two_collectors),
    ProcessRow("quota", "one model writes three times its own", (), hosts.quota),
    ProcessRow(
        "two writers", "the same ids, while files are removed", ("absent",), processes.two_writers
    ),
    ProcessRow("clock jumps", "times of files in 1971 and 2100", (), processes.clock_jumps),
    ProcessRow("no descriptors", "RLIMIT_NOFILE reached", ("io_error",), processes.no_descriptors),
    ProcessRow("no memory", "RLIMIT_AS reached", (), processes.no_memory),
    ProcessRow(
        "dead root", "no response from start to end", (), processes.dead_root, needs_root=True
    ),
    ProcessRow(
        "much damage", "more than the breaker tolerates", ("bad_checksum",), processes.much_damage
    ),
    ProcessRow(
        "root missing", "a file where its parent should be", ("unhealthy",), processes.missing_root
    ),
    ProcessRow(
        "record of another owner",
        "mode 0600",
        ("io_error",),
        processes.owned_by_another,
        needs_root=True,
    ),
]

KILLED = EngineRow("kill -9 of an engine", "all its processes, while blocks are being stored", ())
WEIGHTS = EngineRow("weights replaced", "by another checkpoint's, by unknown ones, and back", ())
SLEEP = EngineRow("sleep and wake", "level 1 and 2", ())
BESIDE = EngineRow("beside another connector", "whose loads end too early, or fail in a step", ())
MEDIA = EngineRow("media renamed", "another picture under the client's name of the first", ())
ENGINE_ROWS = [KILLED, WEIGHTS, SLEEP, BESIDE, MEDIA]
