"""What vLLM runs on: a platform of the table, or left alone with one sentence of the scheduler
side."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from ucm.config import parse
from ucm.config.words import PLATFORMS as WORDS
from ucm.errors import ConfigError
from ucm.integration.vllm.connector import UCMConnector
from ucm.integration.vllm.connector.factory import unmapped, why_off
from ucm.integration.vllm.connector.platforms import (
    PLATFORMS,
    Platform,
    event,
    nothing,
    platform_of,
)
from ucm.reasons import MissReason


class Unwilling:
    """Raises when it is asked."""

    @property
    def device_name(self) -> str:
        return str(1 / 0)


CPU = SimpleNamespace(device_name="cpu")
XPU = SimpleNamespace(device_name="xpu")


@pytest.mark.parametrize(
    ("wanted", "name", "word", "device"),
    [
        (None, "cpu", "host", "cpu"),
        ("host", "cpu", "host", "cpu"),
        (None, "cuda", "cuda", "cuda"),
        ("cuda", "cuda", "cuda", "cuda"),
        ("maca", "cuda", "maca", "cuda"),  # a plugin of vLLM's may call it so
        (None, "rocm", "hip", "cuda"),
        (None, "npu", "ascend", "npu"),
        (None, "musa", "musa", "musa"),
    ],
)
def test_the_platform_is_the_one_vllm_runs_on(
    wanted: str | None, name: str, word: str, device: str
) -> None:
    found = platform_of(wanted, SimpleNamespace(device_name=name))
    assert isinstance(found, Platform)
    assert (found.word, found.device) == (word, device)


@pytest.mark.parametrize(
    ("wanted", "running", "named"),
    [
        # a word does not make a processor of it
        (
            "host",
            SimpleNamespace(device_name="cuda"),
            "write cuda or maca",
        ),
        ("cuda", CPU, "write host"),
        ("ascend", CPU, "ascend"),
        (None, XPU, "xpu"),
        (None, SimpleNamespace(device_name="", device_type="tpu"), "tpu"),
        (None, SimpleNamespace(), "SimpleNamespace"),
        (None, Unwilling(), "ZeroDivisionError"),
    ],
)
def test_an_unknown_platform_is_named_and_not_cached(
    wanted: str | None, running: Any, named: str
) -> None:
    why = platform_of(wanted, running)
    assert isinstance(why, str)
    assert named in why
    assert "nothing is claimed or stored" in why


def test_every_platform_is_a_word_of_the_configuration() -> None:
    assert {platform.word for platform in PLATFORMS} == set(WORDS.values())


def test_work_is_marked_by_an_event_on_the_stream_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch has it for every accelerator: a module of its own, with streams and events."""
    recorded = []

    class Event:
        cuda_event = 0x1234

        def record(self, stream: Any) -> None:
            recorded.append((self, stream))

    module = SimpleNamespace(Event=Event, current_stream=lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    handle, owner = event("cuda_event")(torch.device("cuda:1"))
    assert handle == 0x1234
    assert recorded == [(owner, "the stream of cuda:1")]
    assert nothing(torch.device("cpu")) == (0, None)
    monkeypatch.delattr(Event, "cuda_event")
    with pytest.raises(AttributeError, match="cuda_event"):
        event("cuda_event")(torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("platform", "extra", "environ"),
    [
        (XPU, {}, {}),
        (CPU, {"platform": "cuda"}, {}),
        (CPU, {}, {"PLATFORM": "ascend"}),
        (None, {}, {"PLATFORM": "cuda"}),  # on the platform of the tests themselves
    ],
)
def test_both_sides_are_off_and_the_engine_starts(
    engines: Any,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    platform: Any,
    extra: dict[str, Any],
    environ: dict[str, str],
) -> None:
    config = engines.engine_config(
        tiny,
        kv_transfer_config={
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"storage_backends": str(tmp_path / "root"), **extra},
        },
    )
    scheduler, workers = engines.kv_configs(config)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if platform is not None:
        monkeypatch.setattr("vllm.platforms.current_platform", platform)
    off = why_off(parse(config.kv_transfer_config.kv_connector_extra_config), config, scheduler)
    assert off is not None
    assert off[0] == MissReason.UNSUPPORTED
    with caplog.at_level(logging.INFO, "ucm"):
        half = UCMConnector.create(config, KVConnectorRole.SCHEDULER, scheduler)
        worker = UCMConnector(config, KVConnectorRole.WORKER, workers[0])
    monkeypatch.undo()
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    # Variables of the tests themselves are unknown to the configuration, which says so once in a
    # process.
    ours = [record for record in warned if record.name.startswith("ucm")]
    said = [record.getMessage() for record in ours if record.name != "ucm.config"]
    assert said == [f"the cache is off: {off[1]}"]
    assert half._scheduler is None
    assert worker._worker is None
    request: Any = SimpleNamespace(
        request_id="a", num_tokens=100, num_prompt_tokens=100, prompt_token_ids=[1] * 100
    )
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, SimpleNamespace(blocks=([],)), 0)
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["missed.unsupported"] > 0
    worker.register_kv_caches({})
    worker.wait_for_save()
    assert worker.get_handshake_metadata() is None
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.word)
@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("announces", [True, False])
def test_sleep_mode_is_served_where_vllm_announces_a_sleep(
    monkeypatch: pytest.MonkeyPatch,
    platform: Platform,
    sleeps: bool,
    sparse: bool,
    announces: bool,
) -> None:
    """Dumps hold no block, and a sleep unmaps the KV of a device."""
    name = "unregister_kv_caches"
    if announces:
        monkeypatch.setattr(KVConnectorBase_V1, name, lambda _: None, raising=False)
    else:
        monkeypatch.delattr(KVConnectorBase_V1, name, raising=False)
    engine: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    why = unmapped(parse({"sparse_type": "Quest"} if sparse else {}), platform, engine)
    assert bool(why) == (sleeps and platform.word != "host" and (sparse or not announces))
    assert ("sparse attention" in why) == (bool(why) and announces)


def test_a_connector_that_is_made_as_the_original_makes_it_needs_the_layout() -> None:
    config: Any = None
    with pytest.raises(ConfigError, match="KVCacheConfig as third argument"):
        UCMConnector.create(config, KVConnectorRole.SCHEDULER)
