"""A training run, from its first step to the exported drafter or to the signal that stops it."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from rich.console import Console

from dspark_jax.core.signals import Terminated, unmasked
from dspark_jax.interop.tensor_files import read_json
from dspark_jax.training.cached_step import CachedStep
from dspark_jax.training.checkpoint import Checkpoints
from dspark_jax.training.config import FREE_ON_RESUME, TrainConfig
from dspark_jax.training.curves import draw_curves
from dspark_jax.training.evaluate import mean_accepted_length
from dspark_jax.training.export import RECORD, export_drafter
from dspark_jax.training.feed import Feed
from dspark_jax.training.hosts import agreed, alone, anywhere, first, gathered, meet
from dspark_jax.training.interrupt import Interrupt
from dspark_jax.training.overrides import flatten
from dspark_jax.training.progress import Display
from dspark_jax.training.report import NoReport, Report, Window, read_report
from dspark_jax.training.setup import prepare

_CONTENTS = "data.contents"
_OURS = (
    *("checkpoints", "tokens", "features", "tensorboard", "drafter", "drafter-speculators"),
    *("metrics.jsonl", "curves.png"),
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The drafter's folder and the evaluation of that drafter."""

    drafter: Path
    evaluation: dict


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A signal ended the run, of which `step` was saved last; the same call goes on from there."""

    step: int
    signal: Signals


def train(
    config: TrainConfig, run_dir: Path, *, command: str, fresh: bool = False, console: Console | None = None
) -> Finished | Stopped:
    """Start the run in `run_dir`, or go on with it bit for bit as if it had never stopped.

    command: what the user typed, for the record. fresh: delete this run's files first. A finished run is only
    reported. ValueError, before anything is loaded, when the config is not the one the run was started with.
    """
    console = Console(quiet=not first()) if console is None else console
    if fresh and first():
        _delete(run_dir)
    meet("start")
    checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint)
    try:
        checkpoints.require(flatten(config), FREE_ON_RESUME | {_CONTENTS})
        if (run_dir / "drafter" / RECORD).exists():
            return _report_finished(run_dir, console)
        with unmasked():
            return _train(config, run_dir, checkpoints, command, console)
    except (KeyboardInterrupt, Terminated) as ended:
        # While all is made ready, or by a second signal.
        step = checkpoints.latest or 0
        _say(console, f"Stopped at once; step {step} is what was saved last. To go on: {command}")
        return Stopped(step=step, signal=Signals.SIGTERM if isinstance(ended, Terminated) else Signals.SIGINT)
    finally:
        checkpoints.close()


def _train(
    config: TrainConfig, run_dir: Path, checkpoints: Checkpoints, command: str, console: Console
) -> Finished | Stopped:
    setup = prepare(config, run_dir, lambda text: _say(console, text))
    facts = flatten(config) | {_CONTENTS: setup.contents}
    checkpoints.require(facts, FREE_ON_RESUME)
    state, step, resuming = setup.state, 0, checkpoints.latest is not None
    if resuming:
        step, state, position = checkpoints.restore(state)
        setup.batches.set_state(position)
    feed, window = Feed(setup.batches, setup.batch_sharding), Window()
    report = Report(run_dir, step) if first() else NoReport()
    display = Display(step, setup.steps, console)
    interrupt = Interrupt(lambda: display.say("Stopping when this step is done and saved; once more stops at once."))

    def evaluate() -> float:
        values = setup.evaluate(state.drafter)
        report.write(step, "evaluation", values)
        if first() and step:
            draw_curves(run_dir)
        display.say(f"step {step}: {_accepted_lengths(values)}, held-out loss {values['loss']:.3f}")
        return agreed(mean_accepted_length(values))

    with display, interrupt:
        if resuming:
            display.say(f"Resuming {run_dir} at step {step} of {setup.steps}.")
        else:
            display.say(f"Training {run_dir} for {setup.steps} steps of {config.batch_size} sequences.")
            evaluate()
        stopping = anywhere(interrupt.signal is not None)
        while step < setup.steps and not stopping:
            state, metrics = setup.step(state, setup.target, next(feed))
            step += 1
            window.add(metrics)
            display.advance(step)
            last = step == setup.steps
            if step % config.log_every == 0 or last:
                values = window.fetch()
                report.write(step, "train", values)
                display.show(step, values)
            with window.paused():
                judged = evaluate() if step % config.evaluation.every == 0 or last else None
                if judged is not None or step % config.checkpoint.every == 0:
                    checkpoints.save(step, state, feed.state, facts, judged)
            # Several processes have to agree, and only wait for each other where they wait for the device anyhow.
            if step % config.log_every == 0 or alone():
                stopping = anywhere(interrupt.signal is not None)
        report.close()
        if isinstance(setup.step, CachedStep):
            setup.step.features.flush()
        if stopping and step < setup.steps:
            checkpoints.save(step, state, feed.state, facts)
            checkpoints.wait()
            display.say(f"Stopped at step {step} of {setup.steps}, all of it saved; to go on: {command}")
            return Stopped(step=step, signal=interrupt.signal or Signals.SIGTERM)

    checkpoints.wait()
    exported = step if config.checkpoint.export == "last" else checkpoints.best
    if exported != step:
        state = checkpoints.restore(state, exported).state
    drafter = gathered(state.drafter)
    if first():
        record = {
            "command": command,
            "steps": step,
            "exported_step": exported,
            "evaluation": next(line for line in read_report(run_dir, "evaluation") if line["step"] == exported),
            "config": flatten(config),
        }
        directory = setup.reader.directory
        export_drafter(run_dir, drafter, config.export, target=config.target, directory=directory, record=record)
    meet("exported")
    return _report_finished(run_dir, console)


def _report_finished(run_dir: Path, console: Console) -> Finished:
    folder = run_dir / "drafter"
    record = read_json(folder / RECORD)
    _say(
        console,
        f"{run_dir} is finished after {record['steps']} steps: {_accepted_lengths(record['evaluation'])}. "
        f"The drafter is in {folder}, that of step {record['evaluation']['step']}; --fresh trains again from the "
        "start.",
    )
    return Finished(drafter=folder, evaluation=record["evaluation"])


def _accepted_lengths(values: dict) -> str:
    prefix = "accepted_length_t"
    lengths = [f"{value:.2f} at T={name.removeprefix(prefix)}" for name, value in values.items() if prefix in name]
    return f"accepted length {', '.join(lengths)}"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _delete(run_dir: Path) -> None:
    """Only what a run writes: a mistyped folder loses nothing else."""
    for name in _OURS:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
