"""When the store fails, hangs or refuses, requests get the right tokens and every block is
freed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from cases import FRESH, STORED, Case, output_blocks
from checks import ask_until_reused, assert_reused, assert_same, assert_stored
from harness import Engine, EngineHost, run_program, wait_until
from lives import Disk, Life, store_under_test
from specs import BLOCK, PATIENT, Ask, Result

_salts = itertools.count()


def never_stored(case: Case) -> Ask:
    """The request with a unique cache salt, so that none of its blocks were stored before."""
    return case.ask(salt=f"salt {next(_salts)}")


def loads_of(disk: Disk, since: int) -> int:
    """Rows requested from the store since this number of load events."""
    return sum(len(event["ids"]) for event in disk.faults.events("load")[since:])


def asked_for(disk: Disk, block: str, since: int) -> int:
    """How often a block was requested from the store since this number of load events.

    vLLM's own count of cached tokens does not help: after a failed load it is still the claimed
    number.
    """
    return sum(event["ids"].count(block) for event in disk.faults.events("load")[since:])


def chain_of(engine: Engine, disk: Disk, case: Case) -> list[str]:
    """Ids of the stored prefix of a prompt, as requested from the store."""
    since = len(disk.faults.events("load"))
    engine.generate(case.ask())
    events = disk.faults.events("load")[since:]
    ids = [block for event in events for block in event["ids"]]
    engine.reset()
    assert len(ids) >= case.full_blocks, "the prefix was not loaded"
    return ids


def assert_back_to_normal(engine: Engine, disk: Disk, name: str, right: Result) -> None:
    """Without the faults, all blocks are free and the prompt is reused again."""
    disk.faults.clear()
    ask_until_reused(engine, STORED[name], right)


@pytest.mark.versions
def test_failed_load_is_recomputed(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """All blocks fail: the tokens are right and the same blocks are not claimed repeatedly."""
    since = len(cold.disk.faults.events("load"))
    cold.disk.faults.set("fail-load")
    answer = warm.generate(STORED["middle"].ask())[0]
    assert_same(answer, reference["middle"])
    assert 0 < loads_of(cold.disk, since) <= 2 * STORED["middle"].full_blocks
    assert_back_to_normal(warm, cold.disk, "middle", reference["middle"])


@pytest.mark.versions
@pytest.mark.parametrize("at", [0, 5, -1], ids=["first", "middle", "last"])
def test_one_failed_block(warm: Engine, cold: Life, reference: dict[str, Result], at: int) -> None:
    """Blocks before the failed one are used, later ones are computed."""
    ids = chain_of(warm, cold.disk, STORED["middle"])[: STORED["middle"].full_blocks]
    since = len(cold.disk.faults.events("load"))
    cold.disk.faults.set("fail-load", ids[at])
    answer = warm.generate(STORED["middle"].ask())[0]
    assert cold.disk.faults.events("load-failed")[-1]["ids"] == [ids[at]]
    assert_same(answer, reference["middle"])
    assert asked_for(cold.disk, ids[at], since) == 1, (
        "a failed block was claimed again by the same request"
    )
    assert_back_to_normal(warm, cold.disk, "middle", reference["middle"])


@pytest.mark.one_runner
def test_failed_loads_of_concurrent_requests(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    """Requests with a common prefix fail together, beside one that needs no load."""
    cold.disk.faults.set("fail-load")
    names = ["shared_a", "shared_b", "short"]
    *answers, bystander = warm.generate(
        *(STORED[name].ask() for name in names), never_stored(FRESH["bystander"])
    )
    for name, answer in zip(names, answers, strict=True):
        assert_same(answer, reference[name])
    assert_same(bystander, reference["bystander"])
    assert_back_to_normal(warm, cold.disk, "shared_a", reference["shared_a"])


#: The scheduler side's bounds of a load in seconds: at least, at most, and while speeds are
#: unknown.
BOUNDS = (
    "(connector._scheduler.admission.compute_rate, '_min_s'),"
    " (connector._scheduler.admission.compute_rate, '_max_s'), (connector._scheduler.admission,"
    " '_unknown_load_s')"
)


def test_load_past_its_deadline(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """A hanging load is cancelled at the connector's deadline. The request computes."""
    faults, before = cold.disk.faults, warm.metrics().get("ucm_missed_blocks_total:timeout", 0)
    late = len(faults.events("load-late"))
    # Bounds shorter than those of these tests.
    patient = warm.scheduler_eval(f"[getattr(*place) for place in ({BOUNDS})]")
    warm.scheduler_eval(f"[setattr(*place, 0.3) for place in ({BOUNDS})]")
    try:
        faults.set("hold-load")  # until it is cleared, which is after the answer
        answer = warm.generate(STORED["middle"].ask())[0]
        (event,) = faults.events("load-late")[late:]
    finally:
        warm.scheduler_eval(
            f"[setattr(*place, value) for place, value in zip(({BOUNDS}), {patient})]"
        )
    assert event["seconds"] == 0.3
    assert len(event["ids"]) >= STORED["middle"].full_blocks
    assert_same(answer, reference["middle"])
    assert warm.metrics()["ucm_missed_blocks_total:timeout"] - before > 0
    assert_back_to_normal(warm, cold.disk, "middle", reference["middle"])


def test_others_go_on_while_a_load_is_slow(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    """A hanging load delays only its own request."""
    since = len(cold.disk.faults.events("load"))
    cold.disk.faults.set("hold-load")
    slow = warm.submit(STORED["middle"].ask())
    wait_until(lambda: len(cold.disk.faults.events("load")) > since, "the load began")
    answer = warm.generate(never_stored(FRESH["bystander"]))[0]
    assert_same(answer, reference["bystander"])
    assert warm.progress(*slow) == [(0, False)]
    cold.disk.faults.clear()
    loaded = warm.collect(slow)[0]
    assert_same(loaded, reference["middle"])
    assert_reused(loaded, STORED["middle"])


def test_abort_while_loading(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """The blocks stay allocated while a late write is possible, then they are free; later requests
    are right."""
    since = len(cold.disk.faults.events("load"))
    cold.disk.faults.set("hold-load")
    aborted = warm.submit(STORED["long"].ask())
    wait_until(lambda: len(cold.disk.faults.events("load")) > since, "the load began")
    warm.abort(*aborted)
    assert warm.collect(aborted)[0].finish in ("abort", "none")
    held = warm.scheduler()
    assert held["total_blocks"] - held["free_blocks"] >= STORED["long"].full_blocks, (
        "blocks freed under a load"
    )
    bystander = warm.generate(never_stored(FRESH["bystander"]))[0]
    assert_same(bystander, reference["bystander"])
    # More than the rest of the pool: if the blocks had been freed, this request would get them now.
    crowding = warm.submit(never_stored(FRESH["crowding"]))
    cold.disk.faults.clear()
    assert_same(warm.collect(crowding)[0], reference["crowding"])
    warm.wait_idle()
    assert_back_to_normal(warm, cold.disk, "long", reference["long"])


def test_abort_of_a_load_that_fails(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    since = len(cold.disk.faults.events("load"))
    cold.disk.faults.set("hold-load")
    cold.disk.faults.set("fail-load")
    aborted = warm.submit(STORED["long"].ask(), STORED["middle"].ask())
    wait_until(lambda: len(cold.disk.faults.events("load")) > since, "a load began")
    warm.abort(*aborted)
    warm.collect(aborted)
    cold.disk.faults.clear("hold-load")
    warm.wait_idle()
    assert_back_to_normal(warm, cold.disk, "middle", reference["middle"])


@pytest.mark.one_runner
def test_abort_while_decoding(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """Blocks that are being written to the store when the client disconnects are not reused."""
    since = len(cold.disk.faults.events("dump"))
    cold.disk.faults.set("hold-dump")
    aborted = warm.submit(FRESH["busy"].ask())
    wait_until(lambda: warm.progress(*aborted)[0][0] > 10, "the request decodes")
    wait_until(lambda: len(cold.disk.faults.events("dump")) > since, "a dump began")
    warm.abort(*aborted)
    warm.collect(aborted)
    crowding = warm.submit(never_stored(FRESH["crowding"]))
    cold.disk.faults.clear()
    assert_same(warm.collect(crowding)[0], reference["crowding"])
    warm.wait_idle()
    warm.reset()
    assert_same(warm.generate(FRESH["busy"].ask())[0], reference["busy"])


@pytest.mark.one_runner
def test_failed_dump_is_harmless(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """Nothing is published, nothing is claimed; the next request with this prompt stores it."""
    warm.wait_idle()  # blocks of the previous test exist
    case, before = FRESH["refused"], len(cold.disk.files())
    cold.disk.faults.set("fail-dump")
    since = len(cold.disk.faults.events("dump-failed"))
    assert_same(warm.generate(case.ask())[0], reference["refused"])
    wait_until(lambda: len(cold.disk.faults.events("dump-failed")) > since, "a dump failed")
    warm.wait_idle()
    assert len(cold.disk.files()) == before
    cold.disk.faults.clear()
    warm.reset()
    again = warm.generate(case.ask())[0]
    assert_same(again, reference["refused"])
    assert again.cached == 0
    ask_until_reused(warm, case, reference["refused"])
    assert_stored(cold.disk, before, output_blocks(case))


@pytest.mark.one_runner
def test_refused_dump_is_offered_again(
    warm: Engine, cold: Life, reference: dict[str, Result]
) -> None:
    """The store is full for a while; the request outlives that, and its blocks are stored."""
    warm.wait_idle()  # blocks of the previous test exist
    case, before = FRESH["slow_dump"], len(cold.disk.files())
    cold.disk.faults.set("busy-dump", "1")
    since = len(cold.disk.faults.events("busy"))
    answer = warm.generate(Case(case.tokens, 200).ask())[0]
    assert len(cold.disk.faults.events("busy")) == since + 1, "the first dump was refused"
    assert answer.tokens[: case.max_tokens] == reference["slow_dump"].tokens
    assert_stored(cold.disk, before, (len(case.tokens) + 199) // BLOCK)
    warm.wait_idle()


@pytest.mark.one_runner
def test_slow_dumps_and_preemption(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """Memory of a running dump is not reused, even if memory is short."""
    since = len(cold.disk.faults.events("dump"))
    cold.disk.faults.set("hold-dump")
    first = warm.submit(FRESH["drained"].ask())
    wait_until(lambda: len(cold.disk.faults.events("dump")) > since, "a dump began")
    second = warm.submit(never_stored(FRESH["crowding"]), STORED["long"].ask())
    assert_same(warm.collect(first)[0], reference["drained"])
    cold.disk.faults.clear()
    crowding, long = warm.collect(second)
    assert_same(crowding, reference["crowding"])
    assert_same(long, reference["long"])
    warm.wait_idle()
    warm.reset()
    assert_same(warm.generate(FRESH["drained"].ask())[0], reference["drained"])


@pytest.mark.one_runner
@pytest.mark.parametrize("fault", ["hold-lookup", "fail-lookup"])
def test_lookup_that_does_not_answer(
    warm: Engine, cold: Life, reference: dict[str, Result], fault: str
) -> None:
    """A failed or late lookup is a miss: the request computes, other requests are not affected."""
    cold.disk.faults.set(fault)
    answers = warm.generate(STORED["middle"].ask(), FRESH["blind"].ask())
    assert_same(answers[0], reference["middle"])
    assert_same(answers[1], reference["blind"])
    assert answers[0].cached == 0
    assert_back_to_normal(warm, cold.disk, "middle", reference["middle"])


def missed(engine: Engine, reason: str) -> float:
    """Blocks missed for a reason, from vLLM's Prometheus registry."""
    return engine.metrics()[f"ucm_missed_blocks_total:{reason}"]


@pytest.mark.versions
def test_damaged_block(warm: Engine, cold: Life, reference: dict[str, Result]) -> None:
    """A block that is short (any store) or has a flipped byte (a store with checksums) is computed
    again."""
    block = chain_of(warm, cold.disk, STORED["middle"])[4]
    path = next(file for file in cold.disk.files() if file.name.startswith(block))
    whole = path.read_bytes()
    if store_under_test() == "plain":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        place = len(whole) // 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    since = len(cold.disk.faults.events("load"))
    reason = "io_error" if store_under_test() == "plain" else "bad_checksum"
    before, behind = missed(warm, reason), missed(warm, "load_failed")
    loaded = warm.metrics()["ucm_loaded_blocks_total"]
    answer = warm.generate(STORED["middle"].ask())[0]
    assert_same(answer, reference["middle"])
    assert asked_for(cold.disk, block, since) == 1, (
        "the damaged block was not claimed, or claimed again"
    )
    wait_until(lambda: missed(warm, "load_failed") > behind, "the misses are in vLLM's metrics")
    assert missed(warm, reason) == before + 1, "the reason is counted once"
    metrics = warm.metrics()
    assert metrics["ucm_loaded_blocks_total"] == loaded + 4, (
        "not the prefix before the first bad block"
    )
    given = sum(metrics[f"ucm_{name}_blocks_total"] for name in ("loaded", "missed"))
    assert metrics["ucm_asked_blocks_total"] == given, "every requested block is counted"
    if store_under_test() == "plain":
        path.write_bytes(whole)  # this store checks only its own lengths
    assert_back_to_normal(warm, cold.disk, "middle", reference["middle"])


def test_methods_that_raise(host: EngineHost, model: Path, tmp_path: Path) -> None:
    """Some of what ``tests/vllm_unit/test_hooks.py`` does for every method, in an engine."""
    host.stop()
    store = {
        "storage_backends": str(tmp_path / "root"),
        "storage_capacity": "1GiB",
        "free_space_floor": 0,
        "admission": "always",
        "deadlines": PATIENT,
    }
    answers = run_program("programs:raising", {}, tmp_path / "log", model=str(model), store=store)
    assert answers["loaded"] > 0
    why, failures, pending = answers.pop("why"), answers.pop("failures"), answers.pop("pending")
    assert min(failures) > 0
    assert all("build_connector_meta" in reason for reason in why)
    assert pending is False
    answers.pop("loaded")
    assert len({tuple(tokens) for tokens in answers.values()}) == 1, answers
