"""The one mechanism that turns a checkpoint's tensors into a parameter tree and back, driven by a table.

A parameter's path is its place in the module (`layers.0.attention.kv`). A `Rename` says which tensors of the file
it is made of and how their axes correspond; sizes come from the parameter, so a table holds no numbers.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Shaped

from dspark_jax.interop.tensor_files import TensorSource

Tensor = Shaped[np.ndarray, "..."]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rename:
    """One parameter and the tensors it is made of; `{n}` in path and names stands for a layer's number.

    `file` and `ours` spell the axes with the letters of the dimension key. In `file`, parentheses join axes that
    the file stores as one and `1` is an axis of size 1; in `ours`, `2` is the axis along which `names` are stacked,
    as many of them as the parameter has there (a layer whose values are its keys stores no values).
    """

    path: str
    names: tuple[str, ...]
    file: str
    ours: str

    def tensor_shape(self, shape: Shape) -> Shape:
        """Shape of each tensor in the file, from the parameter's shape."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return tuple(math.prod(sizes[axis] for axis in group) for group in self._groups())

    def to_parameter(self, tensors: Iterable[Tensor], shape: Shape) -> Tensor:
        """The parameter; of a stacked one's tensors, which may be read one by one, none is kept."""
        sizes = dict(zip(self.ours, shape, strict=True))
        flat = "".join(self._groups())
        single = self.ours.replace("2", "")
        parts = (
            tensor.reshape([sizes[axis] for axis in flat]).transpose([flat.index(axis) for axis in single])
            for tensor in tensors
        )
        first = next(iter(parts))
        if "2" not in self.ours:
            return first
        parameter = np.empty(shape, first.dtype)
        along = np.moveaxis(parameter, self.ours.index("2"), 0)
        along[0] = first
        del first
        for index, part in enumerate(parts, start=1):
            along[index] = part
        return parameter

    def to_tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        flat = "".join(self._groups())
        axes = "2" + flat if "2" in self.ours else flat
        stacked = parameter.transpose([self.ours.index(axis) for axis in axes])
        parts = list(stacked) if "2" in self.ours else [stacked]
        shape = self.tensor_shape(parameter.shape)
        named = zip(self.names, parts, strict=True)
        return {name: np.ascontiguousarray(np.reshape(part, shape)) for name, part in named}

    def _groups(self) -> list[str]:
        """`(HC)D1` -> ["HC", "D", ""]: our axes behind each axis of the file."""
        return [joined or single for joined, single, _ in re.findall(r"\(([A-Z]+)\)|([A-Z])|(1)", self.file)]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One file format."""

    renames: tuple[Rename, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a file may hold although they repeat another one; they must equal it and are not kept."""
    buffers: tuple[str, ...] = ()
    """Regular expressions of tensors that a file may hold although they follow from its config."""
    skipped: tuple[str, ...] = ()
    """Prefixes of the tensors of parts that are not built, such as a vision tower."""


def to_parameters(
    table: Table, files: TensorSource, shapes: Mapping[str, Shape], *, elsewhere: Collection[str] = ()
) -> Iterable[tuple[str, Tensor]]:
    """Pairs (path, parameter in the file's dtype), shard by shard, once all names and shapes have been checked.

    `shapes` are the parameters to fill; `elsewhere` are tensors that the caller deals with itself. ValueError names
    every parameter without a tensor, every tensor without a place and every shape that differs.
    """
    renames = _filled_in(table, shapes)
    _check_names(table, renames, files, elsewhere)
    _check_shapes(renames, files, shapes)
    _check_copies(table, files)
    # In the order of the shards: each is opened once.
    renames.sort(key=lambda rename: [files.where(name) for name in rename.names])
    return (
        (rename.path, rename.to_parameter((files.read(name) for name in rename.names), shapes[rename.path]))
        for rename in renames
    )


def to_tensors(table: Table, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors of a parameter tree: the exact inverse of `to_parameters`."""
    tensors = {}
    shapes = {path: parameter.shape for path, parameter in parameters.items()}
    for rename in _filled_in(table, shapes):
        tensors.update(rename.to_tensors(parameters[rename.path]))
    return tensors


def skipped_tensors(table: Table, files: TensorSource) -> dict[str, int]:
    """How many tensors of the file each skipped prefix covers."""
    counts = {prefix: sum(name.startswith(prefix) for name in files.names) for prefix in table.skipped}
    return {prefix: count for prefix, count in counts.items() if count}


def _filled_in(table: Table, shapes: Mapping[str, Shape]) -> list[Rename]:
    """The rename of every path, its layer's number and as many names as its shape asks for put in."""
    by_path = {rename.path: rename for rename in table.renames}
    found = []
    for path, shape in shapes.items():
        number = next(iter(re.findall(r"\.(\d+)\.", path)), "")
        pattern = path.replace(f".{number}.", ".{n}.", 1) if number else path
        if pattern not in by_path:
            raise ValueError(f"this file format has no tensor for the parameter {path}")
        rename = by_path[pattern]
        stacked = shape[rename.ours.index("2")] if "2" in rename.ours else 1
        names = tuple(name.replace("{n}", number) for name in rename.names[:stacked])
        found.append(replace(rename, path=path, names=names))
    return found


def _check_names(table: Table, renames: list[Rename], files: TensorSource, elsewhere: Collection[str]) -> None:
    wanted = {name: rename.path for rename in renames for name in rename.names}
    if missing := [f"{name} ({path})" for name, path in wanted.items() if name not in files.names]:
        raise ValueError(f"{files.where()}: missing {_count('tensor', missing)} (parameter): {_some(missing)}")
    allowed = {*wanted, *elsewhere, *table.copies}
    unknown = [
        name
        for name in sorted(files.names - allowed)
        if not any(re.fullmatch(buffer, name) for buffer in table.buffers) and not name.startswith(table.skipped)
    ]
    if unknown:
        raise ValueError(
            f"{files.where()}: {_count('tensor', unknown)} without a place in the model that config.json "
            f"describes: {_some(unknown)}"
        )


def _check_shapes(renames: list[Rename], files: TensorSource, shapes: Mapping[str, Shape]) -> None:
    for rename in renames:
        needed = rename.tensor_shape(shapes[rename.path])
        for name in rename.names:
            if (found := files.shape(name)) != needed:
                raise ValueError(
                    f"{files.where(name)}: tensor {name} has shape {list(found)}, config.json needs {list(needed)}"
                )


def _check_copies(table: Table, files: TensorSource) -> None:
    for copy, original in table.copies.items():
        if copy in files.names and not np.array_equal(files.read(copy), files.read(original)):
            raise ValueError(f"{files.where(copy)}: {copy} differs from {original}, which config.json ties it to")


def _count(noun: str, items: list[str]) -> str:
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}"


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (", ..." if len(items) > 4 else "")
