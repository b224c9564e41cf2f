"""A run that is stopped and goes on is, bit for bit, a run that was never stopped."""

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from dspark_jax.cli.main import main
from dspark_jax.core.signals import terminable
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.huggingface import load_target
from dspark_jax.training import loop
from dspark_jax.training.checkpoint import CheckpointConfig
from dspark_jax.training.config import find_config
from dspark_jax.training.draft import draft_config
from dspark_jax.training.export import require_exportable
from dspark_jax.training.features import FeatureConfig
from dspark_jax.training.known_targets import target_facts
from dspark_jax.training.loop import Finished, Stopped, train
from dspark_jax.training.report import read_report

ROOT = Path(__file__).parents[2]
COMMAND = "python train.py --config small"


class Signaller(io.StringIO):
    """Sends this process a signal as soon as a text is printed."""

    def __init__(self, text: str, number: signal.Signals):
        super().__init__()
        self._text, self._number = text, number

    def write(self, said: str) -> int:
        written = super().write(said)
        if self._text and self._text in self.getvalue():
            self._text = ""
            signal.raise_signal(self._number)
        return written


def run(config, folder: Path, stream: io.StringIO | None = None, **options):
    stream = io.StringIO() if stream is None else stream
    outcome = train(config, folder, command=COMMAND, console=Console(file=stream, width=200), **options)
    return outcome, stream.getvalue()


def contents(folder: Path, step: int) -> dict:
    """Everything the checkpoint of one step holds."""
    manager = ocp.CheckpointManager((folder / "checkpoints").absolute())
    items = ocp.args.Composite(
        state=ocp.args.StandardRestore(), data=ocp.args.JsonRestore(), config=ocp.args.JsonRestore()
    )
    restored = manager.restore(step, args=items)
    manager.close()
    state = {name: np.asarray(leaf) for name, leaf in restored.state.items() if name != ".key"}
    return {"state": state, "data": restored.data}


def assert_same_run(folder: Path, other: Path, step: int) -> None:
    ours, theirs = contents(folder, step), contents(other, step)
    assert ours["data"] == theirs["data"]
    assert ours["state"].keys() == theirs["state"].keys()
    assert any("mu" in name for name in ours["state"])
    for name, leaf in ours["state"].items():
        assert leaf.tobytes() == theirs["state"][name].tobytes(), name
    for kind in ("train", "evaluation"):
        lines = [
            [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_report(where, kind)]
            for where in (folder, other)
        ]
        assert lines[0] == lines[1]


@pytest.fixture(scope="module")
def whole(small_config, tmp_path_factory):
    """An uninterrupted run, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    outcome, said = run(small_config, folder)
    return folder, outcome, said


def test_a_run_ends_with_a_drafter_a_record_and_a_log(whole, small_config):
    folder, outcome, said = whole
    assert isinstance(outcome, Finished)
    record = json.loads((folder / "drafter" / "metrics.json").read_text())
    assert (record["command"], record["steps"]) == (COMMAND, 6)
    assert record["config"]["drafter.block_size"] == 3
    assert {"loss", "accept_K", "accepted_length_t0", "accepted_length_t1"} <= record["evaluation"].keys()
    assert [line["step"] for line in read_report(folder, "train")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read_report(folder, "evaluation")] == [0, 3, 6]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "step 3: accepted length" in said
    assert f"The drafter is in {folder}/drafter" in said


def test_the_exported_drafter_is_the_trained_one(whole, small_config, small_target):
    folder, outcome, _ = whole
    exported = assert_exported(folder, outcome.evaluation["step"], small_target)
    assert exported.config.tapped_layers == (-1, 0)


def assert_exported(folder: Path, step: int, target: Path):
    exported = load_drafter(folder / "drafter", target=load_target(target))
    state = contents(folder, step)["state"]
    for name in ("fc", "hidden_norm.scale", "layers[0].attention.q", "markov_head.w2", "confidence_head.b"):
        trained = state[f".drafter.{name}.value"]
        ours = exported
        for part in name.replace("[0]", ".0").split("."):
            ours = ours[int(part)] if part.isdigit() else getattr(ours, part)
        assert np.array_equal(np.asarray(ours[...]), trained.astype("bfloat16").astype(np.float32)), name
    return exported


@pytest.mark.parametrize(("export", "step"), [("best", 3), pytest.param("last", 6, marks=pytest.mark.slow)])
def test_the_best_drafter_is_exported_unless_the_last_is_asked_for(
    small_config, small_target, tmp_path, monkeypatch, export, step
):
    verdicts = iter((9.0, 2.0, 1.0))
    monkeypatch.setattr(loop, "mean_accepted_length", lambda values: next(verdicts))
    checkpoint = CheckpointConfig(every=1, keep=1, export=export)
    config = replace(small_config, checkpoint=checkpoint, export=("deepspec", "speculators"))
    outcome, said = run(config, tmp_path / "run")
    assert outcome.evaluation["step"] == step
    assert f"that of step {step}" in said
    assert json.loads((tmp_path / "run" / "drafter" / "metrics.json").read_text())["exported_step"] == step
    assert_exported(tmp_path / "run", step, small_target)
    flags = ["--in", str(tmp_path / "run" / "drafter"), "--out", str(tmp_path / "converted"), "--to", "speculators"]
    assert main(["convert", *flags, "--target", str(small_target)]) == 0
    for name in ("config.json", "model.safetensors"):
        ours, theirs = (folder / name for folder in (tmp_path / "run" / "drafter-speculators", tmp_path / "converted"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_a_layout_that_cannot_hold_the_drafter_is_refused(small_target):
    config = find_config("gemma4_12b", ROOT / "configs")
    drafter = draft_config(config.drafter, target_facts(config.target).spec)
    require_exportable(("deepspec",), drafter, config.target, small_target)
    with pytest.raises(ValueError, match=r"export: this drafter cannot be written for speculators: .*Qwen3"):
        require_exportable(("deepspec", "speculators"), drafter, config.target, small_target)


def test_a_finished_run_says_so_and_is_left_alone(whole, small_config):
    folder, outcome, _ = whole
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again, said = run(small_config, folder)
    assert again == outcome
    assert "is finished after 6 steps: accepted length" in said
    assert "--fresh" in said
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("number", "when", "step"),
    # Step 3 is no multiple of checkpoint.every: what is resumed is what the signal saved.
    [
        (signal.SIGTERM, "step 3/6", 3),
        pytest.param(signal.SIGINT, "step 0: accepted length", 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_same_call_goes_on_bit_for_bit(whole, small_config, tmp_path, number, when, step):
    stopped, said = run(small_config, tmp_path, Signaller(when, number))
    assert stopped == Stopped(step=step, signal=number)
    assert f"Stopped at step {step} of 6, all of it saved; to go on: {COMMAND}" in said
    resumed, said = run(small_config, tmp_path)
    assert isinstance(resumed, Finished)
    assert f"Resuming {tmp_path} at step {step} of 6." in said
    assert_same_run(tmp_path, whole[0], 6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_all_is_made_ready_is_an_end_that_says_how_to_go_on(
    small_config, tmp_path, number, heard_sigint
):
    with terminable():
        outcome, said = run(small_config, tmp_path, Signaller("Sampling", number))
    assert outcome == Stopped(step=0, signal=number)
    assert f"Stopped at once; step 0 is what was saved last. To go on: {COMMAND}" in said


@pytest.mark.slow
def test_a_run_that_caches_as_it_goes_goes_on_bit_for_bit(small_config, tmp_path):
    config = replace(small_config, features=FeatureConfig(kind="mixed", dtype="int8"), steps=20)
    assert isinstance(run(config, tmp_path / "whole")[0], Finished)
    stopped, _ = run(config, tmp_path / "stopped", Signaller("step 13/20", signal.SIGTERM))
    assert stopped == Stopped(step=13, signal=signal.SIGTERM)
    # Of what was kept, a part is lost.
    for file in (tmp_path / "stopped" / "features").glob("*.arrayrecord"):
        file.unlink()
    run(config, tmp_path / "stopped")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole", 20)


def test_kill_9_goes_on_from_the_last_checkpoint_bit_for_bit(whole, small_config, tmp_path, compilation_cache):
    config = tmp_path / "small.py"
    config.write_text(f"import pickle\n\nconfig = pickle.loads({pickle.dumps(small_config)!r})\n")
    folder = tmp_path / "run"
    arguments = [sys.executable, "train.py", "--config", str(config), "--run-dir", str(folder)]
    environment = os.environ | compilation_cache | {"JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in first.stdout:
        if line.startswith("step 5/6"):
            break
    first.kill()
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert not (folder / "drafter").exists()

    second = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    assert "Resuming" in second.stdout
    assert_same_run(folder, whole[0], 6)


def test_another_config_is_refused_before_anything_is_loaded(whole, small_config):
    folder, _, _ = whole
    other = replace(small_config, drafter=replace(small_config.drafter, block_size=4), target="nowhere")
    with pytest.raises(ValueError, match=r"drafter\.block_size was 3 when this run started and is 4 now"):
        run(other, folder)
    free = replace(small_config, log_every=5, checkpoint=CheckpointConfig(every=1))
    assert isinstance(run(free, folder)[0], Finished)


def test_data_that_changed_under_a_stopped_run_is_refused(whole, small_config, small_target, tmp_path):
    target, folder = tmp_path / "target", tmp_path / "run"
    shutil.copytree(small_target, target)
    config = replace(small_config, target=str(target))
    run(config, folder, Signaller("step 0: accepted length", signal.SIGINT))
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, target / "model.safetensors")
    with pytest.raises(ValueError, match=r"data\.contents was .* when this run started"):
        run(config, folder)


def test_fresh_deletes_what_the_run_wrote_and_nothing_else(whole, small_config, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / "notes.txt").write_text("mine")
    outcome, said = run(small_config, folder, fresh=True)
    assert isinstance(outcome, Finished)
    assert "Training" in said
    assert (folder / "notes.txt").read_text() == "mine"
    assert_same_run(folder, whole[0], 6)
