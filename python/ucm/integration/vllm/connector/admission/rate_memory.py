"""Keeps measured speeds across restarts, so that an engine starts with the rates of its last run.

They are written to a small file beside the root's marker, for each identity and machine, and used
until they are measured anew (:meth:`~.compute_rate.ComputeRate.recall`,
:meth:`~.load_rate.LoadRate.recall`). An engine of which nothing is remembered takes the deadlines
of its loads from the best speed of computing that others showed on the machine
(:meth:`~.admission.Admission.borrow`). Background threads read and write the file, so no step waits
for it; where that fails, nothing is remembered.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ucm.integration.vllm.connector.admission.admission import TIERS, Admission
from ucm.integration.vllm.connector.admission.compute_rate import ComputeSpeed
from ucm.integration.vllm.connector.admission.load_rate import LoadSpeed
from ucm.integration.vllm.connector.background import IDLE, Background
from ucm.integration.vllm.connector.guard import harmless, logger
from ucm.integration.vllm.connector.identity.live_identity import lasting
from ucm.integration.vllm.connector.root_file import RootFile

#: The file's name, and how many engines and machines it remembers.
NAME, LIMIT = "ucm-rates.json", 256
#: Seconds until what was learnt is written first, which doubles from time to time up to the second:
#: a process that is killed soon has left something, one that runs long hardly writes.
SOON_S, RARELY_S = 5.0, 640.0
#: The end of an engine waits so long for the last writing, in seconds; on a root that answers it
#: takes milliseconds.
CLOSE_S = 1.0
#: What a processor calls itself, by architecture.
_PROCESSOR = (
    "vendor_id",
    "model name",
    "cpu family",
    "model",
    "CPU implementer",
    "CPU part",
    "cpu",
    "machine",
)

_Rates = TypeVar("_Rates", ComputeSpeed, LoadSpeed)


def machine_name() -> str:
    """The kind of machine this is: processor, number of cores, device.

    Not the host's name: a container that is started again has a new one each time, just when the
    memory is wanted, and what computes as fast may be on any host of a kind. What it does not tell
    apart (a quota of processor time, a neighbour, a slower path to the storage) is learnt anew like
    every change of speed.
    """
    from vllm.platforms import current_platform

    try:
        device = str(current_platform.get_device_name())
    except Exception:  # a platform that cannot say
        device = str(current_platform.device_type)
    return ", ".join([platform.machine(), *_processor(), f"{os.cpu_count()} cores", device])


def _processor() -> list[str]:
    """What the system says of its first processor."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            first = file.read(1 << 16).partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    lines = (line.partition(":") for line in first.splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    return [said[name] for name in _PROCESSOR if said.get(name)]


class Remembered(Protocol):
    """Something else that is measured once on a machine, and kept in the same entry under names of
    its own."""

    def known(self) -> dict[str, Any]:
        """As JSON; nothing while it is not known."""

    def recall(self, entry: Mapping[str, Any]) -> None:
        """Start with what an entry says of it."""


class RateMemory:
    """What one engine's admission knows, carried from process to process."""

    def __init__(
        self,
        root: str | None,
        admission: Admission,
        background: Background,
        machine: Callable[[], str] = machine_name,
        clock: Callable[[], float] = time.monotonic,
        beside: Remembered | None = None,
    ) -> None:
        """``root``: the store's own directory or the state directory, None for nowhere; ``beside``:
        what else was measured."""
        self._beside = beside
        self._file = None if root is None else RootFile(root, NAME, "rates", LIMIT)
        self._admission, self._background, self._machine, self._clock = (
            admission,
            background,
            machine,
            clock,
        )
        self._found: Mapping[str, Mapping[str, Any]] = {}
        self._key = self._store = ""
        self._written: dict[str, Any] = {}
        self._pause = SOON_S
        self.due = float("inf")  # when to look whether there is something to write
        if self._file is not None:
            background.submit(self._read, IDLE)

    @harmless(None)
    def open(self, identity: str, store: str) -> None:
        """The engine's identity is known, and which store it uses: start with what is remembered of
        them, if it was read by now."""
        if self._file is None:
            return
        machine = self._machine()
        self._key = f"{hashlib.sha256(lasting(identity).encode()).hexdigest()[:32]}, {machine}"
        self._store = store
        self.due = self._clock() + self._pause
        entry = self._found.get(self._key)
        self._written = dict(entry or {})
        if entry:
            self._recall(entry)
        self._borrow([e for key, e in self._found.items() if key.partition(", ")[2] == machine])

    @harmless(None)
    def keep(self, now: float) -> None:
        """Write what is known, if it is something else than before; called when :attr:`due`,
        returns at once."""
        self.due = now + self._pause
        self._pause = min(2 * self._pause, RARELY_S)
        self._submit(lambda: None)

    @harmless(None)
    def close(self) -> None:
        """Write what is known, and wait a little for it."""
        self.due = float("inf")
        ended = threading.Event()
        if self._submit(ended.set):
            ended.wait(CLOSE_S)

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _submit(self, ended: Callable[[], None]) -> bool:
        """Have what is new written; false if nothing is. ``ended`` is called behind it, however it
        went."""
        entry = self._entry()
        if not self._key or entry in ({}, self._written):
            return False

        def work() -> None:
            try:
                if self._file is not None and self._file.marked():
                    before = self._file.read().get(self._key, {})
                    self._file.merge({self._key: before | entry})
                    self._written = entry
            except OSError as error:
                logger.debug("measured speeds cannot be remembered: %s", error)
            finally:
                ended()

        return self._background.submit(work, IDLE)

    def _read(self) -> None:
        if self._file is not None:
            self._found = self._file.read()

    def _entry(self) -> dict[str, Any]:
        computing, loading = self._admission.known()
        entry: dict[str, Any] = {} if computing is None else {"computing": _spelled(computing)}
        if loading:
            entry |= {
                "store": self._store,
                "loading": {str(tier): _spelled(known) for tier, known in loading.items()},
            }
        return entry if self._beside is None else entry | self._beside.known()

    def _recall(self, entry: Mapping[str, Any]) -> None:
        computing, loading = self._speeds(entry)
        self._admission.recall(computing, loading)
        if self._beside is not None:
            self._beside.recall(entry)
        if computing is not None or loading:
            logger.info(
                "speeds remembered of this engine on this machine: %s", self._admission.rates()
            )

    def _borrow(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Until this engine has a speed of computing: the best in ``entries``."""
        speeds = [_read_as(ComputeSpeed, entry.get("computing")) for entry in entries]
        plausible = [speed for speed in speeds if speed is not None and speed.plausible()]
        if plausible:
            self._admission.borrow(min(plausible, key=ComputeSpeed.per_token))

    def _speeds(self, entry: Mapping[str, Any]) -> tuple[ComputeSpeed | None, dict[int, LoadSpeed]]:
        """The speeds of computing and of this store's tiers in an entry. A part that makes no sense
        counts as missing."""
        stored = entry.get("loading")
        tiers = stored if isinstance(stored, dict) and entry.get("store") == self._store else {}
        read = {tier: _read_as(LoadSpeed, tiers.get(str(tier))) for tier in range(TIERS)}
        return _read_as(ComputeSpeed, entry.get("computing")), {
            tier: known for tier, known in read.items() if known is not None
        }


def _spelled(rates: ComputeSpeed | LoadSpeed) -> dict[str, float]:
    """As JSON, with digits that mean something: what differs behind them is not worth writing."""
    return {
        name: float(f"{value:.3g}") if isinstance(value, float) else value
        for name, value in rates._asdict().items()
    }


def _read_as(kind: type[_Rates], stored: Any) -> _Rates | None:
    """The rates that were stored, None unless every one of them is a number that may be one."""
    if not isinstance(stored, dict):
        return None
    values: list[Any] = [stored.get(name) for name in kind._fields]
    # NaN is not
    sound = all(isinstance(value, int | float) and 0 <= value < 1 << 53 for value in values)
    return kind(*values) if sound else None
