"""Small modules with parameters: norm, feed-forward, vocabulary. Kernels are [in, out...]."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int


def kernel(rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str], *, fan_in: int, dtype: DType) -> nnx.Param:
    """A normal-initialised parameter (standard deviation fan_in ** -0.5) whose dimensions carry logical names."""
    value = jax.random.normal(rngs.params(), tuple(shape), jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype), axes=tuple(axes))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32."""

    def __init__(self, width: int, axis: str, *, eps: float, dtype: DType):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, dtype), axes=(axis,))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * normed.astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x), gate and up in one kernel."""

    def __init__(self, d_model: int, ffw: int, *, rngs: nnx.Rngs, dtype: DType):
        self.gate_up = kernel(rngs, (d_model, 2, ffw), ("model", "pair", "ffw"), fan_in=d_model, dtype=dtype)
        self.down = kernel(rngs, (ffw, d_model), ("ffw", "model"), fan_in=ffw, dtype=dtype)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        both = jnp.einsum("btd,dpf->btpf", x_BTD, self.gate_up[...])
        return jnp.einsum("btf,fd->btd", jax.nn.silu(both[:, :, 0]) * both[:, :, 1], self.down[...])


class Vocabulary(nnx.Module):
    """Token embedding and LM head of a target; its drafter borrows both. `head` is None when they are tied."""

    def __init__(self, vocab_size: int, d_model: int, *, tied: bool, rngs: nnx.Rngs, dtype: DType):
        self.embedding = kernel(rngs, (vocab_size, d_model), ("vocab", "model"), fan_in=d_model, dtype=dtype)
        self.head = (
            None if tied else kernel(rngs, (d_model, vocab_size), ("model", "vocab"), fan_in=d_model, dtype=dtype)
        )

    def embed(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return self.embedding[...][tokens]

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """float32 logits of normed hidden states."""
        if self.head is None:
            return jnp.einsum("...d,vd->...v", hidden, self.embedding[...], preferred_element_type=jnp.float32)
        return jnp.einsum("...d,dv->...v", hidden, self.head[...], preferred_element_type=jnp.float32)
