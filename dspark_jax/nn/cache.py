"""Key/value cache: explicit state, one pair of arrays a layer, updated in place by a caller that donates it.

There are two ways to write to it, and the one that suits a device is chosen by whoever knows the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Sharding

from dspark_jax.core.arrays import Array, DType, Float, Int, pytree
from dspark_jax.kernels import cache_write as kernels
from dspark_jax.nn.block import LayerSpec

Module = TypeVar("Module", bound="Caching")
Form = TypeVar("Form", bound="Cache")
Pair = tuple[Array, Array]
"""Keys and values of a layer."""


class Cache(ABC):
    """Keys and values of every layer, for some rows of some positions. Positions nobody committed hold scratch."""

    @property
    @abstractmethod
    def span(self) -> int:
        """Positions of a row."""

    @abstractmethod
    def with_layers(self: Form, layers: Sequence[Any]) -> Form:
        """These rows and positions, each layer's entries being these."""

    @abstractmethod
    def picked(self: Form, picked_Z: Int[Array, "Z"], span: int) -> Form:
        """These rows, in that order, repeats allowed, in a cache of another span: cut, or with zeros behind."""

    @abstractmethod
    def inserted(self: Form, group: Form, rows_G: Int[Array, "G"]) -> Form:
        """This cache with its rows `rows_G` replaced by those of `group`; a row index past the end drops that row."""


@pytree
class KVCache(Cache):
    """Each layer's keys and its values [B, J, S, C]."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def span(self) -> int:
        return self.keys[0].shape[2]

    def with_layers(self, layers: Sequence[Pair]) -> "KVCache":
        keys, values = zip(*layers, strict=True)
        return replace(self, keys=keys, values=values)

    def picked(self, picked_Z: Int[Array, "Z"], span: int) -> "KVCache":
        return jax.tree.map(lambda x: resize(x[picked_Z], span), self)

    def inserted(self, group: "KVCache", rows_G: Int[Array, "G"]) -> "KVCache":
        return jax.tree.map(lambda old, new: old.at[rows_G].set(new, mode="drop"), self, group)


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


@runtime_checkable
class CacheWrite(Protocol):
    """A layer's cache with every row's new keys and values [B, J, T, C] at positions start_B..start_B+T-1."""

    def __call__(self, cache: Pair, new: Pair, start_B: Int[Array, "B"]) -> Pair: ...


@dataclass(frozen=True)
class PlainWrites:
    """One update of all rows, which every device can do, and which on a TPU becomes a loop over them."""

    def __call__(self, cache: Pair, new: Pair, start_B: Int[Array, "B"]) -> Pair:
        return write(cache[0], new[0], start_B), write(cache[1], new[1], start_B)


@dataclass(frozen=True, kw_only=True)
class KernelWrites:
    """The TPU kernel, which fetches all rows' places at once; plainly where its tiles do not fit the cache."""

    interpret: bool = False

    def __call__(self, cache: Pair, new: Pair, start_B: Int[Array, "B"]) -> Pair:
        if not kernels.fits(cache[0], new[0].shape[2]):
            return PlainWrites()(cache, new, start_B)
        return kernels.write_pair(*cache, *new, start_B, interpret=self.interpret)


class Caching(nnx.Module):
    """A module that decodes with a cache. `cache_write`: how it writes there; None is plainly."""

    cache_write: CacheWrite | None = None

    def with_cache_write(self: Module, cache_write: CacheWrite) -> Module:
        """This module, the same parameters, writing by `cache_write`."""
        other = copy(self)
        other.cache_write = cache_write
        return other

    def write(self, cache: Pair, new: Pair, start_B: Int[Array, "B"]) -> Pair:
        return (self.cache_write or PlainWrites())(cache, new, start_B)


def on_one_tpu(where: Sharding) -> bool:
    """Whether a kernel may be called as it is: over a mesh it would have to be spread by hand."""
    return [device.platform for device in where.device_set] == ["tpu"]


def writes_suited_to(where: Sharding) -> CacheWrite:
    """The kernel on a single TPU, else plain operations, which XLA spreads over any mesh."""
    return KernelWrites() if on_one_tpu(where) else PlainWrites()
