"""The training objective of chain drafters: Eagle3's training-time test, its vocabulary loss one step at a time."""

import jax.numpy as jnp
from jax import lax

from dspark_jax.core.arrays import Array, Bool, Float, Int
from dspark_jax.drafters.chain import ChainDrafter, ahead
from dspark_jax.drafters.vocabulary_loss import Positions, Trained, compare_laws
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.losses import ChainTerms, Compared, chain_terms


def chain_objective(
    drafter: ChainDrafter,
    vocabulary: Vocabulary,
    *,
    tokens_BT: Int[Array, "B T"],
    loss_mask_BT: Bool[Array, "B T"],
    starts_BT: Int[Array, "B T"],
    features_BTE: Float[Array, "B T E"],
    hidden_BTD: Float[Array, "B T D"],
    chunk: int = 64,
) -> ChainTerms:
    """Terms of every step over every position; `hidden_BTD` are the target's normed hidden states.

    Step k at position i predicts token i + k + 2 and is compared with the target's law at position i + k + 1; it counts
    where `chain_mask` says so. Logits exist for `chunk` positions of every row at a time.
    """
    steps = drafter.block_size
    outputs_ZBTD = drafter.unrolled(vocabulary, tokens_BT, features_BTE, starts_BT, steps)
    aligned_ZBTD = jnp.stack([ahead(hidden_BTD, step + 1) for step in range(steps)])

    def one_step(step: tuple[Array, Array]) -> Compared:
        hidden_BTD, aligned_BTD = step
        positions = Positions(hidden_BND=hidden_BTD, latent_BNR=None, aligned_BND=aligned_BTD, labels_BN=None)
        return compare_laws(vocabulary, Trained(w2_VR=None, draft_bias_V=None), positions, chunk=chunk)

    return chain_terms(lax.map(one_step, (outputs_ZBTD, aligned_ZBTD)), chain_mask(loss_mask_BT, starts_BT, steps))


def chain_mask(
    loss_mask_BT: Bool[Array, "B T"], starts_BT: Int[Array, "B T"], steps: int
) -> Bool[Array, "{steps} B T"]:
    """Step k counts at position i where tokens i + k and i + k + 1 are supervised and of i's document, which begins at
    starts_BT."""
    base_BT, index_T = loss_mask_BT & ahead(loss_mask_BT, 1), jnp.arange(loss_mask_BT.shape[1])
    return jnp.stack([ahead(base_BT, step) & (ahead(starts_BT, step + 1) <= index_T) for step in range(steps)])


def chain_loss(terms: ChainTerms, decay: float) -> Float[Array, ""]:
    """Sum of the steps' losses, step k weighing decay ** k."""
    steps = terms.ce_K.sum.shape[0]
    return jnp.sum(terms.ce_K.value * decay ** jnp.arange(steps))
