"""GSA On-Device: each key is a code of sign bits, and a block scores by its key nearest to the
query in Hamming distance.

``code(x) = pack(x·W > 0)``, bit ``j`` of byte ``i`` being direction ``8i + j``; ``dist[t] = min_h
popcount(code(q̄_h) xor code(K[t,h]))``; ``s_b = -min_{t in b} dist[t]``. Two vectors at angle ``a``
differ in ``a/pi`` of their bits on average. With latent attention there are two codes, of the
latent and of the rotary part, and the distances of all query heads (or of means of
``reduction_heads`` of them) are added up: one latent head serves all. Distances are integers: the
same in any order of adding, on every rank. The bits do not depend on the head size.

Source: the original's GSA On-Device; book 10; HATA (ACL 2025) for the idea.

Directions are random, and the same on every rank, in every process and after every restart. A
direction matrix is made of square blocks, each drawn from the Haar measure (a random rotation): QR
of a Gaussian matrix with the signs of R's diagonal moved into Q. Directions within a block are
orthogonal; more blocks side by side give any number of bits, whatever the head size. The numbers
come from a counter-based generator keyed by seed, layer and block.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from ucm.config.fields import Count, Flag, Number
from ucm.config.sparse import AlgorithmConfig, Preset
from ucm.errors import ConfigError
from ucm.sparse import retrieval
from ucm.sparse.kernels import distance, kernels_for, made_code
from ucm.sparse.retrieval import Kept
from ucm.sparse.selector import BlockSelector, Candidates, Combine, Geometry, register_selector


def directions(
    size: int, bits: int, *, seed: int, layer: int, part: int = 0
) -> npt.NDArray[np.float64]:
    """``bits`` directions in ``size`` dimensions, ``[size, bits]``, each of length 1. Each ``part``
    of a layer has its own matrix."""
    key, count = (layer << 32) | (part << 16), -(-bits // size)
    blocks = [_rotation(size, (seed, key | block)) for block in range(count)]
    return np.concatenate(blocks, axis=1)[:, :bits]


def _rotation(size: int, key: tuple[int, int]) -> npt.NDArray[np.float64]:
    q, r = np.linalg.qr(_gaussian(size * size, key).reshape(size, size))
    return np.asarray(q * np.where(np.diag(r) < 0, -1.0, 1.0))


def _gaussian(count: int, key: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Normal deviates from the raw words of the generator (Box and Muller), which are the same in
    every version of NumPy."""
    raw = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(2 * count)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:count]))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform[count:]))


def load_directions(path: str) -> tuple[dict[str, npt.NDArray[np.float64]], str]:
    """Learned directions from an ``.npz``, by name, and a name for all of them. Raises
    :class:`~ucm.errors.ConfigError`."""
    try:
        data = Path(path).read_bytes()
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.asarray(file[name], dtype=np.float64) for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        wrong = f"hash_weights_file {path} cannot be read as an .npz of arrays: {error}"
        raise ConfigError(wrong) from None
    return found, "learned." + hashlib.sha256(data).hexdigest()[:16]


#: Version of the drawing of directions and packing of bits; codes of another one are foreign.
VERSION = 1


class Hash(BlockSelector):
    """Sign codes of single keys."""

    name = "hash"

    class Keys(AlgorithmConfig):
        """Windows and budget in tokens, the code, and the settings that the original ships for
        models, without its least number of concurrent requests: with it the answer to a request
        would depend on its neighbours."""

        default_budget: ClassVar[tuple[str, Any]] = ("topk_tokens", 4096)
        presets: ClassVar[tuple[Preset, ...]] = (
            Preset("DeepSeek-V2-Lite", 2048, 2048, (0, 1, 2, 3, 4, 5)),
            Preset("DeepSeek-R1", 4096, 16384, (0, 1, 2, 3, 4, 5)),
            Preset("Qwen3-Coder-30B-A3B", 8192, 32768, (0, 1, 2)),
            Preset("Qwen3-32B", 8192, 32768, (0, 1, 2, 3, 4, 5, 6, 61, 62, 63)),
            Preset("Qwen3-4B", 2048, 2048, (0, 1, 2, 3, 4, 5, 6)),
        )

        init_tokens: Number | None = 64
        local_tokens: Count | None = 512
        windows_inside: Flag = True
        hash_bits: Annotated[Count, Field(le=4096, multiple_of=8)] | None = None
        hash_seed: Annotated[Number, Field(le=2**63 - 1)] = 0
        hash_weights_file: str | None = None
        reduction_heads: Annotated[Count, Field(le=128)] = 1

    combine: Combine = "max"
    exact = True
    token_wise = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        bits: int | None = None,
        seed: int = 0,
        weights_file: str | None = None,
        reduction_heads: int = 1,
    ) -> None:
        """``bits`` of a code, a multiple of 8; None: 128, and with latent attention as many as the
        latent has channels. ``weights_file``: learned directions, an ``.npz`` with ``layer.N`` of
        shape ``[d, bits]`` for each layer N that selects. ``reduction_heads``: query heads that
        become one before they are encoded (latent attention)."""
        super().__init__(geometry)
        latent = geometry.head_dim - geometry.rope_dim
        self.bits = bits if bits is not None else latent if geometry.rope_dim else 128
        #: Channels and bits of each part of a key.
        self.parts = [(latent, self.bits)]
        if geometry.rope_dim:
            self.parts.append((geometry.rope_dim, geometry.rope_dim))
        if any(width % 8 for _, width in self.parts):
            wrong = "hash_bits must be a multiple of 8 in every part of a key"
            raise ConfigError(f"{wrong}, got {self.parts}")
        self.seed, self.reduction = seed, reduction_heads
        self._learned: dict[str, Any] | None = None
        self._digest = ""
        if weights_file:
            self._learned, self._digest = load_directions(weights_file)
        self._weights: dict[tuple[int, torch.device], list[Tensor]] = {}

    def settings(self) -> dict[str, Any]:
        """Bits, and where the directions come from."""
        source = self._digest or f"haar{VERSION}.{self.seed}"
        return {"bits": "+".join(str(bits) for _, bits in self.parts), "directions": source}

    def rep_shape(self) -> tuple[tuple[int, ...], torch.dtype]:
        """``[b, h, bytes]``."""
        g = self.geometry
        return (g.block_size, g.kv_heads, sum(bits for _, bits in self.parts) // 8), torch.uint8

    def weights_of(self, layer: int, device: torch.device) -> list[Tensor]:
        """The directions ``[d, bits]`` of each part of a key, float32."""
        key = (layer, device)
        if key not in self._weights:
            every = enumerate(self.parts)
            made = [self._made(layer, part, *sizes).astype(np.float32) for part, sizes in every]
            self._weights[key] = [torch.from_numpy(each).to(device) for each in made]
        return self._weights[key]

    def _made(self, layer: int, part: int, size: int, bits: int) -> Any:
        if self._learned is None or part:
            return directions(size, bits, seed=self.seed, layer=layer, part=part)
        found = self._learned.get(f"layer.{layer}")
        if found is None or found.shape != (size, bits):
            shape = None if found is None else found.shape
            raise ConfigError(
                f"hash_weights_file: layer.{layer} must have shape ({size}, {bits}), got {shape}"
            )
        return found

    def encode(self, layer: int, keys: Tensor) -> Tensor:
        """Codes ``[m, b, h, bytes]``."""
        parts = keys.split([size for size, _ in self.parts], dim=-1)
        weights = self.weights_of(layer, keys.device)
        found = [made_code(x, w) for x, w in zip(parts, weights, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def encode_tokens(self, layer: int, keys: Tensor, reps: Tensor, slots: Tensor) -> None:
        """By one kernel for each part of a key, which writes codes into their slots."""
        kernels = kernels_for(keys, reps)
        if kernels is None:
            super().encode_tokens(layer, keys, reps, slots)
            return
        every = self.weights_of(layer, keys.device)
        if len(every) == 1:
            kernels.hash_encode(keys, every[0], reps, slots)
            return
        start = byte = 0
        for (size, bits), weights in zip(self.parts, every, strict=True):
            part, of = keys[..., start : start + size], reps[..., byte : byte + bits // 8]
            kernels.hash_encode(part, weights, of, slots)
            start, byte = start + size, byte + bits // 8

    def score(self, layer: int, query: Tensor, reps: Tensor) -> Tensor:
        """Minus the least distance in each block."""
        codes = self._query_codes(layer, query[-1:])[0]
        if not self.geometry.rope_dim:
            return -distance(codes, reps).amin(dim=1).T.contiguous()
        dist = sum(distance(one, reps[:, :, 0]) for one in codes[0])  # [n, b]
        assert isinstance(dist, Tensor)
        return -dist.amin(dim=1)[None]

    def fused_scores(
        self,
        layer: int,
        query: Tensor,
        reps: Tensor,
        table: Tensor,
        blocks: Tensor,
        *,
        init: int,
        local: int,
        apart: bool,
    ) -> Tensor | None:
        """By kernels. A CPU's does not take as many heads of latent attention as some models
        have."""
        kernels = kernels_for(query, reps)
        if kernels is None:
            return None
        found: Tensor
        how: dict[str, Any] = {"heads_apart": apart, "init": init, "local": local}
        if not self.geometry.rope_dim:
            weights = self.weights_of(layer, query.device)[0]
            found = kernels.hash_scores(query, weights, reps, table, blocks, **how)
            return found
        codes = self._query_codes(layer, query)
        if kernels is retrieval and codes.shape[2] > retrieval.MOST_QUERIES:
            return None
        found = kernels.hamming_scores(codes, reps, table, blocks * self.geometry.block_size, **how)
        return found

    def fused_select(
        self,
        layer: int,
        query: Tensor,
        reps: Tensor,
        of: Candidates,
        *,
        init: int,
        local: int,
        apart: bool,
        into: Kept,
    ) -> Kept | None:
        """In one call where a key has one code."""
        kernels = kernels_for(query, reps)
        if kernels is None or self.geometry.rope_dim:
            how: dict[str, Any] = {"init": init, "local": local, "apart": apart, "into": into}
            return super().fused_select(layer, query, reps, of, **how)
        weights = self.weights_of(layer, query.device)[0]
        tables, how = (of.reps, of.table, of.tokens, of.budgets), {"init": init, "local": local}
        found: Kept = kernels.hash_select(
            query, weights, reps, *tables, heads_apart=apart, into=into, **how
        )
        return found

    def _query_codes(self, layer: int, query: Tensor) -> Tensor:
        """Codes of queries ``[r, h*g, d]``: ``[r, h, bytes]``, with latent attention ``[r, 1,
        heads, bytes]``."""
        if not self.geometry.rope_dim:
            kernels, weights = kernels_for(query), self.weights_of(layer, query.device)[0]
            if kernels is None:
                return self.encode(layer, self.grouped(query).mean(dim=2))
            codes: Tensor = kernels.hash_encode_query(query, weights, self.geometry.kv_heads)
            return codes
        heads = query.float()
        if self.reduction > 1:
            if heads.shape[1] % self.reduction:
                raise ConfigError(
                    f"reduction_heads: {heads.shape[1]} heads are no multiple of {self.reduction}"
                )
            heads = heads.view(len(heads), self.reduction, -1, heads.shape[-1]).mean(dim=1)
        return self.encode(layer, heads)[:, None]

    def weights(self, scores: Tensor) -> Tensor:
        """A key at angle ``a`` to a query of the same length weighs ``exp(2 sqrt(d) cos a)``: an
        estimate of the order of magnitude, from the distance of codes alone."""
        bits = sum(bits for _, bits in self.parts)
        angle = torch.pi * (-scores.double()).clamp(0, bits) / bits
        return torch.softmax(2 * self.geometry.head_dim**0.5 * torch.cos(angle), dim=-1)


_OPTIONS = {"bits": "hash_bits", "seed": "hash_seed", "weights_file": "hash_weights_file"}
register_selector("GSAOnDevice", Hash, _OPTIONS | {"reduction_heads": "reduction_heads"})
