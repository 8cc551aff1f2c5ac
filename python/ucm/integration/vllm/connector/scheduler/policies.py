"""What the configuration and a request allow: the tokens that may be loaded for it, and the blocks
of it that are offered to the store.

A client writes ``kv_transfer_params: {"ucm": {"load": false}}`` beside its prompt. A request can
only restrict what the configuration allows. Keys that are not known here may mean anything, so a
request with one does not use the cache; it is computed as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from ucm.config import UcmConfig
from ucm.config.fields import Flag, Number, Section
from ucm.integration.vllm.connector.guard import throttle
from ucm.reasons import MissReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: The section of ``kv_transfer_params`` that is ucm's.
SECTION = "ucm"
#: The original's flag for a request that is not stored; it may also stand beside the section.
SKIP_SAVE = "skip_save"
#: vLLM's flag for a request that another engine goes on with.
PRODUCER = "do_remote_decode"


class RequestKeys(Section):
    """The keys of ``kv_transfer_params.ucm``."""

    load: Flag = True
    dump: Flag = True
    skip_save: Flag = False
    max_load_tokens: Number | None = None
    # of a producer's answer, see roles.py
    wait_for: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    tokens: Number | None = None
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    chunks: Any = None  # of Blend, which reads them itself


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """What one request may do with the store."""

    max_load_tokens: int | None = None  # beyond those on the device; None: no limit
    dump: Literal["all", "prompt", "none"] = "all"
    reason: MissReason = MissReason.DISABLED  # of the blocks that are not loaded for it
    produces: bool = False  # another engine goes on with it, and waits for its prompt's blocks
    wait_for: bytes = b""  # the key of a block that its producer publishes, empty for none
    producer: str = ""  # the digest of that one's identity, empty where it is not known

    @property
    def loads(self) -> bool:
        """Whether anything may be loaded."""
        return self.max_load_tokens != 0

    @property
    def dumps(self) -> bool:
        """Whether anything may be stored."""
        return self.dump != "none"

    def dump_limit(self, request: Request) -> int:
        """Tokens of which full blocks may be stored."""
        if self.dump == "all":
            return int(request.num_tokens)
        return int(request.num_prompt_tokens) if self.dumps else 0


class RequestPolicies:
    """The policies of one engine's requests."""

    def __init__(self, config: UcmConfig) -> None:
        self._dump, self._min_dump_tokens = config.dump, config.min_dump_tokens
        self._consumer_dump, self._waits = config.consumer_dump, config.pd_wait_ms > 0

    def of(self, request: Request) -> RequestPolicy:
        """The policy of a new request. Wrong keys are logged; such a request neither loads nor
        stores."""
        params = request.kv_transfer_params
        params = params if isinstance(params, Mapping) else {}
        try:
            given = RequestKeys.model_validate(params.get(SECTION) or {})
        except ValidationError as error:
            throttle.warning(
                "request keys",
                "request %s does not use the cache, because of its kv_transfer_params: %s",
                request.request_id,
                _explained(error),
            )
            return RequestPolicy(0, "none", MissReason.UNSUPPORTED)
        skips = not given.dump or given.skip_save or params.get(SKIP_SAVE) is True
        skips = skips or request.num_prompt_tokens < self._min_dump_tokens
        skips = skips or (given.wait_for is not None and not self._consumer_dump)
        return RequestPolicy(
            given.max_load_tokens if given.load else 0,
            "none" if skips else self._dump,
            produces=params.get(PRODUCER) is True,
            wait_for=bytes.fromhex((self._waits and given.wait_for) or ""),
            producer=given.identity or "",
        )


def _explained(error: ValidationError) -> str:
    """The first wrong key, without its value."""
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join([SECTION, *map(str, first["loc"])])
    if first["type"] != "extra_forbidden":
        return f"{key}: {first['msg']}"
    return f"{key} is not known (known keys: {', '.join(RequestKeys.model_fields)})"
