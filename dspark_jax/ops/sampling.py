"""From logits to the law a request asked for, and from a law to a token.

Both the drafter and the verifier turn logits into float32 probabilities here: the numbers a draft was sampled
from are the numbers it is judged by.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, Float, Int, Keys, pytree


@pytree
class SamplingLaw:
    """Per-row sampling parameters of a batch."""

    temperature_B: Float[Array, "B"]
    """0 is greedy."""
    top_k_B: Int[Array, "B"]
    """0 keeps the whole vocabulary."""
    top_p_B: Float[Array, "B"]
    """1 keeps the whole vocabulary."""
    keys_B: Keys
    """One PRNG key a row. Every draw folds in what it is for."""


def law_probs(logits_BTV: Float[Array, "B T V"], law: SamplingLaw) -> Float[Array, "B T V"]:
    """Temperature, then top-k, then top-p, as float32 probabilities; a one-hot argmax at temperature 0.

    Ties at a cut are all kept, so the law does not depend on the order of the vocabulary.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    temperature = law.temperature_B[:, None, None]
    greedy = jax.nn.one_hot(jnp.argmax(logits_BTV, axis=-1), logits_BTV.shape[-1], dtype=jnp.float32)

    def sampled() -> Float[Array, "B T V"]:
        # The largest logit is taken off first: divided by a tiny temperature it would overflow.
        centred = logits_BTV - jnp.max(logits_BTV, axis=-1, keepdims=True)
        scaled = centred / jnp.where(temperature > 0, temperature, 1.0)
        scaled = lax.cond(jnp.any(law.top_k_B > 0), _keep_top_k, lambda x, _: x, scaled, law.top_k_B)
        probs = jax.nn.softmax(scaled, axis=-1)
        probs = lax.cond(jnp.any(law.top_p_B < 1), _keep_top_p, lambda x, _: x, probs, law.top_p_B)
        return jnp.where(temperature > 0, probs, greedy)

    return lax.cond(jnp.any(law.temperature_B > 0), sampled, lambda: greedy)


def sample(probs_BV: Float[Array, "B V"], keys_B: Keys) -> Int[Array, "B"]:
    """One token a row from (possibly unnormalised) probabilities, by Gumbel-max on their logarithms.

    A one-hot row gives its token whatever the key, so a batch of greedy rows skips the noise.
    """
    certain = jnp.all(jnp.sum(probs_BV > 0, axis=-1) <= 1)

    def noisy() -> Int[Array, "B"]:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, probs_BV.shape[1:], jnp.float32))(keys_B)
        return jnp.argmax(jnp.log(probs_BV) + noise, axis=-1).astype(jnp.int32)

    return lax.cond(certain, lambda: jnp.argmax(probs_BV, axis=-1).astype(jnp.int32), noisy)


def _keep_top_k(logits_BTV: Float[Array, "B T V"], top_k_B: Int[Array, "B"]) -> Float[Array, "B T V"]:
    """-inf for everything under the k-th largest logit."""
    vocab = logits_BTV.shape[-1]
    wanted = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, vocab), vocab)[:, None]
    order = _ordered(logits_BTV)
    threshold = _largest_threshold(
        lambda bound: jnp.sum(order >= bound[..., None], axis=-1) >= wanted, logits_BTV.shape[:-1]
    )
    return jnp.where(order >= threshold[..., None], logits_BTV, -jnp.inf)


def _keep_top_p(probs_BTV: Float[Array, "B T V"], top_p_B: Float[Array, "B"]) -> Float[Array, "B T V"]:
    """The smallest set of most likely tokens whose mass reaches top_p, renormalised."""
    wanted = top_p_B[:, None]
    order = _ordered(probs_BTV)

    def enough(bound: Int[Array, "B T"]) -> Array:
        return jnp.sum(jnp.where(order >= bound[..., None], probs_BTV, 0.0), axis=-1) >= wanted

    threshold = _largest_threshold(enough, probs_BTV.shape[:-1])
    kept = jnp.where(order >= threshold[..., None], probs_BTV, 0.0)
    return jnp.where(wanted[..., None] < 1, kept / jnp.sum(kept, axis=-1, keepdims=True), probs_BTV)


def _ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """int32 keys that compare as the float32 values do; both zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_threshold(enough: Callable[[Array], Array], shape: tuple[int, ...]) -> Int[Array, "..."]:
    """The largest int32 for which `enough` (true at the bottom, false above some point) still holds.

    Bisection over the 2**32 keys: 32 reductions over the vocabulary and no sort.
    """
    low = jnp.full(shape, jnp.iinfo(jnp.int32).min)
    high = jnp.full(shape, jnp.iinfo(jnp.int32).max)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The overflow-free mean, rounded up.
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        holds = enough(middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    return lax.fori_loop(0, 32, halve, (low, high))[0]
