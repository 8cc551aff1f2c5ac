"""``ucm doctor``: checks of the arguments of ``vllm serve``, and of the identity that an engine
with them would have beside those on a root.

vLLM runs in a process of its own (:func:`probe`): it takes seconds to import, prints, and may end
its process. It makes the configuration of the engine and loads no weights, so the fields of the
identity that need the layers of the model, and the digest of its weights, are not compared.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ucm.cli.findings import Finding, error, note, ok, warning
from ucm.cli.terminal import short
from ucm.errors import ConfigError

#: Seconds that vLLM has to make a configuration.
PROBE_S = 180.0
#: Names of ucm's connectors.
OURS = frozenset({"UCMConnector", "UCMDirectConnector", "UCMBlendConnector"})
_TRANSFER = "--kv-transfer-config"
#: Fields of an identity that need the layers of a model, or all of its weights.
_OF_LAYERS = frozenset({"attention_backend", "kv_dtype", "kv_groups", "kv_layout", "kv_packing"})
_UNKNOWN = frozenset({*_OF_LAYERS, "weights"})

#: What to do about a field that differs, by the beginning of its name.
_REMEDIES = (
    ("weights", "the files of the weights differ: use the same revision and files"),
    ("tensor_parallel", "use the same --tensor-parallel-size"),
    ("world_size", "use the same --tensor-parallel-size and --pipeline-parallel-size"),
    ("pipeline_parallel", "use the same --pipeline-parallel-size"),
    ("decode_context_parallel", "use the same --decode-context-parallel-size"),
    ("dtype", "use the same --dtype"),
    ("kv_dtype", "use the same --kv-cache-dtype"),
    ("model_config.lora", "use the same LoRA arguments (--lora-dtype, --lora-target-modules)"),
    ("model_config", "use the same model, --quantization and --hf-overrides"),
    ("position", "use the same --hf-overrides and --max-model-len"),
    ("block_tokens", "use the same --block-size"),
    ("attention_backend", "use the same --attention-backend, and the same build of vLLM"),
    ("kv_", "use the same build of vLLM on the same kind of processor or device"),
    ("architecture", "another model: its blocks are separate, as they should be"),
)


def remedy_of(key: str) -> str:
    """What to do about a field of the identity that differs."""
    return next((text for start, text in _REMEDIES if key.startswith(start)), "use the same value")


@dataclass
class Arguments:
    """The arguments of ``vllm serve``, as far as they are read without vLLM."""

    words: list[str] = field(default_factory=list)
    transfer: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, words: Sequence[str]) -> Arguments:
        """From a command line, with or without ``vllm serve`` at its beginning. Raises
        :class:`~ucm.errors.ConfigError` for a transfer configuration that is no JSON object."""
        found = cls(list(words[2:] if list(words[:2]) == ["vllm", "serve"] else words))
        if found.words and not found.words[0].startswith("-"):
            found.words.insert(0, "--model")
        for at, word in enumerate(found.words):
            name, given, value = word.partition("=")
            if name != _TRANSFER:
                continue
            text = value if given else "".join(found.words[at + 1 : at + 2])
            try:
                transfer = json.loads(text)
            except ValueError as failure:
                raise ConfigError(f"{_TRANSFER} is no JSON: {failure}") from None
            if not isinstance(transfer, dict):
                raise ConfigError(f"{_TRANSFER} is a JSON object, got {short(text)!r}")
            found.transfer = transfer
        return found

    def own(self) -> dict[str, Any]:
        """The transfer configuration of ucm's connector, also within a MultiConnector; empty if
        there is none."""
        if self.transfer.get("kv_connector") in OURS:
            return self.transfer
        extra = self.transfer.get("kv_connector_extra_config")
        several = extra.get("connectors") if isinstance(extra, dict) else None
        several = several if isinstance(several, list) else []
        return next(
            (one for one in several if isinstance(one, dict) and one.get("kv_connector") in OURS),
            {},
        )

    def extra(self) -> dict[str, Any]:
        """The configuration of ucm in it."""
        found = self.own().get("kv_connector_extra_config")
        return found if isinstance(found, dict) else {}

    def value(self, name: str) -> str | None:
        """The value of one argument."""
        for at, word in enumerate(self.words):
            key, given, value = word.partition("=")
            if key.replace("_", "-") == name:
                return value if given else "".join(self.words[at + 1 : at + 2])
        return None

    def ranks(self) -> int:
        """Processes of an engine that keep KV."""
        sizes = map(self.value, ("--tensor-parallel-size", "--pipeline-parallel-size"))
        return math.prod(int(size) for size in sizes if size and size.isdigit())


def transfer(arguments: Arguments) -> Iterator[Finding]:
    """Checks of ``--kv-transfer-config``."""
    outer, own = arguments.transfer, arguments.own()
    if not outer:
        yield error(
            f"the arguments have no {_TRANSFER}, so the engine does not use ucm",
            "`ucm vllm-args --config F` prints it",
        )
        return
    name = outer.get("kv_connector")
    if not own:
        remedy = '"kv_connector": "UCMConnector" (or ucm in a MultiConnector)'
        yield error(f"the connector is {name}, not ucm's", remedy)
        return
    policy = outer.get("kv_load_failure_policy")
    if own is not outer and policy != "recompute":
        yield error(
            f"beside {name} ucm stores and loads nothing: vLLM would end a request with an error"
            " when a block of its load is refused",
            f'write "kv_load_failure_policy": "recompute" beside "kv_connector": "{name}"',
        )
    elif policy not in (None, "recompute"):
        remedy = 'leave it out: ucm sets "recompute", so a failed load is computed'
        yield warning(f"kv_load_failure_policy is {policy}", remedy)
    else:
        yield ok("a load that fails is computed")
    role = own.get("kv_role")
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        yield error(f"kv_role is {role}", 'write "kv_role": "kv_both"')
    elif role == "kv_producer":
        text = "kv_role is kv_producer: with overlapping steps blocks are stored, none are loaded"
        yield warning(text, 'write "kv_role": "kv_both"')


def block_size(wanted: int | None, tokens: int) -> Iterator[Finding]:
    """The configured ``block_size`` beside the tokens of vLLM's block."""
    if wanted is None or wanted == tokens:
        yield ok(f"a block has {tokens} tokens")
    elif wanted % tokens:
        yield error(
            f"block_size is {wanted}, which is no multiple of vLLM's {tokens} tokens",
            "remove block_size from the configuration: vLLM's is used",
        )
    else:
        yield warning(
            f"block_size is {wanted}, and vLLM's block has {tokens} tokens; the engine starts only"
            " if it is the size of a block in bytes",
            "remove block_size from the configuration: vLLM's is used",
        )


def beside(known: Mapping[str, Any], identities: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """The identity of an engine, as far as it is known, beside those on a root."""
    from ucm.cli.records import differences

    same, near = list[str](), list[tuple[str, dict[str, Any]]]()
    for namespace, identity in identities.items():
        stored = {key: value for key, value in identity.items() if key in known}
        fields = differences({"here": dict(known), namespace: stored})
        if len(identity.get("kv_groups") or ()) != 1:
            fields.pop("block_tokens", None)
        fields.pop("tensor_parallel.kv_replicas", None)
        if fields:
            near.append((namespace, fields))
        else:
            same.append(namespace)
    for namespace in same:
        text = f"namespace {namespace[:8]} agrees in everything that is known before start"
        yield ok(f"{text}; weights and layers are compared at the start")
    for namespace, fields in near:
        parts = [
            f"{key} is {_shown(values, 'here')} here and {_shown(values, namespace)} there"
            for key, values in list(fields.items())[:5]
        ]
        more = f", and {len(fields) - 5} more" if len(fields) > 5 else ""
        found = note if same or "architecture" in fields else warning
        yield found(
            f"blocks of namespace {namespace[:8]} are no hits: {'; '.join(parts)}{more}",
            "; ".join(dict.fromkeys(remedy_of(key) for key in fields)),
        )


def among(identities: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """Identities on one root that have the same weights and differ all the same."""
    from ucm.cli.records import differences

    weights: dict[str, dict[str, dict[str, Any]]] = {}
    for namespace, identity in identities.items():
        weights.setdefault(str(identity.get("weights")), {})[namespace] = identity
    for one in weights.values():
        if len(one) > 1:
            fields = differences(one)
            names = ", ".join(namespace[:8] for namespace in one)
            values = "; ".join(
                f"{key} is {' or '.join(dict.fromkeys(_shown(found, name) for name in one))}"
                for key, found in list(fields.items())[:5]
            )
            yield warning(
                f"engines with the same weights share no blocks ({names}): {values}",
                "; ".join(dict.fromkeys(remedy_of(key) for key in fields)),
            )


def _shown(values: Mapping[str, Any], name: str) -> str:
    return short(json.dumps(values[name])) if name in values else "absent"


# vLLM, in a process of its own
# --------------------------------------------------------------------------------------------------


def ask(arguments: Arguments, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM makes of the arguments: ``identity`` (known fields), ``block_tokens``, ``why_off``;
    or ``error``."""
    code = "from ucm.cli.engine import probe; probe()"
    given = json.dumps({"words": arguments.words, "extra": dict(extra)})
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(  # noqa: S603 - this program itself
            [sys.executable, "-c", code],
            input=given,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"vLLM does not make a configuration within {PROBE_S:.0f} seconds"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    return found


def probe() -> None:
    """Runs in a process of its own: reads the arguments from stdin and writes one line of JSON."""
    given = json.loads(sys.stdin.read())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output is not ours
    try:
        found = _engine(given["words"], given["extra"])
    except SystemExit:
        raise
    except Exception as failure:
        found = {"error": f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"}
    answer.write(json.dumps(found) + "\n")
    answer.close()


def _engine(words: list[str], extra: dict[str, Any]) -> dict[str, Any]:
    import vllm.envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ucm.config import parse
    from ucm.integration.vllm.connector.factory import NOT_BATCH_INVARIANT, why_off
    from ucm.integration.vllm.connector.identity.engine_identity import engine_identity

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    known, _ = parser.parse_known_args(words)  # the rest is the server's
    config = EngineArgs.from_cli_args(known).create_engine_config()
    layers: Any = SimpleNamespace(kv_cache_groups=[], kv_cache_tensors=[])
    identity = engine_identity(config, layers, "")
    off = why_off(parse(extra), config, layers)
    why = off[1] if off else ""
    # Without layers only a backend that the arguments name is known.
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    name = str(getattr(backend, "name", ""))
    if vllm.envs.VLLM_BATCH_INVARIANT and name in NOT_BATCH_INVARIANT:
        why = why or f"VLLM_BATCH_INVARIANT with --attention-backend {name}: choose another one"
    return {
        "identity": {key: value for key, value in identity.items() if key not in _UNKNOWN},
        "block_tokens": config.cache_config.block_size,
        "why_off": why,
    }
