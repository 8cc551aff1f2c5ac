"""Decides which part of a hit is loaded: only what is quicker than computing, as far as both speeds
are known.

A hit lies in one tier of the store or in several. It can be loaded whole, or cut before the first
block that lies in a lower tier. A cut pays when ``sum over its tiers of (queue wait + fixed + bytes
/ rate)``, plus the cost of the loads that were recently given up, is within a share of the time to
compute its tokens. Of the cuts that pay, the one that saves most is loaded. An unknown tier is
assumed to cost nothing, so it is loaded from and measured. Within one tier both sides grow with the
length, so no shorter cut would pay better, and short hits are declined by the same rule.

While the speed of computing is not known, a hit is loaded unless loads from its tiers were slower
than any computing can plausibly be (:meth:`~.rates.ComputeRate.at_most`): an engine that has just
started over a full store should use it.

A declined hit measures nothing, so one is loaded from time to time. The time this may cost is kept
in ledgers, one for each tier, in seconds: a tier earns :data:`LEARNING` of the compute time of each
hit in it and the savings of its loads, and pays for loads that took longer than computing. A hit is
tried only when the ledger covers its expected loss, so in the long run the cache costs no more than
that share, at any speed.

The time of a load is attributed to the slowest of its tiers, less the expected time of the others.

:class:`RateMemory` keeps the measured speeds across restarts, in a small file beside the root's
marker, for each identity and machine. They are used until they are measured again. An engine
without an entry takes the deadlines of its loads from the best speed of computing of others on the
machine (:meth:`Admission.borrow`). Background threads read and write the file, so no step waits for
it; where that fails, nothing is remembered.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeVar

from ucm.integration.vllm.connector.admission.rates import (
    ComputeRate,
    ComputeSpeed,
    LoadRate,
    LoadSpeed,
)
from ucm.integration.vllm.connector.guard import IDLE, Background, harmless, logger
from ucm.integration.vllm.connector.identity.engine_identity import lasting
from ucm.integration.vllm.connector.stores import RootFile

# Decisions
# --------------------------------------------------------------------------------------------------

#: Part of the time that computing the hits takes which may be spent on learning.
LEARNING = 0.01
#: First value of a ledger, in seconds.
FIRST_S = 0.5
#: Hits of a tier without a load of it that ended, before one is loaded to learn.
UNLEARNT = 8
#: A ledger is kept within this many times the allowance of the load at hand.
LEDGER = 4.0
#: A load is behind when it has taken this many times the expected time, counted from the end of the
#: step by which it had begun for certain: the first that ends may have been planned before it.
BEHIND, BEGUN = 2.0, 2
#: Seconds that a load may take while no speed of computing is known on this machine. A plain
#: store's loads have ``deadlines.load_unknown_s``.
UNKNOWN_LOAD_S = 1.0
#: Tiers that are distinguished; those further down are one.
TIERS = 8


class Verdict(Enum):
    """The decision about a hit."""

    LOAD = "load"
    LEARN = "learn"  # would be declined, and is loaded to measure the rates
    DECLINE = "decline"


@dataclass(frozen=True, slots=True)
class Cut:
    """A hit, or the beginning of one: its tokens, and its bytes by the number of their tier."""

    tokens: int
    sizes: Mapping[int, int]


@dataclass(slots=True)
class _Tier:
    rate: LoadRate = field(default_factory=LoadRate)
    waiting: int = 0  # bytes of loads under way
    moved: int = 0  # bytes of loads ended
    ended: float = float("-inf")  # when its last load did
    unlearnt: int = 0  # hits since the last load that ended
    ledger: float = FIRST_S  # seconds


@dataclass(slots=True)
class _Load:
    sizes: Mapping[int, int]  # bytes by tier, as planned
    tokens: int
    slowest: int  # the tier that is expected to take most of its time
    compute: float | None  # seconds that computing its tokens would have taken
    allowance: float | None  # seconds it may take
    expected: float | None  # seconds
    learns: bool
    began: float
    moved: Mapping[int, int]  # bytes of each tier's loads ended before it began
    steps: int = 0  # ended since then
    begun: float = 0.0  # when it had begun for certain
    failed: bool = False
    late: bool = False
    served: tuple[int, ...] = ()  # blocks by tier, of the rank with most from furthest down


class Admission:
    """One engine's decisions about hits, and the state of its loads."""

    def __init__(
        self,
        mode: str,
        share: float,
        compute_rate: ComputeRate,
        clock: Callable[[], float] = time.monotonic,
        unknown_load_s: float = UNKNOWN_LOAD_S,
    ) -> None:
        """``mode``: measured, always or never; ``share`` of the time to compute that a load may
        take; ``unknown_load_s``: seconds of a load while the speed of computing is unknown."""
        self._mode, self._share, self.compute_rate, self._clock = mode, share, compute_rate, clock
        self._unknown_load_s = unknown_load_s
        self._tiers: dict[int, _Tier] = {}
        self._newest: _Tier | None = None
        self._loads: dict[str, _Load] = {}
        self._seen = float("-inf")  # when the workers' reports were last processed
        self.learning_loads = 0

    @property
    def measures(self) -> bool:
        """Whether hits are judged by measured speeds."""
        return self._mode == "measured"

    # Judging
    # ----------------------------------------------------------------------------------------------

    def worth_waiting(self, tokens: int, rest: int) -> bool:
        """Whether a request should wait for the store's answer while others compute: not where
        computing all ``tokens`` that it could load (``rest`` more are computed anyway) takes less
        than the step that it loses by waiting, and the one that a load takes at least."""
        if self._mode != "measured":
            return self._mode == "always"
        compute = self.compute_rate.seconds(tokens, rest)
        step = self.compute_rate.step_under_way(self._clock())
        return compute is None or self._share * compute >= 2 * step

    def decide(
        self, cuts: Sequence[Cut], rest: int, *, again: bool = False
    ) -> tuple[Cut | None, Verdict]:
        """Which of these cuts to load, the whole hit being the last, for a request that computes
        ``rest`` tokens more than all of it; None: nothing. Each hit adds to a ledger once:
        ``again`` for one that was judged before."""
        whole = cuts[-1]
        if self._mode != "measured":
            return (whole, Verdict.LOAD) if self._mode == "always" else (None, Verdict.DECLINE)
        now, total = self._clock(), whole.tokens + rest
        compute = self.compute_rate.seconds(whole.tokens, rest)
        allowance = self.compute_rate.allowance(whole.tokens, rest)
        if compute is None or allowance is None:
            usable = [cut for cut in cuts if not self._cannot_pay(cut, now)]
            return (usable[-1], Verdict.LOAD) if usable else (None, Verdict.DECLINE)
        last = self._tier(max(whole.sizes, default=0))
        if not again:
            last.unlearnt += 1
            self._book(last, LEARNING * (self.compute_rate.seconds(total, 0) or 0.0), allowance)
        best, most, saved = None, 0.0, 0.0
        for cut in cuts:
            gain, saves = self._gain(cut, total - cut.tokens, now)
            if gain >= most:
                best, most, saved = cut, gain, saves
        if best is whole:
            return whole, Verdict.LOAD
        declined = best, Verdict.DECLINE if best is None else Verdict.LOAD
        if last.waiting or last.ledger < 0:
            return declined
        step = self.compute_rate.step_under_way(now)
        at_best = self._at_best(whole)
        if self._share * compute - max(at_best + step / 2, step) >= most:
            return whole, Verdict.LEARN
        load = self._seconds(whole, now)
        loss = saved + (max(load - compute, -saved) if load <= allowance else allowance)
        learns = last.unlearnt >= UNLEARNT and loss <= last.ledger
        return (whole, Verdict.LEARN) if learns else declined

    def _gain(self, cut: Cut, rest: int, now: float) -> tuple[float, float]:
        """How far a cut is within the share of computing it, and what it saves, in seconds. Unknown
        tiers are assumed to cost nothing."""
        compute = self.compute_rate.seconds(cut.tokens, rest) or 0.0
        if not self._known(cut) and not self._behind(cut, now):
            return self._share * compute, compute
        load = self._seconds(cut, now)
        allowed = self.compute_rate.allowance(cut.tokens, rest) or 0.0
        late = allowed + compute  # a load given up, with computing after it
        given_up = max(self._tier(tier).rate.given_up for tier in cut.sizes)
        return self._share * compute - load - given_up * max(late - load, 0.0), compute - load

    def _known(self, cut: Cut) -> bool:
        return any(self._tier(tier).rate.seconds(0) is not None for tier in cut.sizes)

    def _seconds(self, cut: Cut, now: float) -> float:
        """Expected seconds of loading a cut until vLLM sees it."""
        load, step = 0.0, self.compute_rate.step_under_way(now)
        for number, size in cut.sizes.items():
            tier = self._tier(number)
            load += tier.rate.seconds(tier.waiting + size) or 0.0
        return max(max(load, self._behind(cut, now)) + step / 2, step)

    def _cannot_pay(self, cut: Cut, now: float) -> bool:
        """Whether loads from a cut's tiers were slower than computing can plausibly be, or the
        oldest under way is by now, since it was first in line."""
        if self._at_best(cut) > self.compute_rate.at_most(cut.tokens):
            return True
        if not (loads := self._begun(cut)):
            return False
        oldest = min(loads, key=lambda load: load.begun)
        first = max(oldest.begun, self._tier(oldest.slowest).ended)
        return now - first > self.compute_rate.at_most(oldest.tokens)

    def _tier(self, number: int) -> _Tier:
        return self._tiers.setdefault(min(number, TIERS - 1), _Tier())

    def _at_best(self, cut: Cut) -> float:
        return sum(self._tier(tier).rate.at_best(size) for tier, size in cut.sizes.items())

    def _begun(self, cut: Cut) -> list[_Load]:
        """Loads under way from a cut's tiers that have begun for certain."""
        loads = self._loads.values()
        return [load for load in loads if load.slowest in cut.sizes and load.steps > BEGUN]

    def _behind(self, cut: Cut, now: float) -> float:
        """Seconds of the oldest load from a cut's tiers that is behind; 0: none is."""
        taken = [(now - load.begun, load.expected or 0.0) for load in self._begun(cut)]
        return max((took for took, expected in taken if took > BEHIND * expected), default=0.0)

    # Loads
    # ----------------------------------------------------------------------------------------------

    def began(self, request: str, cut: Cut, rest: int, *, learns: bool = False) -> float:
        """A load was planned for a request that computes ``rest`` tokens besides; returns the
        seconds it may take."""
        self.forget(request)  # never two of one request
        known = {number: self._tier(number) for number in cut.sizes}
        ahead = {number: tier.waiting + cut.sizes[number] for number, tier in known.items()}
        found = [tier.rate.seconds(ahead[number]) for number, tier in known.items()]
        some = any(seconds is not None for seconds in found)
        expected = sum(seconds or 0.0 for seconds in found) if some else None
        self._loads[request] = _Load(
            dict(cut.sizes),
            cut.tokens,
            self._slowest(ahead),
            self.compute_rate.seconds(cut.tokens, rest),
            self.compute_rate.allowance(cut.tokens, rest),
            expected,
            learns,
            self._clock(),
            {number: tier.moved for number, tier in known.items()},
        )
        for number, tier in known.items():
            tier.waiting += cut.sizes[number]
        self.learning_loads += learns
        allowance = self._loads[request].allowance
        return self._first_load_s(cut.tokens, rest) if allowance is None else allowance

    def _first_load_s(self, tokens: int, rest: int) -> float:
        """Seconds of a load before this engine has computed a prompt."""
        borrowed = self.compute_rate.borrowed_allowance(tokens, rest)
        return self._unknown_load_s if borrowed is None else borrowed

    def _slowest(self, sizes: Mapping[int, int]) -> int:
        """The tier that takes most of the time for these bytes; an unknown one, if there is any."""

        def takes(number: int) -> tuple[float, int]:
            seconds = self._tier(number).rate.seconds(sizes[number])
            return float("inf") if seconds is None else seconds, number

        return max(sizes, key=takes, default=0)

    def forget(self, request: str) -> None:
        """A load without further reports."""
        if load := self._loads.pop(request, None):
            self._left(load)

    def _left(self, load: _Load) -> None:
        for number, size in load.sizes.items():
            self._tier(number).waiting -= size

    def oldest_first(self, requests: Iterable[str]) -> list[str]:
        """Requests whose loads ended, in the order in which these began."""
        loads, far = self._loads, float("inf")
        return sorted(requests, key=lambda name: (getattr(loads.get(name), "began", far), name))

    def failed(self, request: str, late: bool) -> None:
        """A rank reported that its part of a load failed; ``late``: given up for its time."""
        if load := self._loads.get(request):
            load.failed, load.late = True, load.late or late

    def served(self, request: str, blocks: tuple[int, ...]) -> None:
        """A rank reported how many blocks of a load each tier had."""
        if (load := self._loads.get(request)) and sum(blocks) and blocks[::-1] > load.served[::-1]:
            load.served = blocks

    def ended(self, request: str) -> None:
        """Every rank has reported a load, the slowest last. A failed one says something about the
        speed only if it was given up."""
        load = self._loads.pop(request, None)
        if load is None:
            return
        now, late = self._clock(), load.late
        self._left(load)
        for number in load.sizes:
            self._tier(number).ended = now
        if load.failed and not late:
            return
        high = max(now - load.began, 0.0)
        low = min(max(self._seen - load.began, 0.0), high)
        moved = self._moved(load)
        number = load.slowest if late else self._slowest(moved)
        rest = [(each, size) for each, size in moved.items() if each != number]
        others = sum(self._tier(each).rate.seconds(size) or 0.0 for each, size in rest)
        tier = self._newest = self._tier(number)
        tier.unlearnt = 0
        times = (high, float("inf") + others) if late else (low, high)
        bounds = [max(seconds - others, 0.0) for seconds in times]
        tier.rate.add_sample(moved[number], *bounds, late=late, accept_outlier=load.learns)
        if load.compute is not None and load.allowance is not None:
            self._book(tier, -high if late else load.compute - (low + high) / 2, load.allowance)

    def _moved(self, load: _Load) -> dict[int, int]:
        """Bytes that its tiers had to move from the beginning of a load to its end, by the reports
        of its ranks; the progress of a load that was given up is not known."""
        sizes = load.sizes
        if load.served and not load.late:
            block = sum(sizes.values()) / sum(load.served)
            counts = enumerate(load.served)
            sizes = {number: round(blocks * block) for number, blocks in counts if blocks}
        moved = {}
        for number, size in sizes.items():
            tier = self._tier(number)
            moved[number] = size + tier.moved - load.moved.get(number, tier.moved)
            tier.moved += 0 if load.late else size
        return moved

    def step_ended(self) -> None:
        """A step has ended and its reports were processed."""
        self._seen = now = self._clock()
        self.compute_rate.ended(now)
        for load in self._loads.values():
            load.steps += 1
            if load.steps == BEGUN:
                load.begun = now

    @staticmethod
    def _book(tier: _Tier, seconds: float, allowance: float) -> None:
        tier.ledger = min(max(tier.ledger + seconds, -LEDGER * allowance), LEDGER * allowance)

    # What is remembered
    # -------------------------------------------------------------------------------------

    def known(self) -> tuple[ComputeSpeed | None, dict[int, LoadSpeed]]:
        """The speeds for another process of this engine: of computing, and of each tier known."""
        rates = {number: tier.rate.known() for number, tier in sorted(self._tiers.items())}
        loading = {number: known for number, known in rates.items() if known is not None}
        return self.compute_rate.known(), loading

    def recall(self, computing: ComputeSpeed | None, loading: Mapping[int, LoadSpeed]) -> None:
        """Start with the speeds of an earlier process, where nothing was measured yet."""
        if computing is not None:
            self.compute_rate.recall(computing)
        for number, known in loading.items():
            self._tier(number).rate.recall(known)

    def borrow(self, computing: ComputeSpeed) -> None:
        """Take the deadlines of loads from another engine's speed on this machine, until this
        engine has one. Load speeds are never taken from others: they would decline hits."""
        self.compute_rate.borrow(computing)

    # What is reported
    # -------------------------------------------------------------------------------------------

    def rates(self) -> dict[str, float]:
        """The known speeds, by name and unit; those of loads are of the tier that was loaded from
        last."""
        found = {"prefill_tokens_per_second": self.compute_rate.tokens_per_second}
        if self._newest is not None:
            rate = self._newest.rate
            found |= {
                "load_bytes_per_second": rate.bytes_per_second,
                "load_fixed_seconds": rate.fixed,
            }
        return {name: value for name, value in found.items() if value is not None}


# Memory of the speeds
# --------------------------------------------------------------------------------------------------

#: The file's name, and most entries of it.
MEMORY_NAME, MEMORY_LIMIT = "ucm-rates.json", 256
#: Seconds until the first write, which double up to the second: a process that is killed soon has
#: left something, one that runs long rarely writes.
SOON_S, RARELY_S = 5.0, 640.0
#: Seconds that the end of an engine waits for the last write.
CLOSE_S = 1.0
#: Names of a processor, by architecture.
_PROCESSOR = (
    *("vendor_id", "model name", "cpu family", "model"),
    *("CPU implementer", "CPU part", "cpu", "machine"),
)

_Rates = TypeVar("_Rates", ComputeSpeed, LoadSpeed)


def machine_name() -> str:
    """The kind of this machine: processor, number of cores, device. Not the host's name: a
    restarted container has a new one each time, and hosts of a kind are as fast. Other differences
    (a quota of processor time, a neighbour, a slower path to the storage) are measured like every
    change of speed."""
    from vllm.platforms import current_platform

    try:
        device = str(current_platform.get_device_name())
    except Exception:  # a platform that cannot say
        device = str(current_platform.device_type)
    return ", ".join([platform.machine(), *_processor(), f"{os.cpu_count()} cores", device])


def _processor() -> list[str]:
    """The fields of the system's first processor."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            first = file.read(1 << 16).partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    lines = (line.partition(":") for line in first.splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    return [found[name] for name in _PROCESSOR if found.get(name)]


class Remembered(Protocol):
    """Another measurement that is kept in the same entry under names of its own."""

    def known(self) -> dict[str, Any]:
        """As JSON; empty while it is not known."""

    def recall(self, entry: Mapping[str, Any]) -> None:
        """Start with the values of an entry."""


class RateMemory:
    """The speeds of one engine, carried from process to process."""

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
        another measurement."""
        self._beside = beside
        self._file = None if root is None else RootFile(root, MEMORY_NAME, "rates", MEMORY_LIMIT)
        self._admission, self._background = admission, background
        self._machine, self._clock = machine, clock
        self._found: Mapping[str, Mapping[str, Any]] = {}
        self._key = self._store = ""
        self._written: dict[str, Any] = {}
        self._pause = SOON_S
        self.due = float("inf")  # when to check for something to write
        if self._file is not None:
            background.submit(self._read, IDLE)

    @harmless(None)
    def open(self, identity: str, store: str) -> None:
        """The engine's identity and its store are known: start with their entry, if it was read by
        now."""
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
        """Write the speeds, if they have changed; called when :attr:`due`, returns at once."""
        self.due = now + self._pause
        self._pause = min(2 * self._pause, RARELY_S)
        self._submit(lambda: None)

    @harmless(None)
    def close(self) -> None:
        """Write the speeds, and wait a little for it."""
        self.due = float("inf")
        ended = threading.Event()
        if self._submit(ended.set):
            ended.wait(CLOSE_S)

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _submit(self, ended: Callable[[], None]) -> bool:
        """Have changed speeds written; False without any. ``ended`` is called afterwards in any
        case."""
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
            spelled = {str(tier): _spelled(known) for tier, known in loading.items()}
            entry |= {"store": self._store, "loading": spelled}
        return entry if self._beside is None else entry | self._beside.known()

    def _recall(self, entry: Mapping[str, Any]) -> None:
        computing, loading = self._speeds(entry)
        self._admission.recall(computing, loading)
        if self._beside is not None:
            self._beside.recall(entry)
        if computing is not None or loading:
            text = "speeds remembered of this engine on this machine: %s"
            logger.info(text, self._admission.rates())

    def _borrow(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """The best speed of computing in ``entries``, until this engine has one."""
        speeds = [_read_as(ComputeSpeed, entry.get("computing")) for entry in entries]
        plausible = [speed for speed in speeds if speed is not None and speed.plausible()]
        if plausible:
            self._admission.borrow(min(plausible, key=ComputeSpeed.per_token))

    def _speeds(self, entry: Mapping[str, Any]) -> tuple[ComputeSpeed | None, dict[int, LoadSpeed]]:
        """The speeds of computing and of this store's tiers in an entry. A malformed part counts as
        missing."""
        stored = entry.get("loading")
        tiers = stored if isinstance(stored, dict) and entry.get("store") == self._store else {}
        read = {tier: _read_as(LoadSpeed, tiers.get(str(tier))) for tier in range(TIERS)}
        loading = {tier: known for tier, known in read.items() if known is not None}
        return _read_as(ComputeSpeed, entry.get("computing")), loading


def _spelled(rates: ComputeSpeed | LoadSpeed) -> dict[str, float]:
    """As JSON, with three significant digits: smaller differences are not worth writing."""
    values = rates._asdict().items()
    return {name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in values}


def _read_as(kind: type[_Rates], stored: Any) -> _Rates | None:
    """The stored rates, None unless every one of them is a plausible number."""
    if not isinstance(stored, dict):
        return None
    values: list[Any] = [stored.get(name) for name in kind._fields]
    sound = all(isinstance(value, int | float) and 0 <= value < 1 << 53 for value in values)
    return kind(*values) if sound else None
