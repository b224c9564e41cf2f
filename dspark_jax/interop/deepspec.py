"""Drafters in DeepSpec's layout (deepseek-ai/DeepSpec): config.json and model.safetensors of one directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.drafters.dspark import DSpark, DSparkConfig
from dspark_jax.interop.deepspec_config import config_of, fields_of
from dspark_jax.interop.names import to_tensors
from dspark_jax.interop.parameters import fill, named_parameters
from dspark_jax.interop.publish import whole_directory
from dspark_jax.interop.tables import deepspec_dspark
from dspark_jax.interop.tensor_files import WEIGHTS, TensorFiles, read_json
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.targets.model import Target, TargetSpec

# Frozen copies of the target's, which a file may hold and a drafter never does.
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def load_config(directory: Path) -> DSparkConfig:
    """The drafter that a directory's config.json describes; ValueError names file, field and what is supported."""
    file = directory / "config.json"
    try:
        return config_of(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def load_drafter(directory: Path, dtype: jax.typing.DTypeLike = jnp.float32, target: Target | None = None) -> DSpark:
    """The drafter of a directory, cast to `dtype`. With `target`: ValueError unless it was trained for that one."""
    config = load_config(directory)
    if target is not None:
        check_fit(config, target.spec)
    files = TensorFiles(directory)
    abstract = nnx.eval_shape(lambda: DSpark(config, rngs=nnx.Rngs(0), dtype=dtype))
    drafter = fill(abstract, deepspec_dspark(), files, elsewhere=(_EMBEDDING, _LM_HEAD))
    if target is not None:
        _check_vocabulary(files, target.vocabulary)
    return drafter


def save_drafter(
    directory: Path,
    drafter: DSpark,
    *,
    extra_config: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> None:
    """Writes the drafter so that the directory is whole or untouched whenever the process ends.

    `extra_config`: further fields of config.json (DeepSpec copies the target's); the drafter's own take precedence.
    `vocabulary`: the target's, to be copied into the file as released checkpoints do. `dtype`: None keeps it.
    """
    parameters = {path: np.asarray(leaf) for path, leaf in named_parameters(drafter).items()}
    tensors = to_tensors(deepspec_dspark(), parameters)
    if vocabulary is not None:
        tensors |= _vocabulary_tensors(vocabulary)
    if dtype is not None:
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    stored = tensors["fc.weight"].dtype.name
    fields = fields_of(drafter.config, {**(extra_config or {}), "dtype": stored})
    with whole_directory(directory) as partial:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")


def check_fit(config: DSparkConfig, spec: TargetSpec) -> None:
    """ValueError naming the config.json field that keeps a drafter from serving a target."""
    for field, ours, theirs in (
        ("hidden_size", config.layer.d_model, spec.d_model),
        ("vocab_size", config.vocab_size, spec.vocab_size),
        ("num_target_layers", config.num_target_layers, len(spec.layers)),
    ):
        if ours != theirs:
            raise ValueError(f"the drafter does not fit the target: its {field} is {ours}, the target has {theirs}")
    last = len(spec.layers) - 1
    if outside := [layer for layer in config.tapped_layers if not -1 <= layer < last]:
        raise ValueError(
            f"the drafter does not fit the target: target_layer_ids {outside} are outside -1..{last - 1} "
            "(the last layer cannot be tapped)"
        )
    if not 0 <= config.mask_token_id < spec.vocab_size:
        raise ValueError(
            f"the drafter does not fit the target: mask_token_id {config.mask_token_id} is outside its "
            f"vocabulary of {spec.vocab_size}"
        )


def _check_vocabulary(files: TensorFiles, vocabulary: Vocabulary) -> None:
    """Compared in the narrower of both types: either side may have been cast since."""
    for name, expected in _vocabulary_tensors(vocabulary).items():
        if name not in files.names:
            continue
        stored = files.read(name)
        narrow = min(stored.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
        if not np.array_equal(stored.astype(narrow), expected.astype(narrow)):
            raise ValueError(
                f"{files.where(name)}: {name} differs from the target's: the drafter was trained for another target"
            )


def _vocabulary_tensors(vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    embedding = np.asarray(vocabulary.embedding[...])
    head = embedding if vocabulary.head is None else np.ascontiguousarray(np.asarray(vocabulary.head[...]).T)
    return {_EMBEDDING: embedding, _LM_HEAD: head}
