"""What a run minimises, by kind of drafter: the two objectives behind one protocol."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dspark_jax.core.arrays import Array, Bool, Float, Int, Key, pytree
from dspark_jax.drafters.anchors import sample_anchors
from dspark_jax.drafters.chain_objective import chain_loss, chain_objective
from dspark_jax.drafters.objective import LossWeights, block_objective, total_loss
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.ops.losses import BlockTerms, ChainTerms
from dspark_jax.ops.masks import document_starts
from dspark_jax.targets.model import TargetOutput
from dspark_jax.training.draft import DFlashShape, DrafterShape, DSparkShape

Terms = BlockTerms | ChainTerms


@pytree
class Rows:
    """A batch on the device."""

    tokens_BT: Int[Array, "B T"]
    loss_mask_BT: Bool[Array, "B T"]
    segments_BT: Int[Array, "B T"]

    @property
    def starts_BT(self) -> Int[Array, "B T"]:
        """Where each token's document begins in its row."""
        return document_starts(self.segments_BT)


@runtime_checkable
class Objective(Protocol):
    """Terms are sums and counts that add over batches and devices; the loss is a function of them."""

    def terms(self, drafter: Any, vocabulary: Vocabulary, rows: Rows, seen: TargetOutput, key: Key[Array, ""]) -> Any:
        """Of one batch; `seen` are the target's outputs with the features that the drafter taps."""
        ...

    def loss(self, terms: Any) -> Float[Array, ""]: ...


@dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """Of DSpark and DFlash: up to `anchors` blocks a row, drawn anew with each key."""

    anchors: int
    weights: LossWeights

    def terms(
        self, drafter: Any, vocabulary: Vocabulary, rows: Rows, seen: TargetOutput, key: Key[Array, ""]
    ) -> BlockTerms:
        anchors = min(self.anchors, rows.tokens_BT.shape[1])
        anchors_BA, keep_BA = sample_anchors(key, rows.loss_mask_BT, rows.starts_BT, anchors)
        return block_objective(
            drafter,
            vocabulary,
            tokens_BT=rows.tokens_BT,
            loss_mask_BT=rows.loss_mask_BT,
            features_BTE=seen.features_BTE,
            hidden_BTD=seen.hidden_BTD,
            anchors_BA=anchors_BA,
            keep_BA=keep_BA,
            weights=self.weights,
            starts_BT=rows.starts_BT,
        )

    def loss(self, terms: BlockTerms) -> Float[Array, ""]:
        return total_loss(terms, self.weights)


@dataclass(frozen=True, kw_only=True)
class ChainObjective:
    """Of Eagle3 and MTP: the training-time test over every position."""

    step_decay: float

    def terms(
        self, drafter: Any, vocabulary: Vocabulary, rows: Rows, seen: TargetOutput, key: Key[Array, ""]
    ) -> ChainTerms:
        return chain_objective(
            drafter,
            vocabulary,
            tokens_BT=rows.tokens_BT,
            loss_mask_BT=rows.loss_mask_BT,
            starts_BT=rows.starts_BT,
            features_BTE=seen.features_BTE,
            hidden_BTD=seen.hidden_BTD,
        )

    def loss(self, terms: ChainTerms) -> Float[Array, ""]:
        return chain_loss(terms, self.step_decay)


def objective_of(shape: DrafterShape, *, anchors: int) -> BlockObjective | ChainObjective:
    """The objective that drafters of this shape are trained with."""
    match shape:
        case DSparkShape():
            return BlockObjective(anchors=anchors, weights=shape.loss)
        case DFlashShape():
            weights = LossWeights(ce=1.0, l1=0.0, confidence=0.0, decay=shape.decay)
            return BlockObjective(anchors=anchors, weights=weights)
    return ChainObjective(step_decay=shape.step_decay)
