"""Before engines run. ``ucm plan`` computes the room that a workload takes in memory and on disk,
the slowest store that pays for a model, and a configuration to paste; ``ucm vllm-args`` checks a
configuration and prints the arguments of ``vllm serve`` for it; ``ucm pd-proxy`` serves vLLM's
endpoints over prefill and decode servers (:mod:`ucm.pd`).

Sizes of a plan are those of :func:`ucm.utils.estimate_storage_requirements`. Its times are
estimates: computing by the model's operations and the speed of the device, or by a measured rate;
loading by bytes and the speed of the store.

The original's arguments, ``--kv-connector`` and ``--kv-connector-config``, become the one that vLLM
has; all others are passed on as they are. ReRoPE needs a model class of ucm, and the wanted length
of a context, which ``--hf-overrides`` gives to vLLM.

The options of the proxy are the fields of :class:`ucm.pd.Settings`. The extra ``pd`` of the wheel
brings its packages, which are imported when it starts.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from ucm.cli import terminal
from ucm.cli.terminal import MissingExtra, size, url
from ucm.errors import ConfigError
from ucm.integration.vllm.early import UNROTATED
from ucm.logger import in_units
from ucm.pd import Settings

#: Stores and their usual speed in GB/s, the fastest first.
TIERS = (
    ("memory (Cache)", 20.0),
    ("NVMe disk (Posix)", 5.0),
    ("network share, 25 Gbit/s (Posix)", 2.5),
    ("network share, 10 Gbit/s (Posix)", 1.0),
    ("bucket (Object)", 0.5),
)
#: Share of the time to compute that a load may take: admission_share of the configuration.
SHARE = 0.8


@click.command()
@click.argument("model")
@click.option("--context", required=True, type=click.IntRange(1), help="Tokens of a request.")
@click.option("--concurrency", required=True, type=click.IntRange(1), help="Requests at a time.")
@click.option("--hit-rate", default=0.8, show_default=True, type=click.FloatRange(0, 1))
@click.option("--disk-gbps", type=click.FloatRange(0, min_open=True), help="GB/s of your disk.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1))
@click.option("--kv-dtype", default="auto", show_default=True, help="vLLM's --kv-cache-dtype.")
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="TP times PP.")
@click.option(
    "--tflops",
    default=400.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Speed of all devices together as it is reached, not its peak.",
)
@click.option(
    "--prefill-tps",
    type=click.FloatRange(0, min_open=True),
    help="Measured instead: ucm_prefill_tokens_per_second of an engine.",
)
@terminal.json_output
def plan(model: str, as_json: bool, **given: Any) -> None:
    """Size the stores for MODEL: a directory or file of its config.json, a name in the hub's cache,
    or billions of parameters.
    """
    document = make_plan(read_model(model), **given)
    if as_json:
        terminal.document({"command": "plan", "model": model, **document})
    else:
        _show(document)


def read_model(model: str) -> Mapping[str, Any] | float:
    """The model's configuration, or its size in billions of parameters."""
    try:
        return float(model)
    except ValueError:
        pass
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        try:
            from huggingface_hub import try_to_load_from_cache

            path = Path(str(try_to_load_from_cache(model, "config.json")))
        except (ImportError, ValueError):  # no name of the hub
            pass
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{model} is neither a number of billions, nor a config.json or a directory with one,"
            " nor in the hub's cache: download the model first, or give its billions, such as 8"
        )
    return found


def make_plan(
    model: Mapping[str, Any] | float,
    *,
    context: int,
    concurrency: int,
    hit_rate: float,
    disk_gbps: float | None,
    block_size: int,
    kv_dtype: str,
    ranks: int,
    tflops: float,
    prefill_tps: float | None,
) -> dict[str, Any]:
    """The plan, as it stands in the JSON document."""
    from ucm.utils import estimate_storage_requirements

    room = estimate_storage_requirements(model, context, concurrency, block_size, kv_dtype=kv_dtype)
    token, hits = int(room["kv_bytes_per_token"]), context * hit_rate
    operations = _operations(model, context)
    compute_s = hits / prefill_tps if prefill_tps else hits * operations / (tflops * 1e12)
    yours = [("your disk", disk_gbps)] if disk_gbps else []
    tiers = [_tier(name, speed, hits * token, compute_s) for name, speed in (*yours, *TIERS)]
    paying = [tier for tier in tiers if tier["pays"]]
    cache = max(1, math.ceil(room["recommended_memory_gb"] / ranks))
    disk = max(1, math.ceil(room["recommended_storage_gb"]))
    return {
        "bytes_per_token": token,
        "bytes_per_block": token * block_size,
        "working_set_bytes": int(room["kv_cache_size_gb"] * (1 << 30)),
        "memory_bytes": int(room["recommended_memory_gb"] * (1 << 30)),
        "disk_bytes": int(room["recommended_storage_gb"] * (1 << 30)),
        "tokens_loaded": int(hits),
        "compute_seconds": compute_s,
        "least_gbps": hits * token / (compute_s * SHARE) / 1e9 if hits else 0.0,
        "tiers": tiers,
        "slowest_that_pays": min(paying, key=lambda tier: tier["gbps"])["name"] if paying else None,
        "configuration": {
            "store_pipeline": "Cache|Posix",
            "storage_backends": "/data/ucm",
            "cache_size": f"{cache}GiB",
            "storage_capacity": f"{disk}GiB",
        },
    }


def _tier(name: str, gbps: float, loaded: float, compute_s: float) -> dict[str, Any]:
    seconds = loaded / (gbps * 1e9)
    return {
        "name": name,
        "gbps": gbps,
        "load_seconds": seconds,
        "pays": loaded > 0 and seconds <= SHARE * compute_s,
    }


def _operations(model: Mapping[str, Any] | float, context: int) -> float:
    """Operations of computing one token of a prompt, averaged over the prompt: two for each active
    parameter, and attention over half of it."""
    if isinstance(model, float):
        return 2e9 * model
    text = model.get("text_config")
    config = text if isinstance(text, dict) and "num_hidden_layers" in text else model

    def of(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name) is not None), 0)

    layers, hidden = of("num_hidden_layers", "n_layer", "num_layers"), of("hidden_size", "n_embd")
    heads = of("num_attention_heads", "n_head") or 1
    width = heads * (of("head_dim") or hidden // heads)
    shared = width * (of("num_key_value_heads") or heads) // heads
    experts = of("num_experts_per_tok")
    inner = of("intermediate_size", "n_inner") or 4 * hidden
    if experts:
        inner = experts * (of("moe_intermediate_size") or inner)
    weights = layers * (2 * hidden * (width + shared) + 3 * hidden * inner)
    return 2.0 * weights + 2.0 * layers * width * context


def _show(found: dict[str, Any]) -> None:
    terminal.pairs(
        [
            ("a token", in_units(found["bytes_per_token"])),
            ("a block", in_units(found["bytes_per_block"])),
            ("working set", in_units(found["working_set_bytes"])),
            ("memory", f"{in_units(found['memory_bytes'])}: 1.5 times, with room for transfers"),
            ("disk", f"{in_units(found['disk_bytes'])}: 10 times, for history"),
            ("least speed", f"{found['least_gbps']:.2f} GB/s: slower loads are computed instead"),
        ]
    )
    rows = []
    for tier in found["tiers"]:
        load, compute = _time(tier["load_seconds"]), _time(found["compute_seconds"])
        rows.append((tier["name"], tier["gbps"], load, compute, "yes" if tier["pays"] else "no"))
    terminal.table(("store", "GB/s", "load", "compute", "pays"), rows)
    click.echo(f"slowest store that pays: {found['slowest_that_pays'] or 'none of these'}")
    click.echo("\n# ucm.yaml; cache_size is of each rank")
    if found["tokens_loaded"] and not found["slowest_that_pays"]:
        click.echo(
            "# Computing is faster than every store at these speeds. If the engine is a CPU or a"
            " small GPU, pass --prefill-tps with a measured figure."
        )
    for key, value in found["configuration"].items():
        click.echo(f"{key}: {value}")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


# vLLM's arguments
# --------------------------------------------------------------------------------------------------

_ROLES = ("kv_both", "kv_producer", "kv_consumer")


@click.command(
    "vllm-args", context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option("--config", "file", metavar="FILE", help="The configuration file of ucm.")
@click.option("--kv-connector", "name", default="UCMConnector", show_default=True)
@click.option("--kv-connector-config", "inline", metavar="FILE|JSON", help="As in the original.")
@click.option("--role", type=click.Choice(_ROLES), default=_ROLES[0], show_default=True)
@click.option("--architecture", metavar="NAME", help="With rerope, where --model is no directory.")
@terminal.json_output
@click.argument("rest", metavar="[ARGUMENT OF VLLM]...", nargs=-1, type=click.UNPROCESSED)
def vllm_args(
    file: str | None,
    name: str,
    inline: str | None,
    role: str,
    architecture: str | None,
    as_json: bool,
    rest: tuple[str, ...],
) -> None:
    """Print the arguments of vllm serve for a configuration, after checking it.

    vllm serve MODEL $(...) loses the quotes: use eval "vllm serve MODEL $(ucm vllm-args ...)".
    """
    from ucm.config import parse

    if file and inline:
        raise click.UsageError("--config and --kv-connector-config exclude each other")
    extra: dict[str, Any] = _file(file) if file else _inline(inline) if inline else {}
    config = parse(extra if name == "UCMConnector" else {**extra, "kv_connector": name})
    config.require_built()
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    transfer = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    given = _with_overrides(rest, architecture) if config.rerope.enabled else [*rest]
    arguments = [*given, "--kv-transfer-config", json.dumps(transfer)]
    if as_json:
        terminal.document({"command": "vllm-args", "arguments": arguments})
    else:
        click.echo(shlex.join(arguments))


def _file(path: str) -> dict[str, Any]:
    return {"ucm_config_path": os.path.abspath(path)}


def _inline(given: str) -> dict[str, Any]:
    """The configuration that the original's argument holds, or the file that it names."""
    if not given.lstrip().startswith("{"):
        if not Path(given).exists():
            raise click.BadParameter(f"{given!r} is neither a file nor a JSON object")
        return _file(given)
    try:
        found = json.loads(given)
    except ValueError as error:
        raise click.BadParameter(f"--kv-connector-config is no JSON: {error}") from None
    assert isinstance(found, Mapping)  # it begins with a brace
    return dict(found)


def _with_overrides(rest: tuple[str, ...], architecture: str | None) -> list[str]:
    """vLLM's arguments with the overrides of the model's configuration that ReRoPE needs."""
    others, overrides = terminal.without(rest, "--hf-overrides")
    _, model = terminal.without(rest, "--model")
    _, length = terminal.without(rest, "--max-model-len")
    if architecture is None and model and (Path(model) / "config.json").is_file():
        read = json.loads((Path(model) / "config.json").read_text())
        architecture = str((read.get("architectures") or ["none"])[0])
    if architecture is None:
        raise ConfigError("rerope: give --architecture NAME, one of " + ", ".join(UNROTATED))
    if architecture not in UNROTATED:
        raise ConfigError(f"rerope: {architecture} is not served, only {', '.join(UNROTATED)}")
    if not (length or "").isdecimal():
        raise ConfigError(
            "rerope: give --max-model-len as a number of tokens, like 131072: the longest prompt"
            " with its answer"
        )
    found = json.loads(overrides or "{}") | {
        "architectures": [UNROTATED[architecture]],
        "max_position_embeddings": int(length or 0),
    }
    return [*others, "--hf-overrides", json.dumps(found)]


# The proxy
# --------------------------------------------------------------------------------------------------

#: Types of options by field, where the default does not say enough.
TYPES: dict[str, Any] = {
    "max_body": size,
    "prefill_from": size,
    "port": click.IntRange(0, 65_535),
    "prefill": url,
    "decode": url,
    "mixed": url,
}


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for one in reversed(fields(Settings)):
        default, kind = one.default, TYPES.get(one.name)
        if kind is None and not isinstance(default, str):
            least = click.IntRange(min=1) if isinstance(default, int) else None
            kind = least or click.FloatRange(min=0, min_open=True)
        many = isinstance(default, tuple)
        text = str(default) if kind is size else default
        command = click.option(
            f"--{one.name.replace('_', '-')}",
            type=kind,
            multiple=many,
            default=None if many else text,
            show_default=not many,
            metavar="BYTES" if kind is size else "SECONDS" if isinstance(default, float) else None,
            help=one.metadata["help"],
        )(command)
    return command


@click.command("pd-proxy")
@_options
def pd_proxy(**options: Any) -> None:
    """Serve vLLM's endpoints over servers that compute prompts and servers that produce tokens.

    All of them use one store (docs/pd.md). With --mixed it shares requests out among servers of
    both roles.
    """
    settings = Settings(**options)
    if settings.mixed and (settings.prefill or settings.decode):
        raise click.UsageError("--mixed replaces --prefill and --decode; give one or the other")
    if bool(settings.prefill) != bool(settings.decode) or not settings.decoders:
        raise click.UsageError(
            "give --prefill and --decode, at least one server of each, or --mixed"
        )
    try:
        from ucm.pd.proxy import run
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name, "ucm pd-proxy", "pd") from None
    run(settings)
