"""Drafters written in DeepSpec's layout (deepseek-ai/DeepSpec): config.json and model.safetensors of one directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from dspark_jax.interop.deepspec_config import fields_of
from dspark_jax.interop.drafter_kinds import FileDrafter, drafter_table, vocabulary_tensors
from dspark_jax.interop.names import to_tensors
from dspark_jax.interop.parameters import named_parameters
from dspark_jax.interop.publish import whole_directory
from dspark_jax.interop.tensor_files import WEIGHTS
from dspark_jax.nn.layers import Vocabulary


def save_drafter(
    directory: Path,
    drafter: FileDrafter,
    *,
    extra_config: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> None:
    """Writes the drafter so that the directory is whole or untouched whenever the process ends.

    `extra_config`: further fields of config.json (DeepSpec copies the target's); the drafter's own take precedence.
    `vocabulary`: the target's, to be copied into the file as released checkpoints do. `dtype`: None keeps it.
    """
    fields = fields_of(drafter.config, extra_config or {})
    tensors = drafter_tensors(drafter, vocabulary=vocabulary, dtype=dtype)
    write_drafter(directory, fields, tensors)


def drafter_tensors(
    drafter: FileDrafter, *, vocabulary: Vocabulary | None = None, dtype: jax.typing.DTypeLike | None = None
) -> dict[str, np.ndarray]:
    """The file's tensors of a drafter, with copies of the target's vocabulary where it is given."""
    parameters = {path: np.asarray(leaf) for path, leaf in named_parameters(drafter).items()}
    tensors = to_tensors(drafter_table(drafter.config), parameters)
    if vocabulary is not None:
        tensors |= vocabulary_tensors(vocabulary)
    if dtype is not None:
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    return tensors


def write_drafter(directory: Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """config.json and the tensors; the field `dtype` is that of the tensors."""
    fields = {**fields, "dtype": next(iter(tensors.values())).dtype.name}
    with whole_directory(directory) as partial:
        save_file(dict(tensors), partial / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
