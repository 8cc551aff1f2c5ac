"""What the kernels of a GPU compute before they are used there: a small example, which torch
computes as well.

Numbers are whole and small, so both are exact and must be equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ucm.errors import InternalError
from ucm.sparse.kernels import gpu
from ucm.sparse.selectors.codes import code, distance

_BLOCKS, _BLOCK, _HEADS, _GROUP, _SIZE, _BITS = 12, 16, 2, 2, 32, 64


def run(device: torch.device) -> None:
    """Raises what Triton raises, or :class:`~ucm.errors.InternalError` where a kernel computes
    something else."""
    generator = torch.Generator().manual_seed(1)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-7, 8, shape, generator=generator).to(device, torch.bfloat16)

    keys, query, directions = (
        whole(_BLOCKS, _BLOCK, _HEADS, _SIZE),
        whole(1, _HEADS * _GROUP, _SIZE),
        whole(_SIZE, _BITS),
    )
    weights = directions.float()
    table = torch.randperm(_BLOCKS, generator=generator).to(device, torch.int32)[None]
    blocks = torch.tensor([_BLOCKS], dtype=torch.int32, device=device)
    mean = query.float().view(1, _HEADS, _GROUP, _SIZE).mean(dim=2)

    codes = torch.zeros((_BLOCKS, _BLOCK, _HEADS, _BITS // 8), dtype=torch.uint8, device=device)
    slots = torch.arange(_BLOCKS * _BLOCK, device=device)
    gpu.hash_encode(keys.flatten(0, 1), weights, codes, slots)
    _same("codes", codes, code(keys, weights))
    copied = torch.zeros_like(codes)
    gpu.scatter_codes(codes.flatten(0, 1), slots, copied)
    _same("copied codes", copied, codes)
    asked = gpu.hash_encode_query(query, weights, _HEADS)
    _same("codes of queries", asked, code(mean, weights))

    own = table[0].long()
    near = distance(asked[0], codes[own]).amin(dim=(1, 2))
    scores = gpu.hamming_scores(asked, codes, table, blocks * _BLOCK)
    _same("Hamming scores", scores[0, 0], -near)
    latent = codes.view(_BLOCKS, _BLOCK * _HEADS, 1, _BITS // 8)
    summed = (distance(asked[0, 0], latent[own]) + distance(asked[0, 1], latent[own])).amin(
        dim=(1, 2)
    )
    _same(
        "summed Hamming scores",
        gpu.hamming_scores(asked[:, None], latent, table, blocks * _BLOCK * _HEADS)[0, 0],
        -summed,
    )

    first = keys[:, 0].contiguous()
    _same(
        "products",
        gpu.dot_scores(query, first, table, blocks)[0, 0],
        (first[own].float() * mean).sum(dim=(1, 2)),
    )
    bounds = torch.stack([keys.amin(dim=1), keys.amax(dim=1)], dim=1)
    low, high = bounds[own].float().unbind(dim=1)
    _same(
        "Quest's bounds",
        gpu.quest_scores(query, bounds, table, blocks)[0, 0],
        torch.maximum(mean * low, mean * high).sum(dim=(1, 2)),
    )

    kept = gpu.select_blocks(scores, table, blocks * _BLOCK - 3, _BLOCK, [4], init=1, local=2)
    order = torch.sort(-near[1:-2], descending=True, stable=True).indices[:4] + 1
    ends = torch.tensor([0, _BLOCKS - 2, _BLOCKS - 1], device=device)
    expected = torch.sort(torch.cat([order, ends])).values
    _same("kept blocks", kept.logical[0, 0].long(), expected)
    _same("the block table", kept.table[0, 0], table[0, expected])
    _same("the length", kept.tokens[0], 7 * _BLOCK - 3 + 0 * kept.tokens[0])


def _same(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected.to(found.dtype)):
        raise InternalError("a kernel computes something else than torch", context={"what": what})
