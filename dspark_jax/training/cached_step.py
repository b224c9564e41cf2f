"""A training step that takes the target's outputs from a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.core.mesh import sharding
from dspark_jax.data.pipeline import Batch, Host, Rows, fed_rows, numbered_batches, numbered_rows
from dspark_jax.data.store import fingerprint
from dspark_jax.targets.model import Target
from dspark_jax.training.config import TrainConfig
from dspark_jax.training.features import Features, open_files, require_room
from dspark_jax.training.hosts import all_succeed, here, most, sharing
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
    steps: int,
    contents: str,
    say: Callable[[str], None],
) -> CachedStep:
    """`step` with the cache that the config asks for, which is filled here if it is to be filled before training.

    `contents`: a digest of the data. ValueError when the cache is one of something else, or does not fit.
    """
    assert fixed.mesh is not None
    packs = numbered_rows(store, rows, padding=config.padding, seed=config.seed)
    if config.features.directory is not None:
        folder = Path(config.features.directory).expanduser()
    all_succeed(lambda: folder.mkdir(parents=True, exist_ok=True))
    sharers, process = sharing(folder), here()
    files = open_files(
        config.features,
        folder,
        key=_key(config, reader.directory, taps, contents),
        length=config.sequence_length,
        taps=len(taps),
        width=reader.target.spec.d_model,
        writers=len(sharers),
    )
    fed = _fed(config, len(packs), steps, sharers)
    require_room(config.features, files, len(fed), say, speaks=process.index == sharers[0])
    together = sharding(fixed.mesh, "batch")
    compute = jax.jit(partial(look, taps=taps, dtype=config.features.dtype, config=fixed), out_shardings=together)
    features = Features(files, compute, together)
    if config.features.kind == "cached":
        missing = [row for row in fed[sharers.index(process.index) :: len(sharers)] if row not in files]
        size = config.batch_size // process.count
        batches = most(-(-len(missing) // size))
        share = numbered_batches(store, packs, missing, batch_size=size, batches=batches, padding=config.padding)
        features.fill(target, share, fed, say)
    return CachedStep(step=step, features=features)


def _fed(config: TrainConfig, rows: int, steps: int, sharers: tuple[int, ...]) -> Sequence[int]:
    """The rows that these processes are going to feed: all, unless each host has a disk of its own."""
    count = here().count
    if len(sharers) == count:
        return range(rows)
    hosts = [Host(index=index, count=count) for index in sharers]
    return fed_rows(rows, batch_size=config.batch_size, seed=config.seed, steps=steps, hosts=hosts)


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
