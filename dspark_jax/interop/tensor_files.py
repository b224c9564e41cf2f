"""The safetensors files of one checkpoint directory, read tensor by tensor."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_INTEGERS = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}


class UnusableFile(ValueError):
    """A file that is damaged, or that holds what is not read; the message names it."""


@runtime_checkable
class TensorSource(Protocol):
    """Names, shapes and contents of tensors, wherever they come from; `where` says it in messages."""

    @property
    def names(self) -> frozenset[str]: ...

    def where(self, name: str | None = None) -> str: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Shaped[np.ndarray, "..."]: ...


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a tensor lies in which file, and what it is."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """A checkpoint's tensors: one file, or the shards an index lists. One shard at a time is mapped into memory.

    What is read is a view of that mapping, read-only: it costs nothing until it is copied, and holds the shard while it
    lives. Errors name the file: FileNotFoundError when one is missing, UnusableFile when one is damaged or a tensor is
    quantised.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._stored = {name: stored for file in _files(directory) for name, stored in _header(file).items()}
        self._mapped: tuple[Path, np.ndarray] | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def where(self, name: str | None = None) -> str:
        """The file of a tensor, or the directory: for messages."""
        return str(self._directory if name is None else self._stored[name].file)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def is_float(self, name: str) -> bool:
        return self._stored[name].dtype in _FLOATS

    def dtype(self, name: str) -> np.dtype:
        """Of a tensor of floating point numbers."""
        return np.dtype(_FLOATS[self._stored[name].dtype])

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        return self._read(name, _FLOATS)

    def read_integers(self, name: str) -> Shaped[np.ndarray, "..."]:
        """An index or a mask."""
        return self._read(name, _INTEGERS)

    def _read(self, name: str, supported: Mapping[str, Any]) -> Shaped[np.ndarray, "..."]:
        stored = self._stored[name]
        if stored.dtype not in supported:
            raise UnusableFile(
                f"{stored.file}: tensor {name} is {stored.dtype}; supported are {', '.join(sorted(supported))}"
            )
        if self._mapped is None or self._mapped[0] != stored.file:
            # The old shard goes first, so that two are never mapped.
            self._mapped = None
            self._mapped = (stored.file, np.asarray(np.memmap(stored.file, mode="r")))
        dtype = np.dtype(supported[stored.dtype])
        size = math.prod(stored.shape) * dtype.itemsize
        return self._mapped[1][stored.offset : stored.offset + size].view(dtype).reshape(stored.shape)


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object; FileNotFoundError or UnusableFile with the file's name."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent} has no {file.name}: give a directory in Hugging Face layout") from None
    except ValueError as error:
        raise UnusableFile(f"{file} is not valid JSON ({error})") from None
    if not isinstance(fields, Mapping):
        raise UnusableFile(f"{file} holds a JSON {type(fields).__name__}; an object is needed")
    return dict(fields)


def _files(directory: Path) -> Iterable[Path]:
    index = directory / _INDEX
    if not index.exists():
        if not (directory / WEIGHTS).exists():
            raise FileNotFoundError(f"{directory} has neither {WEIGHTS} nor {_INDEX}; other formats are not read")
        return [directory / WEIGHTS]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise UnusableFile(f"{index} has no weight_map")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(f"{directory}: the index lists {', '.join(missing)}, which is not there")
    return files


def _header(file: Path) -> dict[str, _Stored]:
    """A file's tensors by name, once the library has found the file whole."""
    if not file.is_file():
        raise UnusableFile(f"{file} is no file: put the weights there")
    try:
        safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise UnusableFile(f"{file} is damaged or incomplete ({error}): copy or download it again") from None
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        fields = json.loads(stream.read(length))
    fields.pop("__metadata__", None)
    return {
        name: _Stored(
            file=file,
            offset=8 + length + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
        )
        for name, entry in fields.items()
    }
