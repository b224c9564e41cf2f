"""Exact rejection sampling: whatever the drafter does, committed tokens follow the target's law."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int


def accepted_prefix(
    draft_tokens_BK: Int[Array, "B K"],
    draft_probs_BKV: Float[Array, "B K V"],
    target_probs_BNV: Float[Array, "B N V"],
    lengths_B: Int[Array, "B"],
    uniforms_BK: Float[Array, "B K"],
) -> Int[Array, "B"]:
    """How many drafts of each row survive: x_k is kept with probability min(1, p_t(x_k) / p_d(x_k)).

    Only the first `lengths_B` drafts are judged. Uniforms lie in [0, 1); a draft the target gives no mass never passes.
    """
    block = draft_tokens_BK.shape[1]
    picked = draft_tokens_BK[..., None]
    draft_BK = jnp.take_along_axis(draft_probs_BKV, picked, axis=-1)[..., 0]
    target_BK = jnp.take_along_axis(target_probs_BNV[:, :block], picked, axis=-1)[..., 0]
    passes_BK = (uniforms_BK * draft_BK < target_BK) & (jnp.arange(block) < lengths_B[:, None])
    return jnp.sum(jnp.cumprod(passes_BK.astype(jnp.int32), axis=1), axis=1)


def next_token_probs(
    draft_probs_BKV: Float[Array, "B K V"],
    target_probs_BNV: Float[Array, "B N V"],
    accepted_B: Int[Array, "B"],
    lengths_B: Int[Array, "B"],
) -> Float[Array, "B V"]:
    """Unnormalised law of the token after the accepted prefix.

    After a rejection max(p_t - p_d, 0), or p_t where rounding leaves that empty; p_t (the bonus) when every judged
    draft passed.
    """
    row = accepted_B[:, None, None]
    target_BV = jnp.take_along_axis(target_probs_BNV, row, axis=1)[:, 0]
    if draft_probs_BKV.shape[1] == 0:
        return target_BV
    draft_BV = jnp.take_along_axis(draft_probs_BKV, jnp.minimum(row, draft_probs_BKV.shape[1] - 1), axis=1)[:, 0]
    residual_BV = jnp.maximum(target_BV - draft_BV, 0.0)
    rejected_B = accepted_B < lengths_B
    use_residual_B = rejected_B & (jnp.sum(residual_BV, axis=-1) > 0)
    return jnp.where(use_residual_B[:, None], residual_BV, target_BV)
