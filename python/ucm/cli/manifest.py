"""What a namespace stands for: its manifest read with suspicion, and how identities differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ucm.cli.remote import AnyRoot
from ucm.cli.roots import FORMAT, MANIFEST
from ucm.cli.show import short
from ucm.store.record import DTYPES, Part, Shape

#: Keys of an identity that are told in words.
_WORDS = (
    "architecture",
    "dtype",
    "kv_dtype",
    "attention_backend",
    "kv_layout",
    "position",
    "block_tokens",
    "world_size",
    "weights",
)
#: Most characters of a value in words.
_SHORT = 100


@dataclass
class Manifest:
    """A manifest: its state (``ok``, ``missing``, ``damaged``, ``newer``, ``other digest``) and
    what it says."""

    state: str
    digest: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    shapes: dict[Part, Shape] = field(default_factory=dict)

    def words(self) -> list[tuple[str, str]]:
        """The identity in words: labels first, then what tells models apart, and the shape of a
        block's parts."""
        rows = [(str(name), str(value)) for name, value in self.labels.items()]
        rows += [(key, say(self.identity.get(key))) for key in _WORDS]
        groups = self.identity.get("kv_groups")
        rows += [
            (f"kv group {at}", _group(one))
            for at, one in enumerate(groups if isinstance(groups, list) else ())
        ]
        for key in ("tensor_parallel", "pipeline_parallel", "decode_context_parallel"):
            value = self.identity.get(key)
            parallel = value.get("size") if isinstance(value, dict) else value
            if isinstance(parallel, int) and parallel > 1:
                rows.append((key, str(parallel)))
        return [(name, short(value, _SHORT)) for name, value in rows if value]


def say(value: Any) -> str:
    """A value of an identity in words; empty for what says nothing."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text}" for key, inner in value.items() if (text := say(inner)))
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(text for inner in value if (text := say(inner))))
    return "" if value is None else str(value)


def _group(group: Any) -> str:
    """A KV cache group in words: layers, heads and their size, kind."""
    if not isinstance(group, dict):
        return ""
    layers = group.get("layers")
    found = group.get("spec")
    spec: dict[str, Any] = found if isinstance(found, dict) else {}
    words = [f"{len(layers)} layers" if isinstance(layers, list) else ""]
    for key, text in (("num_kv_heads", "heads {}"), ("head_size", "head size {}"), ("dtype", "{}")):
        words.append(text.format(spec[key]) if spec.get(key) is not None else "")
    words.append(say(group.get("kind")))
    return ", ".join(word for word in words if word)


def part_name(part: Part) -> str:
    """A part as the manifest names it."""
    return f"g{part.group}p{part.pipeline_rank}t{part.tensor_rank}"


def read(root: AnyRoot, namespace: str) -> Manifest:
    """The manifest of a namespace. Never fails: what is wrong with it is its state."""
    try:
        found = root.document(namespace, MANIFEST)
    except (ValueError, OSError, RecursionError):
        return Manifest("damaged")
    if found is None:
        return Manifest("missing")
    if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
        return Manifest("damaged")
    if not isinstance(found.get("format"), int) or found["format"] > FORMAT:
        return Manifest("newer" if isinstance(found.get("format"), int) else "damaged")
    identity: dict[str, Any] = found["identity"]
    text = json.dumps(identity, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    state = "ok" if digest[:32] == namespace and found.get("digest") == digest else "other digest"
    labels = found.get("labels")
    return Manifest(
        state,
        str(found.get("digest", "")),
        identity,
        labels if isinstance(labels, dict) else {},
        _shapes(found.get("parts")),
    )


def differences(identities: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By key (dots between levels) the values of each identity, only for keys in which any two
    differ.

    A key that an identity does not have is absent there.
    """
    flat = {name: dict(_flatten(identity)) for name, identity in identities.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    missing = object()
    return {
        key: {name: values[key] for name, values in flat.items() if key in values}
        for key in keys
        if any(
            values.get(key, missing) != next(iter(flat.values())).get(key, missing)
            for values in flat.values()
        )
    }


def _flatten(value: Any, at: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        dot = f"{at}." if at else ""
        return [pair for key, inner in value.items() for pair in _flatten(inner, f"{dot}{key}")]
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        return [pair for i, inner in enumerate(value) for pair in _flatten(inner, f"{at}[{i}]")]
    return [(at, value)]


def _shapes(parts: Any) -> dict[Part, Shape]:
    """The shapes that can be understood; the others are left out, and their records verified
    without."""
    shapes = {}
    for name, entry in parts.items() if isinstance(parts, dict) else ():
        try:
            group, rest = str(name).removeprefix("g").split("p")
            pipeline, tensor = rest.split("t")
            tensors = tuple(int(size) for size in entry["tensors"])
            dtype = DTYPES.index(entry["dtype"])
            shape = Shape(tensors, int(entry["layers"]), int(entry["block_tokens"]), dtype)
            shapes[Part(int(group), int(pipeline), int(tensor))] = shape
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return shapes
