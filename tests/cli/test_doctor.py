"""``ucm doctor``: each broken set-up is found with its cause and remedy, and a good one passes."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cli_roots import Written
from click.testing import Result

from ucm.cli import checks

Json = Callable[..., dict[str, Any]]
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that serves: a known vLLM, no variables of ucm, one short measurement."""
    for name in [name for name in os.environ if name.startswith("UCM_")]:
        monkeypatch.delenv(name)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checks, "_version", lambda *names: Package("0.32.0", names[0]))
    monkeypatch.setattr(checks, "MEASURE_MOST", checks.PIECE)
    monkeypatch.setattr(checks, "SLOW", 0)
    monkeypatch.setattr(checks, "SHM_LEAST", 0)
    monkeypatch.setattr(checks, "FILES_LEAST", 0)
    monkeypatch.setattr(checks, "mount_of", lambda path: ("/", "ext4", "/dev/vda"))
    monkeypatch.setattr(os, "statvfs", lambda path: File(1 << 40, 1 << 39))
    monkeypatch.setattr(checks, "memory", lambda: checks.Memory(64 << 30, 32 << 30, "a machine"))
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"ucm": ["ucm-kv"]})
    return


@pytest.fixture
def examine(ucm: Run) -> Json:
    """Runs doctor and parses its document; the status is added as ``exit``."""

    def run(*words: object) -> dict[str, Any]:
        result = ucm("doctor", "--json", *words)
        document: dict[str, Any] = json.loads(result.stdout)
        return document | {"exit": result.exit_code}

    return run


class File:
    """The answer of statvfs."""

    def __init__(self, size: int, free: int, files: int = 1 << 20) -> None:
        self.f_frsize, self.f_blocks, self.f_bavail, self.f_bfree = 1, size, free, free
        self.f_files, self.f_favail = 1 << 20, files


class Package:
    """An installed distribution."""

    def __init__(self, version: str, name: str) -> None:
        self.version = "2.13.0" if name == "torch" else version
        self.requires = ["torch==2.13.0"]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration on a root that exists."""
    (tmp_path / "blocks").mkdir()

    def write(name: str = "ucm.yaml", **keys: Any) -> Path:
        given = {"storage_backends": str(tmp_path / "blocks"), **keys}
        path = tmp_path / name
        path.write_text(json.dumps(given))
        return path

    return write


def only(document: dict[str, Any], level: str) -> dict[str, str]:
    """The one finding of a level."""
    found = [one for one in document["findings"] if one["level"] == level]
    assert len(found) == 1, found
    return dict(found[0])


def test_a_good_set_up_has_neither_errors_nor_warnings(
    examine: Json, config: Callable[..., Path], tmp_path: Path
) -> None:
    found = examine("--config", config())
    levels = {one["level"] for one in found["findings"]}
    assert levels == {"ok", "note"}
    assert (found["exit"], found["status"]) == (0, 0)
    assert any(
        f"{tmp_path / 'blocks'}: writes" in one["text"] and "reads" in one["text"]
        for one in found["findings"]
    )
    assert any("storage_backends" in line and "file " in line for line in found["configuration"])
    assert list((tmp_path / "blocks").iterdir()) == []  # the measurement leaves nothing


def test_an_unknown_key_is_found_with_what_was_meant(
    examine: Json, config: Callable[..., Path]
) -> None:
    found = examine("--config", config(storage_capacty="1GiB"))
    assert found["exit"] == 2
    assert "storage_capacity" in only(found, "error")["text"]


def test_a_root_that_is_a_file(examine: Json, config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    found = examine("--config", config(storage_backends=str(tmp_path / "taken")))
    error = only(found, "error")
    assert found["exit"] == 2
    assert "is a file, not a directory" in error["text"]
    assert "choose another directory" in error["remedy"]
    below = config(storage_backends=str(tmp_path / "taken" / "below"))
    assert "is a file, not a directory" in only(examine("--config", below), "error")["text"]


def test_a_mount_point_of_fstab_that_is_not_mounted(
    examine: Json, config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "fstab"
    table.write_text(f"# comment\nserver:/kv {tmp_path / 'blocks'} nfs4 defaults 0 0\n")
    monkeypatch.setattr(checks, "FSTAB", table)
    found = examine("--config", config())
    error = only(found, "error")
    assert "not mounted" in error["text"]
    assert error["remedy"] == f"mount {tmp_path / 'blocks'}"


@pytest.mark.parametrize(
    ("kind", "remedy"), [("tmpfs", "store_pipeline: Cache|Posix"), ("overlay", "docker run -v")]
)
def test_a_root_that_is_lost_with_a_boot_or_a_container(
    kind: str,
    remedy: str,
    examine: Json,
    config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "mount_of", lambda path: ("/", kind, "none"))
    found = examine("--config", config())
    assert found["exit"] == 1
    assert remedy in only(found, "warning")["remedy"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (File(1 << 40, 1 << 33), "nothing is stored below 5 % free"),
        (File(1 << 30, 1 << 29), "the limit never holds"),
        (File(1 << 40, 1 << 39, files=3), "3 inodes are free"),
    ],
)
def test_a_root_without_room(
    file: File,
    words: str,
    examine: Json,
    config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: file)
    found = examine("--config", config(storage_capacity="2GiB"))
    assert words in only(found, "warning")["text"]


@pytest.mark.parametrize(
    ("number", "words", "remedy"),
    [
        (errno.EROFS, "read-only", "mount it for writing"),
        (errno.EACCES, "may not be used by", "run the engine as its owner"),
        (errno.ENOSPC, "is full", "ucm gc"),
    ],
)
def test_a_root_that_cannot_be_written(
    number: int,
    words: str,
    remedy: str,
    examine: Json,
    config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def refused(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refused)
    found = examine("--config", config())
    error = only(found, "error")
    assert words in error["text"]
    assert remedy in error["remedy"]


def test_a_root_on_a_file_system_that_refuses_direct_io(
    examine: Json, config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refused)
    found = examine("--config", config(io_direct=True))
    assert found["exit"] == 1
    assert "refuses O_DIRECT" in only(found, "warning")["text"]
    assert examine("--config", config())["exit"] == 0  # io_direct is not configured


def test_a_root_that_does_not_answer(
    examine: Json, config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    hangs = threading.Event()
    monkeypatch.setattr("ucm.cli.doctor.ANSWER_S", 0.2)
    monkeypatch.setattr(checks, "_existing", lambda *_: hangs.wait() and ())
    found = examine("--config", config())
    hangs.set()
    assert found["exit"] == 2
    # once for each check; on a busy machine the second one may be late too
    (text,) = {one["text"] for one in found["findings"] if one["level"] == "error"}
    assert "does not answer" in text


@pytest.mark.parametrize(("seconds", "where"), [(600, "behind"), (-600, "ahead of")])
def test_a_root_with_another_clock(
    examine: Json,
    config: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    where: str,
) -> None:
    now = checks.wall_ns
    monkeypatch.setattr(checks, "wall_ns", lambda: now() + seconds * 10**9)
    found = examine("--config", config())
    assert found["exit"] == 1
    text = only(found, "warning")["text"]
    shown = re.search(rf"is (\d+) seconds {where} this machine's", text)
    assert shown, text
    assert 540 < int(shown[1]) <= 600, "less what the write took"
    assert "synchronise" in only(found, "warning")["remedy"]


def test_a_cache_larger_than_the_memory(
    examine: Json, config: Callable[..., Path], vllm: dict[str, Any]
) -> None:
    small = config(store_pipeline="Cache|Posix", cache_size="40GiB")
    found = examine("--config", small)
    assert "more than the memory that is free now" in only(found, "warning")["text"]
    found = examine("--config", small, "--", "m", "--tensor-parallel-size=2")
    assert any(
        "larger than the memory of a machine: cache_size 80.0 GiB" in one["text"]
        for one in found["findings"]
        if one["level"] == "error"
    )


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(checks, "CGROUPS", tmp_path)
    found = checks.memory()
    assert (found.total, found.free) == (1048576, 48576)
    assert "container" in found.bound


def test_little_shared_memory_and_few_descriptors(
    examine: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SHM_LEAST", 1 << 60)
    monkeypatch.setattr(checks, "FILES_LEAST", 1 << 60)
    found = examine()
    texts = [one["remedy"] for one in found["findings"] if one["level"] == "warning"]
    assert found["exit"] == 1
    assert any("--shm-size" in text for text in texts)
    assert any("ulimit -n" in text for text in texts)


def test_expandable_segments(examine: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    warning = only(examine(), "warning")
    assert "expandable_segments" in warning["text"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert examine()["exit"] == 0


def test_an_old_vllm(examine: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda *names: Package("0.9.2", names[0]))
    found = examine()
    assert found["exit"] == 2
    assert "vLLM 0.9.2" in only(found, "error")["text"]


def test_a_torch_that_vllm_was_not_built_with(
    examine: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Package("0.32.0", "vllm")
    older.requires = ["torch == 2.10.0; platform_system != 'Darwin'"]
    monkeypatch.setattr(
        checks, "_version", lambda *names: Package("", "torch") if names[0] == "torch" else older
    )
    assert only(examine(), "warning")["remedy"] == "pip install torch==2.10.0"


def test_another_distribution_named_ucm(examine: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"ucm": ["ucm-kv", "uc-manager"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: both)
    found = examine()
    assert found["exit"] == 2
    assert "pip uninstall uc-manager" in only(found, "error")["remedy"]


def test_a_server_that_does_not_answer(examine: Json, config: Callable[..., Path]) -> None:
    nowhere = config(storage_backend="redis", storage_backends=["redis://127.0.0.1:1"])
    error = only(examine("--config", nowhere), "error")
    assert error["text"].startswith("redis://127.0.0.1:1: ")
    assert "check address" in error["remedy"]


def test_a_platform_without_its_devices(
    examine: Json, config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []
    monkeypatch.setattr(checks.glob, "glob", lambda _: files)
    wanted = config(platform="cuda")
    error = only(examine("--config", wanted), "error")
    assert error["text"] == "platform is cuda, and this machine shows no accelerator"
    assert "--gpus all" in error["remedy"]
    files.append("/dev/nvidia0")
    found = examine("--config", wanted)
    assert found["exit"] == 0
    assert any("1 device files of cuda" in one["text"] for one in found["findings"])


def arguments(*words: str, **transfer: Any) -> tuple[str, ...]:
    given = {"kv_connector": "UCMConnector", "kv_role": "kv_both"} | transfer
    return ("--", "vllm", "serve", "model", "--kv-transfer-config", json.dumps(given), *words)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answer of vLLM."""
    answer = {"identity": {}, "block_tokens": 16, "why_off": ""}
    monkeypatch.setattr(checks, "ask", lambda *_: answer)
    return answer


def test_the_failure_policy_beside_another_connector(
    examine: Json, tmp_path: Path, vllm: dict[str, Any]
) -> None:
    inside = {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"storage_backends": str(tmp_path)},
    }
    outer = {"kv_connector_extra_config": {"connectors": [inside, {"kv_connector": "Nixl"}]}}
    words = arguments(kv_connector="MultiConnector", **outer)
    found = examine(*words)
    assert found["exit"] == 2
    assert '"kv_load_failure_policy": "recompute"' in only(found, "error")["remedy"]
    good = arguments(kv_connector="MultiConnector", kv_load_failure_policy="recompute", **outer)
    assert examine(*good)["exit"] == 0


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({"kv_connector": "NixlConnector"}, "the connector is NixlConnector, not ucm's"),
        ({"kv_role": "both"}, "kv_role is both"),
    ],
)
def test_a_wrong_transfer_configuration(
    transfer: dict[str, Any], words: str, examine: Json, config: Callable[..., Path], vllm: Any
) -> None:
    found = examine("--config", config(), *arguments(**transfer))
    assert found["exit"] == 2
    assert words in only(found, "error")["text"]


def test_arguments_without_ucm(examine: Json, config: Callable[..., Path], vllm: Any) -> None:
    found = examine("--config", config(), "--", "vllm", "serve", "model")
    assert "ucm vllm-args" in only(found, "error")["remedy"]


@pytest.mark.parametrize(
    ("size", "status", "words"),
    [(16, 0, ""), (24, 2, "no multiple of vLLM's 16 tokens"), (4096, 1, "in bytes")],
)
def test_the_block_size(
    size: int, status: int, words: str, examine: Json, config: Callable[..., Path], vllm: Any
) -> None:
    found = examine("--config", config(block_size=size), *arguments())
    assert found["exit"] == status
    assert any(words in one["text"] for one in found["findings"])


def test_an_engine_that_vllm_configures_and_ucm_does_not_serve(
    examine: Json, config: Callable[..., Path], vllm: dict[str, Any]
) -> None:
    vllm["why_off"] = (
        "with VLLM_BATCH_INVARIANT the attention backend FLASHINFER gives other values"
    )
    found = examine("--config", config(), *arguments())
    assert found["exit"] == 2
    assert "FLASHINFER" in only(found, "error")["text"]


IDENTITY = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "weights": "sha256:1",
    "model_config": {"lora": {}},
    "kv_groups": [{}],
    "block_tokens": 16,
    "tensor_parallel": {"kv_replicas": 1, "size": 1},
}


def of_root(root: Written, name: str, **changes: Any) -> None:
    """Gives a namespace of a root this identity."""
    path = root.path / root.namespace(name) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": IDENTITY | changes}))


def test_the_identity_beside_those_on_the_root(
    examine: Json, root: Written, vllm: dict[str, Any]
) -> None:
    root.fill("one", 1)
    of_root(root, "one", dtype="float16", tensor_parallel={"kv_replicas": 1, "size": 2})
    vllm["identity"] = {key: IDENTITY[key] for key in ("architecture", "dtype", "tensor_parallel")}
    extra = {"storage_backends": str(root.path)}
    found = examine(*arguments(kv_connector_extra_config=extra))
    warning = only(found, "warning")
    assert found["exit"] == 1
    assert 'dtype is "bfloat16" here and "float16" there' in warning["text"]
    assert "tensor_parallel.size is 1 here and 2 there" in warning["text"]
    assert "--dtype" in warning["remedy"]
    assert "--tensor-parallel-size" in warning["remedy"]
    of_root(root, "one")
    assert examine(*arguments(kv_connector_extra_config=extra))["exit"] == 0


def test_prefill_and_decode_of_one_model_with_other_settings(examine: Json, root: Written) -> None:
    root.fill("one", 1)
    root.fill("two", 1)
    of_root(root, "one")
    of_root(root, "two", model_config={"lora": {"dtype": "float32"}})
    warning = only(examine("--root", root.path), "warning")
    assert "share no blocks" in warning["text"]
    assert "LoRA" in warning["remedy"]
    of_root(root, "two", weights="sha256:2")  # another model
    assert examine("--root", root.path)["exit"] == 0


def test_a_peer_with_another_salt(
    examine: Json, config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("a" * 64)
    (tmp_path / "key").chmod(0o600)
    ours, theirs = config(), config("peer.yaml", tenant_key_file=str(tmp_path / "key"))
    found = examine("--config", ours, "--peer", theirs)
    assert found["exit"] == 2
    assert "tenant_key_file differs" in only(found, "error")["text"]
    assert examine("--config", ours, "--peer", config("same.yaml"))["exit"] == 0


def test_the_checklist_names_what_a_machine_cannot_check(
    ucm: Run, examine: Json, config: Callable[..., Path]
) -> None:
    found = examine("--production", "--config", config())
    listed = [one for one in found["findings"] if one["area"] == "checklist"]
    assert len(listed) == 11
    assert found["exit"] == 0
    off = config("off.yaml", metrics={"enabled": False}, log={"level": "DEBUG"})
    found = examine("--production", "--config", off)
    assert {one["remedy"] for one in found["findings"] if one["level"] == "warning"} == {
        "metrics.enabled: true",
        "log.level: INFO",
    }
    assert "the cache will work" in ucm("doctor", "--config", config()).stdout


def test_a_place_that_does_not_exist_was_not_measured(
    examine: Json, config: Callable[..., Path], tmp_path: Path
) -> None:
    absent = config(storage_backends=str(tmp_path / "absent"))
    assert examine("--config", absent)["exit"] == 0
    found = examine("--production", "--config", absent)
    warning = only(found, "warning")
    assert found["exit"] == 1
    assert "does not exist yet" in warning["text"]
    assert "was not measured" in warning["text"]
    texts = {one["text"] for one in found["findings"] if one["area"] == "checklist"}
    assert "every place of blocks: see store above" in texts
    texts = {one["text"] for one in examine("--production")["findings"]}
    assert "every place of blocks: not checked" in texts  # no configuration names one


def test_the_table_of_symptoms(ucm: Run, examine: Json) -> None:
    found = examine("--symptoms")
    assert len(found["symptoms"]) >= 5
    assert all(all(one.values()) for one in found["symptoms"])
    shown = ucm("doctor", "--symptoms").stdout
    assert all(text in shown for one in found["symptoms"] for text in one.values())
