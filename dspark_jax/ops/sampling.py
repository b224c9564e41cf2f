"""From logits to the law a request asked for, and from a law to a token.

Both the drafter and the verifier turn logits into float32 probabilities here: the numbers a draft was sampled
from are the numbers it is judged by.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dspark_jax.core.arrays import Array, Float, Int, Keys, pytree


class Draws(enum.Enum):
    """What is known beforehand about the laws of a batch.

    Knowing less is never wrong, only slower: `ANY` decides on the device, by branches that a CPU takes cheaply and an
    accelerator stalls on; the others compile without branches.
    """

    ANY = "any"
    GREEDY = "greedy"
    """Every row has temperature 0."""
    PLAIN = "plain"
    """No row has a top-k or top-p."""
    FILTERED = "filtered"


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
    draws: Draws = struct.field(pytree_node=False, default=Draws.ANY)

    def rows(self, picked_N: Int[Array, "N"]) -> "SamplingLaw":
        """The laws of these rows, repeats allowed."""
        return SamplingLaw(
            temperature_B=self.temperature_B[picked_N],
            top_k_B=self.top_k_B[picked_N],
            top_p_B=self.top_p_B[picked_N],
            keys_B=self.keys_B[picked_N],
            draws=self.draws,
        )


Peaks = tuple[Array, Array, Array]
"""See `two_largest`."""


def law_probs(logits_BTV: Float[Array, "B T V"], law: SamplingLaw, peaks: Peaks | None = None) -> Float[Array, "B T V"]:
    """Temperature, then top-k, then top-p, as float32 probabilities; a one-hot argmax at temperature 0.

    Ties at a cut are all kept, so the law does not depend on the order of the vocabulary. `peaks`: those of the
    logits, from whoever needs them too.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    temperature = law.temperature_B[:, None, None]
    largest_BT, _, best_BT = peaks or two_largest(logits_BTV)
    greedy = (jnp.arange(logits_BTV.shape[-1]) == best_BT[..., None]).astype(jnp.float32)
    choose = _CHOOSE[law.draws]

    def sampled() -> Float[Array, "B T V"]:
        # The largest logit is taken off first: divided by a tiny temperature it would overflow.
        centred = logits_BTV - largest_BT[..., None]
        scaled = centred / jnp.where(temperature > 0, temperature, 1.0)
        scaled = choose.filter(jnp.any(law.top_k_B > 0), lambda: _keep_top_k(scaled, law.top_k_B), lambda: scaled)
        # What the softmax would take off is 0, and looking for it is one more pass over the vocabulary.
        weights = jnp.exp(scaled)
        probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
        probs = choose.filter(jnp.any(law.top_p_B < 1), lambda: _keep_top_p(probs, law.top_p_B), lambda: probs)
        return jnp.where(temperature > 0, probs, greedy)

    return choose.sample(jnp.any(law.temperature_B > 0), sampled, lambda: greedy)


def two_largest(x_BTV: Float[Array, "B T V"]) -> Peaks:
    """The largest entry of each row [B, T], the next one (-inf where there is none), and where the largest is first.

    One pass for all three: over a vocabulary each counts.
    """
    vocab, lowest = x_BTV.shape[-1], jnp.asarray(-jnp.inf, x_BTV.dtype)
    # Folded in two, an entry brings its runner-up along.
    left, right = jnp.split(jnp.pad(x_BTV, ((0, 0), (0, 0), (0, vocab % 2)), constant_values=lowest), 2, axis=-1)
    place = lax.broadcasted_iota(jnp.int32, left.shape, 2)
    pairs = jnp.maximum(left, right), jnp.minimum(left, right), jnp.where(left >= right, place, place + left.shape[-1])

    def larger(these: tuple[Array, Array, Array], those: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        (first, second, place), (other, another, elsewhere) = these, those
        stays = (first > other) | ((first == other) & (place < elsewhere))
        runner_up = jnp.maximum(jnp.minimum(first, other), jnp.maximum(second, another))
        return jnp.maximum(first, other), runner_up, jnp.where(stays, place, elsewhere)

    nowhere = jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32)
    first_BT, second_BT, place_BT = lax.reduce(pairs, (lowest, lowest, nowhere), larger, (2,))
    return first_BT, second_BT, place_BT


def sample(probs_BV: Float[Array, "B V"], keys_B: Keys, draws: Draws = Draws.ANY) -> Int[Array, "B"]:
    """One token a row from (possibly unnormalised) probabilities: a group of tokens by its mass, then one of the group.

    So noise is drawn for some hundred groups and members, not for the whole vocabulary. A one-hot row gives its token
    whatever the key.
    """
    if draws is Draws.GREEDY:
        return jnp.argmax(probs_BV, axis=-1).astype(jnp.int32)
    batch, vocab = probs_BV.shape
    probs_BGW = jnp.pad(probs_BV, ((0, 0), (0, -vocab % _GROUP))).reshape(batch, -1, _GROUP)
    group_B = _gumbel_max(jnp.sum(probs_BGW, axis=-1), keys_B, 0)
    member_B = _gumbel_max(jnp.take_along_axis(probs_BGW, group_B[:, None, None], axis=1)[:, 0], keys_B, 1)
    return group_B * _GROUP + member_B


_GROUP = 256


def _gumbel_max(weights_BN: Float[Array, "B N"], keys_B: Keys, purpose: int) -> Int[Array, "B"]:
    """An index a row, each as likely as its share of the weights."""

    def noise(key: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, purpose), weights_BN.shape[1:], jnp.float32)

    return jnp.argmax(jnp.log(weights_BN) + jax.vmap(noise)(keys_B), axis=-1).astype(jnp.int32)


Choice = Callable[[Array, Callable[[], Array], Callable[[], Array]], Array]


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """How the two questions (does any row sample? filter?) are answered: on the device, or known."""

    sample: Choice
    filter: Choice


def _yes(_: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    return yes()


def _no(_: Array, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    return no()


_CHOOSE = {
    Draws.ANY: _Choices(sample=lax.cond, filter=lax.cond),
    Draws.GREEDY: _Choices(sample=_no, filter=_no),
    Draws.PLAIN: _Choices(sample=_yes, filter=_no),
    Draws.FILTERED: _Choices(sample=_yes, filter=_yes),
}


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
