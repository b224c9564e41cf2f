"""The one transformer block, of every target and every drafter; what differs is a field of its LayerSpec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.nn.layers import GatedMLP, RMSNorm, kernel
from dspark_jax.ops.rope import RopeSpec, rotate

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Facts of one transformer layer."""

    d_model: int
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    norm_eps: float
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"layer: {self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5


class Attention(nnx.Module):
    """Projections of grouped-query attention; what is attended to is the caller's business."""

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs, dtype: DType):
        width, heads, kv_heads, channels = spec.d_model, spec.heads, spec.kv_heads, spec.head_dim
        self.spec = spec
        self.q = kernel(rngs, (width, heads, channels), ("model", "heads", "head_dim"), fan_in=width, dtype=dtype)
        self.kv = kernel(
            rngs,
            (width, 2, kv_heads, channels),
            ("model", "pair", "kv_heads", "head_dim"),
            fan_in=width,
            dtype=dtype,
        )
        self.o = kernel(
            rngs,
            (heads, channels, width),
            ("heads", "head_dim", "model"),
            fan_in=heads * channels,
            dtype=dtype,
        )

        def norm() -> RMSNorm | None:
            return RMSNorm(channels, "head_dim", eps=spec.norm_eps, dtype=dtype) if spec.qk_norm else None

        self.q_norm, self.k_norm = norm(), norm()

    def queries(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]) -> Float[Array, "B T H C"]:
        q = jnp.einsum("btd,dhc->bthc", x_BTD, self.q[...])
        if self.q_norm is not None:
            q = self.q_norm(q)
        return rotate(q, positions_BT, self.spec.rope)

    def keys_values(
        self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B J T C"], Float[Array, "B J T C"]]:
        """Keys (normed and rotated) and values, heads first as caches keep them."""
        kv = jnp.einsum("btd,dpjc->pbtjc", x_BTD, self.kv[...])
        k, v = kv[0], kv[1]
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(k, positions_BT, self.spec.rope).swapaxes(1, 2), v.swapaxes(1, 2)

    def output(self, mixed_BTHC: Float[Array, "B T H C"]) -> Float[Array, "B T D"]:
        return jnp.einsum("bthc,hcd->btd", mixed_BTHC, self.o[...])


class Block(nnx.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs, dtype: DType):
        self.spec = spec
        self.input_norm = RMSNorm(spec.d_model, "model", eps=spec.norm_eps, dtype=dtype)
        self.attention = Attention(spec, rngs=rngs, dtype=dtype)
        self.post_attention_norm = RMSNorm(spec.d_model, "model", eps=spec.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(spec.d_model, spec.ffw, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        attend: Callable[[Array, Array, Array], tuple[Array, Carry]],
    ) -> tuple[Float[Array, "B T D"], Carry]:
        """`attend(q_BTHC, k_BJTC, v_BJTC) -> (mixed_BTHC, carry)` decides what is seen and what is cached."""
        normed = self.input_norm(x_BTD)
        keys, values = self.attention.keys_values(normed, positions_BT)
        mixed, carry = attend(self.attention.queries(normed, positions_BT), keys, values)
        x_BTD = x_BTD + self.attention.output(mixed)
        return x_BTD + self.mlp(self.post_attention_norm(x_BTD)), carry
