"""The inputs of a request's KV beside its tokens, as frames for the block keys.

A frame is (block index, tag, bytes). LoRA content and cache salt stand in block 0, and the hash
chain carries them to the blocks that follow. Multimodal items (by content) and prompt embeddings
stand in every block they touch. A request that cannot be described exactly raises
:class:`~.unkeyable.UnkeyableError` and is computed without the cache.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.identity.adapters import AdapterDigests
from ucm.integration.vllm.connector.identity.items import Items
from ucm.integration.vllm.connector.identity.unkeyable import UnkeyableError
from ucm.reasons import MissReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

#: Tags of frames, as in ``docs/format.md``.
LORA, MULTIMODAL, SALT, EMBEDS = 1, 2, 3, 4

#: (block index, tag, bytes)
Frame = tuple[int, int, bytes]


class ExtraKeys:
    """Makes the frames of requests. :meth:`of` may be called from several threads, the rest from
    the scheduler's."""

    def __init__(
        self,
        block_tokens: int,
        adapters: AdapterDigests | None = None,
        items: Items | None = None,
        *,
        foreign_encoder: bool = False,
        adapted_encoder: bool = False,
    ) -> None:
        """``items`` remembers what multimodal items are; ``foreign_encoder``: other engines hand
        over what their encoders made of an item, by its name, so its data say nothing here;
        ``adapted_encoder``: adapters change what the encoder makes of it."""
        self._block_tokens = block_tokens
        self._adapters = adapters
        self._known = items or Items()
        self._foreign_encoder, self._adapted_encoder = foreign_encoder, adapted_encoder

    @classmethod
    def for_engine(
        cls, vllm_config: VllmConfig, block_tokens: int, adapters: AdapterDigests, items: Items
    ) -> ExtraKeys:
        """As the constructor, with what the engine's configuration says."""
        foreign = getattr(vllm_config, "ec_transfer_config", None) is not None
        adapted = bool(
            getattr(getattr(vllm_config, "lora_config", None), "enable_tower_connector_lora", False)
        )
        return cls(block_tokens, adapters, items, foreign_encoder=foreign, adapted_encoder=adapted)

    def of(self, request: Request, start: int = 0, end: int | None = None) -> list[Frame]:
        """The frames of blocks ``start`` up to ``end`` (all full ones unless given), sorted by
        block and tag.

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
        # stable: items of one block stay in the order of their places
        frames.sort(key=lambda frame: frame[:2])
        return frames

    @staticmethod
    def only_tokens(request: Request) -> bool:
        """Whether a request has nothing that could take long to name: no adapter, no items, no
        embeddings."""
        return (
            request.lora_request is None
            and not request.mm_features
            and request.prompt_embeds is None
        )

    def current(self, request: Request, since: float) -> bool | None:
        """Whether what :meth:`of` said still held at ``since`` (monotonic, in seconds); never
        waits.

        None when that is not known yet: ask again. False is final. Ask before storing blocks of the
        request.
        """
        if request.lora_request is not None:
            adapter = (
                self._adapters.current(request.lora_request, since)
                if self._adapters is not None
                else False
            )
            if not adapter:
                return adapter
        return self._known.current(request.mm_features) if request.mm_features else True

    def used(self, request: Any, computed: int = 0) -> None:
        """A step computes with the items of a request that end past its first ``computed`` tokens.

        Tell it of every request, cached or not, before blocks of the step are offered.
        """
        items = [item for item in request.mm_features or () if sum(_place(item)) > computed]
        if items:
            lora = request.lora_request
            self._known.used(
                items, str(lora.lora_path) if lora is not None and self._adapted_encoder else ""
            )

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
                content = self._content(item)
                for block in touched:
                    yield (
                        block,
                        MULTIMODAL,
                        struct.pack("<qQ", offset - block * size, length) + content,
                    )

    def _content(self, item: Any) -> bytes:
        if self._foreign_encoder:
            raise UnkeyableError(
                "encoder outputs come from other engines, which know multimodal items by name"
                " alone",
                reason=MissReason.UNSUPPORTED,
            )
        return f"{getattr(item, 'modality', '')}\0".encode(
            "utf-8", "surrogatepass"
        ) + self._known.digest(item)

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


def _refuse_unkeyable(request: Any) -> None:
    extra = getattr(getattr(request, "pooling_params", None), "extra_kwargs", None)
    if extra and any("token_type" in name for name in extra):
        raise UnkeyableError("token types change what is computed and are not part of the keys")


def _place(item: Any) -> tuple[int, int]:
    return int(item.mm_position.offset), int(item.mm_position.length)


def _digest_rows(embeds: Any, rows: list[int], first: int) -> bytes:
    """SHA-256 over the dtype, the width, the places within the block and the bytes of some rows."""
    import torch

    content = (
        embeds[rows[0] : rows[-1] + 1] if len(rows) == rows[-1] - rows[0] + 1 else embeds[rows]
    )
    content = content.detach().to("cpu").contiguous()
    places = struct.pack(f"<{len(rows)}I", *(row - first for row in rows))
    digest = hashlib.sha256(
        f"{content.dtype} {tuple(content.shape[1:])} {len(rows)}\0".encode() + places
    )
    digest.update(memoryview(content.view(torch.uint8).numpy()).cast("B"))
    return digest.digest()
