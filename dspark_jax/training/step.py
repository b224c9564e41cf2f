"""One pure training step: the frozen target reads the batch, the drafter learns to guess its continuations."""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from dspark_jax.core.arrays import Array, DType, Int, Key, pytree
from dspark_jax.core.mesh import constrain, on_mesh
from dspark_jax.data.pipeline import Batch
from dspark_jax.ops.losses import Mean
from dspark_jax.targets.model import Target
from dspark_jax.training.draft import Drafter
from dspark_jax.training.objective import Objective, Rows, Terms
from dspark_jax.training.stored import Stored, StoredDType, store

Tree = TypeVar("Tree")
Metrics = dict[str, Mean]
"""Sums and counts by name: they add over steps and devices."""


@pytree
class TrainState:
    """All that changes in a run: the fp32 masters, their optimizer state, the batches seen, the run's key."""

    drafter: Drafter
    opt_state: optax.OptState
    step: Int[Array, ""]
    key: Key[Array, ""]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What is fixed while a step is compiled: what is minimised, the dtype of the compute, in how many parts a batch is
    computed one after the other, and the mesh whose devices share it (None: as the compiler likes)."""

    objective: Objective
    dtype: DType
    accumulate: int = 1
    mesh: Mesh | None = None


def init_state(drafter: Drafter, optimizer: optax.GradientTransformation, key: Key[Array, ""]) -> TrainState:
    """Step 0. The drafter's parameters become the masters and should be float32."""
    opt_state = optimizer.init(drafter)  # pyrefly: ignore[bad-argument-type] (a module is a pytree)
    return TrainState(drafter=drafter, opt_state=opt_state, step=jnp.zeros((), jnp.int32), key=key)


def train_step(
    state: TrainState,
    target: Target,
    batch: Batch,
    seen: Stored | None = None,
    *,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
) -> tuple[TrainState, Metrics]:
    """One update from one batch.

    The target is an argument, never a constant of the compiled program. Its outputs are computed here unless `seen`
    holds them: then its layers are not run. Each loss term is divided by its weight sum over the whole batch, in
    however many parts that is. Nothing is learnt from a row of which the target's outputs are not finite; it counts
    under "rows_skipped". A step without other rows, or whose loss or gradient is not finite, changes no parameter and
    no optimizer state; it counts under "skipped" and in no other mean.
    """
    with on_mesh(config.mesh):
        value, terms, rows_skipped, grads = _gradient(state, target, batch, seen, config)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(norm) & (rows_skipped.sum < rows_skipped.count)
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
    metrics |= {"skipped": _once(~finite), "rows_skipped": rows_skipped}
    return after, metrics | {"tokens": _once(jnp.sum(batch.segments_BT > 0))}


def _gradient(
    state: TrainState, target: Target, batch: Batch, seen: Stored | None, config: StepConfig
) -> tuple[Array, Terms, Mean, Any]:
    """The loss, its terms, the share of rows left out of it, and its gradient, over the whole batch."""
    # The key belongs to the batch number, so a resumed run draws the anchors an uninterrupted one would.
    key = jax.random.fold_in(state.key, state.step)
    drawn = config.objective.draw(_rows(batch), key)
    counts = config.objective.counts(state.drafter, drawn)

    def loss(masters: Drafter, part: tuple[Any, Stored | None]) -> tuple[Array, tuple[Terms, Mean]]:
        terms, rows_skipped = _terms(masters, target, part[0], part[1], config)
        return config.objective.loss(_over(terms, counts)), (terms, rows_skipped)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(state.drafter, part)), None

    gradient = jax.value_and_grad(loss, has_aux=True)
    if config.accumulate == 1:
        (value, (terms, rows_skipped)), grads = gradient(state.drafter, (drawn, seen))
    else:
        none = Mean(sum=jnp.zeros(()), count=jnp.zeros(()))
        zero = ((jnp.zeros(()), (counts, none)), jax.tree.map(jnp.zeros_like, state.drafter))
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), zero)
        ((value, (terms, rows_skipped)), grads), _ = lax.scan(
            add, zero, jax.tree.map(partial(_parts, config.accumulate), (drawn, seen))
        )
    return value, terms, rows_skipped, grads


def measure(masters: Drafter, target: Target, batch: Batch, key: Key[Array, ""], config: StepConfig) -> Terms:
    """The loss terms of one batch, the drafter computed in config.dtype; `key` decides what the objective draws."""
    with on_mesh(config.mesh):
        return _terms(masters, target, config.objective.draw(_rows(batch), key), None, config)[0]


def look(target: Target, batch: Batch, *, taps: tuple[int, ...], dtype: StoredDType, config: StepConfig) -> Stored:
    """What train_step would compute of the target, to be kept; in as many parts as there."""

    def one(rows: Rows) -> Stored:
        rows = constrain(rows, "batch")
        return store(target.encode(rows.tokens_BT, taps, rows.starts_BT), dtype)

    with on_mesh(config.mesh):
        if config.accumulate == 1:
            return one(_rows(batch))
        parts = lax.map(one, jax.tree.map(partial(_parts, config.accumulate), _rows(batch)))
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), parts)


def _rows(batch: Batch) -> Rows:
    return Rows(*map(jnp.asarray, (batch.tokens_BT, batch.loss_mask_BT, batch.segments_BT)))


def _terms(masters: Drafter, target: Target, drawn: Any, held: Stored | None, config: StepConfig) -> tuple[Terms, Mean]:
    """The terms, and the share of rows left out of them."""
    drafter, (drawn, held) = cast(masters, config.dtype), constrain((drawn, held), "batch")
    if held is None:
        seen = target.encode(drawn.rows.tokens_BT, drafter.tapped_layers, drawn.rows.starts_BT)
    else:
        seen = held.output(config.dtype)
    sound_B = _finite_rows(seen.features_BTE) & _finite_rows(seen.hidden_BTD)
    # Not just unsupervised: a gradient of 0 times something infinite would not be 0.
    drawn = replace(
        drawn,
        rows=replace(
            drawn.rows,
            tokens_BT=jnp.where(sound_B[:, None], drawn.rows.tokens_BT, 0),
            loss_mask_BT=drawn.rows.loss_mask_BT & sound_B[:, None],
        ),
    )
    seen = replace(
        seen,
        features_BTE=jnp.where(sound_B[:, None, None], seen.features_BTE, 0),
        hidden_BTD=jnp.where(sound_B[:, None, None], seen.hidden_BTD, 0),
    )
    unsound = Mean(sum=jnp.sum(~sound_B, dtype=jnp.float32), count=jnp.asarray(sound_B.size, jnp.float32))
    return config.objective.terms(drafter, target.vocabulary, drawn, seen), unsound


def _finite_rows(x_BTD: Array) -> Array:
    return jnp.all(jnp.isfinite(x_BTD), axis=(1, 2))


def _over(terms: Terms, counts: Terms) -> Terms:
    """Sums of a part over the counts of the whole."""
    return jax.tree.map(
        lambda part, whole: Mean(sum=part.sum, count=whole.count),
        terms,
        counts,
        is_leaf=lambda node: isinstance(node, Mean),
    )


def _parts(count: int, x: Array) -> Array:
    # Every count-th row: rows that lie side by side are on one device, which has its share of every part.
    return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)


def cast(module: Tree, dtype: DType) -> Tree:
    """Every parameter in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), module)


def named(terms: Terms) -> Metrics:
    """The terms' means by name."""
    return {field.name: getattr(terms, field.name) for field in fields(terms)}


def _once(value: Array) -> Mean:
    return Mean(sum=value.astype(jnp.float32), count=jnp.ones(()))


def _choose(condition: Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
