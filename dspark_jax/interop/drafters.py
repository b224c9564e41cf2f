"""Drafters of any layout this package reads, from the directory of their config.json."""

from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.mtp import MtpConfig
from dspark_jax.interop.deepspec_config import DrafterConfig
from dspark_jax.interop.drafter_kinds import (
    EMBEDDING,
    LM_HEAD,
    FileDrafter,
    abstract_drafter,
    drafter_table,
    vocabulary_tensors,
)
from dspark_jax.interop.layouts import Checkpoint, layout_of
from dspark_jax.interop.parameters import fill, placing
from dspark_jax.interop.reduced_vocabulary import ReducedVocabulary
from dspark_jax.interop.tensor_files import TensorFiles, TensorSource, UnusableFile, read_json
from dspark_jax.nn.layers import Vocabulary
from dspark_jax.targets.model import Target, TargetSpec


def load_config(directory: Path, target: TargetSpec | None = None) -> DrafterConfig:
    """The drafter that a directory's config.json describes; ValueError names file, field and what is supported.

    `target` is needed where the file does not say how many layers its target has.
    """
    return _Opened(directory, target).config


def check_drafter(directory: Path, target: TargetSpec) -> DrafterConfig:
    """A directory's config, once all is known to be well that can be without either model's weights.

    ValueError or OSError as `load_drafter` raises them: for a config that cannot be read or does not fit the target,
    for a file that is missing, damaged, or lacks a tensor.
    """
    opened = _Opened(directory, target)
    check_fit(opened.config, target)
    opened.tensors()
    return opened.config


def load_drafter(
    directory: Path,
    dtype: jax.typing.DTypeLike = jnp.float32,
    target: Target | None = None,
    *,
    target_spec: TargetSpec | None = None,
    vocabulary: Vocabulary | None = None,
    mesh: Mesh | None = None,
) -> FileDrafter:
    """The drafter of a directory, cast to `dtype`. With `target`: ValueError unless it was trained for that one.

    Where the whole target is too much to load, `target_spec` checks sizes and `vocabulary` the copies of it. With
    `mesh`, parameters go straight to their device shards.
    """
    if target is not None:
        target_spec, vocabulary = target.spec, target.vocabulary
    opened = _Opened(directory, target_spec)
    if target_spec is not None:
        check_fit(opened.config, target_spec)
    source = opened.tensors()
    abstract = abstract_drafter(opened.config, dtype)
    table, copies = drafter_table(opened.config), (EMBEDDING, LM_HEAD)
    drafter = fill(abstract, table, source, elsewhere=copies, place=placing(mesh, abstract))
    if vocabulary is not None:
        _check_vocabulary(source, vocabulary)
    return drafter


def stored_dtype(directory: Path) -> np.dtype:
    """The type that holds every tensor of a drafter's file."""
    files = TensorFiles(directory)
    return np.result_type(*{files.dtype(name) for name in files.names if files.is_float(name)})


class _Opened:
    """A directory's config, and its tensors once somebody asks for them."""

    def __init__(self, directory: Path, target: TargetSpec | None):
        self._directory = directory
        self._fields = read_json(directory / "config.json")
        try:
            self._layout = layout_of(self._fields)
            given = Checkpoint(fields=self._fields, target=target, has_tensor=lambda name: name in self._files.names)
            self.config = self._layout.config(given)
        except UnusableFile:
            raise
        except (ValueError, TypeError) as error:
            raise ValueError(f"{directory / 'config.json'}: {error}") from error

    @cached_property
    def _files(self) -> TensorFiles:
        return TensorFiles(self._directory)

    def tensors(self) -> TensorSource:
        return self._layout.tensors(self._files, self._fields)


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


def _check_vocabulary(files: TensorSource, vocabulary: Vocabulary) -> None:
    """Compared in the narrower of both types: either side may have been cast since."""
    for name, expected in vocabulary_tensors(vocabulary).items():
        if name not in files.names:
            continue
        if name == LM_HEAD and isinstance(files, ReducedVocabulary):
            expected = expected[files.draft_ids]
        stored = files.read(name)
        narrow = min(stored.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
        if not np.array_equal(stored.astype(narrow), expected.astype(narrow)):
            raise ValueError(
                f"{files.where(name)}: {name} differs from the target's: the drafter was trained for another target"
            )
