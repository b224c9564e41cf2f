"""Where training blocks start."""

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Int, Key


def sample_anchors(
    key: Key[Array, ""], loss_mask_BT: Bool[Array, "B T"], starts_BT: Int[Array, "B T"], num_anchors: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Up to `num_anchors` positions a row, uniformly without replacement, ascending; and which of them are real.

    A position qualifies when it and the next are supervised and of one document (`starts_BT`: where each token's
    begins). Rows with fewer keep all they have; the rest is padding.
    """
    next_BT = loss_mask_BT & (starts_BT < jnp.arange(loss_mask_BT.shape[1]))
    eligible_BT = loss_mask_BT & jnp.roll(next_BT, -1, axis=1).at[:, -1].set(False)
    scores_BT = jnp.where(eligible_BT, jax.random.uniform(key, loss_mask_BT.shape), -1.0)
    scores_BA, anchors_BA = jax.lax.top_k(scores_BT, num_anchors)
    keep_BA = scores_BA >= 0
    order = jnp.argsort(jnp.where(keep_BA, anchors_BA, loss_mask_BT.shape[1]), axis=1)
    anchors_BA = jnp.take_along_axis(jnp.where(keep_BA, anchors_BA, 0), order, axis=1)
    return anchors_BA, jnp.take_along_axis(keep_BA, order, axis=1)
