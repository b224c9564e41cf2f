"""The safetensors files of one checkpoint directory, read tensor by tensor."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {"F32", "F16", "BF16"}


class TensorFiles:
    """Names, shapes and contents of a checkpoint's tensors; one file, or the shards an index lists.

    Errors name the file: FileNotFoundError when one is missing, ValueError when one is damaged or a tensor is
    quantised.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._holder = {}
        for file in _files(directory):
            handle = _open(file)
            self._holder.update(dict.fromkeys(handle.keys(), (file, handle)))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._holder)

    def where(self, name: str | None = None) -> str:
        """The file of a tensor, or the directory: for messages."""
        return str(self._directory if name is None else self._holder[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._holder[name][1].get_slice(name).get_shape())

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        file, handle = self._holder[name]
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise ValueError(f"{file}: tensor {name} is {dtype}; supported are {', '.join(sorted(_FLOATS))}")
        return handle.get_tensor(name)


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object; FileNotFoundError or ValueError with the file's name."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent} has no {file.name}: give a directory in Hugging Face layout") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(fields, Mapping):
        raise ValueError(f"{file} holds a JSON {type(fields).__name__}; an object is needed")
    return dict(fields)


def _files(directory: Path) -> Iterable[Path]:
    index = directory / _INDEX
    if not index.exists():
        if not (directory / WEIGHTS).exists():
            raise FileNotFoundError(f"{directory} has neither {WEIGHTS} nor {_INDEX}; other formats are not read")
        return [directory / WEIGHTS]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ValueError(f"{index} has no weight_map")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(f"{directory}: the index lists {', '.join(missing)}, which is not there")
    return files


def _open(file: Path):
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}): copy or download it again") from None
