"""What a request's KV depends on beside its tokens, as frames for the block keys.

A frame is (block index, tag, bytes). LoRA content and cache salt stand in block 0, and the chain of keys carries them
on; multimodal items and prompt embeddings stand in every block they touch. A request that cannot be described exactly
raises :class:`UnkeyableError` and is left alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.adapters import AdapterDigests, UnkeyableError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

#: Tags of frames, as in ``docs/format.md``.
LORA, MULTIMODAL, SALT, EMBEDS = 1, 2, 3, 4

#: (block index, tag, bytes)
Frame = tuple[int, int, bytes]

#: A content hash of vLLM's is at least this long, in hex digits.
_HASH_DIGITS = 64


class ExtraKeys:
    """Makes the frames of requests. Safe to use from several threads.

    ``trust_item_names`` accepts identifiers of multimodal items that are not content hashes: names that users gave
    and promise never to reuse for other content, in no process and on no host.
    """

    def __init__(
        self, block_tokens: int, adapters: AdapterDigests | None = None, *, trust_item_names: bool = False
    ) -> None:
        self._block_tokens = block_tokens
        self._adapters = adapters
        self._trust_item_names = trust_item_names

    @classmethod
    def for_engine(
        cls, vllm_config: VllmConfig, block_tokens: int, adapters: AdapterDigests, *, trust_item_names: bool = False
    ) -> ExtraKeys:
        """As the constructor; user-given names are trusted only where vLLM does not make up names of its own."""
        return cls(block_tokens, adapters, trust_item_names=trust_item_names and items_are_hashed(vllm_config))

    def of(self, request: Request, start: int = 0, end: int | None = None) -> list[Frame]:
        """The frames of blocks ``start`` up to ``end`` (all full ones unless given), sorted by block and tag.

        Raises :class:`UnkeyableError`.
        """
        if end is None:
            end = request.num_tokens // self._block_tokens
        _refuse_unkeyable(request)
        frames: list[Frame] = []
        if start == 0 and end > 0:
            frames += self._whole_request(request)
        frames += self._items(request, start, end)
        frames += self._embeds(request, start, end)
        frames.sort(key=lambda frame: frame[:2])  # stable: items of one block stay in the order of their places
        return frames

    @staticmethod
    def only_tokens(request: Request) -> bool:
        """Whether a request has nothing that could take long to name: no adapter, no items, no embeddings."""
        return request.lora_request is None and not request.mm_features and request.prompt_embeds is None

    def current(self, request: Request) -> bool:
        """Whether what :meth:`of` said still holds, without waiting; ask before storing blocks of the request."""
        lora = request.lora_request
        return lora is None or (self._adapters is not None and self._adapters.current(lora))

    def _whole_request(self, request: Any) -> Iterator[Frame]:
        if request.lora_request is not None:
            if self._adapters is None:
                raise UnkeyableError("requests with adapters are not kept here")
            yield 0, LORA, self._adapters.payload(request.lora_request)
        if request.cache_salt:
            yield 0, SALT, str(request.cache_salt).encode("utf-8", "surrogatepass")

    def _items(self, request: Any, start: int, end: int) -> Iterator[Frame]:
        size = self._block_tokens
        for item in sorted(request.mm_features or (), key=_place):
            offset, length = int(item.mm_position.offset), int(item.mm_position.length)
            first, last = offset // size, (offset + max(length, 1) - 1) // size
            touched = range(max(first, start), min(last + 1, end))
            if touched:
                name = self._item_name(request, item)
                for block in touched:
                    yield block, MULTIMODAL, struct.pack("<qQ", offset - block * size, length) + name

    def _item_name(self, request: Any, item: Any) -> bytes:
        identifier = item.identifier
        if not identifier:
            raise UnkeyableError("a multimodal item has no identifier", context={"request": request.request_id})
        if request.lora_request is not None:
            # vLLM puts the adapter's name in front; the adapter's content stands in block 0 already.
            identifier = identifier.removeprefix(f"{request.lora_request.lora_name}:")
        if not (_is_hash(identifier) or self._trust_item_names):
            raise UnkeyableError(
                "a multimodal item is named, not hashed, and the name may mean something else elsewhere",
                context={"identifier": identifier},
            )
        return f"{getattr(item, 'modality', '')}\0{identifier}".encode("utf-8", "surrogatepass")

    def _embeds(self, request: Any, start: int, end: int) -> Iterator[Frame]:
        embeds = request.prompt_embeds
        if embeds is None:
            return
        is_token = getattr(request, "prompt_is_token_ids", None)
        size, rows = self._block_tokens, int(embeds.shape[0])
        for block in range(start, min(end, -(-rows // size))):
            first, last = block * size, min((block + 1) * size, rows)
            # Where the prompt has tokens, the tokens are in the key and the rows are not used.
            used = [row for row in range(first, last) if is_token is None or not is_token[row]]
            if used:
                yield block, EMBEDS, _digest_rows(embeds, used, first)


def items_are_hashed(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names multimodal items by content.

    With its processor cache and prefix caching both off it numbers them, and the numbers start again in each process.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    cached = multimodal is None or getattr(multimodal, "mm_processor_cache_gb", 1) != 0
    return cached or bool(vllm_config.cache_config.enable_prefix_caching)


def _refuse_unkeyable(request: Any) -> None:
    extra = getattr(getattr(request, "pooling_params", None), "extra_kwargs", None)
    if extra and any("token_type" in name for name in extra):
        raise UnkeyableError("token types change what is computed and are not part of the keys")


def _place(item: Any) -> tuple[int, int, str]:
    return int(item.mm_position.offset), int(item.mm_position.length), str(item.identifier)


def _is_hash(identifier: str) -> bool:
    return len(identifier) >= _HASH_DIGITS and all(letter in "0123456789abcdef" for letter in identifier)


def _digest_rows(embeds: Any, rows: list[int], first: int) -> bytes:
    """SHA-256 over the dtype, the width, the places within the block and the bytes of some rows."""
    import torch

    content = embeds[rows[0] : rows[-1] + 1] if len(rows) == rows[-1] - rows[0] + 1 else embeds[rows]
    content = content.detach().to("cpu").contiguous()
    places = struct.pack(f"<{len(rows)}I", *(row - first for row in rows))
    digest = hashlib.sha256(f"{content.dtype} {tuple(content.shape[1:])} {len(rows)}\0".encode() + places)
    digest.update(memoryview(content.view(torch.uint8).numpy()).cast("B"))
    return digest.digest()
