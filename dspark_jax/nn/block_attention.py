"""How a draft block attends to its context in a cache: the ways there are, and the one that suits a device."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jax.sharding import Mesh, Sharding

from dspark_jax.core.arrays import Array, Int
from dspark_jax.kernels import block_attention as kernels
from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import Pair, PlainWrites, on_one_tpu
from dspark_jax.nn.row_attention import PlainRows, RowAttention, rows_suited_to


@runtime_checkable
class BlockAttention(Protocol):
    """Attention of one block a row, at start_B.., over what a cache holds before start_B and over itself."""

    def __call__(
        self, spec: LayerSpec, q_BKHC: Array, own: Pair, cache: Pair, start_B: Int[Array, "B"]
    ) -> tuple[Array, Pair]:
        """(what is mixed, [B, K, H, C]; the cache, in which positions from start_B on are scratch)"""
        ...


@dataclass(frozen=True)
class CachedBlocks:
    """The block passes through the cache, and attends as `rows` do; every device can do that plainly."""

    rows: RowAttention = field(default_factory=PlainRows)

    def __call__(
        self, spec: LayerSpec, q_BKHC: Array, own: Pair, cache: Pair, start_B: Int[Array, "B"]
    ) -> tuple[Array, Pair]:
        cache = PlainWrites()(cache, own, start_B)
        return self.rows(spec, q_BKHC, own, cache, start_B, causal=False), cache


@dataclass(frozen=True, kw_only=True)
class KernelBlocks:
    """The TPU kernel: reads the context that is there instead of the whole cache, and writes none of it.

    `mesh`: the one that rows and heads are spread over; its axes have to divide them.
    """

    mesh: Mesh | None = None
    interpret: bool = False

    def __call__(
        self, spec: LayerSpec, q_BKHC: Array, own: Pair, cache: Pair, start_B: Int[Array, "B"]
    ) -> tuple[Array, Pair]:
        own_k, own_v = (new.astype(held.dtype) for held, new in zip(cache, own, strict=True))
        arguments = (q_BKHC, *cache, own_k, own_v, start_B)
        how = {"scale": spec.attention_scale, "window": spec.window, "interpret": self.interpret}
        if self.mesh is None:
            return kernels.block_attention(*arguments, **how), cache
        return kernels.sharded_block_attention(self.mesh, *arguments, **how), cache


def suited_to(where: Sharding) -> BlockAttention:
    """The kernel on a single TPU, else the cache and what suits its rows."""
    return KernelBlocks() if on_one_tpu(where) else CachedBlocks(rows=rows_suited_to(where))
