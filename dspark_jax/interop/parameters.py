"""Parameter trees by path, and filling an abstract one from files."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.core.mesh import module_shardings
from dspark_jax.interop.names import Table, to_parameters
from dspark_jax.interop.tensor_files import TensorSource

Module = TypeVar("Module", bound=nnx.Module)
Place = Callable[[str, np.ndarray], jax.Array]
"""Puts the parameter of a path where it lives."""


def named_parameters(module: nnx.Module) -> dict[str, Any]:
    """The leaves of a module (or of its abstract shape) by path, in the order of its pytree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module)
    return {_path(keys): leaf for keys, leaf in leaves}


def fill(
    abstract: Module,
    table: Table,
    files: TensorSource,
    *,
    elsewhere: Collection[str] = (),
    place: Place = lambda _, tensor: jnp.array(tensor),
) -> Module:
    """The module of an abstract one (`nnx.eval_shape`), each parameter read, cast and placed before the next.

    Every parameter gets a tensor and every tensor a place, `elsewhere` aside: ValueError otherwise.
    """
    wanted = named_parameters(abstract)
    shapes = {path: leaf.shape for path, leaf in wanted.items()}
    read = to_parameters(table, files, shapes, elsewhere=elsewhere)
    put = {}
    for path, tensor in read:
        put[path] = place(path, tensor.astype(wanted[path].dtype, copy=False))
        # Nothing of it is here any more when the next is read.
        del tensor
    return jax.tree.unflatten(jax.tree.structure(abstract), [put[path] for path in wanted])


def placing(mesh: Mesh | None, abstract: nnx.Module) -> Place:
    """Every parameter straight onto the device shards that its logical axes ask for; nothing of it stays behind.

    Without a mesh, onto the default device. Both copy: a device of the host would go on reading the file otherwise.
    """
    if mesh is None:
        return lambda _, tensor: jnp.array(tensor)
    shardings = named_parameters(module_shardings(mesh, abstract))

    def place(path: str, tensor: np.ndarray) -> jax.Array:
        parts = jax.make_array_from_callback(tensor.shape, shardings[path], lambda part: np.array(tensor[part]))
        return jax.block_until_ready(parts)

    return place


def _path(keys: Iterable[Any]) -> str:
    names = [str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", "")))) for key in keys]
    return ".".join(names[:-1] if names[-1] == "value" else names)
