"""A long prompt without computing it: a model with a large one's attention shape, and a store with
generated KV.

:class:`PlantedStore` reports every block as stored. A load fills the pages with numbers that depend
on the block only: normally distributed keys and values, and every :data:`HEAVY`-th block three
times as large, so that scores differ like those of real prompts. An engine over it has the KV of
128 K tokens in seconds and decodes over it as over any other; its answers have no meaning. It is
configured by ``ucm_connector_module_path``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1, Until

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, FFN, VOCAB = 8, 32, 8, 128, 1024, 1024, 512
#: Tokens of a block.
BLOCK = 128
#: Bytes of the KV of one block of one layer, in bfloat16.
PAGE = 2 * KV_HEADS * BLOCK * DIM * 2
#: One block in this number is heavy.
HEAVY = 61


class PlantedStore(UcmKVStoreBaseV1):
    """Reports every block as stored, and stores none."""

    #: Number of different pages, a power of two above the size of a cache.
    PAGES = 64

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        drawn = np.random.default_rng(0).standard_normal((self.PAGES, PAGE // 2), dtype=np.float32)
        self._usual, self._heavy = _bfloat16(drawn), _bfloat16(drawn[:4] * 3)

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        return [True] * len(block_ids)

    def load_data(
        self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: npt.NDArray[np.uint64]
    ) -> Task:
        del shard_index
        for block_id, row in zip(block_ids, addrs, strict=True):
            number = int.from_bytes(block_id[:8], "little")
            pages = self._heavy if number % HEAVY == 0 else self._usual
            for layer, address in enumerate(row):
                page = pages[(number + layer) % len(pages)]
                ctypes.memmove(int(address), page.ctypes.data, PAGE)
        return Task(None)

    def dump_data(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        prerequisite_handle: int = 0,
    ) -> Task:
        del block_ids, shard_index, addrs, prerequisite_handle
        return Task(None)

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        del task, timeout, until

    def check(self, task: Any, until: Until = "published") -> bool:
        del task, until
        return True


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))


def write_model(folder: Path, tokens: int) -> Path:
    """A Llama of random weights with this context length and the attention shape of an 8 B
    model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
