"""One pure training step: the frozen target reads the batch, the drafter learns to guess its continuations."""

from dataclasses import dataclass, fields
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from dspark_jax.core.arrays import Array, DType, Int, Key, pytree
from dspark_jax.data.pipeline import Batch
from dspark_jax.drafters.anchors import sample_anchors
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.objective import LossWeights, block_objective, total_loss
from dspark_jax.ops.losses import BlockTerms, Mean
from dspark_jax.targets.model import Target

Tree = TypeVar("Tree")
Metrics = dict[str, Mean]
"""Sums and counts by name: they add over steps and devices."""


@pytree
class TrainState:
    """All that changes in a run: the fp32 masters, their optimizer state, the batches seen, the run's key."""

    drafter: DSpark
    opt_state: optax.OptState
    step: Int[Array, ""]
    key: Key[Array, ""]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What is fixed while a step is compiled: blocks a sequence, loss weights, and the dtype of the compute."""

    anchors: int
    weights: LossWeights
    dtype: DType


def init_state(drafter: DSpark, optimizer: optax.GradientTransformation, key: Key[Array, ""]) -> TrainState:
    """Step 0. The drafter's parameters become the masters and should be float32."""
    opt_state = optimizer.init(drafter)  # pyrefly: ignore[bad-argument-type] (a module is a pytree)
    return TrainState(drafter=drafter, opt_state=opt_state, step=jnp.zeros((), jnp.int32), key=key)


def train_step(
    state: TrainState,
    target: Target,
    batch: Batch,
    *,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
) -> tuple[TrainState, Metrics]:
    """One update from one batch.

    The target is an argument, never a constant of the compiled program, and its features are computed here: nothing
    is cached. A step whose loss or gradient is not finite changes no parameter and no optimizer state; it counts
    under "skipped" and in no other mean.
    """
    # The key belongs to the batch number, so a resumed run draws the anchors an uninterrupted one would.
    key = jax.random.fold_in(state.key, state.step)

    def loss(masters: DSpark) -> tuple[Array, BlockTerms]:
        terms = measure(masters, target, batch, key, config)
        return total_loss(terms, config.weights), terms

    (value, terms), grads = jax.value_and_grad(loss, has_aux=True)(state.drafter)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    updates, opt_state = optimizer.update(
        grads,
        state.opt_state,
        state.drafter,  # pyrefly: ignore[bad-argument-type]
    )
    drafter = jax.tree.map(lambda master, update: master + update, state.drafter, updates)
    after = TrainState(
        drafter=_choose(finite, drafter, state.drafter),
        opt_state=_choose(finite, opt_state, state.opt_state),
        step=state.step + 1,
        key=state.key,
    )
    metrics = named(terms) | {"loss": _once(value), "grad_norm": _once(norm)}
    metrics = _choose(finite, metrics, jax.tree.map(jnp.zeros_like, metrics))
    return after, metrics | {"skipped": _once(~finite), "tokens": _once(jnp.sum(batch.length_B))}


def measure(masters: DSpark, target: Target, batch: Batch, key: Key[Array, ""], config: StepConfig) -> BlockTerms:
    """The loss terms of one batch at anchors drawn with `key`, the drafter computed in config.dtype."""
    drafter = cast(masters, config.dtype)
    tokens_BT, loss_mask_BT = jnp.asarray(batch.tokens_BT), jnp.asarray(batch.loss_mask_BT)
    anchors_BA, keep_BA = sample_anchors(key, loss_mask_BT, min(config.anchors, tokens_BT.shape[1]))
    seen = target.encode(tokens_BT, drafter.tapped_layers)
    return block_objective(
        drafter,
        target.vocabulary,
        tokens_BT=tokens_BT,
        loss_mask_BT=loss_mask_BT,
        features_BTE=seen.features_BTE,
        hidden_BTD=seen.hidden_BTD,
        anchors_BA=anchors_BA,
        keep_BA=keep_BA,
        weights=config.weights,
    )


def cast(module: Tree, dtype: DType) -> Tree:
    """Every parameter in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), module)


def named(terms: BlockTerms) -> Metrics:
    """The terms' means by name."""
    return {field.name: getattr(terms, field.name) for field in fields(terms)}


def _once(value: Array) -> Mean:
    return Mean(sum=value.astype(jnp.float32), count=jnp.ones(()))


def _choose(condition: Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
