"""Every key of every sample of the original's documents works, has one warning, or is refused with
a message.

The test finds out which of the three: it removes the key, or changes its value, and compares the
results. A key *works* if a value of it changes the core's description or the connector's keys.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from config_cases import FIXTURES, REPOSITORY, shape

from ucm.config import UcmConfig, parse
from ucm.config.loading import algorithm_of
from ucm.config.model import flatten
from ucm.config.sparse import AlgorithmConfig, BlendConfig
from ucm.errors import ConfigError, UcmError

pytest.importorskip("ucm._core")
pytest.importorskip("torch")  # what a selector makes of its keys needs it

Sample = dict[str, Any]
Path = tuple[str | int, ...]

#: Values that are tried for a text, beside what can be made from the text itself.
WORDS = (
    "WARNING",
    "posix",
    "pc",
    "empty",
    "lru",
    "s3fifo",
    "sha256",
    "host",
    "UcmPosixStore",
    "UcmPcStore",
    "/other",
)
#: Keys of a store in addition to its configuration.
SIZES = {"tensor_size": 4096, "shard_size": 4096, "block_size": 4096, "identity": "x"}


def samples() -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for sample in yaml.safe_load((FIXTURES / "samples.yaml").read_text()):
        found[sample["name"]] = {
            key: sample[key] for key in ("config", "environment") if key in sample
        }
    for file in sorted(FIXTURES.glob("[a-h]_*")):
        found[file.name] = {
            "environment" if "environment" in file.name else "config": shape(file.name)
        }
    return found


SAMPLES = samples()


def keys_read() -> set[str]:
    """Dotted keys of the configuration that code outside of it reads, as ``config.<key>`` or
    ``self._config.<key>``."""
    package = REPOSITORY / "python" / "ucm"
    read = set()
    for file in package.rglob("*.py"):
        if (package / "config") in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id == "self" and parts[:1] == ["_config"]:
                node, parts = ast.Name("config"), parts[1:]
            if parts and isinstance(node, ast.Name) and node.id == "config":
                read |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return read


READ = keys_read()


@dataclass
class Judgement:
    refusals: frozenset[str]
    warnings: frozenset[str]
    effect: Any = None


def judged(sample: Sample) -> Judgement:
    try:
        config = parse(sample.get("config"), sample.get("environment", {}))
    except ConfigError as error:
        return Judgement(frozenset([str(error)]), frozenset())
    assert len(set(config.warnings)) == len(config.warnings)
    engine = {key: value for key, value in flatten(config) if key in READ}
    stores = [told(one) for one in (config, *config.alternatives)]
    try:
        chosen = selected(config)
    except ConfigError as error:  # keys that do not fit the shape of the KV
        return Judgement(frozenset([str(error)]), frozenset())
    return Judgement(
        frozenset(config.problems), frozenset(config.warnings), (engine, stores, chosen)
    )


def selected(config: UcmConfig) -> Any:
    """The selectors' host with the keys of the algorithm, for blocks of 16 tokens; the keys of
    Blend, all of which it reads."""
    from ucm.sparse.policy import method_of
    from ucm.sparse.selector import Geometry

    settings = config.sparse.settings
    if isinstance(settings, BlendConfig):
        return settings
    if not isinstance(settings, AlgorithmConfig):
        return None
    method = method_of(settings, Geometry(block_size=16, kv_heads=2, head_dim=64))
    return type(method.selector), vars(method.selector), method.policy


def told(config: UcmConfig) -> Any:
    """The core's description of the configured store."""
    from ucm.store.factory_v1 import UcmConnectorFactoryV1

    try:
        store: Any = UcmConnectorFactoryV1.resolve(
            config.ucm_connector_name, config.ucm_connector_module_path
        )
        given = config.store_config() | SIZES
        return store._read(given).setup() if hasattr(store, "_read") else given
    except UcmError:
        return None  # it is refused


def leaves(value: Any, above: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*above, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from leaves(item, (*above, number))
    else:
        yield above


def value_at(sample: Sample, path: Path) -> Any:
    found: Any = sample
    for step in path:
        found = found[step]
    return found


def without(sample: Sample, *paths: Path) -> Sample:
    changed = copy.deepcopy(sample)
    for path in sorted(paths, key=len, reverse=True):
        del value_at(changed, path[:-1])[path[-1]]
    return changed


def others(value: Any) -> list[Any]:
    """Other values than this one, of which some may be wrong."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value + 1]
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return ["false" if value.lower() == "true" else "true"]
    if isinstance(value, str) and value.isdigit():
        return [str(int(value) * 2)]
    return [f"{value}2", *WORDS] if isinstance(value, str) else [WORDS[-1]]


def changed(sample: Sample, path: Path) -> Iterator[Judgement]:
    """The sample with other values of one key, as far as they are accepted."""
    for other in variants(sample, path):
        found = judged(other)
        if found.effect is not None:
            yield found


def variants(sample: Sample, path: Path) -> Iterator[Sample]:
    for value in others(value_at(sample, path)):
        other = copy.deepcopy(sample)
        value_at(other, path[:-1])[path[-1]] = value
        yield other


def is_refused(sample: Sample, path: Path, whole: Judgement) -> bool:
    """True if a refusal names this key or its section, or disappears with the key or its value."""
    steps = [str(step) for step in path[1:]]
    names = [*steps, *filter(None, map(algorithm_of, steps))]
    if any(
        re.search(rf"\b{re.escape(name)}\b(?![\[.])", refusal)
        for refusal in whole.refusals
        for name in names
    ):
        return True
    gone = [judged(without(sample, path)), *changed(sample, path)]
    return any(found.effect is not None and whole.refusals - found.refusals for found in gone)


def is_part_of_refused(sample: Sample, path: Path, whole: Judgement) -> bool:
    """True if a refusal disappears with the key's whole section (such as a store that is not
    built)."""
    gone = [judged(without(sample, path[:length])) for length in range(2, len(path))]
    return any(found.effect is not None and whole.refusals - found.refusals for found in gone)


def is_warned_about(sample: Sample, path: Path, whole: Judgement) -> bool:
    """True if exactly one warning disappears with this key or its section, and names it."""
    for length in range(len(path), 1, -1):
        rest = judged(without(sample, path[:length]))
        gone = whole.warnings - rest.warnings if rest.effect is not None else ()
        if naming := [text for text in gone if str(path[length - 1]) in keys_of(text)]:
            assert len(naming) == 1, f"{path}: {naming}"
            return True
    return False


def keys_of(warning: str) -> set[str]:
    """The keys that a warning quotes, without their sections."""
    words = re.findall(r'"([^"]+)"', warning) + re.findall(r"environment (\w+)", warning)
    return {word.rpartition(".")[2].partition(":")[0] for word in words}


def works(sample: Sample, path: Path) -> bool:
    """True if it is required, or another value of it makes a difference."""
    whole = judged(sample)
    gone = judged(without(sample, path))
    if gone.effect != whole.effect or gone.refusals - whole.refusals:
        return True
    return any(
        found.effect != whole.effect and found.refusals <= whole.refusals
        for found in changed(sample, path)
    )


def outcome(sample: Sample, path: Path) -> str:
    whole = judged(sample)
    if is_refused(sample, path, whole):
        return "refused"
    # another part is wrong: check this key after its correction
    if whole.effect is None:
        right = [
            other
            for at in leaves(sample)
            for other in [*variants(sample, at), without(sample, at)]
            if judged(other).effect is not None and path in set(leaves(other))
        ]
        assert right, f"{whole.refusals} says of no key what is wrong"
        sample = min(right, key=lambda other: len(judged(other).refusals))
        whole = judged(sample)
    if is_warned_about(sample, path, whole):
        return "warned"
    if works(sample, path) or works(alone(sample, path), path):
        return "works"
    return "refused" if is_part_of_refused(sample, path, whole) else "silent"


def alone(sample: Sample, path: Path) -> Sample:
    """The sample with this key only, or with its list, in case another key has the same effect."""
    depth = next((place for place, step in enumerate(path) if isinstance(step, int)), len(path))
    found = value_at(sample, path[:depth])
    for step in reversed(path[:depth]):
        found = {step: found}
    assert isinstance(found, dict)
    return found


@pytest.fixture(autouse=True)
def beside_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_key_of_a_sample_is_silent(name: str) -> None:
    sample = SAMPLES[name]
    found = {".".join(map(str, path[1:])): outcome(sample, path) for path in leaves(sample)}
    assert found
    assert [key for key, what in found.items() if what == "silent"] == []


def test_all_three_happen_and_a_key_that_nobody_reads_would_be_found() -> None:
    sample = {
        "config": {
            "storage_path": "/d",
            "min_hit_tokens": 3,
            "stream_number": 8,
            "use_layerwise": True,
        }
    }
    found = {path[1]: outcome(sample, path) for path in leaves(sample)}
    assert found == {
        "storage_path": "works",
        "min_hit_tokens": "works",
        "stream_number": "warned",
        "use_layerwise": "refused",
    }
    off = {
        "config": {
            "storage_path": "/d",
            "sparse": {"enabled": False, "config": {"ratio": 0.2}, "type": "GSA"},
        }
    }
    # enabled: false is intended
    assert outcome(off, ("config", "sparse", "config", "ratio")) == "silent"


@pytest.mark.parametrize(
    ("config", "environment", "sentence"),
    [
        ({"ReRoPE": {}}, {}, "sparse.type: ReRoPE chooses no blocks"),
    ],
)
def test_an_algorithm_at_the_top_that_is_not_built_is_refused(
    config: dict[str, Any], environment: dict[str, str], sentence: str
) -> None:
    assert sentence in "; ".join(parse({"storage_path": "/d", **config}, environment).problems)


@pytest.mark.parametrize(
    ("config", "environment", "algorithm"),
    [
        ({"GSA": {"topk_ratio": 0.3}}, {}, "GSA"),
        ({"ESA": {}, "GSA": {}}, {}, "ESA"),
        ({"ESA": {}}, {"UCM_SPARSE_TYPE": "GSA"}, "GSA"),
    ],
)
def test_an_algorithm_at_the_top_means_that_it_is_wanted(
    config: dict[str, Any], environment: dict[str, str], algorithm: str
) -> None:
    sparse = parse({"storage_path": "/d", **config}, environment).sparse
    assert (sparse.enabled, sparse.type) == (True, algorithm)
    assert isinstance(sparse.settings, AlgorithmConfig) and sparse.settings.algorithm == algorithm


def test_an_algorithm_at_the_top_may_be_switched_off() -> None:
    assert (
        parse(
            {"storage_path": "/d", "GSA": {"topk_ratio": 0.3}}, {"ENABLE_SPARSE": "false"}
        ).sparse.settings
        is None
    )


def test_the_build_flag_alone_does_not_refuse_the_start() -> None:
    config = parse({"storage_path": "/d"}, {"ENABLE_SPARSE": "true"})
    assert config.problems == ()
    assert config.sparse.enabled is False
    (warning,) = config.warnings
    assert "ENABLE_SPARSE" in warning
    assert "UCM_SPARSE_TYPE" in warning
    named = parse({"storage_path": "/d"}, {"ENABLE_SPARSE": "true", "UCM_SPARSE_TYPE": "GSA"})
    assert named.sparse.enabled is True


def test_metrics_that_are_exported_are_not_said_to_be_missing() -> None:
    environment = {"UCM_METRICS_ENABLE": "true", "UCM_METRICS_PORT": "9100"}
    assert parse({"storage_path": "/d"}, environment).warnings == ()
