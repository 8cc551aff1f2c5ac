"""The statistics that vLLM gets through its hooks, and its metrics from them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
from parts import BLOCK, Rig
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from test_transfers import Worker, dump, load
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.outputs import KVConnectorOutput

from ucm.integration.vllm.connector import UCMConnector, UCMDirectConnector
from ucm.integration.vllm.connector.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    MISSED,
    MISSED_BLOCKS,
    TIMES,
    MissStats,
    UcmStats,
)
from ucm.reasons import MissReason

TYPES: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def connector(**halves: Any) -> UCMConnector:
    """A connector around halves, without the configuration of an engine."""
    made = UCMConnector.__new__(UCMConnector)
    made._scheduler, made._worker, made._miss_stats, made._off = None, None, None, None
    for name, half in halves.items():
        setattr(made, f"_{name}", half)
    return made


def sample(name: str, **labels: str) -> float:
    """A sample of the process's registry."""
    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None
    return value


def test_the_scheduler_reports_new_counts_only() -> None:
    rig = Rig()
    half = connector(scheduler=rig.scheduler, miss_stats=rig.scheduler.miss_stats)
    assert half.get_kv_connector_stats() is None
    rig.admit(rig.request("a", 2 * BLOCK + 1))
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert not stats.is_empty()
    assert stats.data == {"asked": 2, "missed.absent": 2, "lookup_seconds": [0.0]}
    assert half.get_kv_connector_stats() is None


def test_a_connector_that_is_off_counts_why() -> None:
    rig = Rig()
    half = connector(miss_stats=rig.scheduler.miss_stats, off=MissReason.UNSUPPORTED)
    half.on_new_request(rig.request("a", 3 * BLOCK))
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"asked": 3, "missed.unsupported": 3}


def test_hooks_never_raise() -> None:
    broken = connector(
        miss_stats=SimpleNamespace(take=lambda: 1 / 0), worker=SimpleNamespace(stats=lambda: 1 / 0)
    )
    assert broken.get_kv_connector_stats() is None
    assert broken.stats() == {}
    assert UCMConnector.build_prom_metrics(None, {}, [], {0: []}) is None  # type: ignore[arg-type]
    assert UCMConnector.build_kv_connector_stats(None).is_empty()  # type: ignore[union-attr]
    strange: Any = SimpleNamespace(data={"asked": "many"})
    assert UcmStats(data={"asked": 1}).aggregate(strange).data == {"asked": 1}


def test_ranks_and_halves_add_up_on_vllms_own_way() -> None:
    """As in vLLM: pickled by the workers, aggregated over ranks and with the scheduler's, sent as
    msgpack, rebuilt."""
    both = [UcmStats(data={"loaded_bytes": 10 * n, "published_bytes": 1}) for n in (1, 2)]
    ranks = [pickle.loads(pickle.dumps(stats)) for stats in both]  # noqa: S301 - made here
    output = KVConnectorOutput(kv_connector_stats=ranks[0].aggregate(ranks[1]))
    assert output.kv_connector_stats is not None
    merged = output.kv_connector_stats.aggregate(UcmStats(data={"asked": 3, "missed.timeout": 1}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(merged.to_dict()))
    rebuilt = UCMDirectConnector.build_kv_connector_stats(sent)
    assert rebuilt is not None
    rebuilt = rebuilt.aggregate(UcmStats(data={"asked": 2}))
    line = ", ".join(f"{name}={value}" for name, value in rebuilt.reduce().items())
    assert line == "ucm asked=5, ucm loaded_bytes=30, ucm published_bytes=2, ucm missed timeout=1"
    rebuilt.reset()
    assert rebuilt.is_empty()


def test_vllm_logs_and_exports_them() -> None:
    """Through vLLM's own classes, which find the connector by its name."""
    transfer = KVTransferConfig(
        kv_connector="UCMDirectConnector",
        kv_connector_module_path="ucm.integration.vllm.connector",
        kv_role="kv_both",
    )
    said: list[str] = []
    logging = KVConnectorLogging(transfer)
    for data in ({"asked": 3, "missed.absent": 3}, {"asked": 1, "loaded": 1}):
        logging.observe(data)
    logging.log(lambda text, *args: said.append(text % args))
    logging.log(lambda text, *args: said.append(text % args))  # nothing since
    assert said == ["KV Transfer metrics: ucm asked=4, ucm loaded=1, ucm missed absent=3"]
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    exported = KVConnectorProm(config, ["model_name", "engine"], {0: ["small", "0"]})
    labels = {"model_name": "small", "engine": "0"}
    before = sample("ucm_loaded_blocks_total", **labels)
    exported.observe({"asked": 1, "loaded": 1}, 0)
    assert sample("ucm_loaded_blocks_total", **labels) == before + 1


def test_prometheus_has_every_reason_from_the_start_and_counts_per_engine() -> None:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    metrics = UCMConnector.build_prom_metrics(config, TYPES, ["model_name", "engine"], labels)  # type: ignore[arg-type]
    again = UCMConnector.build_prom_metrics(config, TYPES, ["model_name", "engine"], labels)  # type: ignore[arg-type]
    assert metrics is not None
    assert again is not None  # a second engine in one process
    one = {"model_name": "tiny", "engine": "1"}
    missed = f"{MISSED_BLOCKS[0]}_total"
    before = {reason: sample(missed, **one, reason=reason) for reason in MissReason}
    asked = sample("ucm_asked_blocks_total", **one)
    metrics.observe({"asked": 4, MISSED + MissReason.TIMEOUT: 3, "a newer name": 1}, 1)
    again.observe({"asked": 1}, 1)
    metrics.observe({"asked": 9}, 7)  # an engine that was not announced
    assert sample("ucm_asked_blocks_total", **one) == asked + 5
    after = {reason: sample(missed, **one, reason=reason) for reason in MissReason}
    assert {
        reason: after[reason] - before[reason]
        for reason in MissReason
        if after[reason] != before[reason]
    } == {MissReason.TIMEOUT: 3}
    metrics.observe({"asked": "many"}, 1)  # logged, not passed to vLLM


def test_times_are_put_together_logged_as_means_and_exported_as_histograms() -> None:
    stats = UcmStats(data={"load_seconds": [0.5]})
    stats.aggregate(UcmStats(data={"load_seconds": [0.25, 0.75], "dump_seconds": [2.0]}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert UcmStats(data=sent).reduce() == {
        "ucm mean load_seconds": 0.5,
        "ucm mean dump_seconds": 2.0,
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = UCMConnector.build_prom_metrics(
        config, TYPES, ["model_name", "engine"], {0: ["timed", "0"]}
    )  # type: ignore[arg-type]
    assert metrics is not None
    metrics.observe(sent, 0)
    metrics.observe({"lookup_seconds": [0.002]}, 0)
    labels = {"model_name": "timed", "engine": "0"}
    assert sample("ucm_load_seconds_count", **labels) == 3
    assert sample("ucm_load_seconds_sum", **labels) == 1.5
    assert sample("ucm_load_seconds_bucket", **labels, le="0.5") == 2
    assert sample("ucm_lookup_seconds_bucket", **labels, le="0.0025") == 1


def test_speeds_are_the_newest_and_exported_as_gauges() -> None:
    stats = UcmStats(data={"load_bytes_per_second": 5.0, "asked": 1})
    stats.aggregate(UcmStats(data={"load_bytes_per_second": 1234567.0}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert UcmStats(data=sent).reduce() == {"ucm asked": 1, "ucm load_bytes_per_second": 1235000.0}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = UCMConnector.build_prom_metrics(
        config, TYPES, ["model_name", "engine"], {0: ["gauged", "0"]}
    )  # type: ignore[arg-type]
    assert metrics is not None
    metrics.observe(sent, 0)
    metrics.observe({"load_bytes_per_second": 7.0}, 0)
    assert sample("ucm_load_bytes_per_second", model_name="gauged", engine="0") == 7.0


def test_times_that_are_not_read_are_bounded() -> None:
    account = MissStats(BLOCK, 0.0)
    for _ in range(TIMES + 1):
        account.looked_up(0.5)
    assert account.take() == {"lookup_seconds": [0.5] * TIMES}
    assert account.take() is None
    stats = UcmStats(data={})
    for _ in range(8):
        stats.aggregate(UcmStats(data={"load_seconds": [0.5] * TIMES}))
    assert len(stats.data["load_seconds"]) == 4 * TIMES


def test_the_time_of_an_answered_lookup_is_reported_once() -> None:
    rig = Rig()
    request = rig.request("a", 2 * BLOCK + 1)
    rig.clock.now += 0.25
    rig.later.run()
    for _ in range(2):
        rig.scheduler.get_num_new_matched_tokens(request, 0)
    assert rig.scheduler.miss_stats.take() == {"lookup_seconds": [0.25]}
    unanswered = rig.request("c", 2 * BLOCK + 1, seed=2)
    for _ in range(2):
        rig.scheduler.get_num_new_matched_tokens(unanswered, 0)
        rig.clock.now += 0.1
    rig.later.run()
    assert rig.scheduler.miss_stats.take() is None


def test_the_worker_tells_how_long_transfers_took() -> None:
    worker = Worker()
    clock: Any = worker.connector._clock
    store = worker.open()
    half = connector(worker=worker.connector)
    worker.step(dumps=[dump(1, [1])])
    clock.now += 2.0
    store.end("staged", "published")
    worker.step(loads=[load("r", [2])])
    clock.now += 0.5
    store.end("staged", "published")
    worker.step()
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert (stats.data["dump_seconds"], stats.data["load_seconds"]) == ([2.0], [0.5])
    assert half.get_kv_connector_stats() is None


@pytest.mark.parametrize(
    "name",
    [name for name, _ in (*COUNTERS.values(), *HISTOGRAMS.values(), *GAUGES.values())]
    + [MISSED_BLOCKS[0]],
)
def test_names_have_our_prefix_and_a_unit(name: str) -> None:
    assert name.startswith("ucm_")
    assert name.endswith(("_blocks", "_bytes", "_seconds", "_tokens", "_rows", "_per_second"))


def test_metrics_switched_off_are_neither_given_to_vllm_nor_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    half = connector(
        scheduler=rig.scheduler, miss_stats=rig.scheduler.miss_stats, exports_metrics=False
    )
    rig.admit(rig.request("a", 2 * BLOCK + 1))
    assert half.get_kv_connector_stats() is None
    assert rig.scheduler.miss_stats.take() is None, "they do not heap up"
    off = SimpleNamespace(
        kv_connector_extra_config={"storage_path": "/d", "metrics": {"enabled": False}}
    )
    config: Any = SimpleNamespace(kv_transfer_config=off)
    assert (
        UCMConnector.build_prom_metrics(config, TYPES, ["model_name", "engine"], {0: ["off", "0"]})
        is None
    )  # type: ignore[arg-type]
    off.kv_connector_extra_config = {"storage_path": "/d"}
    monkeypatch.setenv("UCM_METRICS_ENABLE", "false")
    assert (
        UCMConnector.build_prom_metrics(config, TYPES, ["model_name", "engine"], {0: ["off", "0"]})
        is None
    )  # type: ignore[arg-type]
    assert (
        REGISTRY.get_sample_value("ucm_asked_blocks_total", {"model_name": "off", "engine": "0"})
        is None
    )
