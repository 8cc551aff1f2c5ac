"""The statistics that vLLM gets through its hooks, and its metrics from them."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
from parts import BLOCK, Rig
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector
from test_transfers import Worker, dump, load
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.outputs import KVConnectorOutput

from ucm import __version__
from ucm.integration.vllm.connector import UCMConnector, UCMDirectConnector
from ucm.integration.vllm.connector.stats import TIMES, MissStats, StoreInfo, Tally, UcmStats
from ucm.metrics.names import (
    AT,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    MEMORY_NOW,
    MISSED,
    MISSED_BLOCKS,
    rows,
)
from ucm.mode import Mode
from ucm.reasons import MissReason

TYPES: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def connector(**halves: Any) -> UCMConnector:
    """A connector around halves, without the configuration of an engine."""
    made = UCMConnector.__new__(UCMConnector)
    made._scheduler, made._worker, made._miss_stats, made._off = None, None, None, None
    made._found = {}
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
    opened = half.get_kv_connector_stats()
    assert opened is not None
    info, at = sorted(opened.data, reverse=True)
    assert at == AT
    assert info.startswith(f"info.{__version__}|")
    assert info.endswith("|read-write")
    assert half.get_kv_connector_stats() is None
    rig.admit(rig.request("a", 2 * BLOCK + 1))
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert not stats.is_empty()
    del stats.data[AT]
    assert stats.data == {
        "asked": 2,
        "asked_requests": 1,
        "missed.absent": 2,
        "lookup_seconds": [0.0],
        "block_hit_rate": 0.0,
        "prefix_hit_rate": 0.0,
    }
    assert half.get_kv_connector_stats() is None
    rig.scheduler._mode.now = Mode.OFF
    switched = half.get_kv_connector_stats()
    assert switched is not None
    del switched.data[AT]
    assert switched.data == {info: 0, info.replace("read-write", "off"): 1}


def test_a_connector_that_is_off_counts_why() -> None:
    rig = Rig()
    half = connector(miss_stats=rig.scheduler.miss_stats, off=MissReason.UNSUPPORTED)
    request = rig.request("a", 3 * BLOCK)
    half.on_new_request(request)
    assert half.get_kv_connector_stats() is None
    half.request_finished(request, [])  # before it was admitted
    stats = half.get_kv_connector_stats()
    assert stats is not None
    rates = {"block_hit_rate": 0.0, "prefix_hit_rate": 0.0}
    counts = {"asked": 3, "asked_requests": 1, "missed.unsupported": 3, "requests.success": 1}
    del stats.data[AT]
    assert stats.data == counts | rates


@pytest.mark.parametrize("case", ["off", "mode", "request", "given up"])
def test_blocks_on_the_device_are_not_counted_for_a_request_without_the_cache(case: str) -> None:
    rig = Rig()
    half = connector(scheduler=rig.scheduler, miss_stats=rig.scheduler.miss_stats)
    if case == "off":
        half = connector(miss_stats=rig.scheduler.miss_stats, off=MissReason.DISABLED)
    elif case == "mode":
        rig.scheduler._mode.now = Mode.OFF
    elif case == "given up":
        rig.scheduler.failures.why = "by the test"
    params: Any = {"ucm": {"load": False, "dump": False}} if case == "request" else None
    reason = "internal" if case == "given up" else "disabled"
    total = half._miss_stats.total  # type: ignore[union-attr]
    for name, local, asked in (("a", 0, 3), ("b", 2 * BLOCK, 4), ("c", 3 * BLOCK, 4)):
        request = rig.request(name, 3 * BLOCK, params=params)
        if case in ("off", "given up"):
            half.on_new_request(request)
        for _ in range(2):  # it does not fit at once
            assert half.get_num_new_matched_tokens(request, local) == (0, False)
        for _ in range(2):
            half.update_state_after_alloc(request, rig.tables.allocate(request, 4), 0)
        half.request_finished(request, [])
        assert total.asked == asked
    assert total.missed == {reason: 4}


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


def test_counts_of_ranks_and_sides_are_aggregated_by_vllm() -> None:
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


def test_vllm_logs_and_exports_the_counts() -> None:
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


def test_of_several_api_servers_the_newest_report_counts_whichever_is_read_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM sends each report to one of them, and they share a directory of values."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    config: Any = SimpleNamespace(kv_transfer_config=None)
    for server, at, held in (("busy", 200.0, 0), ("late", 100.0, 7)):
        kind = values.MultiProcessValue(process_identifier=lambda server=server: server)
        monkeypatch.setattr(values, "ValueClass", kind)
        own = CollectorRegistry()
        types: Any = {each: functools.partial(each, registry=own) for each in TYPES}
        metrics = UCMConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
        assert metrics is not None
        metrics.observe({AT: at, f"{MEMORY_NOW}gpu.scheduler": held}, 0)
    both = CollectorRegistry()
    MultiProcessCollector(both)
    labels = {"engine": "0", "location": "gpu", "side": "scheduler"}
    assert both.get_sample_value("ucm_memory_usage_bytes", labels) == 0


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


def test_the_first_stored_and_the_first_loaded_blocks_have_a_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then a summary a minute, if there is anything new."""
    stats = MissStats(BLOCK, 0.0)
    with caplog.at_level("INFO", "ucm"):
        stats.dumped(0, 3)
        stats.loaded(stats.total, 0)
        stats.offered(stats.total, 0)
        assert not caplog.records
        stats.offered(stats.total, 5)
        for blocks in (5, 7):
            stats.dumped(blocks, 0)
            stats.loaded(stats.total, blocks + 1)
        first = [record.getMessage() for record in caplog.records]
        caplog.clear()
        stats.summary(60.0, 1 << 20)
        stats.summary(120.0, 1 << 20)
    assert first == [
        f"the first blocks go to the store: 5 blocks, {5 * BLOCK} tokens",
        f"the first blocks are stored: 5 blocks, {5 * BLOCK} tokens can be loaded now",
        f"the first load: 6 blocks, {6 * BLOCK} tokens were not computed",
    ]
    (summary,) = [record.getMessage() for record in caplog.records]
    assert "12 published (12.0 MiB), 3 not" in summary


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


def test_the_worker_reports_the_time_of_transfers() -> None:
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
    assert stats.data["dump_gbps"] == stats.data["published_bytes"] / 2.0 / 1e9
    assert stats.data["load_gbps"] == stats.data["loaded_bytes"] / 0.5 / 1e9
    assert half.get_kv_connector_stats() is None


@pytest.mark.parametrize(
    "name",
    [name for name, _ in (*COUNTERS.values(), *HISTOGRAMS.values(), *GAUGES.values())]
    + [MISSED_BLOCKS[0]],
)
def test_names_have_our_prefix_and_a_unit(name: str) -> None:
    assert name.startswith("ucm_")
    assert name.endswith(
        ("_blocks", "_bytes", "_seconds", "_tokens", "_rows", "_per_second", "_requests")
    )


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


def exported(name: str, **extra: Any) -> Any:
    """The metrics of a model of this name, in the process's registry."""
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {})
    )
    made = UCMConnector.build_prom_metrics(
        config, TYPES, ["model_name", "engine"], {0: [name, "0"]}
    )
    assert made is not None
    return made


def families(model: str) -> set[str]:
    """Names of the series with a sample of this model."""
    return {
        sample.name
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.labels.get("model_name") == model and sample.name.startswith("ucm_")
    }


def test_the_names_of_the_seeds_have_the_values_of_ours() -> None:
    labels = {"model_name": "named", "engine": "0"}
    exported("named").observe(
        {
            "load_seconds": [0.004, 0.7],
            "dump_seconds": [0.02],
            "block_hit_rate": 0.75,
            "prefix_hit_rate": 0.5,
            "load_gbps": 3.5,
            "dump_gbps": 1.5,
            "requests.success": 2,
            "requests.error": 1,
            "saved_prefill_seconds": 2.5,
            "memory_now.gpu.scheduler": 7,
            "memory_now.cpu.1": 8,
            "info.1.0|abc|segment|memory,posix|off": 1,
        },
        0,
    )
    by_operation = {"load": (0.704, 2), "dump": (0.02, 1)}
    for operation, (total, count) in by_operation.items():
        for name, more in (
            (f"ucm_{operation}_seconds", {}),
            (f"ucm_{operation}_latency_seconds", {}),
            ("ucm_io_latency_seconds", {"operation": operation}),
        ):
            assert sample(f"{name}_sum", **labels, **more) == pytest.approx(total)
            assert sample(f"{name}_count", **labels, **more) == count
    bounds = [
        one.labels["le"]
        for metric in REGISTRY.collect()
        for one in metric.samples
        if one.name == "ucm_io_latency_seconds_bucket"
        and one.labels["model_name"] == "named"
        and one.labels["operation"] == "load"
    ]
    assert bounds == ["0.001", "0.005", "0.01", "0.05", "0.1", "0.5", "1.0", "+Inf"]
    assert sample("ucm_cache_hit_rate", **labels, cache_type="block") == 0.75
    assert sample("ucm_kv_cache_hit_rate", **labels) == 0.75
    assert sample("ucm_cache_hit_rate", **labels, cache_type="prefix") == 0.5
    assert sample("ucm_io_throughput_gbps", **labels, operation="load") == 3.5
    assert sample("ucm_io_throughput_gbps", **labels, operation="dump") == 1.5
    assert sample("ucm_requests_total", **labels, status="success") == 2
    assert sample("ucm_requests_total", **labels, status="error") == 1
    assert sample("ucm_saved_prefill_seconds_total", **labels) == 2.5
    usage = {"location": "gpu", "side": "scheduler"}
    assert sample("ucm_memory_usage_bytes", **labels, **usage) == 7
    usage = {"location": "cpu", "side": "1"}
    assert sample("ucm_memory_usage_bytes", **labels, **usage) == 8
    info = {"version": "1.0", "identity": "abc", "layout": "segment", "tiers": "memory,posix"}
    info["mode"] = "off"
    assert sample("ucm_info", **labels, **info) == 1


def test_series_of_sparse_attention_are_there_only_where_it_is_on() -> None:
    exported("dense", storage_path="/d")
    exported("chosen", storage_path="/d", ucm_sparse_config={"ESA": {}})
    sparse = {row.name for topic, found in rows() if topic == "sparse" for row in found}
    assert not families("dense") & sparse
    assert families("chosen") & sparse == sparse


def test_every_listed_name_is_exported() -> None:
    names = {row.name: row for _, found in rows() for row in found}
    tiers = {f"tier.{key}.t": 1 for key in names_of("ucm_tier_", "counter")}
    now = {f"tier_now.{key}.t.0": 1 for key in names_of("ucm_tier_", "gauge")}
    exported("listed", storage_path="/d", ucm_sparse_config={"ESA": {}}).observe(
        tiers | now | {"memory_now.cpu.0": 1, "info.a|b|c|d|e": 1}, 0
    )
    ends = {"histogram": "_count"}
    expected = {name + ends.get(row.kind, "") for name, row in names.items()}
    assert expected <= families("listed")
    for name in families("listed") - expected:
        assert name.endswith(("_bucket", "_sum", "_created")), f"{name} is not listed"


def names_of(begin: str, kind: str) -> list[str]:
    """Keys of the series of tiers."""
    from ucm.metrics.names import TIER_COUNTERS, TIER_GAUGES

    table = TIER_COUNTERS if kind == "counter" else TIER_GAUGES
    return [key for key, series in table.items() if series.name.startswith(begin)]


def test_a_request_with_a_failed_block_is_an_error_and_the_others_a_success() -> None:
    stats = MissStats(BLOCK, 0.0)
    request: Any = SimpleNamespace(request_id="a", num_prompt_tokens=5)
    for reason in (MissReason.BAD_CHECKSUM, MissReason.ABSENT, None):
        tally = Tally()
        if reason is not None:
            stats.missed(tally, reason, 1)
        stats.ended(request, tally)
    news = stats.take()
    assert news is not None
    assert (news["requests.error"], news["requests.success"]) == (1, 2)


def test_hit_rates_count_since_the_start() -> None:
    stats = MissStats(BLOCK, 0.0)
    stats.asked(Tally(), 3, {MissReason.ABSENT: 1})
    stats.take()
    stats.asked(Tally(), 0, {MissReason.ABSENT: 2})
    news = stats.take()
    assert news is not None
    assert (news["block_hit_rate"], news["prefix_hit_rate"]) == (0.5, 0.5)
    assert (news["asked_requests"], "hit_requests" in news) == (1, False)


def test_saved_seconds_are_those_of_computing_loaded_tokens() -> None:
    speeds: dict[str, float] = {}
    stats = MissStats(BLOCK, 0.0, lambda: speeds)
    stats.loaded(Tally(), 2)
    assert "saved_prefill_seconds" not in (stats.take() or {}), "the speed is not known"
    speeds["prefill_tokens_per_second"] = BLOCK / 2
    stats.loaded(Tally(), 3)
    news = stats.take()
    assert news is not None
    assert news["saved_prefill_seconds"] == 6.0


def test_the_store_in_use_replaces_the_one_before() -> None:
    info = StoreInfo()
    assert info.take("") == {}
    assert info.take("a|b|c|d") == {"info.a|b|c|d": 1}
    assert info.take("a|b|c|d") == {}
    assert info.take("a|e|c|d") == {"info.a|b|c|d": 0, "info.a|e|c|d": 1}
    assert info.take("") == {"info.a|e|c|d": 0}
