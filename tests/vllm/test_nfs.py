"""Engines of two hosts on several roots over an NFS client's semantics: right tokens cold, on the
other host, and during and after an outage of its server. The file system is that of
``tests/trust/nfs.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import STORED
from checks import ask_until_reused, assert_reused, assert_same
from harness import EngineHost, wait_until
from lives import over_device
from specs import PATIENT, ROOM, EngineSpec, Result, StoreSpec

# at the end: both directories have a conftest
sys.path.insert(0, str(Path(__file__).parents[1] / "trust"))

from nfs import NfsClient

ASKED = ("short", "middle", "shared_a")
#: Directories side by side, each with blocks in another layout.
ROOTS = ("one", "two")


class Export:
    """One export, mounted by two hosts."""

    def __init__(self, work: Path) -> None:
        self.directory = work / "nfs-export"
        self.seen = [work / "nfs-left", work / "nfs-right"]
        self.clients = [NfsClient(self.directory, place) for place in self.seen]

    def spec(self, model: Path, runner: str, host: int) -> EngineSpec:
        """An engine on a host. Its breaker tries again at once, so that a root is soon taken
        back."""
        roots = ":".join(str(self.seen[host] / root) for root in ROOTS)
        options = {"segment_age": 0, **ROOM, **over_device()}
        store = StoreSpec(Path(roots), "UcmNfsStore", options=options)
        # This file system is written in Python: on a busy machine it is slow, and a late lookup is
        # a miss.
        loads = {"load_min_ms": 20_000, "load_max_s": 20.0, "load_unknown_s": 20.0}
        extra = {"deadlines": {**PATIENT, **loads, "dump_s": 20.0}, "breaker": {"cool_down_s": 0.5}}
        return EngineSpec(model, runner, store, extra_config=extra, label=f"nfs-{host}")

    def close(self) -> None:
        """Takes the mounts away."""
        for client in self.clients:
            client.close()


@pytest.fixture
def export(work: Path) -> Iterator[Export]:
    """A new export with two mounts."""
    made = Export(work)
    yield made
    made.close()


@pytest.mark.skipif(
    "os.environ.get('UCM_TEST_STORE', 'posix') != 'posix'",
    reason="UcmNfsStore is of our own stores",
)
@pytest.mark.long
@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_two_hosts_and_a_server_that_comes_back(
    runner: str, host: EngineHost, model: Path, reference: dict[str, Result], export: Export
) -> None:
    host.stop()
    engine = host.get(export.spec(model, runner, 0))
    # a dump is refused if a root is not counted yet: a repeated prompt is stored again
    for name in ASKED:
        ask_until_reused(engine, STORED[name], reference[name])
    host.stop()
    for root in ROOTS:
        assert any((export.directory / root).glob("*/segments/*.seg")), f"no block is in {root}"

    engine = host.get(export.spec(model, runner, 1))
    for name in ASKED:
        answer = engine.generate(STORED[name].ask())[0]
        assert_same(answer, reference[name])
        assert_reused(answer, STORED[name])

    export.clients[1].close()  # during all of it
    for name in ASKED:
        engine.wait_idle()
        engine.reset()
        assert_same(engine.generate(STORED[name].ask())[0], reference[name])
    export.clients[1] = NfsClient(export.directory, export.seen[1])
    for name in ASKED:
        ask_until_reused(engine, STORED[name], reference[name])
    wait_until(engine.alive, "the engine goes on")
    host.stop()
