"""The training objective of block drafters written plainly: what a fast step is held against."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Float, Key
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.objective import block_labels
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.losses import BlockTerms, block_terms, compare
from dspark_jax.ops.training_attention import training_attention
from dspark_jax.targets.model import TargetOutput
from dspark_jax.training.objective import BlockObjective, Blocks, Rows


@dataclass(frozen=True, kw_only=True)
class PlainObjective:
    """A block objective with a dense mask and all logits at once; everything else is `ours`."""

    ours: BlockObjective

    def draw(self, rows: Rows, key: Key[Array, ""]) -> Blocks:
        return self.ours.draw(rows, key)

    def counts(self, drafter: DSpark, drawn: Blocks) -> BlockTerms:
        return self.ours.counts(drafter, drawn)

    def loss(self, terms: BlockTerms) -> Float[Array, ""]:
        return self.ours.loss(terms)

    def terms(self, drafter: DSpark, vocabulary: Vocabulary, drawn: Blocks, seen: TargetOutput) -> BlockTerms:
        rows, anchors_BA, block = drawn.rows, drawn.anchors_BA, drafter.block_size
        tokens_BAN, mask_BAK = block_labels(
            rows.tokens_BT, rows.loss_mask_BT, anchors_BA, drawn.keep_BA, rows.starts_BT, block
        )
        hidden_BAKD = _plain_blocks(drafter, vocabulary, rows, anchors_BA, seen.features_BTE)
        draft_logits, confidence_BAK = drafter.head_logits(vocabulary, hidden_BAKD, tokens_BAN[..., :-1])
        places = jnp.minimum(anchors_BA[..., None] + jnp.arange(block), rows.tokens_BT.shape[1] - 1)
        aligned_BAKD = jax.vmap(lambda hidden_TD, places_AK: hidden_TD[places_AK])(seen.hidden_BTD, places)
        compared = compare(draft_logits, vocabulary.logits(aligned_BAKD), tokens_BAN[..., 1:])
        if drafter.confidence_head is None:
            confidence_BAK = jnp.full(mask_BAK.shape, jnp.inf)
        return block_terms(compared, mask_BAK, confidence_BAK, decay=self.ours.weights.decay)


def _plain_blocks(drafter: DSpark, vocabulary: Vocabulary, rows: Rows, anchors_BA: Array, features_BTE: Array) -> Array:
    (batch, anchors), slots, spec = anchors_BA.shape, drafter.config.input_slots, drafter.config.layer
    starts_BA = jnp.take_along_axis(rows.starts_BT, anchors_BA, axis=1)
    context_BTD, context_positions = drafter.context(features_BTE), jnp.arange(features_BTE.shape[1]) - rows.starts_BT
    positions_BQ = ((anchors_BA - starts_BA)[..., None] + jnp.arange(slots)).reshape(batch, -1)
    first_BA1 = jnp.take_along_axis(rows.tokens_BT, anchors_BA, axis=1)[..., None]
    masks = jnp.full((batch, anchors, slots - 1), drafter.config.mask_token_id)
    x_BQD = vocabulary.embed(jnp.concatenate([first_BA1, masks], axis=-1).reshape(batch, -1)).astype(context_BTD.dtype)
    for layer in drafter.layers:
        context = layer.attention.keys_values(context_BTD, context_positions)
        dense = partial(training_attention, scale=spec.attention_scale, window=spec.window)

        def attend(q: Array, k: Array, v: Array, context: Any = context, dense: Any = dense) -> tuple[Array, None]:
            return dense(q, *context, k, v, anchors_BA, starts_BA), None

        x_BQD, _ = layer(x_BQD, positions_BQ, attend)
    return drafter.norm(x_BQD).reshape(batch, anchors, slots, -1)[:, :, slots - drafter.block_size :]
