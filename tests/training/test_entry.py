"""train.py turns what is wrong into one sentence and exit code 2."""

import importlib.util
import sys
from pathlib import Path
from signal import SIGTERM

import pytest

from dspark_jax.training.loop import Finished, Stopped

ROOT = Path(__file__).parents[2]


@pytest.fixture
def entry():
    spec = importlib.util.spec_from_file_location("train_entry", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(entry, monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        code = entry.main()
        return code, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "tinny"], "there is no config tinny"),
        (["--config", "tiny", "--set", "drafter.blocksize=3"], "the nearest are drafter.block_size"),
        (["--config", "tiny", "--set", "steps=many"], "steps takes a whole number or none, not 'many'"),
        (["--config", "tiny", "--set", "batch_size=0"], "batch_size must be at least 1, not 0"),
        (["--config", "smollm2_135m", "--set", "target=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(call, tmp_path, arguments, sentence):
    code, said = call(*arguments, "--run-dir", str(tmp_path))
    assert code == 2
    assert said.startswith("train.py: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_overrides_run_dir_and_the_command_reach_the_run(entry, call, monkeypatch):
    seen = {}

    def train(config, run_dir, *, command, fresh):
        seen.update(config=config, run_dir=run_dir, command=command, fresh=fresh)
        return Finished(drafter=run_dir, evaluation={})

    monkeypatch.setattr(entry, "train", train)
    assert call("--config", "tiny", "--set", "steps=7", "--set", "optimizer.clip=0.5", "--fresh")[0] == 0
    assert (seen["config"].steps, seen["config"].optimizer.clip) == (7, 0.5)
    assert (seen["run_dir"], seen["fresh"]) == (Path("runs/tiny"), True)
    # To go on is not to start afresh.
    assert seen["command"] == "python train.py --config tiny --set steps=7 --set optimizer.clip=0.5"


def test_a_stopped_run_exits_as_the_signal_would(entry, call, monkeypatch):
    monkeypatch.setattr(entry, "train", lambda *args, **options: Stopped(step=3, signal=SIGTERM))
    assert call("--config", "tiny")[0] == 143
