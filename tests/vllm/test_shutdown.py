"""The end of an engine: full blocks at its stop are on the disk when it has ended."""

from __future__ import annotations

from cases import FRESH, output_blocks
from checks import assert_same
from harness import Engine, EngineHost, wait_until
from lives import Life
from specs import Result


def test_shutdown_publishes_what_is_under_way(
    warm: Engine, host: EngineHost, cold: Life, reference: dict[str, Result]
) -> None:
    """Dumps are held until the engine was stopped; every one of them is published all the
    same."""
    warm.wait_idle()  # what the test before dumped is there
    case, before = FRESH["drained"], len(cold.disk.files())
    salted = case.ask(salt="drained")
    since = len(cold.disk.faults.events("dump"))
    cold.disk.faults.set("hold-dump")
    assert_same(warm.generate(salted)[0], reference["drained"])
    wait_until(lambda: len(cold.disk.faults.events("dump")) > since, "a dump began")
    warm.begin_shutdown()
    cold.disk.faults.clear("hold-dump")
    host.stop()
    assert len(cold.disk.files()) == before + output_blocks(case)
