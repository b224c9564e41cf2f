"""Attention of all draft blocks of a sequence at once, by a dense mask: the twin of the kernel."""

import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Int
from dspark_jax.ops.attention import attention
from dspark_jax.ops.masks import training_block_mask


def training_attention(
    q_BQHC: Float[Array, "B Q H C"],
    k_BJTC: Float[Array, "B J T C"],
    v_BJTC: Float[Array, "B J T C"],
    own_k_BJQC: Float[Array, "B J Q C"],
    own_v_BJQC: Float[Array, "B J Q C"],
    anchors_BA: Int[Array, "B A"],
    doc_start_BA: Int[Array, "B A"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B Q H C"]:
    """Blocks of Q / A slots at their anchors see the context from doc_start_BA to before the anchor, and themselves."""
    length, block = k_BJTC.shape[2], q_BQHC.shape[1] // anchors_BA.shape[1]
    mask = training_block_mask(anchors_BA, doc_start_BA, block, length, window)
    keys = jnp.concatenate([k_BJTC, own_k_BJQC], axis=2)
    values = jnp.concatenate([v_BJTC, own_v_BJQC], axis=2)
    return attention(q_BQHC, keys, values, mask, scale=scale)
