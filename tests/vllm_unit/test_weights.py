"""The digest of the weights: what it sees, what it ignores, and when it says that it does not
know."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ucm.errors import ConfigError, UnsupportedError
from ucm.integration.vllm.connector import stores
from ucm.integration.vllm.connector.identity import weights
from ucm.integration.vllm.connector.identity.weights import (
    MEMORY_NAME,
    WeightsDigest,
    WeightSource,
    WeightsState,
    find_weight_files,
    hash_file,
    weight_source,
)
from ucm.integration.vllm.connector.stores import ROOT_MARKER
from ucm.mode import state_directory

#: The first import of vLLM takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)

Clock = Callable[[], int]
LONG = 60.0


def digest_of(
    model: Path, mode: str = "full", root: Path | None = None, **args: Any
) -> WeightsDigest:
    """A finished digest of a model that an engine is about to load now."""
    args.setdefault("since_ns", 1 << 62)
    digest = WeightsDigest(WeightSource(str(model)), mode, str(root) if root else None, **args)
    assert digest.wait(LONG).kind != "pending"
    return digest


def text_of(model: Path, mode: str = "full", root: Path | None = None, **args: Any) -> str:
    state = digest_of(model, mode, root, **args).state
    assert state.kind == "known", state
    return state.text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store's root."""
    path = tmp_path / "root"
    path.mkdir()
    (path / ROOT_MARKER).write_text("{}")
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content was read, in any order."""
    names: list[str] = []

    def spy(path: str, *args: Any) -> Any:
        names.append(os.path.basename(path))
        return hash_file(path, *args)

    monkeypatch.setattr(weights, "hash_file", spy)
    return names


def test_a_root_that_does_not_answer_is_not_waited_for(
    engines: Any, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "ANSWER_S", 0.1)
    model = engines.make_model(tmp_path / "m")
    right = text_of(model)
    memo = root / MEMORY_NAME
    os.mkfifo(memo)  # opening it to read waits for a writer
    try:
        for _ in range(stores.MOST_HANGING + 1):
            assert text_of(model, root=root) == right
    finally:
        for _ in range(2 * stores.MOST_HANGING):  # each time those go on that wait by now
            with contextlib.suppress(OSError):
                os.close(os.open(memo, os.O_WRONLY | os.O_NONBLOCK))


def test_without_a_root_digests_are_remembered_in_the_state_directory(
    engines: Any, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCM_STATE_DIR", str(tmp_path / "deep" / "state"))
    model = engines.make_model(tmp_path / "m")
    where, later = (
        Path(str(state_directory())),
        {"now_ns": lambda: time.time_ns() + 10**11},
    )
    first = text_of(model, root=where, **later)
    assert hashed
    hashed.clear()
    assert (text_of(model, root=where, **later), hashed) == (first, [])
    assert where.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("UCM_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory() == str(tmp_path / "ucm")
    monkeypatch.setenv("XDG_STATE_HOME", "here")  # the standard has such a one ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_directory() == str(tmp_path / "home" / ".local" / "state" / "ucm")


def test_the_text_is_the_documented_digest(engines: Any, tmp_path: Path) -> None:
    model = engines.make_model(tmp_path / "m")
    total = hashlib.sha256(b"UCMWEIGHTS")
    for file in sorted(model.glob("*.safetensors")):
        name, content = file.name.encode(), file.read_bytes()
        total.update(len(name).to_bytes(4, "little") + name + len(content).to_bytes(8, "little"))
        total.update(hashlib.sha256(content).digest())
    assert text_of(model) == f"sha256:{total.hexdigest()}"


def test_a_copy_is_the_same_and_changed_weights_are_not(engines: Any, tmp_path: Path) -> None:
    model = engines.make_model(tmp_path / "m")
    before = text_of(model)
    assert text_of(shutil.copytree(model, tmp_path / "elsewhere" / "n")) == before
    file = model / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # same path, same size
    file.write_bytes(content)
    assert text_of(model) != before


@pytest.mark.parametrize("mode", ["full", "sampled"])
def test_names_of_the_files_count(engines: Any, tmp_path: Path, mode: str) -> None:
    model = engines.make_model(tmp_path / "m")
    before = text_of(model, mode)
    (model / "model-00001-of-00002.safetensors").rename(model / "model-00003-of-00002.safetensors")
    assert text_of(model, mode) != before


def test_other_files_do_not_count(engines: Any, tmp_path: Path) -> None:
    model = engines.make_model(tmp_path / "m")
    before = text_of(model)
    for name in (
        "README.md",
        "tokenizer.json",
        "pytorch_model.bin",
        "code.py",
        "training_args.bin",
    ):
        (model / name).write_bytes(b"x")
    assert text_of(model) == before


def test_a_quantisation_file_and_allowed_code_count(engines: Any, tmp_path: Path) -> None:
    model = engines.make_model(tmp_path / "m")
    before = text_of(model)
    (model / "modeling_x.py").write_text("x = 1")
    code = WeightSource(str(model), with_code=True)
    with_code = WeightsDigest(code, since_ns=1 << 62).wait(LONG).text
    assert with_code.startswith("sha256:")
    assert with_code != before
    (model / "hf_quant_config.json").write_text("{}")
    assert text_of(model) != before


def test_sampled_says_so_and_sees_a_retrained_model(engines: Any, tmp_path: Path) -> None:
    model = engines.make_model(tmp_path / "m")
    big = model / "model-00001-of-00002.safetensors"
    big.write_bytes(bytes(8 << 20))
    before = text_of(model, "sampled")
    assert before.startswith("sampled:")
    big.write_bytes(b"\x01" * (8 << 20))
    assert text_of(model, "sampled") != before
    big.write_bytes(bytes(8 << 20) + b"\x00")
    assert text_of(model, "sampled") != before


def test_declared_weights_are_believed_without_reading(hashed: list[str]) -> None:
    digest = WeightsDigest(WeightSource("/nowhere"), "declared:release 7")
    assert digest.state == WeightsState("known", "declared:release 7")
    assert digest.value == "declared:release 7"
    assert digest.recheck().kind == "known"
    assert hashed == []


@pytest.mark.parametrize("mode", ["declared: ", "declared:", "fast", ""])
def test_a_wrong_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"identity\.weights"):
        WeightsDigest(WeightSource("/nowhere"), mode)


def test_nothing_to_read_is_off_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    digest = digest_of(tmp_path)
    assert digest.state.kind == "off"
    assert str(tmp_path) in digest.state.reason
    assert "declared:<text>" in digest.state.reason
    with pytest.raises(UnsupportedError, match="no weight file"):
        _ = digest.value


def test_a_hub_name_without_a_local_copy_is_off(tmp_path: Path) -> None:
    source = WeightSource("nobody/nothing", download_dir=str(tmp_path))
    state = WeightsDigest(source).wait(LONG)
    assert state.kind == "off"
    assert "nobody/nothing" in state.reason


def test_unreadable_weights_are_off(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(weights, "hash_file", broken)
    state = digest_of(engines.make_model(tmp_path / "m")).state
    assert state.kind == "off"
    assert "Permission denied" in state.reason


def test_files_written_after_the_engine_started_are_unknown(engines: Any, tmp_path: Path) -> None:
    model = engines.make_model(tmp_path / "m")
    newest = max(file.stat().st_ctime_ns for file in model.iterdir())
    state = digest_of(model, since_ns=newest - 1_000_000_000).state
    assert state.kind == "unknown"
    assert "after the engine started" in state.reason
    assert digest_of(model, since_ns=newest + 1_000_000_000).state.kind == "known"


def test_the_start_of_the_engine_is_that_of_its_process(tmp_path: Path) -> None:
    code = (
        "from ucm.integration.vllm.connector.identity.weights import engine_start_ns as start;"
        " print(start())"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    marks = []
    for name in ("before", "after"):
        (tmp_path / name).write_bytes(b"")
        marks.append((tmp_path / name).stat().st_ctime_ns)
        if name == "before":
            done = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=280
            )
    slack = 30_000_000  # the kernel counts a process's start in ticks of 10 ms
    assert marks[0] - slack <= int(done.stdout.split()[-1]) <= marks[1]


def test_a_change_while_the_engine_runs_makes_them_unknown_for_good(
    engines: Any, tmp_path: Path
) -> None:
    model = engines.make_model(tmp_path / "m")
    digest = digest_of(model)
    assert digest.recheck(LONG).kind == "known"
    file = model / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    replacement = tmp_path / "new"
    replacement.write_bytes(content)
    # same bytes, but it is unknown what another process loaded in between
    replacement.rename(file)
    state = digest.recheck(LONG)
    assert state.kind == "unknown"
    assert file.name in state.reason
    assert digest.recheck(LONG) == state
    with pytest.raises(UnsupportedError, match="changed"):
        _ = digest.value


def test_a_file_that_changes_under_the_hash_is_unknown(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engines.make_model(tmp_path / "m")

    def meddle(path: str, *args: Any) -> Any:
        with open(path, "ab") as file:
            file.write(b"!")
        return hash_file(path, *args)

    monkeypatch.setattr(weights, "hash_file", meddle)
    assert digest_of(model).state.kind == "unknown"


def test_samples_are_64_pieces_of_64_kib(tmp_path: Path) -> None:
    file, read = tmp_path / "m.safetensors", list[int]()
    with file.open("wb") as made:
        made.truncate(64 << 20)
    hash_file(str(file), True, read.append)
    assert read == [64 << 10] * 64


def test_hash_file_notices_a_file_cut_short_or_replaced(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(10 << 20))

    def cut(_: int) -> None:
        os.truncate(file, 5 << 20)

    with pytest.raises(weights.FileChangedError):
        hash_file(str(file), False, cut)
    file.write_bytes(b"one")

    def replace(_: int) -> None:
        other = tmp_path / "g"
        other.write_bytes(b"two")
        other.rename(file)

    with pytest.raises(weights.FileChangedError):
        hash_file(str(file), False, replace)


def test_no_thread_that_takes_the_interpreter_has_a_lower_priority(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: list[int] = []

    def spy(path: str, *args: Any) -> Any:
        found = hash_file(path, *args)
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return found

    monkeypatch.setattr(weights, "hash_file", spy)
    assert digest_of(engines.make_model(tmp_path / "m")).state.kind == "known"
    assert set(seen) == {usual}


def test_pending_until_the_hash_is_done(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slow(path: str, *args: Any) -> Any:
        assert go.wait(LONG)
        return hash_file(path, *args)

    monkeypatch.setattr(weights, "hash_file", slow)
    digest = WeightsDigest(WeightSource(str(engines.make_model(tmp_path / "m"))), since_ns=1 << 62)
    assert digest.wait(0.0).kind == "pending"
    assert digest.value is None
    assert digest.recheck(0.0).kind == "pending"
    go.set()
    assert digest.wait(LONG).kind == "known"
    digest.close()
    digest.close()


def test_a_digest_is_remembered_while_nothing_touches_the_file(
    engines: Any, tmp_path: Path, root: Path, hashed: list[str], far_future: Clock
) -> None:
    model = engines.make_model(tmp_path / "m")
    before = text_of(model, root=root, now_ns=far_future)
    assert len(hashed) == 2
    assert (root / MEMORY_NAME).stat().st_mode & 0o777 == 0o600
    assert text_of(model, root=root, now_ns=far_future) == before
    assert len(hashed) == 2
    file = model / "model-00001-of-00002.safetensors"
    stat = file.stat()
    file.write_bytes(bytes(stat.st_size))
    # size and mtime as before; ctime and content are not
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert text_of(model, root=root, now_ns=far_future) != before
    assert hashed[2:] == [file.name]


def test_young_files_are_neither_remembered_nor_believed(
    engines: Any, tmp_path: Path, root: Path, hashed: list[str], far_future: Clock
) -> None:
    model = engines.make_model(tmp_path / "m")
    newest = max(file.stat().st_ctime_ns for file in model.iterdir())
    text_of(model, root=root, now_ns=lambda: newest + 1_000_000_000)
    assert not (root / MEMORY_NAME).exists()
    text_of(model, root=root, now_ns=far_future)
    assert len(hashed) == 4
    text_of(model, root=root, now_ns=lambda: newest + 1_000_000_000)
    assert len(hashed) == 6


@pytest.mark.parametrize(
    "memory",
    [
        "",
        "{}",
        "[1]",
        '{"version":1,"files":[]}',
        '{"version":2,"files":{}}',
        '{"version":1,"files":{"PATH":7}}',
        '{"version":1,"files":{"PATH":{"stamp":STAMP,"sha256":"zz"}}}',
        '{"version":1,"files":{"PATH":{"stamp":STAMP,"sha256":"00"}}}',
        '{"version":1,"files":{"PATH":{"stamp":STAMP}}}',
    ],
)
def test_a_damaged_memory_costs_a_hash_and_nothing_else(
    engines: Any, tmp_path: Path, root: Path, far_future: Clock, memory: str
) -> None:
    model = engines.make_model(tmp_path / "m")
    file = model / "model-00001-of-00002.safetensors"
    stat = file.stat()
    stamp = json.dumps([stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    (root / MEMORY_NAME).write_text(memory.replace("PATH", str(file)).replace("STAMP", stamp))
    assert text_of(model, root=root, now_ns=far_future) == text_of(model)
    assert set(json.loads((root / MEMORY_NAME).read_text())["files"]) == {
        str(f) for f in model.glob("*.safetensors")
    }


def test_nothing_is_written_below_a_root_without_a_marker_until_it_has_one(
    engines: Any, tmp_path: Path, root: Path, far_future: Clock
) -> None:
    (root / ROOT_MARKER).unlink()
    digest = digest_of(engines.make_model(tmp_path / "m"), root=root, now_ns=far_future)
    assert list(root.iterdir()) == []
    (root / ROOT_MARKER).write_text("{}")
    assert digest.recheck(LONG).kind == "known"
    assert (root / MEMORY_NAME).exists()


def test_two_processes_that_remember_at_once_keep_both(
    engines: Any, tmp_path: Path, root: Path, far_future: Clock
) -> None:
    memories = [weights.DigestMemory(str(root), far_future) for _ in range(2)]
    for index, memory in enumerate(memories):
        file = tmp_path / f"f{index}"
        file.write_bytes(b"x")
        digest, stamp = hash_file(str(file))
        memory.learn(str(file), stamp, digest, far_future())
        memory.save()
    again = weights.DigestMemory(str(root), far_future)
    for index in range(2):
        path = str(tmp_path / f"f{index}")
        assert again.recall(path, hash_file(path)[1]) == hashlib.sha256(b"x").digest()


def hub_copy(engines: Any, cache: Path, repo: str = "org/tiny") -> Path:
    """A hub cache with one snapshot, as huggingface_hub lays it out."""
    model = engines.make_model(cache / "source")
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    for file in model.iterdir():
        content = file.read_bytes()
        name = hashlib.sha256(content).hexdigest()
        (folder / "blobs" / name).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_the_name_of_a_hub_blob_is_believed(
    engines: Any, tmp_path: Path, hashed: list[str]
) -> None:
    snapshot = hub_copy(engines, tmp_path)
    source = WeightSource("org/tiny", download_dir=str(tmp_path))
    assert {os.path.dirname(file.path) for file in find_weight_files(source)} == {str(snapshot)}
    # Downloaded by this very process: content-addressed files cannot be anything else than what was
    # loaded.
    state = WeightsDigest(source, since_ns=0).wait(LONG)
    assert state.kind == "known"
    assert hashed == []
    assert state.text == text_of(tmp_path / "source")


def test_sampled_reads_hub_blobs_like_any_copy(engines: Any, tmp_path: Path) -> None:
    snapshot = hub_copy(engines, tmp_path)
    assert text_of(snapshot, "sampled") == text_of(tmp_path / "source", "sampled")


def names(source: WeightSource) -> list[str]:
    return [file.name for file in find_weight_files(source)]


def test_files_are_found_as_vllm_finds_them(tmp_path: Path) -> None:
    for name in ("a.pt", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"")
    assert names(WeightSource(str(tmp_path))) == ["a.pt"]
    for name in ("b.bin", "training_args.bin"):
        (tmp_path / name).write_bytes(b"")
    assert names(WeightSource(str(tmp_path))) == ["b.bin"]
    for name in ("model-1.safetensors", "model-2.safetensors", "spare.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert names(WeightSource(str(tmp_path))) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "spare.safetensors",
    ]
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names(WeightSource(str(tmp_path))) == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    assert names(WeightSource(str(tmp_path))) == ["consolidated.safetensors"]
    assert names(WeightSource(str(tmp_path), "safetensors")) == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    assert names(WeightSource(str(tmp_path), "pt")) == ["a.pt"]
    assert names(WeightSource(str(tmp_path / "b.bin"))) == ["b.bin"]


def test_further_directories_and_second_models_are_read_too(tmp_path: Path) -> None:
    for path in ("main/a.safetensors", "main/whisper-large-v3/b.safetensors", "text/c.safetensors"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    source = WeightSource(
        str(tmp_path / "main"),
        subdirectories=("whisper-*",),
        second_models=(("text_model_id", str(tmp_path / "text")),),
    )
    assert names(source) == [
        "a.safetensors",
        "text_model_id/c.safetensors",
        "whisper-large-v3/b.safetensors",
    ]


def test_the_source_comes_from_the_engines_configuration(engines: Any, tiny: Path) -> None:
    source = weight_source(engines.engine_config(tiny))
    assert (source.model, source.load_format, source.with_code, source.unknowable) == (
        str(tiny),
        "auto",
        False,
        "",
    )
    second = weight_source(engines.engine_config(tiny, hf_overrides={"text_model_id": "org/text"}))
    assert second.second_models == (("text_model_id", "org/text"),)


def test_the_files_of_a_drafting_model_count(engines: Any, tiny: Path, tmp_path: Path) -> None:
    """Its layers keep KV in the same blocks; one that lies in the model itself is read already."""
    config = engines.engine_config(tiny)
    assert weight_source(config).draft is None
    for name in ("a", "b"):
        engines.make_model(tmp_path / name, content=name.encode() * 100)
    sources = []
    for path, method in (
        (tiny, "mtp"),
        (tmp_path / "a", "medusa"),
        (tmp_path / "a", "eagle"),
        (tmp_path / "b", "eagle"),
    ):
        draft = engines.engine_config(path).model_config
        config.speculative_config = SimpleNamespace(
            draft_model_config=draft, method=method, draft_load_config=None
        )
        sources.append(weight_source(config))
    assert [source.draft is None for source in sources] == [True, True, False, False]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names(sources[2]) == [f"draft/{file}" for file in files] + files
    texts = {WeightsDigest(source, since_ns=1 << 62).wait(60).text for source in sources[2:]}
    assert len(texts) == 2
    assert all(texts)
    config.speculative_config.draft_load_config = SimpleNamespace(
        load_format="dummy", download_dir=None
    )
    assert "dummy" in weight_source(config).unknowable


def test_made_up_weights_are_off_unless_declared(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny, load_format="dummy")
    digest = WeightsDigest.for_engine(config, "full")
    assert digest.state.kind == "off"
    assert "dummy" in digest.state.reason
    assert WeightsDigest.for_engine(config, "declared:seed 0").value == "declared:seed 0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: setattr(config.load_config, "load_format", "tensorizer"), "tensorizer"),
        (
            lambda config: setattr(config.model_config, "model_weights", "s3://bucket/model"),
            "s3://bucket/model",
        ),
    ],
)
def test_weights_that_are_in_no_file_are_off(
    engines: Any, tiny: Path, change: Callable[[Any], None], words: str
) -> None:
    config = engines.engine_config(tiny)
    change(config)
    state = WeightsDigest.for_engine(config, "full").state
    assert state.kind == "off"
    assert words in state.reason


def test_the_whole_identity_follows_the_weights(engines: Any, tmp_path: Path) -> None:
    from ucm.integration.vllm.connector.identity.engine_identity import identity_digest

    model = engines.make_model(tmp_path / "m")
    copied = shutil.copytree(model, tmp_path / "n")
    digests = [
        identity_digest(engines.identity_of(path, text_of(path))) for path in (model, copied)
    ]
    engines.make_model(model, content=b"retrain" * 100)
    digests.append(identity_digest(engines.identity_of(model, text_of(model))))
    assert digests[0] == digests[1] != digests[2]
