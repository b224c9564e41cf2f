"""Where a step gets the target's outputs from: computed inside it, or kept on disk between epochs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grain
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.feature_files import FeatureFiles
from dspark_jax.data.pipeline import Batch
from dspark_jax.targets.model import Target
from dspark_jax.training.stored import Stored, StoredDType

# Sentences about the progress of filling a cache.
_TOLD = 10


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """kind: "online", in every step; "cached", once for every row before training; "mixed", kept as they come.

    dtype: what they are rounded to on disk; max_gb: most that they may take there; directory: where, by default in the
    run's own. Rows are kept as they are packed: a cache serves the same data, packing, seed and target.
    """

    kind: Literal["online", "cached", "mixed"] = "online"
    dtype: StoredDType = "bfloat16"
    max_gb: float = 100.0
    directory: str | None = None

    def __post_init__(self):
        if not 0.0 < self.max_gb < math.inf:
            raise ValueError(f"features.max_gb must be above 0, not {self.max_gb}")


class Features:
    """Called with a batch of numbered rows: their stored outputs, read from disk where all of them are there, else
    computed and, while there is room, kept. Either way they are the same numbers."""

    def __init__(self, files: FeatureFiles, look: Callable[[Target, Batch], Stored], sharding: jax.sharding.Sharding):
        self._files, self._look, self._sharding = files, look, sharding

    def __call__(self, target: Target, batch: Batch) -> Stored:
        rows = np.asarray(batch.rows_B).tolist()
        if all(row in self._files for row in rows):
            values, *scale = jax.device_put(self._files.read(rows), self._sharding)
            return Stored(values_BTMD=values, scale_BTM=scale[0] if scale else None)
        seen = self._look(target, batch)
        if self._files.has_room():
            self._files.write(rows, jax.tree.leaves(jax.device_get(seen)))
        return seen

    def fill(self, target: Target, batches: grain.MapDataset, say: Callable[[str], None]) -> None:
        """Every row of `batches`, whose rows of padding have number -1; what is there already is not computed again."""
        for number, batch in enumerate(batches):
            rows = np.asarray(batch.rows_B)
            missing = [row for row in rows[rows >= 0].tolist() if row not in self._files]
            if missing:
                seen = jax.device_get(self._look(target, jax.device_put(batch, self._sharding)))
                picked = np.isin(rows, missing)
                self._files.write(rows[picked].tolist(), [leaf[picked] for leaf in jax.tree.leaves(seen)])
            if number % max(1, len(batches) // _TOLD) == 0:
                say(f"Caching the target's outputs: {number} of {len(batches)} batches are done.")
        self._files.flush()
        say(f"All rows are cached, in {self._files.bytes_written / 1e9:.3g} GB.")

    def flush(self) -> None:
        """What was kept is on disk after this."""
        self._files.flush()


def require_alone(config: FeatureConfig, processes: int) -> None:
    """ValueError when several processes would have to share a cache."""
    if config.kind != "online" and processes > 1:
        raise ValueError(
            f"features.kind {config.kind} is for a run in one process, and this one has {processes}: set it to online"
        )


def open_files(
    config: FeatureConfig, folder: Path, *, key: Mapping[str, Any], length: int, taps: int, width: int
) -> FeatureFiles:
    """Of rows of `length` tokens with `taps` layers' outputs and the hidden states, each `width` wide."""
    values = (length, taps + 1, width)
    layout: list[tuple[tuple[int, ...], np.dtype]] = [(values, np.dtype(jnp.dtype(config.dtype)))]
    if config.dtype == "int8":
        layout.append((values[:-1], np.dtype(np.float32)))
    return FeatureFiles(folder, key=key, layout=layout, max_bytes=config.max_gb * 1e9)


def require_room(config: FeatureConfig, files: FeatureFiles, rows: int, say: Callable[[str], None]) -> None:
    """Says what the cache will take. ValueError when max_gb or the disk is too small for it."""
    whole, free = files.size(rows), files.bytes_free
    wanted = whole if config.kind == "cached" else min(whole, config.max_gb * 1e9)
    left = max(0.0, wanted - files.bytes_written)
    say(
        f"The target's outputs of {rows:,} rows take {whole / 1e9:.3g} GB in {config.dtype}; up to {left / 1e9:.3g} GB "
        f"are still to be written to {files.folder}, where {free / 1e9:.3g} GB are free."
    )
    if wanted > config.max_gb * 1e9:
        raise ValueError(
            f"the cache would take {whole / 1e9:.3g} GB and features.max_gb is {config.max_gb:g}: raise it, or set "
            "features.dtype=int8, features.kind=mixed or features.kind=online"
        )
    if left > free:
        raise ValueError(
            f"the cache needs {left / 1e9:.3g} GB more and {files.folder} has {free / 1e9:.3g} GB free: give another "
            "features.directory, or set features.dtype=int8, a smaller features.max_gb with features.kind=mixed, or "
            "features.kind=online"
        )
