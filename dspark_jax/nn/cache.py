"""Key/value cache: explicit state, one pair of arrays a layer, updated in place by a caller that donates it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, DType, Float, Int, pytree
from dspark_jax.nn.block import LayerSpec


@pytree
class KVCache:
    """Keys and values of every layer, each [B, J, S, C]. Positions nobody committed hold scratch."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def init_cache(layers: Sequence[LayerSpec], batch: int, span: int, dtype: DType) -> KVCache:
    """Zeros for `batch` rows of `span` positions."""

    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros((batch, spec.kv_heads, span, spec.head_dim), dtype) for spec in layers)

    return KVCache(keys=zeros(), values=zeros())


def write(
    cache_BJSC: Float[Array, "B J S C"], new_BJTC: Float[Array, "B J T C"], start_B: Int[Array, "B"]
) -> Float[Array, "B J S C"]:
    """Row b's new entries at positions start_B[b]..start_B[b]+T-1. The caller keeps start + T <= S."""

    def row(cache: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(cache, new, (0, start, 0))

    return jax.vmap(row)(cache_BJSC, new_BJTC.astype(cache_BJSC.dtype), start_B)


def resize(cache_BJSC: Float[Array, "B J S C"], span: int) -> Float[Array, "B J Z C"]:
    """The first `span` positions, padded with zeros where the cache is shorter."""
    held = cache_BJSC[:, :, :span]
    return jnp.pad(held, ((0, 0), (0, 0), (0, span - held.shape[2]), (0, 0)))
