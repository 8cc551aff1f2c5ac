"""A replacement of other connectors beside ours in a MultiConnector: it exchanges metadata through
vLLM and accepts only its own, like Nixl, and it only pretends to load, if a request says so.

``kv_transfer_params`` of a request select the behaviour: ``{"sibling": "stall"}`` claims its full
blocks and never fills them, ``{"sibling": "fail"}`` claims them for the step itself, writes
nonsense there and reports them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

#: Arguments of vLLM's KVTransferConfig for it.
SIBLING = {"kv_connector": "Sibling", "kv_connector_module_path": "siblings", "kv_role": "kv_both"}


def several(*connectors: Any, **options: Any) -> dict[str, Any]:
    """The same for vLLM's connector of several."""
    extra = {"connectors": list(connectors)}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **options,
    }


def load_of_sibling(how: str) -> dict[str, Any]:
    """Extra arguments of a request whose blocks it claims: ``stall`` or ``fail``."""
    return {"kv_transfer_params": {"sibling": how}}


#: Of the engine's scheduler: whether one request is known, and waits for a load.
LOADING = (
    "[request.status.name for request in scheduler.requests.values()] == ['WAITING_FOR_REMOTE_KVS']"
)


@dataclass
class SiblingHandshake(KVConnectorHandshakeMetadata):
    """Of one worker."""

    rank: int = 0


@dataclass
class SiblingPlan(KVConnectorMetadata):
    """The loads of a step."""

    stalled: set[str] = field(default_factory=set)
    failing: list[int] = field(default_factory=list)


class Sibling(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._blocks = kv_cache_config.num_blocks
        self._claimed: dict[str, int] = {}  # request -> first block claimed
        self._next = SiblingPlan()
        self._caches: list[torch.Tensor] = []
        self._stalled: set[str] = set()
        self._failed: set[int] = set()
        self.shaken = 0

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes its own alone."""
        if not all(isinstance(each, SiblingHandshake) for each in metadata.values()):
            raise ValueError("SiblingHandshake expected")
        self.shaken = len(metadata)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Once for each such request."""
        asked = (request.kv_transfer_params or {}).get("sibling")
        if asked is None or request.request_id in self._claimed:
            return 0, False
        return (
            request.num_tokens - 1
        ) // self._block * self._block - num_computed_tokens, asked == "stall"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Its load begins with the next step."""
        if not num_external_tokens:
            return
        end = (request.num_tokens - 1) // self._block
        first = self._claimed[request.request_id] = end - num_external_tokens // self._block
        if request.kv_transfer_params["sibling"] == "stall":
            self._next.stalled.add(request.request_id)
        else:
            self._next.failing += blocks.get_block_ids()[0][first:end]

    def build_connector_meta(self, scheduler_output: Any) -> SiblingPlan:
        """Claims since the last step."""
        plan, self._next = self._next, SiblingPlan()
        return plan

    # Worker side

    def get_handshake_metadata(self) -> SiblingHandshake:
        """Its own class."""
        return SiblingHandshake()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """To write nonsense into."""
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Executes the plan."""
        plan = self._get_connector_metadata()
        self._stalled |= plan.stalled
        self._failed |= set(plan.failing)
        for cache in self._caches:
            if plan.failing:
                cache.movedim(cache.shape.index(self._blocks), 0)[plan.failing] = 1.0

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """A stalled load ends with its request."""
        ended = self._stalled & finished_req_ids
        self._stalled -= ended
        return None, ended or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What was not filled."""
        failed, self._failed = self._failed, set()
        return failed
