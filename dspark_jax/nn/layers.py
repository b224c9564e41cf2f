"""Small modules with parameters: norm, feed-forward, vocabulary. Kernels are [in, out...]."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.core.mesh import constrain


def kernel(rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str], *, fan_in: int, dtype: DType) -> nnx.Param:
    """A normal-initialised parameter (standard deviation fan_in ** -0.5) whose dimensions carry logical names."""
    value = jax.random.normal(rngs.params(), tuple(shape), jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype), axes=tuple(axes))


def float32_product(spec: str, x: Float[Array, "*B D"], w: Float[Array, "..."]) -> Float[Array, "*B E"]:
    """`jnp.einsum(spec, x, w)` over x's last dimension, in float32 whatever the dtype of the weights.

    A single row comes with one of zeros where the weights are narrower: for it alone XLA makes a float32 copy of them
    on a GPU (on an H200 a product with [151936, 256] took 49 us so, and takes 27).
    """
    single = x.size == x.shape[-1] and w.dtype != jnp.float32
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))) if single else x
    out = jnp.einsum(spec, rows, w, preferred_element_type=jnp.float32)
    return out[0].reshape(*x.shape[:-1], -1) if single else out


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32."""

    def __init__(self, width: int, axis: str, *, eps: float, dtype: DType):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, dtype), axes=(axis,))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.scale[...] * rms_normalise(x, self.eps)


def rms_normalise(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """x / rms(x) in float32, returned in x's dtype: the norm without a scale."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)).astype(x.dtype)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class GatedMLP(nnx.Module):
    """down(activation(gate x) * up x), gate and up in one kernel."""

    def __init__(self, d_model: int, ffw: int, *, activation: str, rngs: nnx.Rngs, dtype: DType):
        self.activation = activation
        self.gate_up = kernel(rngs, (d_model, 2, ffw), ("model", "pair", "ffw"), fan_in=d_model, dtype=dtype)
        self.down = kernel(rngs, (ffw, d_model), ("ffw", "model"), fan_in=ffw, dtype=dtype)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        both = jnp.einsum("btd,dpf->btpf", x_BTD, self.gate_up[...])
        gated = ACTIVATIONS[self.activation](both[:, :, 0]) * both[:, :, 1]
        return jnp.einsum("btf,fd->btd", gated, self.down[...])


@dataclass(frozen=True, kw_only=True)
class VocabularySpec:
    """Facts of an embedding and LM head. `embedding_scale` multiplies embeddings; `soft_cap` c bounds logits to
    c tanh(logits / c); `tied`: the head is the embedding."""

    size: int
    d_model: int
    tied: bool
    embedding_scale: float | None = None
    soft_cap: float | None = None


class Vocabulary(nnx.Module):
    """Token embedding and LM head of a target; its drafter borrows both. `head` is None when they are tied."""

    def __init__(self, spec: VocabularySpec, *, rngs: nnx.Rngs, dtype: DType):
        size, width = spec.size, spec.d_model
        self.spec = spec
        self.embedding = kernel(rngs, (size, width), ("vocab", "model"), fan_in=width, dtype=dtype)
        self.head = None if spec.tied else kernel(rngs, (width, size), ("model", "vocab"), fan_in=width, dtype=dtype)

    def embed(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        embedded = constrain(self.embedding[...][tokens], "batch")
        if self.spec.embedding_scale is None:
            return embedded
        # The scale is rounded to the weights' dtype first, as the family's own code does.
        return embedded * jnp.asarray(self.spec.embedding_scale, embedded.dtype)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """float32 logits of normed hidden states."""
        if self.head is None:
            logits = float32_product("...d,vd->...v", hidden, self.embedding[...])
        else:
            logits = float32_product("...d,dv->...v", hidden, self.head[...])
        cap = self.spec.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
