"""The light sequential half of the semi-autoregressive drafter, and the confidence head (sections 3.1 and 3.2)."""

import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.nn.layers import kernel


class MarkovHead(nnx.Module):
    """Vanilla Markov head: the bias of draft token k is W2 W1[x_{k-1}], rank R. The first x_{k-1} is the anchor."""

    def __init__(self, vocab_size: int, rank: int, *, rngs: nnx.Rngs, dtype: DType):
        self.w1 = kernel(rngs, (vocab_size, rank), ("vocab", "rank"), fan_in=rank, dtype=dtype)
        self.w2 = kernel(rngs, (vocab_size, rank), ("vocab", "rank"), fan_in=rank, dtype=dtype)

    def embed(self, previous: Int[Array, "*B"]) -> Float[Array, "*B R"]:
        return self.w1[...][previous]

    def bias(self, embedded: Float[Array, "*B R"]) -> Float[Array, "*B V"]:
        """float32 addition to the backbone's logits."""
        return jnp.einsum("...r,vr->...v", embedded, self.w2[...], preferred_element_type=jnp.float32)


class ConfidenceHead(nnx.Module):
    """Logit of c_k from [h_k ; W1[x_{k-1}]] or h_k alone; never from x_k, so a length may depend on it losslessly."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, dtype: DType):
        self.w = kernel(rngs, (width,), ("features",), fan_in=width, dtype=dtype)
        self.b = nnx.Param(jnp.zeros((), dtype), axes=())

    def __call__(self, inputs: Float[Array, "*B D"]) -> Float[Array, "*B"]:
        return jnp.einsum("...d,d->...", inputs, self.w[...], preferred_element_type=jnp.float32) + self.b[...]
