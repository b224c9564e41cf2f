"""The target's cache in pages, by which packed tokens are attended as they are packed: the other form beside KVCache.

Which form a target's cache has is chosen by whoever knows the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jax.sharding import Sharding

from dspark_jax.core.arrays import Array, DType, Float, Int, pytree
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import Cache, Pair, init_cache, on_one_tpu
from dspark_jax.nn.paged_attention import KernelPages, PagedAttention
from dspark_jax.nn.row_attention import PlainRows, RowAttention, rows_suited_to
from dspark_jax.ops.packing import Packing

_PAGE = 128


@pytree
class PagedCache(Cache):
    """Each layer's pages [P, S, 2 J, C], keys in even heads and values in odd ones; every layer's are used alike.

    `attention`: how they are written to and attended over.
    """

    pages: tuple[Array, ...]
    pages_BI: Int[Array, "B I"]
    """Position s of row b is in page pages_BI[b, s // S]."""
    attention: PagedAttention = struct.field(pytree_node=False)

    @property
    def span(self) -> int:
        return self.pages_BI.shape[1] * self.pages[0].shape[1]

    def with_layers(self, layers: Sequence[Array]) -> "PagedCache":
        return replace(self, pages=tuple(layers))

    def extended(
        self,
        layer: int,
        spec: LayerSpec,
        q_BTHC: Float[Array, "B T H C"],
        new: Pair,
        start_B: Int[Array, "Z"],
        packed: Packing,
    ) -> tuple[Float[Array, "B T H C"], Array]:
        """(what tokens mix of their rows up to themselves; the layer's pages with them), B T being the packed axis."""
        # Keys and values of a head one after the other.
        new_BTJ2C = jnp.stack(new, axis=-2).swapaxes(1, 2)
        new_NXC = new_BTJ2C.reshape(-1, 2 * spec.kv_heads, spec.head_dim)
        q_NHC = q_BTHC.reshape(-1, *q_BTHC.shape[2:])
        # Rows that nobody is in may have wandered past their end.
        start_B = jnp.minimum(start_B, self.span - packed.width)
        pages = self.attention.write(self.pages[layer], new_NXC, self.pages_BI, start_B, packed)
        mixed_NHC = self.attention.attend(spec, q_NHC, pages, self.pages_BI, start_B, packed.count_B)
        is_token_N = jnp.arange(q_NHC.shape[0]) < jnp.sum(packed.count_B)
        # What lies behind the last token may be NaN, and goes where zero weights would multiply it.
        return jnp.where(is_token_N[:, None, None], mixed_NHC, 0).reshape(q_BTHC.shape), pages

    def picked(self, picked_Z: Int[Array, "Z"], span: int) -> "PagedCache":
        table_ZI = self.pages_BI[picked_Z]
        rows, size = picked_Z.shape[0], page_size(span)

        def move(pages_PSXC: Array) -> Array:
            held = pages_PSXC[table_ZI].reshape(rows, self.span, *pages_PSXC.shape[2:])[:, :span]
            held = jnp.pad(held, ((0, 0), (0, span - held.shape[1]), (0, 0), (0, 0)))
            return held.reshape(-1, size, *held.shape[2:])

        return replace(self, pages=tuple(map(move, self.pages)), pages_BI=_own_pages(rows, span))

    def inserted(self, group: "PagedCache", rows_G: Int[Array, "G"]) -> "PagedCache":
        # There is no such page.
        dropped = self.pages[0].shape[0]
        here_GI = self.pages_BI.at[rows_G].get(mode="fill", fill_value=dropped)
        pages = (
            old.at[here_GI].set(new[group.pages_BI], mode="drop")
            for old, new in zip(self.pages, group.pages, strict=True)
        )
        return replace(self, pages=tuple(pages))


def page_size(span: int) -> int:
    """Positions of a page; a span that is not whole pages is one."""
    return span if span % _PAGE else _PAGE


def init_pages(
    layers: Sequence[LayerSpec], batch: int, span: int, dtype: DType, attention: PagedAttention
) -> PagedCache:
    """Zeros for `batch` rows of `span` positions."""
    size = page_size(span)
    pages = (jnp.zeros((batch * span // size, size, 2 * spec.kv_heads, spec.head_dim), dtype) for spec in layers)
    return PagedCache(pages=tuple(pages), pages_BI=_own_pages(batch, span), attention=attention)


def _own_pages(batch: int, span: int) -> Int[Array, "B I"]:
    """Every row's own pages, one after the other."""
    return jnp.arange(batch * span // page_size(span), dtype=jnp.int32).reshape(batch, -1)


@runtime_checkable
class CacheForm(Protocol):
    """Makes the empty cache of a target: zeros for `batch` rows of `span` positions."""

    def __call__(self, layers: Sequence[LayerSpec], batch: int, span: int, dtype: DType) -> Cache: ...


@dataclass(frozen=True)
class InRows:
    """A KVCache, over which tokens attend by `attention`; every device can do that plainly."""

    attention: RowAttention = field(default_factory=PlainRows)

    def __call__(self, layers: Sequence[LayerSpec], batch: int, span: int, dtype: DType) -> Cache:
        return init_cache(layers, batch, span, dtype)


@dataclass(frozen=True, kw_only=True)
class InPages:
    """Pages, where `attention` fits every layer; else in rows."""

    attention: PagedAttention

    def __call__(self, layers: Sequence[LayerSpec], batch: int, span: int, dtype: DType) -> Cache:
        if not all(self.attention.fits(spec, dtype) for spec in layers):
            return init_cache(layers, batch, span, dtype)
        return init_pages(layers, batch, span, dtype, self.attention)


def form_suited_to(where: Sharding) -> CacheForm:
    """Pages and their kernels on a single TPU, else rows and what suits them."""
    return InPages(attention=KernelPages()) if on_one_tpu(where) else InRows(attention=rows_suited_to(where))
