"""The compiled training step of a config, for devices that are here or not."""

from functools import partial
from typing import Any, TypeVar

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.core.mesh import sharding, variable_sharding
from dspark_jax.nn.training_attention import training_suited_to
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.objective import objective_of
from dspark_jax.training.step import StepConfig, train_step

Tree = TypeVar("Tree")


def shardings_of(mesh: Mesh, tree: Tree) -> Tree:
    """Parameters split as their logical axes say, everything else on every device."""

    def where(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return sharding(mesh)
        # An optimizer's state has no values for the parameters that another one takes.
        return leaf.replace(variable_sharding(mesh, leaf)) if jax.tree.leaves(leaf) else leaf

    return jax.tree.map(where, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def step_config(config: TrainConfig, mesh: Mesh) -> StepConfig:
    """What the config says about a step on that mesh."""
    objective = objective_of(
        config.drafter,
        anchors=config.anchors,
        remat=config.remat == "layer",
        attention=training_suited_to(mesh),
    )
    return StepConfig(objective=objective, dtype=config.dtype, accumulate=config.accumulate, mesh=mesh)


def jitted_step(optimizer: optax.GradientTransformation, config: StepConfig, state: Any) -> jax.stages.Wrapped:
    """train_step, which may use the state's memory for the next; `state` is of arrays, or of shapes that are placed."""
    assert config.mesh is not None
    return jax.jit(
        partial(train_step, optimizer=optimizer, config=config),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), sharding(config.mesh)),
    )
