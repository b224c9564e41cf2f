"""Everything a run needs before its first step, made from its config."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dspark_jax.core.mesh import make_mesh, sharding
from dspark_jax.data.pipeline import Rows, evaluation_batches, iterate, training_batches
from dspark_jax.interop.huggingface import load_target, read_spec, resolve, stop_ids
from dspark_jax.targets.model import Target
from dspark_jax.training.cached_step import Step, cached_step
from dspark_jax.training.config import TrainConfig, require_batch
from dspark_jax.training.draft import DrafterConfig, draft_config, new_drafter
from dspark_jax.training.evaluate import Evaluator, held_out_prompts
from dspark_jax.training.export import require_exportable
from dspark_jax.training.feed import Batches
from dspark_jax.training.hosts import all_succeed, alone, here, in_turn, own_mesh, require_alike
from dspark_jax.training.known_targets import shipped_target
from dspark_jax.training.optimizer import build_optimizer
from dspark_jax.training.program import jitted_step, shardings_of, step_config
from dspark_jax.training.sources import Reader, fingerprint_of, open_store, split_rows
from dspark_jax.training.step import StepConfig, TrainState, init_state

Tree = TypeVar("Tree")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that is ready to start: its state at step 0, its jitted step, its data and a digest of that data."""

    reader: Reader
    target: Target
    state: TrainState
    step: Step
    steps: int
    contents: str
    batches: Batches
    batch_sharding: NamedSharding
    evaluate: Evaluator


def prepare(config: TrainConfig, run_dir: Path, say: Callable[[str], None]) -> Setup:
    """Load, tokenise, initialise and place on the mesh.

    ValueError or OSError, one sentence each, for a target, data or sizes that do not fit.
    """
    mesh = _mesh(config)
    directory = all_succeed(lambda: find_target(config.target))
    spec = read_spec(directory)
    _refuse_long(config, spec.max_len)
    drafter_config = draft_config(config.drafter, spec)
    require_exportable(config.export, drafter_config, config.target, directory)
    target = load_target(directory, config.dtype, mesh=mesh, say=say)
    # To decode with, each process has a target of its own: which rows are done when is its own business.
    own = target if alone() else load_target(directory, config.dtype, mesh=own_mesh())
    reader = Reader(target=own, directory=directory, stop_ids=stop_ids(directory))

    sizes = {"length": config.sequence_length, "seed": config.seed}
    store = in_turn(lambda: open_store(config.data, reader, run_dir / "tokens", say=say, **sizes))
    contents = fingerprint_of(config.data, reader, **sizes)
    require_alike("the data", int(contents[:8], 16))
    rows, held_out = split_rows(config.data, store)
    batches = training_batches(
        store,
        rows,
        batch_size=config.batch_size,
        padding=config.padding,
        seed=config.seed,
        epochs=None if config.steps else config.epochs,
        host=here(),
        numbered=config.features.kind != "online",
    )
    steps = config.steps or len(batches)

    optimizer = build_optimizer(config.optimizer, steps)
    state = place(mesh, _initial(config, drafter_config, optimizer))
    fixed = step_config(config, mesh)
    step: Step = jitted_step(optimizer, fixed, state)
    if config.features.kind != "online":
        step = cached_step(
            step,
            config,
            run_dir / "features",
            fixed=fixed,
            reader=reader,
            target=target,
            taps=state.drafter.tapped_layers,
            store=store,
            rows=rows,
            steps=steps,
            contents=contents,
            say=say,
        )
    return Setup(
        reader=reader,
        target=target,
        state=state,
        step=step,
        steps=steps,
        contents=contents,
        batches=iterate(batches),
        batch_sharding=sharding(mesh, "batch"),
        evaluate=_evaluator(config, reader, target, mesh, store, held_out, fixed),
    )


def find_target(name: str) -> Path:
    """The directory of a target: one that ships with the package, or whatever interop.huggingface resolves."""
    return shipped_target(name) or resolve(name)


def place(mesh: Mesh, tree: Tree) -> Tree:
    """Parameters split as their logical axes say, everything else copied to every device."""
    shardings = shardings_of(mesh, tree)
    if alone():
        return jax.device_put(tree, shardings)
    # Of what every process has, each device takes its part; a transfer could not reach the others' devices.
    return jax.jit(lambda tree: tree, out_shardings=shardings)(tree)


def _mesh(config: TrainConfig) -> Mesh:
    mesh = make_mesh(fsdp=config.fsdp, tensor=config.tensor)
    ways = mesh.size // config.tensor
    require_batch(config, ways)
    return mesh


def _refuse_long(config: TrainConfig, longest: int) -> None:
    if config.sequence_length + config.evaluation.new_tokens > longest:
        raise ValueError(
            f"sequence_length {config.sequence_length} and evaluation.new_tokens {config.evaluation.new_tokens} "
            f"together pass the target's {longest} positions"
        )


def _initial(config: TrainConfig, drafter_config: DrafterConfig, optimizer) -> TrainState:
    # rbg: a threefry program for each shape would take longer to compile than a toy run to train.
    rngs = nnx.Rngs(params=jax.random.key(config.seed, impl="rbg"))
    drafter = new_drafter(drafter_config, rngs=rngs, dtype=jnp.float32)
    return init_state(drafter, optimizer, jax.random.key(config.seed))


def _evaluator(
    config: TrainConfig,
    reader: Reader,
    target: Target,
    mesh: Mesh,
    store: Rows,
    held_out: np.ndarray,
    fixed: StepConfig,
) -> Evaluator:
    batches: grain.MapDataset = evaluation_batches(
        store, held_out, batch_size=config.batch_size, padding=config.padding, host=here()
    )
    evaluation = config.evaluation
    return Evaluator(
        target,
        reader.target,
        batches[: evaluation.batches],
        held_out_prompts(store, held_out, evaluation.prompts, config.sequence_length),
        config=evaluation,
        step=fixed,
        mesh=mesh,
        stop_ids=reader.stop_ids,
        max_len=config.sequence_length + evaluation.new_tokens,
    )
