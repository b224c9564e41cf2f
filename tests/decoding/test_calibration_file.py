"""calibration.json comes back as it was written; what does not belong or is damaged is refused by name."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.calibration_file import NAME, Calibration, Measured, read_calibration, write_calibration
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.reliability import Report, quality

RNG = np.random.default_rng(0)
CALIBRATION = Calibration(
    fingerprint="sha256:ab",
    use="combined",
    measured=Measured(temperature=0.7, prompts=4, rounds=9, max_new_tokens=8, seed=3),
    temperature_K=RNG.random(2) + 0.5,
    combined=Fitted(weights_KF=RNG.normal(size=(2, 3)), bias_K=RNG.normal(size=2)),
)
# One position was reached, the other never was.
SEEN = quality(np.array([0.2, 0.8]), np.array([False, True]))
NEVER = quality(np.zeros(0), np.zeros(0, bool))
REPORTS = {"raw": Report(conditional=(SEEN, NEVER), cumulative=(SEEN, NEVER))}


@pytest.fixture
def file(tmp_path):
    return write_calibration(tmp_path, CALIBRATION, REPORTS)


def read(path):
    return read_calibration(path, fingerprint="sha256:ab", block_size=2)


def test_a_round_trip_changes_nothing(file):
    assert file.name == NAME
    back = read(file)
    assert (back.use, back.measured, back.fingerprint) == ("combined", CALIBRATION.measured, "sha256:ab")
    np.testing.assert_array_equal(back.temperature_K, CALIBRATION.temperature_K)
    np.testing.assert_array_equal(back.combined.weights_KF, CALIBRATION.combined.weights_KF)
    np.testing.assert_array_equal(back.combined.bias_K, CALIBRATION.combined.bias_K)
    held_out = json.loads(file.read_text())["held_out"]["raw"]["conditional"]
    assert (held_out[0]["outcomes"], held_out[0]["kept"], held_out[0]["auc"]) == (2, 1, 1.0)
    assert (held_out[1]["outcomes"], held_out[1]["ece"]) == (0, None)


def test_the_estimators_are_chosen_by_name(file):
    back = read(file)
    evidence_BKF = RNG.normal(size=(5, 2, 3))
    np.testing.assert_array_equal(back.estimator().weights_KF, CALIBRATION.combined.weights_KF)
    np.testing.assert_array_equal(back.estimator("raw").logits(evidence_BKF), evidence_BKF[..., 0])
    np.testing.assert_allclose(
        back.estimator("sts").logits(evidence_BKF), evidence_BKF[..., 0] / CALIBRATION.temperature_K
    )


def test_the_device_computes_what_was_fitted_here(file):
    evidence_BKF = RNG.normal(size=(5, 2, 3)).astype(np.float32)
    for name in ("raw", "sts", "combined"):
        fitted = read(file).estimator(name)
        features = fitted.weights_KF.shape[1]
        on_device = fitted.on_device()(jnp.asarray(evidence_BKF[..., :features]))
        np.testing.assert_allclose(on_device, fitted.confidences(evidence_BKF), rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], 2, "version is 2 and 1 here"),
        (["drafter"], "sha256:cd", 'drafter is "sha256:cd" and "sha256:ab" here: it was measured with another drafter'),
        (["block_size"], 3, "block_size is 3 and 2 here"),
        (["version"], True, "version is true and 1 here"),
        (["estimator"], "best", 'estimator is "best", not one of sts, combined, raw'),
        (["sts_temperatures"], [1.0, float("nan")], "sts_temperatures is .*NaN.* not 2 finite numbers"),
        (["sts_temperatures"], [1.0, 0.0], "not temperatures above 0"),
        (["sts_temperatures"], [1.0], "sts_temperatures is .* not 2 finite numbers"),
        (["combined", "weights"], [[1, 2, 3], [1, 2]], "combined.weights is .* not 2 by 3 finite numbers"),
        (["combined", "bias"], "none", 'combined.bias is "none", not 2 finite numbers'),
        (["measured", "temperature"], None, "measured.temperature is null, not a finite number"),
        (["measured", "rounds"], 1.5, "measured.rounds is 1.5, not a whole number"),
        (["measured", "rounds"], -1, "measured.rounds is -1, not a whole number from 0 up"),
        (["combined", "bias"], ["1", "2"], "combined.bias is .*, not 2 finite numbers"),
        (["combined", "bias"], [1, 1e40], "combined.bias is .*, not 2 finite numbers"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_field_and_value(file, path, value, said):
    fields = json.loads(file.read_text())
    inner = fields
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=said) as refusal:
        read(file)
    assert str(refusal.value).startswith(str(file))
    assert "run `dspark calibrate` again" in str(refusal.value)
    del inner[path[-1]]
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"has no field {'.'.join(path)}: run `dspark calibrate` again"):
        read(file)


@pytest.mark.parametrize(("text", "said"), [("{", "is not valid JSON"), ("[]", "holds a JSON list, not an object")])
def test_a_file_that_is_no_object_is_refused(file, text, said):
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read(file)


def test_temperatures_of_a_drafter_without_a_head_cannot_be_asked_for(tmp_path):
    headless = Calibration(
        fingerprint="sha256:ab",
        use="combined",
        measured=CALIBRATION.measured,
        temperature_K=None,
        combined=CALIBRATION.combined,
    )
    back = read(write_calibration(tmp_path, headless, REPORTS))
    assert back.temperature_K is None
    with pytest.raises(ValueError, match="no confidence head"):
        back.estimator("sts")
    chosen = write_calibration(tmp_path, replace(headless, use="sts"), REPORTS)
    with pytest.raises(ValueError, match="sts_temperatures is null, not the temperatures that its estimator sts takes"):
        read(chosen)
