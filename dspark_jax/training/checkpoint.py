"""Atomic, asynchronous checkpoints of everything a run needs to go on bit for bit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

State = TypeVar("State")
_METRIC = "accepted_length"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """every: steps between checkpoints (one is also written with each evaluation, at the end and on a signal).

    keep: how many of the newest stay; the one that was judged best by its accepted length stays too.
    export: whether the drafter that a run ends with is that of its best checkpoint or of its last.
    """

    every: int = 500
    keep: int = 2
    export: Literal["best", "last"] = "best"

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"checkpoint.{name} must be at least 1, not {getattr(self, name)}")


class Restored(NamedTuple):
    """What a checkpoint holds: the train state, the data iterator's state and the step they belong to."""

    step: int
    state: Any
    data: Any


class Checkpoints:
    """The checkpoints under one folder; an interrupted save leaves the last complete one in place."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(
            best_fn=_verdict,
            preservation_policy=AnyPreservationPolicy([LatestN(config.keep), BestN(get_metric_fn=_verdict, n=1)]),
            enable_async_checkpointing=True,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the last complete checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the checkpoint that was judged best; the newest of those alike, or of all where none was judged."""
        return self._manager.best_step()

    def save(
        self, step: int, state: Any, data: Any, config: Mapping[str, Any], accepted_length: float | None = None
    ) -> None:
        """Start writing: the arrays are copied off the device before this returns, the files follow later.

        accepted_length: what an evaluation found of this very state, if there was one.
        """
        if step == self.latest:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_by_path(state)),
                data=ocp.args.JsonSave(data),
                config=ocp.args.JsonSave(dict(config)),
            ),
            metrics={} if accepted_length is None else {_METRIC: accepted_length},
        )

    def require(self, config: Mapping[str, Any], free: frozenset[str]) -> None:
        """ValueError, naming the first field that differs, unless the last checkpoint was made with this config.

        config is flattened; fields in `free` may differ. Without a checkpoint there is nothing to fit.
        """
        if self.latest is None:
            return
        only = ocp.args.Composite(config=ocp.args.JsonRestore())
        saved = self._manager.restore(self.latest, args=only)["config"]
        for field in sorted((saved.keys() | config.keys()) - free):
            if saved.get(field) != config.get(field):
                raise ValueError(
                    f"{field} was {saved.get(field)} when this run started and is {config.get(field)} now: "
                    "put it back, name another --run-dir, or start again with --fresh"
                )

    def restore(self, like: State, step: int | None = None) -> Restored:
        """The checkpoint of that step, by default the last complete one, laid out and sharded like `like`.

        FileNotFoundError when there is none.
        """
        step, leaves = self.latest if step is None else step, _by_path(like)
        if step is None:
            raise FileNotFoundError(f"{self._manager.directory} holds no complete checkpoint")
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(jax.tree.map(_abstract, leaves)), data=ocp.args.JsonRestore()
            ),
        )
        ordered = [restored["state"][path] for path in leaves]
        return Restored(step, jax.tree.unflatten(jax.tree.structure(like), ordered), restored["data"])

    def wait(self) -> None:
        """Until every started save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _verdict(metrics: Mapping[str, float]) -> float:
    return metrics.get(_METRIC, -math.inf)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    # Leaves by name: a checkpoint then says what it holds, and other tools can read it without this package.
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
