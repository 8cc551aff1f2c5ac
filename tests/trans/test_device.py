"""The choice of the device, and the names of the original."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ucmtrans
from ucm import __version__, trans
from ucm._core import TransDevice
from ucm.errors import ConfigError, InvalidInputError, UcmError, UnsupportedError

#: The original's name -> ours.
STREAM_NAMES = {
    "DeviceToHost": "device_to_host",
    "DeviceToHostAsync": "device_to_host_async",
    "DeviceToHostBatch": "device_to_host_batch",
    "DeviceToHostBatchAsync": "device_to_host_batch_async",
    "DeviceToHostGather": "device_to_host_gather",
    "DeviceToHostGatherAsync": "device_to_host_gather_async",
    "HostToDevice": "host_to_device",
    "HostToDeviceAsync": "host_to_device_async",
    "HostToDeviceBatch": "host_to_device_batch",
    "HostToDeviceBatchAsync": "host_to_device_batch_async",
    "HostToDeviceScatter": "host_to_device_scatter",
    "HostToDeviceScatterAsync": "host_to_device_scatter_async",
    "AppendCallback": "append_callback",
    "Synchronized": "synchronize",
}


def test_the_names_of_the_original_are_the_same_methods() -> None:
    for theirs, ours in STREAM_NAMES.items():
        assert getattr(trans.Stream, theirs) is getattr(trans.Stream, ours)
    for theirs, ours in {
        "Setup": "setup",
        "MakeStream": "make_stream",
        "MakeSMStream": "make_sm_stream",
    }.items():
        assert getattr(trans.Device, theirs) is getattr(trans.Device, ours)
    for what in ["DeviceBuffer", "HostBuffer"]:
        low = what.replace("Buffer", "_buffer").lower()
        for verb in ["Make", "Get"]:
            assert getattr(trans.Buffer, verb + what) is getattr(
                trans.Buffer, f"{verb.lower()}_{low}"
            )
        assert getattr(trans.Buffer, f"Make{what}s") is getattr(trans.Buffer, f"make_{low}s")
    assert trans.Buffer.RegisterHostBuffer is trans.Buffer.register_host_buffer
    assert trans.Buffer.UnregisterHostBuffer is trans.Buffer.unregister_host_buffer


def test_ucmtrans_is_the_same() -> None:
    for name in trans.__all__:
        assert getattr(ucmtrans, name) is getattr(trans, name)
    assert (trans.project, trans.version) == ("ucm", __version__)
    assert trans.commit_id and trans.build_type in {"debug", "release"}


def test_as_the_original_is_used(device: trans.Device, memory: Any) -> None:
    stream = device.MakeStream()
    pages = [device.allocate_memory(512) for _ in range(8)]
    for number, page in enumerate(pages):
        memory.write(page.address, np.full(512, number, np.uint8))
    buffers = [np.empty(512, np.uint8) for _ in range(8)]
    src = np.array([page.address for page in pages], dtype=np.uintp)
    dst = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uintp)
    stream.DeviceToHostBatch(src, dst, 512, 8)
    assert [int(buffer[-1]) for buffer in buffers] == list(range(8))
    stream.DeviceToHostAsync(int(src[3]), int(dst[0]), 512)
    stream.Synchronized()
    assert (buffers[0] == 3).all()


def test_the_platform_abstraction(device: trans.Device) -> None:
    assert trans.PlatformAbstraction is trans.Device
    there = device.allocate_memory(800)
    data, back = np.arange(100.0), np.zeros(100)
    device.h2d_transfer(data, there)
    device.d2h_transfer(there, back)
    assert (data == back).all()
    stream = device.create_stream()
    device.synchronize(stream)
    device.synchronize()
    with pytest.raises(InvalidInputError, match="smaller"):
        device.h2d_transfer(np.zeros(101), there)
    with pytest.raises(InvalidInputError, match="contiguous"):
        device.h2d_transfer(np.zeros((10, 20))[:, ::2], there)
    back.flags.writeable = False
    with pytest.raises(InvalidInputError, match="read-only"):
        device.d2h_transfer(there, back)


def test_a_device_that_is_not_open() -> None:
    device = trans.Device("host")
    calls: list[Callable[[], object]] = [
        device.make_stream,
        device.make_buffer,
        lambda: device.name,
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="setup"):
            call()
    for wrong in [-1, "0", None, 1.0, True]:
        with pytest.raises(InvalidInputError):
            device.setup(wrong)  # type: ignore[arg-type]


def test_the_platform_by_name_and_by_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PLATFORM", "simu")
    device = trans.Device()
    device.setup(3)
    assert device.name == "host"
    with pytest.raises(ConfigError, match="abacus"):
        trans.Device("abacus")
    monkeypatch.setenv("PLATFORM", "abacus")
    with caplog.at_level(logging.WARNING, "ucm.trans"):
        trans.Device()
    assert "abacus" in caplog.text


def test_without_a_name_the_log_says_what_was_taken_and_why(
    memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PLATFORM", raising=False)

    def missing(name: str) -> Any:
        if name == "host":
            return TransDevice(name)
        raise UnsupportedError(f"nothing for {name} here")

    if memory.platform not in {"host", "cuda"}:
        pytest.skip("taken by name alone")
    if memory.platform == "host":
        monkeypatch.setattr("ucm.trans.TransDevice", missing)
    device = trans.Device()
    with caplog.at_level(logging.INFO, "ucm.trans"):
        device.setup(0)
    expected = {"host": "host", "cuda": "cuda:0"}[memory.platform]
    assert device.name == expected and f"device {expected}" in caplog.text
    assert (" opened: " in caplog.text) == (memory.platform == "cuda")
    assert ("nothing for cuda:0 here" in caplog.text) == (memory.platform == "host")


def test_a_number_that_the_machine_does_not_have(soft: Any) -> None:
    with pytest.raises(UcmError, match="99"):
        trans.Device("cuda").setup(99)


def test_the_example_of_the_documentation(
    memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs/device-streams.md").read_text()
    (program,) = re.findall(r"## Streams from Python.*?```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setenv("PLATFORM", memory.platform)
    exec(compile(program, "docs/device-streams.md", "exec"), {})
    assert capsys.readouterr().out == "copied\n"


NO_GPU = """
import ctypes, sys
from ucm import trans
from ucm.errors import UnsupportedError
def plant(call):
    name, answer = call.split("=")
    ctypes.CDLL(sys.argv[1]).softcuda_fail(name.encode(), ctypes.c_uint64(1), int(answer))
plant(sys.argv[2])
try:
    trans.Device("cuda").setup(0)
except UnsupportedError as error:
    print(error)
for call in sys.argv[2:]:
    plant(call)  # a driver that was not found is asked again
device = trans.Device()
device.setup(0)
print(device.name)
"""

#: Each runtime's result without a device, in the order of the attempts.
NONE = {
    "cuda": "cuInit=100",
    "hip": "hipGetDeviceCount=100",
    "musa": "musaGetDeviceCount=100",
    "maca": "mcGetDeviceCount=100",
    "ascend": "aclrtGetDeviceCount=207004",
}


@pytest.mark.parametrize("found", [*list(NONE)[1:], "host"])
def test_a_driver_that_finds_no_device_is_as_good_as_none(soft: Any, found: str) -> None:
    none = list(NONE.values())[: [*NONE, "host"].index(found)]
    command = [sys.executable, "-c", NO_GPU, soft.library._name, *none]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, name = done.stdout.splitlines()
    assert "CUDA_ERROR_NO_DEVICE" in error and name == ("host" if found == "host" else f"{found}:0")


def test_a_driver_that_lacks_something_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> Any:
        raise UnsupportedError("too old", context={"function": "cuStreamQuery"})

    monkeypatch.delenv("PLATFORM", raising=False)
    monkeypatch.setattr("ucm.trans.TransDevice", lacks)
    with pytest.raises(UnsupportedError, match="too old"):
        trans.Device().setup(0)


FORKS = """
import ctypes, os, sys
from ucm import trans
from ucm.errors import ForkedError
if sys.argv[2] == "ucm":
    trans.Device(sys.argv[3]).setup(0)
else:
    ctypes.CDLL(sys.argv[1]).cuInit(0)  # as torch does
if os.fork() == 0:
    for platform in (sys.argv[3], None):
        try:
            trans.Device(platform).setup(0)
        except ForkedError as error:
            print(error, flush=True)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("first", ["ucm", "torch"])
def test_a_child_of_a_process_that_uses_a_device_is_told(memory: Any, first: str) -> None:
    if memory.platform == "host" or (first == "torch" and memory.platform != "cuda"):
        pytest.skip("the host survives a fork; of the others only CUDA says who began")
    command = [sys.executable, "-c", FORKS, memory.library._name, first, memory.platform]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert len(re.findall("open it in the process that uses it", done.stdout)) == 2, done.stdout
