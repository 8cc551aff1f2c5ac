"""The prefetch engine of GSA by its names, and the original's batch form of it over the same plan
of residency."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ucm.errors import UnsupportedError
from ucm.sparse.prefetch import PrefetchEngine, PrefetchHandle, PrefetchPriority, PrefetchTask
from ucm.sparse.residency import plan_residency

__all__ = [
    "GSAPrefetchEngineC",
    "PrefetchEngine",
    "PrefetchHandle",
    "PrefetchPriority",
    "PrefetchTask",
]


class GSAPrefetchEngineC:
    """Which blocks of each request and layer must be loaded, and into which blocks of the device.

    All tensors have the layer in their first dimension and the place in the batch in their second.
    """

    def __init__(
        self,
        prefetch_blocks: Tensor,
        load_success_list: Tensor,
        prefetch_block_len: Tensor,
        block_table_len: Tensor,
        kv_shape: Sequence[int],
        use_mla: bool = False,
        is_log: bool = False,
        tp_size: int = 1,
        rank: int = 0,
        num_prefetch_blocks: int = 1,
        is_python_load: bool = True,
    ) -> None:
        """``prefetch_blocks [layers, batch, most]`` gets the physical blocks of each row,
        ``prefetch_block_len [layers, batch]`` how many, and ``load_success_list [layers, batch,
        most]`` 1 for those whose KV is there already. ``is_python_load`` must be true: loads are
        the caller's (:meth:`obtain_load_blocks`). The rest is not needed here.
        """
        del block_table_len, kv_shape, use_mla, is_log, tp_size, rank, num_prefetch_blocks
        if not is_python_load:
            raise UnsupportedError(
                "loads through the pointer of a store are not built: pass is_python_load=True and"
                " load what obtain_load_blocks() says, or use ucm.sparse.prefetch.PrefetchEngine"
            )
        self._blocks, self._there, self._len = (
            prefetch_blocks,
            load_success_list,
            prefetch_block_len,
        )
        self._resident: dict[tuple[int, int], dict[int, int]] = {}
        self._loads: list[int] = []
        self._misses: list[int] = []

    def set_blocks_table_info(
        self, block_table: Tensor, block_table_len: Tensor, topk_buf: Tensor, step_time: int = 0
    ) -> None:
        """``block_table [layers, batch, N]`` has each row's physical blocks, of which
        ``block_table_len [layers, batch]`` count; ``topk_buf [layers, batch, k]`` the logical
        blocks that are wanted, the most wanted first."""
        del step_time
        self._table, self._table_len, self._wanted = block_table, block_table_len, topk_buf

    def run_async_prefetch_bs(
        self,
        req_id_list: Sequence[int],
        topk_len_list: Sequence[int],
        bs_index_list: Sequence[int],
        kvcache: object = None,
        store_ptr: int = 0,
    ) -> None:
        """Plan the step of these requests, each with so many wanted blocks, at these places of the
        batch. A request that is seen for the first time has its logical blocks in the order of its
        block table."""
        del kvcache, store_ptr
        self._loads, self._misses = [], []
        for request, count, place in zip(req_id_list, topk_len_list, bs_index_list, strict=True):
            for layer in range(self._wanted.shape[0]):
                self._plan(
                    request,
                    layer,
                    place,
                    [int(block) for block in self._wanted[layer, place, :count]],
                )

    def _plan(self, request: int, layer: int, place: int, wanted: list[int]) -> None:
        physical = [
            int(block) for block in self._table[layer, place, : int(self._table_len[layer, place])]
        ]
        resident = self._resident.get(
            (request, layer), {logical: logical for logical in range(len(physical))}
        )
        plan = plan_residency(resident, wanted, len(physical))
        self._resident[request, layer] = {**plan.keep, **dict(plan.load)}
        chosen = sorted(set(wanted) - set(plan.dropped))
        slots = self._resident[request, layer]
        missing = dict(plan.load)
        self._blocks[layer, place, : len(chosen)] = torch.tensor(
            [physical[slots[b]] for b in chosen]
        ).to(self._blocks)
        self._there[layer, place, : len(chosen)] = torch.tensor(
            [b not in missing for b in chosen]
        ).to(self._there)
        self._len[layer, place] = len(chosen)
        self._loads += [physical[slot] for _, slot in plan.load]
        self._misses += [logical for logical, _ in plan.load]

    def obtain_load_blocks(self) -> list[int]:
        """The physical blocks to fill, by request and layer in the order of the call."""
        return list(self._loads)

    def obtain_miss_idxs(self) -> list[int]:
        """The logical block that each of them gets."""
        return list(self._misses)

    def finish_request(self, request: int) -> None:
        """Forget a request."""
        for known in [key for key in self._resident if key[0] == request]:
            del self._resident[known]
