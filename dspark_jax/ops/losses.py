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


def block_terms(
    draft_logits: Float[Array, "*A K V"],
    target_logits: Float[Array, "*A K V"],
    labels: Int[Array, "*A K"],
    mask: Bool[Array, "*A K"],
    confidence_logits: Float[Array, "*A K"],
    *,
    decay: float,
) -> BlockTerms:
    """Terms of section 3.3: cross-entropy to the ground truth, full L1 distance between the laws, and BCE of the
    confidence to the acceptance probability; slot k weighs exp(-k / decay)."""
    block = mask.shape[-1]
    decays_K = jnp.exp(-jnp.arange(block) / decay)
    weights = mask * decays_K
    draft_logp = jax.nn.log_softmax(draft_logits.astype(jnp.float32))
    draft_probs = jnp.exp(draft_logp)
    target_probs = jax.nn.softmax(target_logits.astype(jnp.float32))
    ce = -jnp.take_along_axis(draft_logp, labels[..., None], axis=-1)[..., 0]
    l1 = jnp.sum(jnp.abs(draft_probs - target_probs), axis=-1)
    accept = jax.lax.stop_gradient(1 - l1 / 2)
    # A drafter without the head is certain (+inf) and has no such term.
    headless = jnp.isposinf(confidence_logits)
    logits = jnp.where(headless, 0.0, confidence_logits)
    bce = jax.nn.softplus(logits) - accept * logits
    hit = jnp.argmax(draft_logits, axis=-1) == jnp.argmax(target_logits, axis=-1)
    blocks = tuple(range(mask.ndim - 1))

    def weighted(x: Array, counted: Array = mask) -> Mean:
        counts = jnp.where(counted, weights, 0.0)
        return Mean(sum=jnp.sum(jnp.where(counted, x, 0.0) * counts), count=jnp.sum(counts))

    def by_slot(x: Array) -> Mean:
        return Mean(
            sum=jnp.sum(jnp.where(mask, x, 0.0), axis=blocks), count=jnp.sum(mask, axis=blocks, dtype=jnp.float32)
        )

    return BlockTerms(
        ce=weighted(ce),
        l1=weighted(l1),
        confidence=weighted(bce, mask & ~headless),
        accept_K=by_slot(accept),
        top1_K=by_slot(hit),
    )
