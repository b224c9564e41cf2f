"""Step curves and calibrations that were changed by any hand are read right or refused in one sentence."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.calibration_file import Calibration, Measured, read_calibration, write_calibration
from dspark_jax.decoding.fingerprint import Fingerprint
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.profile import Shape, StepCurve
from dspark_jax.decoding.profile_file import Profile, load_profile, save_profile

MINE = Fingerprint(
    target="llama 0a",
    drafter="DSpark 0b",
    dtype="float32",
    block=2,
    rule="token",
    mesh="1",
    device="a TPU",
    devices=1,
    jax="0.10.2",
)
SHAPES = [Shape(rows, 256, rows * width, width - 1) for rows in (1, 2) for width in (1, 3)]
PROFILE = Profile(fingerprint=MINE, curve=StepCurve(dict.fromkeys(SHAPES, 0.5)), method="by hand")
CALIBRATION = Calibration(
    fingerprint="sha256:ab",
    use="sts",
    measured=Measured(temperature=0.7, prompts=4, rounds=9, max_new_tokens=8, seed=3),
    temperature_K=np.full(2, 1.5),
    combined=Fitted(weights_KF=np.ones((2, 3)), bias_K=np.ones(2)),
)
DEEP = json.loads("[" * 400 + "]" * 400)
JUNK = (None, True, -1, 0, 3, 0.5, 2**40, 10**400, 1e-320, 1e300, float("nan"), float("inf"), "", "7", [], {}, DEEP)


def read_curve(path):
    curve = load_profile(path, MINE, predicted=True).curve
    times = [curve.seconds(rows, span, rows, drafts) for rows in (1, 4) for span in (16, 5000) for drafts in (0, 2)]
    assert all(0 < seconds < np.inf for seconds in times)


def read_chances(path):
    calibration = read_calibration(path, fingerprint="sha256:ab", block_size=2)
    for name, features in ((None, 3), ("sts", 1), ("combined", 3)):
        fitted = calibration.estimator(name)
        chances_BK = fitted.confidences(np.ones((1, 2, min(features, fitted.weights_KF.shape[1]))))
        assert ((chances_BK >= 0) & (chances_BK <= 1)).all()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(a whole file, what reads it) of either kind."""
    folder = tmp_path_factory.mktemp("measured")
    save_profile(folder / "curve.json", PROFILE)
    return (folder / "curve.json", read_curve), (write_calibration(folder, CALIBRATION, {}), read_chances)


def places(value, path=()):
    """The path of every value within."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def check(read, whole, text):
    changed = whole.with_suffix(".changed")
    changed.write_text(text)
    try:
        read(changed)
    except ValueError as refusal:
        said = str(refusal)
        assert said.startswith(str(changed))
        assert "run `dspark" in said
        assert "\n" not in said
        assert len(said) < 500 + len(str(changed))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_whatever_is_wrong_with_a_file_is_one_sentence(files, data):
    whole, read = data.draw(st.sampled_from(files))
    value = json.loads(whole.read_text())
    *outer, last = data.draw(st.sampled_from(places(value)[1:]))
    holder = value
    for key in outer:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[last] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    else:
        del holder[last]
    check(read, whole, json.dumps(value))


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0, 1))
def test_a_file_that_ends_early_is_one_sentence(files, share):
    for whole, read in files:
        text = whole.read_text()
        check(read, whole, text[: int(share * len(text))])


def test_files_of_anything_else_are_one_sentence(files):
    for whole, read in files:
        for junk in (*JUNK, "[" * 100_000):
            text = junk if isinstance(junk, str) and junk.startswith("[") else json.dumps(junk)
            check(read, whole, text)
            with pytest.raises(ValueError, match=str(whole.with_suffix(".changed"))):
                read(whole.with_suffix(".changed"))
