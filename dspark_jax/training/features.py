"""Where a step gets the target's outputs from: computed inside it, or kept on disk between epochs."""

import math
from collections.abc import Callable, Collection, Mapping
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
from dspark_jax.training.hosts import all_succeed, anywhere, everyone, here, meet, on_devices, own_rows
from dspark_jax.training.stored import Stored, StoredDType

# Sentences about the progress of filling a cache.
_TOLD = 10


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """kind: "online", in every step; "cached", once for every row before training; "mixed", kept as they come.

    dtype: what they are rounded to on disk; max_gb: most that they may take there; directory: where, by default in the
    run's own. Rows are kept as they are packed: a cache serves the same data, packing, seed and target. Hosts may share
    the directory or have disks of their own, each of which then holds the rows that are fed there.
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
    computed and, while there is room, kept. Either way they are the same numbers.

    Every process reads and keeps its own rows of a batch; what is missing to one, all compute.
    """

    def __init__(self, files: FeatureFiles, look: Callable[[Target, Batch], Stored], sharding: jax.sharding.Sharding):
        self._files, self._look, self._sharding = files, look, sharding
        self._whole = False

    def __call__(self, target: Target, batch: Batch) -> Stored:
        assert batch.rows_B is not None
        rows = own_rows(batch.rows_B).tolist()
        kept = self._files.read(rows) if self._has(rows) else None
        if self._whole or not anywhere(kept is None):
            arrays: Any = on_devices(kept, self._sharding)
            values, *scale = arrays
            return Stored(values_BTMD=values, scale_BTM=scale[0] if scale else None)
        seen = self._look(target, batch)
        if self._files.has_room():
            self._files.write(rows, [own_rows(leaf) for leaf in jax.tree.leaves(seen)])
        return seen

    def fill(
        self, target: Target, batches: grain.MapDataset, rows: Collection[int], say: Callable[[str], None]
    ) -> None:
        """Keeps what `batches` hold, this process's share of them, whose rows of padding have number -1.

        `rows`: all that this process is going to ask for. Every process must have the same number of batches.
        """
        for number, batch in enumerate(batches):
            picked = batch.rows_B >= 0
            seen = self._look(target, on_devices(batch, self._sharding))
            self._files.write(batch.rows_B[picked].tolist(), [own_rows(leaf)[picked] for leaf in jax.tree.leaves(seen)])
            if number % max(1, len(batches) // _TOLD) == 0:
                say(f"Caching the target's outputs: {number} of {len(batches)} batches are done.")
        self._files.flush()
        meet("cached")
        self._whole = not anywhere(not self._has(rows))
        size = f"{self._files.bytes_written / 1e9:.3g} GB"
        say(
            f"All rows are cached, in {size}."
            if self._whole
            else f"Some rows are not in the cache, which takes {size}: they are computed as they come."
        )

    def flush(self) -> None:
        """What was kept is on disk after this."""
        self._files.flush()

    def _has(self, rows: Collection[int]) -> bool:
        if not all(row in self._files for row in rows):
            self._files.look_again()
        return all(row in self._files for row in rows)


def open_files(
    config: FeatureConfig, folder: Path, *, key: Mapping[str, Any], length: int, taps: int, width: int, writers: int = 1
) -> FeatureFiles:
    """Of rows of `length` tokens with `taps` layers' outputs and the hidden states, each `width` wide.

    `writers`: processes that share the folder. ValueError on every process when it cannot be used on one.
    """
    values = (length, taps + 1, width)
    layout: list[tuple[tuple[int, ...], np.dtype]] = [(values, np.dtype(jnp.dtype(config.dtype)))]
    if config.dtype == "int8":
        layout.append((values[:-1], np.dtype(np.float32)))
    process = here()
    return all_succeed(
        lambda: FeatureFiles(
            folder,
            key=key,
            layout=layout,
            max_bytes=config.max_gb * 1e9,
            writer=f"{process.index}-of-{process.count}",
            writers=writers,
        )
    )


def require_room(
    config: FeatureConfig, files: FeatureFiles, rows: int, say: Callable[[str], None], *, speaks: bool = True
) -> None:
    """Says what the cache will take in every folder. ValueError when max_gb or the disk is too small for it anywhere.

    speaks: whether this process is the one of those with its folder to tell of it.
    """
    whole, free = files.size(rows), files.bytes_free
    wanted = whole if config.kind == "cached" else min(whole, config.max_gb * 1e9)
    left = max(0.0, wanted - files.bytes_written)
    told = (
        f"The target's outputs of {rows:,} rows take {whole / 1e9:.3g} GB in {config.dtype}; up to {left / 1e9:.3g} GB "
        f"are still to be written to {files.folder}, where {free / 1e9:.3g} GB are free."
    )
    parts = {process: text for process, text in enumerate(everyone(told if speaks else "")) if text}
    for process, text in parts.items():
        say(text if len(parts) == 1 else f"Process {process}: {text}")

    def refuse() -> None:
        if wanted > config.max_gb * 1e9:
            raise ValueError(
                f"the cache would take {whole / 1e9:.3g} GB and features.max_gb is {config.max_gb:g}: raise it, or set "
                "features.dtype=int8, features.kind=mixed or features.kind=online"
            )
        if left > free:
            raise ValueError(
                f"the cache needs {left / 1e9:.3g} GB more and {files.folder} has {free / 1e9:.3g} GB free: give "
                "another features.directory, or set features.dtype=int8, a smaller features.max_gb with "
                "features.kind=mixed, or features.kind=online"
            )

    all_succeed(refuse)
