"""Serving with the calibration that lies beside a drafter."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dspark_jax
from dspark_jax.decoding.calibration_file import Calibration, Measured, write_calibration
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.scheduler import Threshold
from dspark_jax.engine.assembly import load_model
from dspark_jax.engine.calibrated import load_estimator
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.launch import main, parse_arguments
from dspark_jax.engine.refitting import RefittingSlots
from dspark_jax.engine.scheduling import Scheduling
from dspark_jax.interop.fingerprint import drafter_fingerprint

BLOCK = 5


@pytest.fixture
def draft(tiny_drafter_dir, tmp_path):
    directory = tmp_path / "mine"
    shutil.copytree(tiny_drafter_dir, directory)
    calibration = Calibration(
        fingerprint=drafter_fingerprint(directory),
        use="sts",
        measured=Measured(temperature=1.0, prompts=20, rounds=3000, max_new_tokens=64, seed=0),
        temperature_K=np.full(BLOCK, 2.0),
        combined=Fitted(weights_KF=np.ones((BLOCK, 3)), bias_K=np.zeros(BLOCK)),
    )
    write_calibration(directory, calibration, {})
    return directory


@pytest.fixture
def loaded(tiny_target_dir, draft):
    def load(*flags):
        said = []
        args = parse_arguments(["--target", str(tiny_target_dir), "--draft", str(draft), "--max-len", "64", *flags])
        return load_model(args, said.append), said

    return load


def test_what_the_calibration_chose_is_used_and_said_unless_told_otherwise(loaded):
    model, said = loaded()
    np.testing.assert_array_equal(model.estimator.weights_KF, np.full((BLOCK, 1), 0.5))
    assert "Confidences are calibrated (sts, temperature 1, 3,000 rounds of 20 prompts)." in said
    model, said = loaded("--estimator", "combined")
    assert model.estimator.weights_KF.shape == (BLOCK, 3)
    assert any("(combined," in line for line in said)
    model, said = loaded("--estimator", "raw")
    assert model.estimator is None
    assert not any("calibrated" in line for line in said)


def test_slots_are_made_with_it_and_learn_where_asked(loaded, monkeypatch):
    made = []

    def engine(make_slots, **options):
        made.append(make_slots())
        return Engine(make_slots, **options)

    monkeypatch.setattr("dspark_jax.engine.assembly.Engine", engine)
    model, _ = loaded()
    model.engine(max_queue=1)
    model.engine(max_queue=1, refit_every=10)
    model.engine(max_queue=1, refit_every=10, drafting=False)
    replace(model, scheduling=Scheduling(policy=Threshold(confidence=0.5))).engine(max_queue=1)
    fixed, learning, plain, follows = made
    np.testing.assert_array_equal(follows.estimator.weights_KF, model.estimator.weights_KF)
    # Nothing looks at confidences here, so they are the cheapest.
    np.testing.assert_array_equal(fixed.estimator.weights_KF, np.ones((BLOCK, 1)))
    assert isinstance(learning, RefittingSlots)
    assert not isinstance(plain, RefittingSlots)


def test_a_calibration_that_does_not_belong_is_refused_at_the_start(draft, tiny_target_dir, capsys):
    config = (draft / "config.json").read_text()
    (draft / "config.json").write_text(config + " ")
    assert main(["--port", "0", "--target", str(tiny_target_dir), "--draft", str(draft)]) == 2
    said = capsys.readouterr()
    error = said.err
    assert "Loading" not in said.out, "it is known before any weights are read"
    assert error.count("\n") == 1
    assert "calibration.json: drafter is" in error
    assert "run `dspark calibrate` again with this one" in error


def test_the_shipped_calibration_belongs_to_the_shipped_drafter():
    directory = Path(dspark_jax.__file__).parent / "pretrained" / "smollm2_135m"
    fitted = load_estimator(None, directory, 7, lambda line: None)
    assert fitted.weights_KF.shape == (7, 3)
