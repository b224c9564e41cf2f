"""A training step that takes the target's outputs from a cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.core.mesh import sharding
from dspark_jax.data.pipeline import Batch, Rows, numbered_batches
from dspark_jax.data.store import fingerprint
from dspark_jax.targets.model import Target
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.features import Features, open_files, require_room
from dspark_jax.training.sources import Reader
from dspark_jax.training.step import Metrics, StepConfig, TrainState, look

Step = Callable[..., tuple[TrainState, Metrics]]


@dataclass(frozen=True, kw_only=True)
class CachedStep:
    """Called as the step inside; batches have to be numbered."""

    step: Step
    features: Features

    def __call__(self, state: TrainState, target: Target, batch: Batch) -> tuple[TrainState, Metrics]:
        return self.step(state, target, batch, self.features(target, batch))


def cached_step(
    step: Step,
    config: TrainConfig,
    folder: Path,
    *,
    fixed: StepConfig,
    reader: Reader,
    target: Target,
    taps: tuple[int, ...],
    store: Rows,
    rows: np.ndarray,
    contents: str,
    say: Callable[[str], None],
) -> CachedStep:
    """`step` with the cache that the config asks for, which is filled here if it is to be filled before training.

    `contents`: a digest of the data. ValueError when the cache is one of something else, or does not fit.
    """
    assert fixed.mesh is not None
    numbered = numbered_batches(store, rows, batch_size=config.batch_size, padding=config.padding, seed=config.seed)
    files = open_files(
        config.features,
        folder if config.features.directory is None else Path(config.features.directory).expanduser(),
        key=_key(config, reader.directory, taps, contents),
        length=config.sequence_length,
        taps=len(taps),
        width=reader.target.spec.d_model,
    )
    last: Any = numbered[len(numbered) - 1]
    require_room(config.features, files, int(last.rows_B.max()) + 1, say)
    together = sharding(fixed.mesh, "batch")
    compute = jax.jit(partial(look, taps=taps, dtype=config.features.dtype, config=fixed), out_shardings=together)
    features = Features(files, compute, together)
    if config.features.kind == "cached":
        features.fill(target, numbered, say)
    return CachedStep(step=step, features=features)


def _key(config: TrainConfig, target: Path, taps: tuple[int, ...], contents: str) -> dict[str, Any]:
    return {
        "data.contents": contents,
        "drafter.tapped_layers": list(taps),
        "features.dtype": config.features.dtype,
        "packing": config.packing,
        "precision": config.precision,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "target": fingerprint([target / "config.json", *sorted(target.glob("*.safetensors"))]),
    }
