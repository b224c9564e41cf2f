"""Exact rejection sampling: whatever the drafter does, committed tokens follow the target's law.

The target's laws come on a packed axis: row b's are first_B[b].., its law after i accepted drafts at first_B[b] + i.
"""

import enum

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int


class Rule(enum.Enum):
    """How drafts are judged. Both give the same law; BLOCK keeps longer prefixes, for sums over the vocabulary."""

    TOKEN = "token"
    BLOCK = "block"


def judge(
    rule: Rule,
    draft_tokens_BK: Int[Array, "B K"],
    draft_probs_BKV: Float[Array, "B K V"],
    target_probs_NV: Float[Array, "N V"],
    first_B: Int[Array, "B"],
    lengths_B: Int[Array, "B"],
    uniforms_BK: Float[Array, "B K"],
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """(how many drafts of each row survive, unnormalised law of the token after them).

    Only the first `lengths_B` drafts are judged. Uniforms lie in [0, 1); a draft the target gives no mass never
    survives.
    """
    laws = (draft_tokens_BK, draft_probs_BKV, target_probs_NV, first_B, lengths_B, uniforms_BK)
    if rule is Rule.BLOCK and draft_tokens_BK.shape[1]:
        accepted_B, kept_B = block_prefix(*laws)
    else:
        accepted_B = accepted_prefix(*laws)
        kept_B = jnp.ones(accepted_B.shape)
    return accepted_B, next_token_probs(draft_probs_BKV, target_probs_NV, first_B, accepted_B, lengths_B, kept_B)


def accepted_prefix(
    draft_tokens_BK: Int[Array, "B K"],
    draft_probs_BKV: Float[Array, "B K V"],
    target_probs_NV: Float[Array, "N V"],
    first_B: Int[Array, "B"],
    lengths_B: Int[Array, "B"],
    uniforms_BK: Float[Array, "B K"],
) -> Int[Array, "B"]:
    """Token by token: x_k is kept with probability min(1, p_t(x_k) / p_d(x_k)), up to the first that is not."""
    draft_BK, target_BK = _drafted(draft_tokens_BK, draft_probs_BKV, target_probs_NV, first_B)
    passes_BK = (uniforms_BK * draft_BK < target_BK) & _judged(lengths_B, draft_BK.shape[1])
    return jnp.sum(jnp.cumprod(passes_BK.astype(jnp.int32), axis=1), axis=1)


def block_prefix(
    draft_tokens_BK: Int[Array, "B K"],
    draft_probs_BKV: Float[Array, "B K V"],
    target_probs_NV: Float[Array, "N V"],
    first_B: Int[Array, "B"],
    lengths_B: Int[Array, "B"],
    uniforms_BK: Float[Array, "B K"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Block verification (arXiv 2403.10444): (the longest prefix that passes, the mass kept_i it is kept with).

    kept_i = min(1, kept_{i-1} p_t(x_i) / p_d(x_i)), kept_0 = 1, is the probability that at least i drafts survive.
    Prefix i passes alone with (kept_i - m_i) / (1 - m_i), m_i = sum_x min(kept_i p_t(x), p_d(x)) being what goes on
    to i + 1; the last judged prefix passes with kept_i. m_i is known before token i + 1 is, so lengths may be any
    that token-by-token judging allows.
    """
    block = draft_tokens_BK.shape[1]
    draft_BK, target_BK = _drafted(draft_tokens_BK, draft_probs_BKV, target_probs_NV, first_B)
    ratio_BK = target_BK / jnp.maximum(draft_BK, jnp.finfo(jnp.float32).tiny)
    kept = [jnp.ones(draft_tokens_BK.shape[0])]
    for k in range(block):
        kept.append(jnp.minimum(kept[-1] * ratio_BK[:, k], 1.0))
    kept_BN = jnp.stack(kept, axis=1)
    # Prefix i = 1..K-1 ends before slot i, whose laws say what can go on.
    going_on = jnp.minimum(
        kept_BN[:, 1:block, None] * target_probs_NV[_entries(first_B, target_probs_NV, 1, block)],
        draft_probs_BKV[:, 1:],
    )
    mass_BK = jnp.concatenate([jnp.sum(going_on, axis=-1), jnp.zeros((kept_BN.shape[0], 1))], axis=1)
    kept_BK = kept_BN[:, 1:]
    last_BK = jnp.arange(1, block + 1) == lengths_B[:, None]
    stops_BK = jnp.where(last_BK, kept_BK, (kept_BK - mass_BK) / jnp.maximum(1 - mass_BK, 1e-9))
    passes_BK = (uniforms_BK < stops_BK) & _judged(lengths_B, block)
    accepted_B = jnp.max(jnp.where(passes_BK, jnp.arange(1, block + 1), 0), axis=1)
    return accepted_B, jnp.take_along_axis(kept_BN, accepted_B[:, None], axis=1)[:, 0]


def next_token_probs(
    draft_probs_BKV: Float[Array, "B K V"],
    target_probs_NV: Float[Array, "N V"],
    first_B: Int[Array, "B"],
    accepted_B: Int[Array, "B"],
    lengths_B: Int[Array, "B"],
    kept_B: Float[Array, "B"],
) -> Float[Array, "B V"]:
    """Unnormalised law of the token after the accepted prefix.

    After a rejection max(kept p_t - p_d, 0), or p_t where rounding leaves that empty; p_t (the bonus) when every
    judged draft passed.
    """
    block = draft_probs_BKV.shape[1]
    target_BV = target_probs_NV[first_B + accepted_B]
    if block == 0:
        return target_BV
    row = jnp.minimum(accepted_B, block - 1)[:, None, None]
    draft_BV = jnp.take_along_axis(draft_probs_BKV, row, axis=1)[:, 0]
    residual_BV = jnp.maximum(kept_B[:, None] * target_BV - draft_BV, 0.0)
    rejected_B = accepted_B < lengths_B
    use_residual_B = rejected_B & (jnp.sum(residual_BV, axis=-1) > 0)
    return jnp.where(use_residual_B[:, None], residual_BV, target_BV)


def _drafted(
    tokens_BK: Array, draft_probs_BKV: Array, target_probs_NV: Array, first_B: Array
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """What either law gives the drafted tokens."""
    draft_BK = jnp.take_along_axis(draft_probs_BKV, tokens_BK[..., None], axis=-1)[..., 0]
    return draft_BK, target_probs_NV[_entries(first_B, target_probs_NV, 0, tokens_BK.shape[1]), tokens_BK]


def _entries(first_B: Array, target_probs_NV: Array, low: int, high: int) -> Int[Array, "B K"]:
    """Packed indices of the laws low..high-1 of each row; beyond the axis, where nothing is judged, its last."""
    return jnp.minimum(first_B[:, None] + jnp.arange(low, high), target_probs_NV.shape[0] - 1)


def _judged(lengths_B: Array, block: int) -> Array:
    return jnp.arange(block) < lengths_B[:, None]
