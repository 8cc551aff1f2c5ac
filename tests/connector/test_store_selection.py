"""The first available of several stores: one for all processes of an engine, chosen by what each of
them found."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from blocks import PATIENT  # noqa: E402
from parts import Memory, Rig, configured_store, eventually  # noqa: E402
from test_transfers import Worker  # noqa: E402

from ucm.config import load  # noqa: E402
from ucm.errors import ConfigError  # noqa: E402
from ucm.integration.vllm.connector.metadata import Handshake, RankReport, StoreSetup  # noqa: E402
from ucm.integration.vllm.connector.scheduler import readiness as module  # noqa: E402
from ucm.integration.vllm.connector.scheduler.readiness import (  # noqa: E402
    OFF,
    OPEN,
    OPENING,
    RETRY_S,
)
from ucm.integration.vllm.connector.stores import (  # noqa: E402
    ConfiguredStore,
    engine_stores,
    layout_and_tiers,
    stores_of,
)
from ucm.store.engine import read_settings, settings_of  # noqa: E402
from ucm.store.factory_v1 import why_unavailable  # noqa: E402
from ucm.store.posix import UcmPosixStore  # noqa: E402


class Sick(Memory):
    """A store that is made and does not answer."""

    def healthy(self) -> bool:
        return False

    def trouble(self) -> str:
        return "the share is gone"


def broken(config: dict[str, Any]) -> Any:
    raise OSError("no such server")


def several(*makes: Callable[[dict[str, Any]], Any]) -> list[ConfiguredStore]:
    return [configured_store(f"Store{number}", make) for number, make in enumerate(makes)]


def opening(*makes: Callable[[dict[str, Any]], Any], ranks: int = 1) -> Rig:
    """A rig whose workers shook hands; nothing was opened yet."""
    rig = Rig(ranks, opened=False, stores=several(*makes))
    rig.shake()
    return rig


def offered(rig: Rig) -> StoreSetup | None:
    """Background work is done, the next step is planned: what the workers are to open."""
    rig.later.run()
    return rig.step().setup


def told(rig: Rig, setup: StoreSetup | None, rank: int = 0, unavailable: str = "") -> None:
    """A rank's answer to a setup."""
    assert setup is not None
    rig.report(
        RankReport(rank, ready=not unavailable, attempt=setup.attempt, unavailable=unavailable)
    )


@pytest.mark.parametrize("layers", [(2, 1), (1, 2), (2, 2), (2, 1, 2, 3)])
def test_the_store_that_looks_up_is_given_the_sizes_of_every_part(layers: tuple[int, ...]) -> None:
    """Pipeline ranks hold different numbers of layers. Each size is named once, beside that of the
    first rank."""
    made: list[dict[str, Any]] = []

    def make(config: dict[str, Any]) -> Memory:
        made.append(config)
        return Memory(config)

    def sizes(count: int) -> dict[str, Any]:
        return {
            "tensor_size_list": [4096] * count,
            "shard_size": 4096 * count,
            "block_size": 4096 * count,
        }

    rig = Rig(len(layers), opened=False, stores=several(make))
    shapes = [sizes(count) | {"block_tokens": 4, "dtype": "float32"} for count in layers]
    rig.report(
        *(
            RankReport(
                rank,
                Handshake((0, rank, 0), rank, True, {"dtype": "float32"}, shape, stores=rig.names),
            )
            for rank, shape in enumerate(shapes)
        )
    )
    rig.later.run()
    (config,) = made
    assert config["part"] == (0, 0, 0)
    assert config["block_size"] == 4096 * layers[0]
    others = [rank for rank, count in enumerate(layers) if count not in layers[:rank]][1:]
    assert config.get("parts", []) == [
        sizes(layers[rank]) | {"part": (0, rank, 0)} for rank in others
    ]
    settings = read_settings(
        config | {"storage_backends": "/nowhere"}, settings_of("UcmPosixStore"), "UcmPosixStore"
    )
    assert [part["block_size"] for part in json.loads(settings.setup())["parts"]] == [
        4096 * layers[rank] for rank in others
    ]


def test_the_first_store_is_used_if_it_is_available(caplog: pytest.LogCaptureFixture) -> None:
    rig = opening(Memory, Memory)
    with caplog.at_level(logging.INFO):
        setup = offered(rig)
        assert setup is not None
        assert (setup.choice, setup.trial) == (0, True)
        told(rig, setup)
        rig.step()
    assert rig.readiness.phase == OPEN
    assert "of 2 stores the first available is used: Store0 on /nowhere" in caplog.text


def test_unavailable_stores_are_skipped_with_a_reason_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = opening(broken, Sick, Memory)
    with caplog.at_level(logging.INFO):
        rig.later.run()
        assert rig.step().setup is None
        rig.later.run()
        assert rig.step().setup is None
        setup = offered(rig)
        assert setup is not None
        assert setup.choice == 2
        told(rig, setup)
        rig.step()
    assert rig.readiness.phase == OPEN
    (line,) = [
        record.getMessage() for record in caplog.records if "first available" in record.getMessage()
    ]
    assert (
        line
        == "of 3 stores the first available is used: Store2 on /nowhere (not Store0 on /nowhere: it"
        " cannot be opened: no such server; not Store1 on /nowhere: the share is gone)"
    )


def test_all_ranks_change_to_the_next_store_if_one_cannot_open_it() -> None:
    first = Memory()
    rig = opening(lambda config: first, Memory, ranks=2)
    setup = offered(rig)
    told(rig, setup, rank=0)
    told(rig, setup, rank=1, unavailable="it cannot be opened: read-only")
    again = offered(rig)
    assert again is not None
    assert again.choice == 1
    assert setup is not None
    assert again.attempt > setup.attempt
    assert first._closed
    told(rig, setup, rank=0)  # a late word about the one before counts for nothing
    told(rig, again, rank=1)
    rig.step()
    assert rig.readiness.phase == OPENING
    told(rig, again, rank=0)
    rig.step()
    assert rig.readiness.phase == OPEN


def test_without_an_available_store_requests_miss_and_stores_are_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: list[Callable[[], Any]] = [Sick, Sick, Memory]
    rig = opening(lambda config: answers.pop(0)(), broken)
    rig.later.run()
    rig.step()
    rig.later.run()
    rig.step()
    assert rig.readiness.phase == OPENING
    assert "no store is available" in caplog.text
    assert "the share is gone; Store1 on /nowhere: it cannot be opened" in caplog.text
    rig.clock.now += 6.0
    request = rig.request("r", 12)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (
        0,
        False,
    ), "nobody waits for it any more"
    assert not rig.scheduler.has_pending_push_work
    assert not rig.later.jobs, "not tried again at once"
    rig.clock.now += RETRY_S
    for _ in range(3):  # the first is sick again, the second cannot be opened, then all over
        rig.step()
        rig.later.run()
    rig.clock.now += RETRY_S
    rig.step()
    setup = offered(rig)
    told(rig, setup)
    rig.step()
    assert rig.readiness.phase == OPEN


def test_stores_whose_directories_only_their_owner_can_mend_are_tried_again_rarely() -> None:
    def denied(config: dict[str, Any]) -> Any:
        raise OSError("cannot make it [path=/nowhere/a]: Permission denied (os error 13)")

    rig = opening(denied, denied)
    for _ in range(2):
        rig.later.run()
        rig.step()
    rig.clock.now += module.UNUSABLE_S - 1
    rig.step()
    assert not rig.later.jobs
    rig.clock.now += 2
    rig.step()
    assert rig.later.jobs


def test_a_constructor_that_hangs_costs_its_deadline_once() -> None:
    rig = opening(Memory, Memory)
    hanging, rig.later.jobs = rig.later.jobs, []
    rig.clock.now += 9.0
    rig.step()
    assert not rig.later.jobs
    assert rig.scheduler.has_pending_push_work, "an idle engine steps until it is decided"
    rig.clock.now += 2.0
    rig.step()
    setup = offered(rig)
    assert setup is not None
    assert setup.choice == 1
    rig.clock.now += 30.0
    rig.step()  # nor did the rank open the second one in time
    assert rig.readiness.phase == OPENING
    rig.clock.now += RETRY_S + 1
    rig.step()
    again = offered(rig)
    assert again is not None
    assert again.choice == 1, (
        "the first has not returned from its constructor: no second thread for it"
    )
    hanging[0]()
    told(rig, again)
    rig.step()
    assert rig.readiness.phase == OPEN


def test_a_store_that_opened_too_late_is_closed() -> None:
    late = Memory()
    rig = opening(lambda config: late, Memory)
    hanging, rig.later.jobs = rig.later.jobs, []
    rig.clock.now += 11.0
    rig.step()
    hanging[0]()
    assert late._closed


def test_a_worker_that_is_configured_for_another_store_disables_the_cache() -> None:
    rig = Rig(opened=False, stores=several(Memory, Memory))
    rig.shake(stores=("Store0",))
    assert rig.readiness.phase == OFF
    assert "rank 0 is configured for other stores (Store0) than the scheduler (Store0, Store1)" in (
        rig.readiness.why_off
    )


def test_a_single_store_is_taken_as_it_is() -> None:
    rig = opening(Sick)
    setup = rig.step().setup
    assert setup is not None
    assert not setup.trial
    rig.later.run()
    told(rig, setup)
    rig.step()
    assert rig.readiness.phase == OPEN, "it is retried by itself and answers with misses meanwhile"


def test_a_single_store_that_cannot_be_opened_is_off() -> None:
    rig = opening(broken)
    rig.step()
    rig.later.run()
    rig.step()
    assert rig.readiness.phase == OFF
    assert "no such server" in rig.readiness.why_off


# The worker side
# --------------------------------------------------------------------------------------------


def answer(worker: Worker, setup: StoreSetup) -> RankReport:
    """The rank's report about a setup, once its thread has ended."""
    report = worker.step(setup=setup)[2]
    while report is None or not (report.ranks[0].ready or report.ranks[0].unavailable):
        report = worker.step()[2]
    return report.ranks[0]


def test_a_worker_reports_a_store_that_it_cannot_open_and_opens_the_next() -> None:
    made: list[Memory] = []

    def sick(config: dict[str, Any]) -> Any:
        made.append(Sick())
        return made[-1]

    worker = Worker()
    worker.connector._stores = several(broken, sick, worker.make)
    assert worker.connector.handshake().stores == ("Store0", "Store1", "Store2")
    said = answer(worker, StoreSetup("{}", {}, 0, 7, True))
    assert (said.attempt, said.ready, said.unavailable) == (
        7,
        False,
        "it cannot be opened: no such server",
    )
    said = answer(worker, StoreSetup("{}", {}, 1, 8, True))
    assert (said.attempt, said.ready, said.unavailable) == (8, False, "the share is gone")
    eventually("it is closed", lambda: made[0]._closed)
    said = answer(worker, StoreSetup("{}", {}, 2, 9, True))
    assert (said.attempt, said.ready, said.unavailable, said.broken) == (9, True, "", "")
    assert worker.step()[2] is None, "said once"


def test_a_worker_that_was_ready_changes_with_the_others() -> None:
    worker, first = Worker(), Memory()
    worker.connector._stores = several(lambda config: first, worker.make)
    assert answer(worker, StoreSetup("{}", {}, 0, 1, True)).ready
    said = answer(worker, StoreSetup("{}", {}, 1, 2, True))
    assert (said.attempt, said.ready) == (2, True)
    assert worker.connector._store is worker.store
    assert first._closed


@pytest.mark.parametrize(
    ("parallel", "processes", "several_hosts"),
    [
        ({"world_size": 4}, 4, False),  # vLLM says nothing of hosts
        ({"world_size": 8, "local_world_size": 8, "data_parallel_size_local": 1}, 8, False),
        ({"world_size": 16, "local_world_size": 8, "data_parallel_size_local": 1}, 8, True),
        ({"world_size": 2, "local_world_size": 2, "data_parallel_size_local": 4}, 8, False),
        ({"world_size": 1, "local_world_size": 1, "data_parallel_size_local": 0}, 1, False),
    ],
)
def test_memory_is_divided_among_the_ranks_of_one_host(
    parallel: dict[str, int], processes: int, several_hosts: bool
) -> None:
    for keys in ({"store_pipeline": "Cache|Empty"}, {"ucm_connector_name": "UcmCacheStore"}):
        config = load(keys | {"cache_size": "1MiB"}, {})
        (one,) = engine_stores(config, SimpleNamespace(**parallel))
        assert (one.config["processes"], one.config["scheduler_elsewhere"]) == (
            processes,
            several_hosts,
        )


def test_every_store_of_ours_gets_the_engines_settings() -> None:
    config = load({"storage_backends": "/d"}, {})
    (one,) = engine_stores(config, SimpleNamespace(world_size=2), step_tokens=8192)
    assert (one.config["processes"], one.config["step_tokens"]) == (2, 8192)
    sizes = {
        "tensor_size": 4096,
        "shard_size": 8192,
        "block_size": 8192,
        "block_tokens": 48,
        "dtype": "float16",
    }
    settings = read_settings(
        dict(one.config) | sizes, settings_of("UcmPosixStore"), "UcmPosixStore"
    )
    told = json.loads(settings.setup())
    assert (told["staging_bytes"], told["step_bytes"]) == (None, 171 * 8192)


def test_a_users_store_is_refused_on_an_accelerator_unless_it_serves_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take the device's addresses for the host's, and the engine's process would end."""
    (one,) = stores_of(
        load({"ucm_connector_name": "Memory", "ucm_connector_module_path": "parts"}, {}), 1, "cuda"
    )
    with pytest.raises(
        ConfigError, match="Memory reads and writes the host's memory, and the KV lies on cuda"
    ):
        one.make({})
    monkeypatch.setattr(Memory, "serves_accelerators", True)
    assert one.make({}).config == {"platform": "cuda"}


def test_a_store_of_the_core_gets_the_platform() -> None:
    ours = {"ucm_connector_name": "UcmPosixStore", "storage_backends": "/d"}
    theirs = {"ucm_connector_name": "Theirs", "ucm_connector_module_path": "theirs"}
    for keys, told in ((ours, "cuda"), (theirs, None)):
        (one,) = stores_of(load(keys, {}), 1, "cuda")
        assert one.config.get("platform") == told


# Real stores
# ------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_is_not_available(tmp_path: Path) -> None:
    """The first store's directory lies below a file: the scheduler side and the worker see that,
    the second works."""
    (tmp_path / "file").write_text("in the way")
    entries = [
        {
            "ucm_connector_name": "UcmPosixStore",
            "ucm_connector_config": {"storage_backends": str(tmp_path / path)},
        }
        for path in ("file/below", "good")
    ]
    room = {"storage_capacity": "1GiB", "staging_capacity": "4MiB"}
    config = load({"ucm_connectors": entries, **room, "deadlines": PATIENT}, {})
    first, second = stores_of(config, 1)
    assert (first.name, second.where) == ("UcmPosixStore", f"UcmPosixStore on {tmp_path / 'good'}")
    shapes = {
        "tensor_size": 4096,
        "shard_size": 4096,
        "block_size": 4096,
        "identity": "x",
        "part": (0, 0, 0),
    }
    for device in (-1, 0):
        with first.make(dict(first.config) | shapes | {"device_id": device}) as store:
            assert isinstance(store, UcmPosixStore)
            assert "Not a directory" in why_unavailable(store)
        with second.make(dict(second.config) | shapes | {"device_id": device}) as store:
            assert why_unavailable(store) == ""


def test_a_store_whose_health_check_fails_is_not_available() -> None:
    store = Memory()
    store.healthy = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert "division by zero" in why_unavailable(store)
    assert module.why_unavailable(Memory()) == ""


@pytest.mark.parametrize(
    ("marker", "config", "layout"),
    [
        (None, {}, "segment"),
        ({"layout": {"kind": "file"}}, {}, "file"),
        ({"layout": {"kind": "segment"}}, {"layout": "file"}, "file"),
        ({}, {}, ""),
        (None, {"storage_backends": "s3://bucket/x"}, ""),
        (None, {"storage_backends": ""}, ""),
    ],
)
def test_the_metrics_name_layout_and_tiers(
    tmp_path: Path, marker: dict[str, Any] | None, config: dict[str, Any], layout: str
) -> None:
    if marker is not None:
        (tmp_path / "ucm-root.json").write_text(json.dumps(marker))
    store: Any = SimpleNamespace(
        tier_names=(), stats=lambda: {"tiers": [{"name": "memory"}, {"name": "posix"}]}
    )
    given = {"storage_backends": [str(tmp_path)]} | config
    assert layout_and_tiers(given, store) == (layout, "memory,posix")
    store.stats = lambda: 1 / 0
    assert layout_and_tiers(given, store) == (layout, "")
