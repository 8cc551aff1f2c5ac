"""Requests equal in tokens but different in what else shapes their KV never share a block."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.request import Request

from ucm.integration.vllm.connector.identity.keys import (
    EMBEDS,
    LORA,
    MULTIMODAL,
    SALT,
    AdapterDigests,
    ExtraKeys,
    Frame,
    Items,
    UnkeyableError,
)
from ucm.reasons import MissReason

#: The first import of vLLM takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)

SIZE = 4
TOKENS = list(range(100, 124))  # six blocks
A, B = "a" * 64, "b" * 64


def chain(
    tokens: Sequence[int], frames: Sequence[Frame], identity: bytes = bytes(32)
) -> list[bytes]:
    """The block keys as ``docs/format.md`` defines them, with Python's own hashlib."""
    previous, keys = hashlib.sha256(b"UCMHASHSEED" + identity).digest()[:16], []
    for block in range(len(tokens) // SIZE):
        digest = hashlib.sha256(
            previous + struct.pack(f"<{SIZE}I", *tokens[block * SIZE : (block + 1) * SIZE])
        )
        for index, tag, payload in frames:
            if index == block:
                digest.update(struct.pack("<BI", tag, len(payload)) + payload)
        previous = digest.digest()[:16]
        keys.append(previous)
    return keys


def data_of(**fields: Any) -> MultiModalKwargsItem:
    """What vLLM's preprocessing makes of an item."""
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=data, field=MultiModalBatchedField())
            for name, data in fields.items()
        }
    )


def item(
    content: str, offset: int, length: int, modality: str = "image", name: str | None = None
) -> MultiModalFeatureSpec:
    """An item with this content; vLLM's name for it follows from that unless given."""
    return MultiModalFeatureSpec(
        data=data_of(pixel_values=torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)),
        modality=modality,
        identifier=content if name is None else name,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def digest_of(content: str) -> bytes:
    """The digest of such an item, as ``docs/format.md`` defines it."""
    described = b"S" + struct.pack("<Q", 12) + b"pixel_values"
    described += b"T" + struct.pack("<Q", 11) + b"torch.uint8" + struct.pack("<IQ", 1, len(content))
    return hashlib.sha256(b"UCMITEM" + described + content.encode()).digest()


def request(tokens: list[int] | None = None, **args: Any) -> Request:
    tokens = list(TOKENS) if tokens is None and "prompt_embeds" not in args else tokens
    args.setdefault("sampling_params", SamplingParams(max_tokens=8))
    return Request(
        request_id="r",
        prompt_token_ids=tokens,
        pooling_params=args.pop("pooling_params", None),
        **args,
    )


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def extra() -> ExtraKeys:
    return ExtraKeys(SIZE, AdapterDigests(since_ns=1 << 62))


def keys_of(extra: ExtraKeys, one: Request) -> list[bytes]:
    return chain(list(one.all_token_ids), extra.of(one))


def test_a_plain_request_has_no_frames(extra: ExtraKeys) -> None:
    assert extra.of(request()) == []
    assert extra.current(request(), 0.0)


def test_where_the_frames_stand(extra: ExtraKeys, adapter: Path) -> None:
    one = request(
        lora_request=LoRARequest("x", 1, str(adapter)),
        cache_salt="tenant",
        mm_features=[item(A, 6, 6, name=f"x:{A}"), item(B, 12, 4, name=f"x:{B}")],
    )
    frames = extra.of(one)
    assert [frame[:2] for frame in frames] == [
        (0, LORA),
        (0, SALT),
        (1, MULTIMODAL),
        (2, MULTIMODAL),
        (3, MULTIMODAL),
    ]
    assert frames[1][2] == b"tenant"
    assert [struct.unpack_from("<qQ", frame[2]) for frame in frames[2:]] == [
        (2, 6),
        (-2, 6),
        (0, 4),
    ]
    assert [frame[2][16:] for frame in frames[2:]] == [
        b"image\0" + digest_of(content) for content in (A, A, B)
    ]
    # The chain carries block 0 on; the parts of a longer request are the same frames.
    assert extra.of(one, 0, 2) + extra.of(one, 2, 6) == frames


def different_requests(adapter: Path) -> list[Request]:
    """Equal in tokens, each different in something else."""
    other = adapter / "other"
    other.mkdir()
    (other / "adapter_model.safetensors").write_bytes(b"ADAPTER")
    embeds = torch.arange(len(TOKENS) * 2, dtype=torch.float32).reshape(-1, 2)
    changed = embeds.clone()
    changed[0, 0] += 1
    return [
        request(),
        request(lora_request=LoRARequest("x", 1, str(adapter))),
        request(lora_request=LoRARequest("y", 2, str(other))),
        request(cache_salt="tenant"),
        request(cache_salt="tenants"),
        request(mm_features=[item(A, 0, 8)]),
        request(mm_features=[item(B, 0, 8)]),
        request(mm_features=[item(A, 1, 8)]),
        request(mm_features=[item(A, 0, 7)]),
        request(mm_features=[item(A, 0, 8, "video")]),
        request(mm_features=[item(A, 0, 4), item(B, 4, 4)]),
        request(mm_features=[item(B, 0, 4), item(A, 4, 4)]),
        request(cache_salt="tenant", mm_features=[item(A, 0, 8)]),
        request(prompt_embeds=embeds),
        request(prompt_embeds=changed),
        request(prompt_embeds=embeds.double()),
        request(
            tokens=list(TOKENS), prompt_embeds=embeds, prompt_is_token_ids=[True] * 3 + [False] * 21
        ),
        request(
            tokens=list(TOKENS), prompt_embeds=embeds, prompt_is_token_ids=[True] * 2 + [False] * 22
        ),
    ]


def test_different_requests_never_share_a_block(extra: ExtraKeys, adapter: Path) -> None:
    seen: dict[bytes, int] = {}
    for number, one in enumerate(different_requests(adapter)):
        for key in chain(TOKENS, extra.of(one)):
            assert seen.setdefault(key, number) == number
    assert len(seen) == 18 * 6


def test_equal_requests_share_all_blocks(extra: ExtraKeys, adapter: Path) -> None:
    again = ExtraKeys(SIZE, AdapterDigests(since_ns=1 << 62))  # another process
    first = different_requests(adapter)
    (adapter / "other" / "adapter_model.safetensors").unlink()
    (adapter / "other").rmdir()
    for one, other in zip(first, different_requests(adapter), strict=True):
        if one.lora_request is None:
            assert keys_of(extra, one) == keys_of(again, other)


def test_blocks_before_an_item_are_shared(extra: ExtraKeys) -> None:
    plain, pictured = (
        keys_of(extra, request()),
        keys_of(extra, request(mm_features=[item(A, 9, 2)])),
    )
    assert plain[:2] == pictured[:2]
    assert not set(plain[2:]) & set(pictured)


def test_a_renamed_adapter_shares_and_a_retrained_one_does_not(adapter: Path) -> None:
    def keys(name: str, number: int) -> list[bytes]:
        process = ExtraKeys(SIZE, AdapterDigests(since_ns=1 << 62))
        features = [item(A, 4, 4, name=f"{name}:{A}")]
        return keys_of(
            process,
            request(lora_request=LoRARequest(name, number, str(adapter)), mm_features=features),
        )

    first = keys("x", 1)
    assert keys("y", 2) == first
    (adapter / "adapter_model.safetensors").write_bytes(b"retrain")
    assert not set(keys("x", 1)) & set(first)


def test_a_growing_request_keeps_its_keys(extra: ExtraKeys) -> None:
    one = request(cache_salt="s", mm_features=[item(A, 20, 4)])
    before = keys_of(extra, one)
    one.append_output_token_ids([7] * 8)
    assert keys_of(extra, one)[:6] == before
    assert extra.of(one, 6, 8) == []


def test_prompt_embeddings_stand_in_every_block_they_fill(extra: ExtraKeys) -> None:
    one = request(prompt_embeds=torch.zeros(10, 3, dtype=torch.bfloat16))
    one.append_output_token_ids([1] * 6)
    frames = extra.of(one)
    assert [frame[:2] for frame in frames] == [(0, EMBEDS), (1, EMBEDS), (2, EMBEDS)]
    # equal rows at equal places; two rows in the last
    assert frames[0][2] == frames[1][2] != frames[2][2]
    expected = hashlib.sha256(
        b"torch.bfloat16 (3,) 4\0" + struct.pack("<4I", 0, 1, 2, 3) + bytes(24)
    ).digest()
    assert frames[0][2] == expected


def test_rows_that_tokens_replace_do_not_count(extra: ExtraKeys) -> None:
    embeds, mask = torch.zeros(24, 2), [row % 3 != 0 for row in range(24)]
    other = embeds.clone()
    other[torch.tensor(mask)] = 5.0
    requests = [
        request(list(TOKENS), prompt_embeds=each, prompt_is_token_ids=mask)
        for each in (embeds, other)
    ]
    assert extra.of(requests[0]) == extra.of(requests[1])
    assert (
        extra.of(request(list(TOKENS), prompt_embeds=embeds, prompt_is_token_ids=[True] * 24)) == []
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from([A, B])), max_size=4
    ),
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from([A, B])), max_size=4
    ),
)
def test_items_are_distinguished_wherever_they_touch_a_full_block(
    one: list[tuple[int, int, str]], other: list[tuple[int, int, str]]
) -> None:
    extra = ExtraKeys(SIZE)
    first, second = (
        extra.of(
            request(mm_features=[item(name, offset, length) for offset, length, name in items])
        )
        for items in (one, other)
    )
    # What of each item lies in the full blocks: offset, whole length and content.
    seen = [sorted(each for each in items if each[0] < len(TOKENS)) for items in (one, other)]
    assert (chain(TOKENS, first)[-1] == chain(TOKENS, second)[-1]) == (seen[0] == seen[1])


@pytest.mark.parametrize("name", ["renderer0-mm-1-image-0", "cat.png", "c" * 64])
def test_the_name_of_an_item_is_not_its_content(extra: ExtraKeys, name: str) -> None:
    """A client may choose the name, also one that looks like a hash; in another process it is
    another picture."""
    first, second = (
        keys_of(extra, request(mm_features=[item(content, 0, 8, name=name)])) for content in (A, B)
    )
    assert not set(first) & set(second)
    assert keys_of(extra, request(mm_features=[item(A, 0, 8)])) == first


def test_items_whose_data_are_elsewhere_are_unsupported() -> None:
    missing, cached, address = item(A, 0, 8), item(A, 0, 8), item(A, 0, 8)
    missing.data = None
    cached.data = data_of(pixel_values=None)
    # of vLLM's shm cache
    address.data = data_of(address=torch.tensor(1), monotonic_id=torch.tensor(2))
    for each in (missing, cached, address):
        extra = ExtraKeys(SIZE)
        with pytest.raises(UnkeyableError) as refused:
            extra.of(request(mm_features=[each]))
        assert refused.value.reason == MissReason.UNSUPPORTED
        extra.used(request(mm_features=[each]))
        assert extra.current(request(mm_features=[item(A, 0, 8)]), 0.0) is False, (
            "its name may stand for anything"
        )


def test_an_encoder_elsewhere_is_unsupported(engines: Any, tiny: Path) -> None:
    config = engines.engine_config(tiny)
    assert ExtraKeys.for_engine(config, SIZE, AdapterDigests(), Items()).of(
        request(mm_features=[item(A, 0, 8)])
    )
    config.ec_transfer_config = object()
    with pytest.raises(UnkeyableError) as refused:
        ExtraKeys.for_engine(config, SIZE, AdapterDigests(), Items()).of(
            request(mm_features=[item(A, 0, 8)])
        )
    assert refused.value.reason == MissReason.UNSUPPORTED


def test_a_name_that_stood_for_two_contents_spoils_both() -> None:
    """vLLM keeps encoder outputs and blocks under the name: whose they are cannot be known."""
    extra = ExtraKeys(SIZE)
    first, second = (request(mm_features=[item(content, 0, 8, name="cat")]) for content in (A, B))
    for one in (first, second):
        extra.of(one)
    assert extra.current(first, 0.0) is False, "no step has begun with it"
    extra.used(first)
    assert extra.current(first, 0.0)
    extra.used(request(mm_features=[item(A, 4, 8, name="cat"), item(B, 12, 8, name="dog")]))
    extra.of(request(mm_features=[item(A, 4, 8, name="cat")]))
    extra.used(second)
    assert extra.current(first, 0.0) is False
    assert extra.current(second, 0.0) is False


def test_an_adapter_changes_what_an_encoder_makes_of_an_item_only_where_it_is_applied_there() -> (
    None
):
    for adapted in (False, True):
        extra = ExtraKeys(SIZE, adapted_encoder=adapted)
        plain = request(mm_features=[item(A, 0, 8, name="x:cat")])
        extra.of(plain)
        extra.used(plain)
        other = request(
            mm_features=plain.mm_features, lora_request=LoRARequest("x", 1, "/somewhere")
        )
        extra.used(other)
        assert extra.current(plain, 0.0) is not adapted


def test_a_request_that_cannot_be_described_is_not_cached(extra: ExtraKeys, adapter: Path) -> None:
    with pytest.raises(UnkeyableError, match="adapters"):
        ExtraKeys(SIZE).of(request(lora_request=LoRARequest("x", 1, str(adapter))))
    assert (
        ExtraKeys(SIZE).current(request(lora_request=LoRARequest("x", 1, str(adapter))), 0.0)
        is False
    )
    pooling = PoolingParams(extra_kwargs={"compressed_token_type_ids": 3})
    with pytest.raises(UnkeyableError, match="token types"):
        extra.of(request(sampling_params=None, pooling_params=pooling))


def test_the_chain_is_the_hashers_own(extra: ExtraKeys, adapter: Path) -> None:
    """The reference chain of this file and the one of the core agree on every kind of frame."""
    store = pytest.importorskip("ucm.store", reason="the core is not built")
    if not hasattr(store, "BlockHasher"):
        pytest.skip("the core is not built")
    hasher = store.BlockHasher(bytes(32), SIZE)
    for one in different_requests(adapter):
        frames = extra.of(one)
        assert hasher.hash_blocks(TOKENS, extra=frames) == chain(TOKENS, frames)
