"""Finds the files an engine reads its weights from, in the way vLLM does, without a network.

A local directory is read as it is; a hub name is looked up in the local cache, at the revision that
vLLM resolved. The result includes the few other files that change what is computed: a
quantisation's own configuration, and the model's code when the user allowed it to run.
"""

from __future__ import annotations

import fnmatch
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm.errors import NotFoundError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: File name patterns by load format, in the order in which vLLM tries them; the first with a match
#: wins.
_ANY = ("*.safetensors", "*.bin", "*.pt")
_PATTERNS: dict[str, tuple[str, ...]] = {
    "auto": _ANY,
    "hf": _ANY,
    "bitsandbytes": _ANY,
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "runai_streamer": ("*.safetensors",),
    "runai_streamer_sharded": ("*.safetensors",),
    "sharded_state": ("*.safetensors", "*.pt"),
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
    "gguf": ("*.gguf",),
}

#: Indices that say which safetensors files belong together, with the pattern of the files they
#: speak of.
_INDICES = (
    ("consolidated.safetensors.index.json", "consolidated*.safetensors"),
    ("model.safetensors.index.json", "*.safetensors"),
)

#: Files of a training run that look like weights and are not.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

#: Configuration that a quantisation method reads beside the weights.
_QUANTISATION = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")

#: Patterns of further directories of the same model, by architecture.
_SUBDIRECTORIES: dict[str, tuple[str, ...]] = {
    "Cosmos3EdgeForConditionalGeneration": ("[tv]*er",),
    "Cosmos3ForConditionalGeneration": ("[tv]*er",),
    "MoonshotKimiaForCausalLM": ("whisper-large-v3",),
}

#: Keys of a model's configuration that name a second model whose weights are read too.
_SECOND_MODELS = ("audio_model_id", "text_model_id")

#: Ways to draft that use a model, or parts of one, without KV.
_DRAFTS_WITHOUT_KV = ("medusa", "mlp_speculator")

_DECLARE = "set identity.weights to declared:<text>, with another text whenever the weights change"


@dataclass(frozen=True)
class WeightSource:
    """What decides which files are read."""

    model: str
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    subdirectories: tuple[str, ...] = ()
    second_models: tuple[tuple[str, str], ...] = ()
    with_code: bool = False
    #: Of the model that drafts tokens, where it has weights and KV of its own.
    draft: WeightSource | None = None
    #: Why no set of files can tell the weights, as a sentence; empty when one can.
    unknowable: str = ""


@dataclass(frozen=True)
class WeightFile:
    """A file that is part of the weights: its name within the model, and where it lies."""

    name: str
    path: str


def weight_source(vllm_config: VllmConfig) -> WeightSource:
    """Where this engine's weights come from. Reads no file."""
    model, load = vllm_config.model_config, vllm_config.load_config
    draft = draft_model(vllm_config)
    drafted = None
    if draft is not None:
        drafted = _source(
            draft, getattr(vllm_config.speculative_config, "draft_load_config", None) or load
        )
    return _source(model, load, drafted)


def models_of(vllm_config: VllmConfig) -> list[str]:
    """The models of an engine, directories or names as vLLM was given them; one that drafts too."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    drafts = [getattr(speculative, "model", None)] if speculative is not None else []
    return [str(model) for model in (vllm_config.model_config.model, *drafts) if model]


def draft_model(vllm_config: VllmConfig) -> Any:
    """vLLM's ModelConfig of a model of its own whose layers draft tokens and keep KV beside the
    main one's, or None."""
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if (
        draft is None
        or speculative.method in _DRAFTS_WITHOUT_KV
        or draft.model == vllm_config.model_config.model
    ):
        return None
    return draft


def _source(model: Any, load: Any, draft: WeightSource | None = None) -> WeightSource:
    architectures = getattr(model.hf_config, "architectures", None) or []
    second = [(key, getattr(model.hf_config, key, None)) for key in _SECOND_MODELS]
    return WeightSource(
        model=model.model,
        load_format=str(load.load_format),
        revision=model.revision,
        download_dir=load.download_dir,
        subdirectories=tuple(
            name for arch in architectures for name in _SUBDIRECTORIES.get(arch, ())
        ),
        second_models=tuple((key, str(value)) for key, value in second if value),
        with_code=bool(model.trust_remote_code),
        draft=draft,
        unknowable=_unknowable(model, load) or (draft.unknowable if draft is not None else ""),
    )


def _unknowable(model: Any, load: Any) -> str:
    load_format = str(load.load_format)
    remote = getattr(model, "model_weights", "")
    if load_format == "dummy":
        return f"load format dummy makes up weights from a seed, so they are in no file; {_DECLARE}"
    if load_format not in _PATTERNS:
        return (
            f"load format {load_format} does not read its weights from files ucm knows; {_DECLARE}"
        )
    if remote and remote != model.model:
        return (
            f"the weights are streamed from {remote}, so there is no local file to read; {_DECLARE}"
        )
    return ""


def find_weight_files(source: WeightSource) -> list[WeightFile]:
    """The files, sorted by name. Raises :class:`~ucm.errors.NotFoundError` with a sentence when
    there are none."""
    root = _locate(source.model, source.revision, source.download_dir)
    if os.path.isfile(root):
        return [WeightFile(os.path.basename(root), root)]
    found: list[WeightFile] = []
    below = [
        name
        for pattern in source.subdirectories
        for name in fnmatch.filter(os.listdir(root), pattern)
    ]
    for where in ("", *below):
        directory = os.path.join(root, where)
        prefix = f"{where}/" if where else ""
        names = _chosen(directory, source.load_format) + _companions(directory, source.with_code)
        found += [WeightFile(prefix + name, os.path.join(directory, name)) for name in names]
    for key, name in source.second_models:
        directory = _locate(name, None, source.download_dir)
        found += [
            WeightFile(f"{key}/{file}", os.path.join(directory, file))
            for file in _chosen(directory, "auto")
        ]
    if source.draft is not None:
        found += [
            WeightFile(f"draft/{file.name}", file.path) for file in find_weight_files(source.draft)
        ]
    weights = [file for file in found if not file.name.endswith((".json", ".py"))]
    if not weights:
        patterns = ", ".join(_PATTERNS[source.load_format])
        raise NotFoundError(
            f"no weight file ({patterns}) lies in {root}; {_DECLARE}",
            context={"model": source.model},
        )
    return sorted(set(found), key=lambda file: file.name)


def is_content_addressed(path: str) -> bool:
    """Whether the path leads to a hub cache's blob, whose name is made from its content."""
    real = os.path.realpath(path)
    name = os.path.basename(real)
    return (
        os.path.basename(os.path.dirname(real)) == "blobs"
        and len(name) in (40, 64)
        and _is_hex(name)
    )


def blob_sha256(path: str) -> bytes | None:
    """The SHA-256 that a hub cache uses as the name of this file, None for any other file. The name
    is not checked."""
    name = os.path.basename(os.path.realpath(path))
    return bytes.fromhex(name) if len(name) == 64 and is_content_addressed(path) else None


def _is_hex(name: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in name)


def _locate(model: str, revision: str | None, download_dir: str | None) -> str:
    if os.path.exists(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (OSError, ValueError) as error:  # the hub's own errors are both
        raise NotFoundError(
            f"{model} is neither a local path nor in the local hub cache; {_DECLARE}",
            context={"model": model, "revision": revision},
        ) from error


def _chosen(directory: str, load_format: str) -> list[str]:
    """Names of the weight files in one directory."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_file()]
    except NotADirectoryError:
        return [os.path.basename(directory)]
    except FileNotFoundError:
        return []
    patterns = _PATTERNS[load_format]
    if load_format == "auto" and fnmatch.filter(names, "consolidated*.safetensors"):
        patterns = _PATTERNS["mistral"] + patterns
    for pattern in patterns:
        matching = [name for name in fnmatch.filter(names, pattern) if name not in _NOT_WEIGHTS]
        if matching:
            return _in_index(directory, pattern, matching)
    return []


def _in_index(directory: str, pattern: str, names: list[str]) -> list[str]:
    """Without the files that an index leaves out: a second copy of the weights is not loaded."""
    for index, of in _INDICES:
        path = os.path.join(directory, index)
        if pattern == of and os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                listed = set(json.load(file).get("weight_map", {}).values())
            return [name for name in names if name in listed] or names
    return names


def _companions(directory: str, with_code: bool) -> list[str]:
    names = [name for name in _QUANTISATION if os.path.isfile(os.path.join(directory, name))]
    if with_code and os.path.isdir(directory):
        names += fnmatch.filter(os.listdir(directory), "*.py")
    return names
