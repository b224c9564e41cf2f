"""What a run minimises, by kind of drafter: the two objectives behind one protocol."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from dspark_jax.core.arrays import Array, Bool, Float, Int, Key, pytree
from dspark_jax.drafters.anchors import sample_anchors
from dspark_jax.drafters.chain import ChainDrafter
from dspark_jax.drafters.chain_objective import chain_loss, chain_mask, chain_objective
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.objective import LossWeights, block_labels, block_objective, total_loss
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.nn.training_attention import TrainingAttention
from dspark_jax.ops.losses import BlockTerms, ChainTerms, Compared, Mean, block_terms, chain_terms
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


@pytree
class Blocks:
    """Rows, and where blocks start in them."""

    rows: Rows
    anchors_BA: Int[Array, "B A"]
    keep_BA: Bool[Array, "B A"]


@runtime_checkable
class Objective(Protocol):
    """Terms are sums and counts that add over batches and devices; the loss is a function of them.

    A batch is drawn from as a whole and may then be cut into parts, of which `terms` are computed one by one.
    """

    def draw(self, rows: Rows, key: Key[Array, ""]) -> Any:
        """What is learnt from these rows: a pytree with `rows`, every leaf of which has a row of its own for each."""
        ...

    def counts(self, drafter: Any, drawn: Any) -> Any:
        """The terms with their counts, which no parameter changes, and sums of 0."""
        ...

    def terms(self, drafter: Any, vocabulary: Vocabulary, drawn: Any, seen: TargetOutput) -> Any:
        """`seen` are the target's outputs with the features that the drafter taps."""
        ...

    def loss(self, terms: Any) -> Float[Array, ""]: ...


@dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """Of DSpark and DFlash: up to `anchors` blocks a row, drawn anew with each key. `remat`: the backward pass computes
    each layer again. `attention`: how blocks attend; None is plainly."""

    anchors: int
    weights: LossWeights
    remat: bool = False
    attention: TrainingAttention | None = None

    def draw(self, rows: Rows, key: Key[Array, ""]) -> Blocks:
        anchors = min(self.anchors, rows.tokens_BT.shape[1])
        anchors_BA, keep_BA = sample_anchors(key, rows.loss_mask_BT, rows.starts_BT, anchors)
        return Blocks(rows=rows, anchors_BA=anchors_BA, keep_BA=keep_BA)

    def counts(self, drafter: DSpark, drawn: Blocks) -> BlockTerms:
        rows = drawn.rows
        _, mask_BAK = block_labels(
            rows.tokens_BT,
            rows.loss_mask_BT,
            drawn.anchors_BA,
            drawn.keep_BA,
            rows.starts_BT,
            drafter.block_size,
        )
        certain = 0.0 if drafter.confidence_head is not None else jnp.inf
        return _only_counts(
            block_terms(_nothing(mask_BAK), mask_BAK, jnp.full(mask_BAK.shape, certain), decay=self.weights.decay)
        )

    def terms(self, drafter: DSpark, vocabulary: Vocabulary, drawn: Blocks, seen: TargetOutput) -> BlockTerms:
        return block_objective(
            drafter,
            vocabulary,
            tokens_BT=drawn.rows.tokens_BT,
            loss_mask_BT=drawn.rows.loss_mask_BT,
            features_BTE=seen.features_BTE,
            hidden_BTD=seen.hidden_BTD,
            anchors_BA=drawn.anchors_BA,
            keep_BA=drawn.keep_BA,
            weights=self.weights,
            starts_BT=drawn.rows.starts_BT,
            remat=self.remat,
            attention=self.attention,
        )

    def loss(self, terms: BlockTerms) -> Float[Array, ""]:
        return total_loss(terms, self.weights)


@pytree
class Chains:
    """Rows, of which every position starts a chain."""

    rows: Rows


@dataclass(frozen=True, kw_only=True)
class ChainObjective:
    """Of Eagle3 and MTP: the training-time test over every position."""

    step_decay: float

    def draw(self, rows: Rows, key: Key[Array, ""]) -> Chains:
        return Chains(rows=rows)

    def counts(self, drafter: ChainDrafter, drawn: Chains) -> ChainTerms:
        mask_ZBT = chain_mask(drawn.rows.loss_mask_BT, drawn.rows.starts_BT, drafter.block_size)
        return _only_counts(chain_terms(_nothing(mask_ZBT), mask_ZBT))

    def terms(self, drafter: ChainDrafter, vocabulary: Vocabulary, drawn: Chains, seen: TargetOutput) -> ChainTerms:
        return chain_objective(
            drafter,
            vocabulary,
            tokens_BT=drawn.rows.tokens_BT,
            loss_mask_BT=drawn.rows.loss_mask_BT,
            starts_BT=drawn.rows.starts_BT,
            features_BTE=seen.features_BTE,
            hidden_BTD=seen.hidden_BTD,
        )

    def loss(self, terms: ChainTerms) -> Float[Array, ""]:
        return chain_loss(terms, self.step_decay)


def objective_of(
    shape: DrafterShape, *, anchors: int, remat: bool = False, attention: TrainingAttention | None = None
) -> BlockObjective | ChainObjective:
    """The objective that drafters of this shape are trained with; the rest as in BlockObjective."""
    blocks = partial(BlockObjective, anchors=anchors, remat=remat, attention=attention)
    match shape:
        case DSparkShape():
            return blocks(weights=shape.loss)
        case DFlashShape():
            return blocks(weights=LossWeights(ce=1.0, l1=0.0, confidence=0.0, decay=shape.decay))
    return ChainObjective(step_decay=shape.step_decay)


def _nothing(mask: Bool[Array, "..."]) -> Compared:
    zeros = jnp.zeros(mask.shape)
    return Compared(ce=zeros, l1=zeros, hit=zeros)


def _only_counts(terms: Any) -> Any:
    return jax.tree.map(
        lambda mean: Mean(sum=jnp.zeros_like(mean.sum), count=mean.count),
        terms,
        is_leaf=lambda node: isinstance(node, Mean),
    )
