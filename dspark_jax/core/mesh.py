"""The device mesh, and the one table from logical axis names to mesh axes."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Module = TypeVar("Module", bound=nnx.Module)
Tree = TypeVar("Tree")
MESH_AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "model": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffw": "tensor",
    "features": None,
    "head_dim": None,
    "rank": None,
    "pair": None,
    "slot": None,
}
"""Logical axis -> mesh axis. Model code names the left side only; `None` is replicated."""


def make_mesh(*, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, fsdp, tensor) mesh over `devices` (all of them by default); data takes what the others leave.

    Raises ValueError when fsdp * tensor does not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) % (fsdp * tensor):
        raise ValueError(
            f"mesh: fsdp={fsdp} x tensor={tensor} does not divide {len(devices)} devices; "
            "choose factors whose product does"
        )
    shape = (len(devices) // (fsdp * tensor), fsdp, tensor)
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def sharding(mesh: Mesh | AbstractMesh, *axes: str | None) -> NamedSharding:
    """Sharding of an array whose dimensions carry these logical names (None: replicated)."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] if axis else None for axis in axes)))


def variable_sharding(mesh: Mesh | AbstractMesh, variable: nnx.Variable) -> NamedSharding:
    """As its `axes` metadata asks; replicated where its value is of another shape, as an optimizer's may be."""
    axes = variable.get_metadata()["axes"]
    return sharding(mesh, *axes) if len(variable.shape) == len(axes) and variable.size > 1 else sharding(mesh)


def module_shardings(mesh: Mesh, module: Module) -> Module:
    """The module with every parameter replaced by the sharding its `axes` metadata asks for."""

    def one(param: nnx.Variable) -> nnx.Variable:
        return param.replace(variable_sharding(mesh, param))

    return jax.tree.map(one, module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def on_mesh(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager:
    """Inside, `constrain` means this mesh; None: nothing is constrained. For use around what is being traced."""
    if mesh is None:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def constrain(x: Tree, *axes: str | None) -> Tree:
    """The arrays of x, split along their first dimensions as these logical names say and not along the others.

    Left to itself the partitioner may split an activation as the weights are split, and add up partial sums where it
    should have gathered weights. Off a mesh, as in decoding, x as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, *axes))


def gathered(module: Module) -> Module:
    """The module with its parameters whole along `model`, for a loop that would else gather them at every turn."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return module

    def one(param: nnx.Variable) -> nnx.Variable:
        axes = (None if axis == "model" else axis for axis in param.get_metadata()["axes"])
        return param.replace(jax.lax.with_sharding_constraint(param[...], sharding(mesh, *axes)))

    return jax.tree.map(one, module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def ways(axis: str) -> int:
    """How many parts arrays are split in along this logical name; 1 off a mesh."""
    mesh, over = jax.sharding.get_abstract_mesh(), RULES[axis]
    if mesh.empty or over is None:
        return 1
    return math.prod(mesh.shape[name] for name in ((over,) if isinstance(over, str) else over))
