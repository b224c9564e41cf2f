"""How the new tokens of rows attend over a cache of rows: the ways there are, and the one that suits a device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import Sharding

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.kernels import cudnn_attention
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import Pair
from dspark_jax.ops import attention_parts as plain
from dspark_jax.ops.attention import attention
from dspark_jax.ops.masks import cached_block_mask, causal_mask


@runtime_checkable
class RowAttention(Protocol):
    """Tokens at positions start_B.. of each row, over what a cache holds before start_B and over one another, which it
    holds too: each up to itself when `causal`, else over all of them.
    """

    def __call__(
        self,
        spec: LayerSpec,
        q_BTHC: Float[Array, "B T H C"],
        own: Pair,
        cache: Pair,
        start_B: Int[Array, "B"],
        *,
        causal: bool,
    ) -> Float[Array, "B T H C"]:
        """`own`: the tokens' keys and values [B, J, T, C]."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Scores all of the cache, which every device can do."""

    def __call__(
        self,
        spec: LayerSpec,
        q_BTHC: Float[Array, "B T H C"],
        own: Pair,
        cache: Pair,
        start_B: Int[Array, "B"],
        *,
        causal: bool,
    ) -> Float[Array, "B T H C"]:
        mask = causal_mask if causal else cached_block_mask
        seen = mask(start_B, q_BTHC.shape[1], cache[0].shape[2], spec.window)
        return attention(q_BTHC, *cache, seen, scale=spec.attention_scale)


@runtime_checkable
class AttentionPart(Protocol):
    """See `ops.attention_parts.attention_part`."""

    def __call__(
        self,
        q_BHTC: Array,
        k_BJSC: Array,
        v_BJSC: Array,
        count_B: Array | None = None,
        *,
        scale: float,
        causal: bool = False,
    ) -> plain.Part: ...


@dataclass(frozen=True, kw_only=True)
class FusedRows:
    """Reads the context that is there, by a kernel that keeps scores to itself; plainly where there are few of them.

    `part`, where it `fits` heads of so many channels and that type. `least_scores`: bytes of float32 scores from which
    it pays. Fewer stay in the chip's own memory, where plain attention is as fast or faster: 8 layers of Qwen3-4B's
    heads over 8 tokens of 8 rows of 520 positions took 201 us on an H200 plainly and 255 so, those of 32 rows of 4104
    positions 2,345 and 1,339. `side_by_side`: problems that a device works on at once; contexts are cut where rows and
    heads make fewer of them.
    """

    part: AttentionPart = cudnn_attention.attention_part
    fits: Callable[[int, DType], bool] = cudnn_attention.fits
    least_scores: int = 2**24
    side_by_side: int = 128

    def __call__(
        self,
        spec: LayerSpec,
        q_BTHC: Float[Array, "B T H C"],
        own: Pair,
        cache: Pair,
        start_B: Int[Array, "B"],
        *,
        causal: bool,
    ) -> Float[Array, "B T H C"]:
        (batch, tokens, heads, channels), keys = q_BTHC.shape, cache[0]
        fits = spec.window is None and self.fits(channels, keys.dtype)
        if not fits or 4 * batch * heads * tokens * keys.shape[2] < self.least_scores:
            return PlainRows()(spec, q_BTHC, own, cache, start_B, causal=causal)
        q_BHTC = q_BTHC.swapaxes(1, 2).astype(keys.dtype)
        parts = self._of_context(q_BHTC, cache, start_B if causal else start_B + tokens, spec.attention_scale)
        if causal:
            own_k, own_v = (new.astype(keys.dtype) for new in own)
            # A tile of the kernel that a few tokens of one head do not fill costs as much as a full one.
            of_own = plain.own_part if tokens < _TILE else partial(self.part, causal=True)
            parts.append(of_own(q_BHTC, own_k, own_v, scale=spec.attention_scale))
        return plain.merged(parts).swapaxes(1, 2).astype(q_BTHC.dtype)

    def _of_context(self, q_BHTC: Array, cache: Pair, count_B: Array, scale: float) -> list[plain.Part]:
        """Every key/value head of every piece of a row is a problem of its own, the queries that share it together."""
        batch, kv_heads, span, channels = cache[0].shape
        queries = q_BHTC.shape[1] // kv_heads * q_BHTC.shape[2]
        pieces = self._pieces(batch * kv_heads * -(-queries // _TILE), span)
        length = span // pieces

        def spread(x: Array) -> Array:
            """[B, J or 1, P or 1, ...], one entry a problem."""
            return jnp.broadcast_to(x, (batch, kv_heads, pieces, *x.shape[3:])).reshape(-1, *x.shape[3:])

        keys, values = (x.reshape(-1, 1, length, channels) for x in cache)
        count = spread(jnp.clip(count_B[:, None, None] - length * jnp.arange(pieces), 0, length))
        rows = spread(q_BHTC.reshape(batch, kv_heads, 1, 1, queries, channels))
        mixed, mass = self.part(rows, keys, values, count, scale=scale)
        mixed = mixed.reshape(batch, kv_heads, pieces, queries, channels)
        mass = mass.reshape(batch, kv_heads, pieces, queries)
        of_heads = q_BHTC.shape[:3]
        return [(mixed[:, :, p].reshape(q_BHTC.shape), mass[:, :, p].reshape(of_heads)) for p in range(pieces)]

    def _pieces(self, problems: int, span: int) -> int:
        """Into how many equal pieces contexts are cut."""
        most = min(self.side_by_side // problems, span // _SHORTEST_PIECE)
        return next((count for count in range(most, 1, -1) if span % count == 0), 1)


_TILE, _SHORTEST_PIECE = 64, 256


def rows_suited_to(where: Sharding) -> RowAttention:
    """cuDNN's kernel on a single GPU that has it, else plain operations, which XLA spreads over any mesh."""
    [*devices] = where.device_set
    if len(devices) > 1 or devices[0].platform != "gpu" or "NVIDIA" not in devices[0].device_kind:
        return PlainRows()
    return FusedRows() if float(devices[0].compute_capability) >= 8 else PlainRows()
