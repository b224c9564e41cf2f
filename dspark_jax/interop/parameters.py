"""Parameter trees by path, and filling an abstract one from files."""

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.interop.names import Table, to_parameters
from dspark_jax.interop.tensor_files import TensorFiles

Module = TypeVar("Module", bound=nnx.Module)


def named_parameters(module: nnx.Module) -> dict[str, Any]:
    """The leaves of a module (or of its abstract shape) by path, in the order of its pytree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module)
    return {_path(keys): leaf for keys, leaf in leaves}


def fill(abstract: Module, table: Table, files: TensorFiles, *, elsewhere: Collection[str] = ()) -> Module:
    """The module of an abstract one (`nnx.eval_shape`), each parameter read and cast before the next is touched.

    Every parameter gets a tensor and every tensor a place, `elsewhere` aside: ValueError otherwise.
    """
    wanted = named_parameters(abstract)
    shapes = {path: leaf.shape for path, leaf in wanted.items()}
    read = to_parameters(table, files, shapes, elsewhere=elsewhere)
    values = [jnp.asarray(tensor.astype(wanted[path].dtype, copy=False)) for path, tensor in read]
    return jax.tree.unflatten(jax.tree.structure(abstract), values)


def _path(keys: Iterable[Any]) -> str:
    names = [str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", "")))) for key in keys]
    return ".".join(names[:-1] if names[-1] == "value" else names)
