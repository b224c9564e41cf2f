"""The light sequential half of the semi-autoregressive drafter, and the confidence head (sections 3.1 and 3.2).

A Markov head turns the tokens drafted so far into a bias on the backbone's logits: `W2 latent`, where the latent
[R] comes from the previous token, and in the richer heads from the slot's hidden state and a recurrent state too.
All heads run through `step`, in training and in decoding, so that one scan serves both.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.arrays import Array, DType, Float, Int
from dspark_jax.nn.layers import float32_product, kernel


@dataclass(frozen=True, kw_only=True)
class VanillaMarkov:
    """bias = W2 W1[x_{k-1}]."""

    rank: int = 256


@dataclass(frozen=True, kw_only=True)
class GatedMarkov:
    """bias = W2 (sigmoid(Wg [h_k ; W1[x_{k-1}]]) * W1[x_{k-1}])."""

    rank: int = 256


@dataclass(frozen=True, kw_only=True)
class RnnMarkov:
    """A gated recurrence over the slots with state [R]: bias = W2 tanh(output)."""

    rank: int = 256


MarkovSpec = VanillaMarkov | GatedMarkov | RnnMarkov

State = Float[Array, "*B R"]
Latent = Float[Array, "*B R"]


class MarkovHead(nnx.Module):
    """Parameters of any of the heads. The first previous token of a block is its anchor."""

    def __init__(self, spec: MarkovSpec, *, vocab_size: int, d_model: int, rngs: nnx.Rngs, dtype: DType):
        rank = spec.rank
        self.spec = spec
        self.w1 = kernel(rngs, (vocab_size, rank), ("vocab", "rank"), fan_in=rank, dtype=dtype)
        self.w2 = kernel(rngs, (vocab_size, rank), ("vocab", "rank"), fan_in=rank, dtype=dtype)
        match spec:
            case VanillaMarkov():
                self.mix = None
            case GatedMarkov():
                self.mix = Affine(d_model + rank, rank, rngs=rngs, dtype=dtype)
            case RnnMarkov():
                self.mix = Affine(d_model + 2 * rank, 3 * rank, rngs=rngs, dtype=dtype)

    def embed(self, previous: Int[Array, "*B"]) -> Float[Array, "*B R"]:
        return self.w1[...][previous]

    def start(self, shape: tuple[int, ...]) -> State:
        """The recurrent state before a block's first slot: zeros."""
        return jnp.zeros((*shape, self.spec.rank), self.w1.dtype)

    def step(self, state: State, hidden: Float[Array, "*B D"], embedded: Float[Array, "*B R"]) -> tuple[State, Latent]:
        """One slot: from its hidden state and the previous token's embedding to the latent of its bias."""
        if self.mix is None:
            return state, embedded
        match self.spec:
            case GatedMarkov():
                gate = self.mix(jnp.concatenate([hidden, embedded], axis=-1))
                return state, jax.nn.sigmoid(gate) * embedded
            case _:
                joint = self.mix(jnp.concatenate([state, embedded, hidden], axis=-1))
                gate, candidate, output = jnp.split(joint, 3, axis=-1)
                gate = jax.nn.sigmoid(gate)
                return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)

    def latents(self, hidden: Float[Array, "*B K D"], embedded: Float[Array, "*B K R"]) -> Float[Array, "*B K R"]:
        """`step` over all slots of known previous tokens, as training has them."""

        def slot(state: State, inputs: tuple[Array, Array]) -> tuple[State, Latent]:
            return self.step(state, *inputs)

        slots = (jnp.moveaxis(hidden, -2, 0), jnp.moveaxis(embedded, -2, 0))
        _, latents = jax.lax.scan(slot, self.start(hidden.shape[:-2]), slots)
        return jnp.moveaxis(latents, 0, -2)

    def bias(self, latent: Latent) -> Float[Array, "*B V"]:
        """float32 addition to the backbone's logits."""
        return float32_product("...r,vr->...v", latent, self.w2[...])


class Affine(nnx.Module):
    """x W + b."""

    def __init__(self, width: int, out: int, *, rngs: nnx.Rngs, dtype: DType):
        self.w = kernel(rngs, (width, out), ("features", "rank"), fan_in=width, dtype=dtype)
        self.b = nnx.Param(jnp.zeros(out, dtype), axes=("rank",))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B E"]:
        return x @ self.w[...] + self.b[...]


class ConfidenceHead(nnx.Module):
    """Logit of c_k from [h_k ; W1[x_{k-1}]] or h_k alone; never from x_k, so a length may depend on it losslessly."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, dtype: DType):
        self.w = kernel(rngs, (width,), ("features",), fan_in=width, dtype=dtype)
        self.b = nnx.Param(jnp.zeros((), dtype), axes=())

    def __call__(self, inputs: Float[Array, "*B D"]) -> Float[Array, "*B"]:
        return jnp.einsum("...d,d->...", inputs, self.w[...], preferred_element_type=jnp.float32) + self.b[...]
