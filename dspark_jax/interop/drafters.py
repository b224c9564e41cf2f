"""Drafters of any layout this package reads, from the directory of their config.json."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.mtp import MtpConfig
from dspark_jax.interop.deepspec_config import DrafterConfig, config_of
from dspark_jax.interop.drafter_kinds import (
    EMBEDDING,
    LM_HEAD,
    FileDrafter,
    abstract_drafter,
    drafter_table,
    vocabulary_tensors,
)
from dspark_jax.interop.parameters import fill, on_mesh
from dspark_jax.interop.tensor_files import TensorFiles, read_json
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.targets.model import Target, TargetSpec


def load_config(directory: Path) -> DrafterConfig:
    """The drafter that a directory's config.json describes; ValueError names file, field and what is supported."""
    file = directory / "config.json"
    try:
        return config_of(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def load_drafter(
    directory: Path,
    dtype: jax.typing.DTypeLike = jnp.float32,
    target: Target | None = None,
    *,
    mesh: Mesh | None = None,
) -> FileDrafter:
    """The drafter of a directory, cast to `dtype`. With `target`: ValueError unless it was trained for that one.

    With `mesh`, parameters go straight to their device shards.
    """
    config = load_config(directory)
    if target is not None:
        check_fit(config, target.spec)
    files = TensorFiles(directory)
    abstract = abstract_drafter(config, dtype)
    placing = {} if mesh is None else {"place": on_mesh(mesh, abstract)}
    drafter = fill(abstract, drafter_table(config), files, elsewhere=(EMBEDDING, LM_HEAD), **placing)
    if target is not None:
        _check_vocabulary(files, target.vocabulary)
    return drafter


def check_fit(config: DrafterConfig, spec: TargetSpec) -> None:
    """ValueError naming the config.json field that keeps a drafter from serving a target."""
    for field, ours, theirs in (
        ("hidden_size", config.layer.d_model, spec.d_model),
        ("vocab_size", config.vocab_size, spec.vocab_size),
        ("num_target_layers", config.num_target_layers, len(spec.layers)),
    ):
        if ours != theirs:
            raise ValueError(f"the drafter does not fit the target: its {field} is {ours}, the target has {theirs}")
    last = len(spec.layers) - 1
    tapped = () if isinstance(config, MtpConfig) else config.tapped_layers
    if outside := [layer for layer in tapped if not -1 <= layer < last]:
        raise ValueError(
            f"the drafter does not fit the target: target_layer_ids {outside} are outside -1..{last - 1} "
            "(the last layer cannot be tapped)"
        )
    if isinstance(config, DSparkConfig) and not 0 <= config.mask_token_id < spec.vocab_size:
        raise ValueError(
            f"the drafter does not fit the target: mask_token_id {config.mask_token_id} is outside its "
            f"vocabulary of {spec.vocab_size}"
        )


def _check_vocabulary(files: TensorFiles, vocabulary: Vocabulary) -> None:
    """Compared in the narrower of both types: either side may have been cast since."""
    for name, expected in vocabulary_tensors(vocabulary).items():
        if name not in files.names:
            continue
        stored = files.read(name)
        narrow = min(stored.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
        if not np.array_equal(stored.astype(narrow), expected.astype(narrow)):
            raise ValueError(
                f"{files.where(name)}: {name} differs from the target's: the drafter was trained for another target"
            )
