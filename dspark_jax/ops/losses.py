"""The training losses of a drafted block, each as (sum, count) pairs that add across chunks and devices."""

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Float, Int, pytree


@pytree
class Mean:
    """A weighted mean not divided yet."""

    sum: Array
    count: Array

    @property
    def value(self) -> Array:
        """sum / count; 0 where nothing was counted."""
        return self.sum / jnp.where(self.count > 0, self.count, 1)

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)


@pytree
class BlockTerms:
    """Loss terms and per-slot metrics of drafted blocks."""

    ce: Mean
    l1: Mean
    confidence: Mean
    accept_K: Mean
    """Probability that slot k's draft is accepted, 1 - TV(p_d, p_t)."""
    top1_K: Mean
    """How often slot k's most likely draft token is the target's."""


@pytree
class ChainTerms:
    """Loss terms and metrics of the steps of a training-time test."""

    ce_K: Mean
    """Cross-entropy of step k to the target's law, over all positions of the batch."""
    accept_K: Mean
    top1_K: Mean


@pytree
class Compared:
    """Drafter and target at each position."""

    ce: Array
    """Cross-entropy of the drafter's law to a label, or to the target's law."""
    l1: Array
    """Sum of |p_d - p_t|."""
    hit: Array
    """1 where the likeliest tokens agree. Without gradient."""

    @property
    def accept(self) -> Array:
        """Probability that a draft is accepted, 1 - TV(p_d, p_t). Without gradient."""
        return jax.lax.stop_gradient(1 - self.l1 / 2)


def compare(
    draft_logits: Float[Array, "*B V"], target_logits: Float[Array, "*B V"], labels: Int[Array, "*B"] | None
) -> Compared:
    """At each position; without labels the cross-entropy is to the target's law."""
    draft_logp = jax.nn.log_softmax(draft_logits.astype(jnp.float32))
    target_probs = jax.nn.softmax(target_logits.astype(jnp.float32))
    if labels is None:
        ce = -jnp.sum(target_probs * draft_logp, axis=-1)
    else:
        ce = -jnp.take_along_axis(draft_logp, labels[..., None], axis=-1)[..., 0]
    hit = jnp.argmax(draft_logits, axis=-1) == jnp.argmax(target_logits, axis=-1)
    l1 = jnp.sum(jnp.abs(jnp.exp(draft_logp) - target_probs), axis=-1)
    return Compared(ce=ce, l1=l1, hit=hit.astype(jnp.float32))


def chain_terms(compared: Compared, mask_ZBT: Bool[Array, "Z B T"]) -> ChainTerms:
    """Terms of every step. The loss is spread over all B*T positions, supervised or not (Eagle3's convention)."""

    def total(x_ZBT: Array) -> Array:
        return jnp.sum(jnp.where(mask_ZBT, x_ZBT, 0.0), axis=(1, 2))

    supervised = jnp.sum(mask_ZBT, axis=(1, 2), dtype=jnp.float32)
    everywhere = jnp.full(mask_ZBT.shape[0], mask_ZBT[0].size, jnp.float32)
    return ChainTerms(
        ce_K=Mean(sum=total(compared.ce), count=everywhere),
        accept_K=Mean(sum=total(compared.accept), count=supervised),
        top1_K=Mean(sum=total(compared.hit), count=supervised),
    )


def block_terms(
    compared: Compared, mask: Bool[Array, "*A K"], confidence_logits: Float[Array, "*A K"], *, decay: float
) -> BlockTerms:
    """Terms of section 3.3: cross-entropy to the ground truth, full L1 distance between the laws, and BCE of the
    confidence to the acceptance probability; slot k weighs exp(-k / decay)."""
    block = mask.shape[-1]
    weights = mask * jnp.exp(-jnp.arange(block) / decay)
    # A drafter without the head is certain (+inf) and has no such term.
    headless = jnp.isposinf(confidence_logits)
    logits = jnp.where(headless, 0.0, confidence_logits)
    bce = jax.nn.softplus(logits) - compared.accept * logits
    blocks = tuple(range(mask.ndim - 1))

    def weighted(x: Array, counted: Array = mask) -> Mean:
        counts = jnp.where(counted, weights, 0.0)
        return Mean(sum=jnp.sum(jnp.where(counted, x, 0.0) * counts), count=jnp.sum(counts))

    def by_slot(x: Array) -> Mean:
        return Mean(
            sum=jnp.sum(jnp.where(mask, x, 0.0), axis=blocks), count=jnp.sum(mask, axis=blocks, dtype=jnp.float32)
        )

    return BlockTerms(
        ce=weighted(compared.ce),
        l1=weighted(compared.l1),
        confidence=weighted(bce, mask & ~headless),
        accept_K=by_slot(compared.accept),
        top1_K=by_slot(compared.hit),
    )
