"""The one transformer block, of every target and every drafter; what differs is a field of its LayerSpec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.core.mesh import constrain
from dspark_jax.nn.layers import GatedMLP, RMSNorm, kernel, rms_normalise
from dspark_jax.ops.rope import RopeSpec, rotate

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Facts of one transformer layer.

    `in_width`: width of the attention's input where it is not the residual's (Eagle3 reads twice d_model). `qk_norm`:
    RMS norms on query and key heads. `v_norm`: values RMS-normed without a scale. `k_is_v`: values are the keys before
    their norm and rotation. `scale`: of the scores, head_dim ** -0.5 when None. `branch_norms`: attention and
    feed-forward outputs are normed before they join the residual. `layer_scalar`: one factor on the layer's output.
    `window`: positions a query sees, its own included; None is all.
    """

    d_model: int
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    norm_eps: float
    in_width: int | None = None
    activation: str = "silu"
    qk_norm: bool = False
    v_norm: bool = False
    k_is_v: bool = False
    scale: float | None = None
    branch_norms: bool = False
    layer_scalar: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"layer: {self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Attention(nnx.Module):
    """Projections of grouped-query attention; what is attended to is the caller's business."""

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs, dtype: DType):
        heads, kv_heads, channels = spec.heads, spec.kv_heads, spec.head_dim
        width = spec.in_width or spec.d_model
        parts = 1 if spec.k_is_v else 2
        self.spec = spec
        self.q = kernel(rngs, (width, heads, channels), ("model", "heads", "head_dim"), fan_in=width, dtype=dtype)
        self.kv = kernel(
            rngs,
            (width, parts, kv_heads, channels),
            ("model", "pair", "kv_heads", "head_dim"),
            fan_in=width,
            dtype=dtype,
        )
        self.o = kernel(
            rngs,
            (heads, channels, spec.d_model),
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
        kv = jnp.einsum("btd,dpjc->btpjc", x_BTD, self.kv[...])
        k, v = kv[:, :, 0], kv[:, :, -1]
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.spec.v_norm:
            v = rms_normalise(v, self.spec.norm_eps)
        return rotate(k, positions_BT, self.spec.rope).swapaxes(1, 2), v.swapaxes(1, 2)

    def output(self, mixed_BTHC: Float[Array, "B T H C"]) -> Float[Array, "B T D"]:
        # Contracted over one dimension, with results in the order of x's and the weights' own: else XLA copies weights,
        # transposed, in every pass (13 % of a small model's step on a CPU, 6 % of a 4B one's on a GPU).
        flat_BTW = mixed_BTHC.reshape(*mixed_BTHC.shape[:2], -1)
        return jnp.einsum("btw,wd->btd", flat_BTW, self.o[...].reshape(-1, self.spec.d_model))


class Block(nnx.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, spec: LayerSpec, *, rngs: nnx.Rngs, dtype: DType):
        def norm(wanted: bool = True) -> RMSNorm | None:
            return RMSNorm(spec.d_model, "model", eps=spec.norm_eps, dtype=dtype) if wanted else None

        self.spec = spec
        # An input of another width is made, and normed, by whoever makes it.
        self.input_norm = norm(spec.in_width is None)
        self.attention = Attention(spec, rngs=rngs, dtype=dtype)
        self.attention_out_norm = norm(spec.branch_norms)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(spec.d_model, spec.ffw, activation=spec.activation, rngs=rngs, dtype=dtype)
        self.mlp_out_norm = norm(spec.branch_norms)
        self.scalar = nnx.Param(jnp.ones((), dtype), axes=()) if spec.layer_scalar else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        attend: Callable[[Array, Array, Array], tuple[Array, Carry]],
        *,
        attention_input: Float[Array, "B T W"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Carry]:
        """`attend(q_BTHC, k_BJTC, v_BJTC) -> (mixed_BTHC, carry)` decides what is seen and what is cached.

        `attention_input` replaces the normed residual as what queries, keys and values are made of.
        """
        x_BTD = constrain(x_BTD, "batch")
        if attention_input is None:
            attention_input = _normed(self.input_norm, x_BTD)
        keys, values = self.attention.keys_values(attention_input, positions_BT)
        mixed, carry = attend(self.attention.queries(attention_input, positions_BT), keys, values)
        x_BTD = constrain(x_BTD + _normed(self.attention_out_norm, self.attention.output(mixed)), "batch")
        x_BTD = constrain(x_BTD + _normed(self.mlp_out_norm, self.mlp(_normed(self.mlp_norm, x_BTD))), "batch")
        return (x_BTD if self.scalar is None else x_BTD * self.scalar[...]), carry


def _normed(norm: RMSNorm | None, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return x_BTD if norm is None else norm(x_BTD)
