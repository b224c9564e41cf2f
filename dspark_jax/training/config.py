"""What a training run is made of, and where runs are found by name."""

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from dspark_jax.data.pipeline import Packed, PadTo
from dspark_jax.training.checkpoint import CheckpointConfig
from dspark_jax.training.draft import DrafterShape
from dspark_jax.training.evaluate import EvaluationConfig
from dspark_jax.training.export import Layout
from dspark_jax.training.features import FeatureConfig
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.overrides import nearest
from dspark_jax.training.sources import ChatFiles, PackedShards, SelfSampled

Precision = Literal["bfloat16", "float32"]
Remat = Literal["none", "layer"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run: a drafter trained for a frozen target.

    target: a name, hub id or folder that interop.huggingface resolves.
    batch_size: sequences over all devices; sequence_length: tokens; anchors: at most so many blocks a sequence
    (of block drafters; chain drafters learn from every position).
    packing: a row holds as many conversations as fit in sequence_length, each for itself; otherwise one a row.
    steps: updates; None means as many as `epochs` passes over the data take.
    accumulate: parts in which a batch is computed, one after the other, for less memory; the step is the same.
    remat: "layer" keeps only each drafter layer's input for the backward pass, which computes the layer again (chain
    drafters, of one layer, always do).
    precision: dtype of the forward and backward pass and of the target; the drafter's masters are float32.
    fsdp, tensor: ways the parameters are split; the devices left over hold copies and share the batch.
    log_every: steps between two fetches of metrics, the only time the host waits for the device.
    export: layouts that the finished drafter is written in; DeepSpec's, which serving reads, always is.
    """

    target: str
    data: ChatFiles | PackedShards | SelfSampled
    drafter: DrafterShape
    batch_size: int = 512
    sequence_length: int = 4096
    anchors: int = 512
    packing: bool = True
    epochs: int = 10
    steps: int | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    accumulate: int = 1
    remat: Remat = "none"
    precision: Precision = "bfloat16"
    fsdp: int = 1
    tensor: int = 1
    log_every: int = 10
    export: tuple[Layout, ...] = ("deepspec",)
    seed: int = 0

    def __post_init__(self):
        for name in ("batch_size", "sequence_length", "anchors", "epochs", "log_every", "fsdp", "tensor", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1 or none, not {self.steps}")
        if isinstance(self.data, PackedShards) and not self.packing:
            raise ValueError("data.path holds packed rows, so packing must be true")
        # What the shuffling of the data takes.
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie between 0 and {2**32 - 1}, not {self.seed}")

    @property
    def padding(self) -> PadTo | Packed:
        """How conversations become rows."""
        return (Packed if self.packing else PadTo)(length=self.sequence_length)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that `precision` names."""
        return jnp.dtype(self.precision)


# May differ between a checkpoint and the run that goes on from it: they change what is written, not what is learnt.
FREE_ON_RESUME = frozenset(
    {"log_every", "export", "features.max_gb", "features.directory"}
    | {f"checkpoint.{name}" for name in CheckpointConfig.__dataclass_fields__}
    | {f"evaluation.{name}" for name in EvaluationConfig.__dataclass_fields__}
)


def find_config(name: str, folder: Path) -> TrainConfig:
    """The `config` of `folder`/name.py, or of the file itself when `name` is a path to one.

    ValueError names the nearest configs when there is none.
    """
    path = Path(name) if name.endswith(".py") else folder / f"{name}.py"
    if not path.is_file():
        known = [file.stem for file in folder.glob("*.py")]
        raise ValueError(f"there is no config {name} in {folder}; the nearest are {nearest(name, known)}")
    config = runpy.run_path(str(path)).get("config")
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path} does not define `config`, a dspark_jax.training.config.TrainConfig")
    return config


def require_batch(config: TrainConfig, ways: int) -> None:
    """ValueError unless every part of a batch divides over the devices that share it."""
    if config.batch_size % (ways * config.accumulate):
        parts = f" in {config.accumulate} parts" if config.accumulate > 1 else ""
        raise ValueError(
            f"batch_size {config.batch_size} does not divide over {ways} devices{parts}; take a multiple of "
            f"{ways * config.accumulate}"
        )
