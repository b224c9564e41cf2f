"""Estimators recover what made the outcomes, leave alone what is right, and never look ahead."""

import numpy as np
import pytest

from dspark_jax.decoding.calibration import MIN_OUTCOMES, calibrate, combined, temperatures
from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.logistic import logistic_regression, sigmoid
from dspark_jax.decoding.outcomes import Outcomes
from dspark_jax.decoding.reliability import report

BLOCK = 3
RAW = Fitted.tempered(np.ones(BLOCK))


def outcomes_of(evidence_BKF, chance_BK, rng, rounds_a_prompt=10):
    kept_BK = rng.random(chance_BK.shape) < chance_BK
    rounds, block = chance_BK.shape
    return Outcomes(
        evidence_BKF=evidence_BKF,
        verified_B=np.full(rounds, block),
        accepted_B=np.cumprod(kept_BK, axis=1).sum(axis=1),
        prompt_B=np.arange(rounds) // rounds_a_prompt,
    )


def synthetic(rounds, temperature_K=(1.0, 1.0, 1.0), share=0.0, seed=0):
    """Rounds whose head is off by the temperatures; `share` of what decides is in the draft's own probabilities."""
    rng = np.random.default_rng(seed)
    evidence_BKF = rng.normal([0.5, -1.0, 2.0], [1.5, 0.5, 1.0], (rounds, BLOCK, 3))
    true_BK = evidence_BKF[..., 0] + share * (evidence_BKF[..., 2] - 2)
    evidence_BKF[..., 0] *= temperature_K
    return outcomes_of(evidence_BKF, sigmoid(true_BK), rng)


def errors(estimator, outcomes):
    return np.array([each.ece for each in report(estimator, outcomes).cumulative])


def test_temperature_scaling_finds_the_temperatures_and_repairs_the_error():
    outcomes = synthetic(20_000, temperature_K=(2.5, 0.5, 1.6))
    fitting, held_out = outcomes.halves(0)
    found_K = temperatures(RAW, fitting)
    np.testing.assert_allclose(found_K, (2.5, 0.5, 1.6), rtol=0.2)
    before, after = errors(RAW, held_out), errors(Fitted.tempered(found_K), held_out)
    assert (before[:2] > 0.04).all()
    assert (after < 0.02).all()
    assert (after < before).all()


def test_calibrated_confidences_are_left_alone():
    fitting, held_out = synthetic(20_000, share=0.0).halves(0)
    fits = calibrate(fitting)
    np.testing.assert_allclose(fits.temperature_K, 1, rtol=0.15)
    for estimator in fits.by_name().values():
        assert (errors(estimator, held_out) < errors(RAW, held_out) + 0.005).all()
    np.testing.assert_allclose(fits.combined.weights_KF[:, 0], 1, rtol=0.15)
    assert np.abs(fits.combined.weights_KF[:, 1:]).max() < 0.12


def test_a_position_is_fitted_after_those_before_it_and_touches_none_of_them():
    outcomes = synthetic(2_000, temperature_K=(2.0, 1.0, 1.0))
    full_K = temperatures(RAW, outcomes)
    for k in range(1, BLOCK):
        later = np.array(outcomes.evidence_BKF)
        later[:, k:] = later[:, k:] ** 2 - 1
        changed = Outcomes(
            evidence_BKF=later,
            verified_B=outcomes.verified_B,
            accepted_B=np.minimum(outcomes.accepted_B, k),
            prompt_B=outcomes.prompt_B,
        )
        np.testing.assert_array_equal(temperatures(RAW, changed)[:k], full_K[:k])
        assert temperatures(RAW, changed)[k] != full_K[k]
    # The survival it repairs includes the earlier temperatures: with another first one, the second differs.
    first = np.array(outcomes.evidence_BKF)
    first[:, 0] = -4 * first[:, 0]
    other = Outcomes(
        evidence_BKF=first,
        verified_B=outcomes.verified_B,
        accepted_B=outcomes.accepted_B,
        prompt_B=outcomes.prompt_B,
    )
    assert temperatures(RAW, other)[1] != full_K[1]


def test_combined_beats_the_head_where_the_drafts_probabilities_say_more():
    fitting, held_out = synthetic(12_000, share=1.5).halves(0)
    fits = calibrate(fitting).by_name()
    reports = {name: report(each, held_out) for name, each in fits.items()}
    for k in range(BLOCK):
        head, both = reports["sts"].conditional[k], reports["combined"].conditional[k]
        assert both.auc > head.auc + 0.05
        assert both.brier < head.brier - 0.01
        assert reports["combined"].cumulative[k].ece < 0.03


def test_a_drafter_without_a_head_is_judged_by_its_own_probabilities():
    rng = np.random.default_rng(0)
    evidence_BKF = rng.normal([30.0, -1.0, 2.0], [0, 0.5, 1.0], (8_000, BLOCK, 3))
    outcomes = outcomes_of(evidence_BKF, sigmoid(evidence_BKF[..., 2] - 1), rng)
    fits = calibrate(outcomes)
    assert fits.temperature_K is None
    assert list(fits.by_name()) == ["raw", "combined"]
    assert (fits.combined.weights_KF[:, 0] == 0).all()
    np.testing.assert_allclose(fits.combined.weights_KF[:, 2], 1, rtol=0.2)
    assert (errors(fits.combined, outcomes) < 0.02).all()
    assert (errors(RAW, outcomes) > 0.2).all()


def test_a_position_that_few_drafts_reach_takes_over_its_neighbours_fit():
    rng = np.random.default_rng(0)
    evidence_BKF = rng.normal(size=(1_000, BLOCK, 3))
    chance_BK = sigmoid(2 * evidence_BKF[..., 0]) * np.array([1.0, 0.05, 1.0])
    outcomes = outcomes_of(evidence_BKF, chance_BK, rng)
    assert outcomes.reached(2).sum() < MIN_OUTCOMES < outcomes.reached(1).sum()
    fits = calibrate(outcomes)
    assert fits.borrowed == (2,)
    assert fits.temperature_K[2] == fits.temperature_K[1] != fits.temperature_K[0]
    np.testing.assert_array_equal(fits.combined.weights_KF[2], fits.combined.weights_KF[1])
    nothing = calibrate(outcomes.take(np.arange(1_000) < 20))
    assert nothing.borrowed == (0, 1, 2)
    np.testing.assert_array_equal(nothing.temperature_K, 1)
    np.testing.assert_array_equal(nothing.combined.weights_KF, np.tile([1, 0, 0], (BLOCK, 1)))


def test_what_a_shorter_verification_leaves_open_counts_neither_way():
    outcomes = synthetic(2_000)
    rng = np.random.default_rng(1)
    verified_B = rng.integers(0, BLOCK + 1, 2_000)
    cut = Outcomes(
        evidence_BKF=outcomes.evidence_BKF,
        verified_B=verified_B,
        accepted_B=np.minimum(outcomes.accepted_B, verified_B),
        prompt_B=outcomes.prompt_B,
    )
    for k in range(BLOCK):
        rows = [b for b in range(2_000) if verified_B[b] > k]
        assert cut.judged(k).nonzero()[0].tolist() == rows
        assert cut.reached(k).nonzero()[0].tolist() == [b for b in rows if outcomes.accepted_B[b] >= k]
        assert (cut.kept(k)[rows] == (outcomes.accepted_B[rows] > k)).all()


def test_the_halves_share_no_prompt_and_lose_no_round():
    outcomes = synthetic(505, seed=3)
    first, second = outcomes.halves(0)
    assert not set(first.prompt_B) & set(second.prompt_B)
    assert first.rounds + second.rounds == 505
    assert abs(len(set(first.prompt_B)) - len(set(second.prompt_B))) <= 1
    assert (outcomes.halves(0)[0].prompt_B == first.prompt_B).all()
    assert set(outcomes.halves(1)[0].prompt_B) != set(first.prompt_B)


def test_logistic_regression_is_at_a_minimum_and_obeys_weights_and_prior():
    rng = np.random.default_rng(0)
    x_BF = rng.normal([3.0, -2.0], [5.0, 0.1], (3_000, 2))
    kept_B = rng.random(3_000) < sigmoid(0.4 * x_BF[:, 0] - 6 * x_BF[:, 1] - 13)
    nothing = (np.zeros(2), 0.0)
    weights_F, bias = logistic_regression(x_BF, kept_B, prior=nothing, ridge=1e-6)
    rest_B = sigmoid(x_BF @ weights_F + bias) - kept_B
    np.testing.assert_allclose([rest_B.sum(), *(x_BF.T @ rest_B)], 0, atol=1e-3)
    # A weight of two is the same row twice.
    twice = np.arange(3_000) < 700
    doubled = logistic_regression(
        np.vstack([x_BF, x_BF[twice]]), np.append(kept_B, kept_B[twice]), prior=nothing, ridge=1e-9
    )
    weighted = logistic_regression(x_BF, kept_B, prior=nothing, weight_B=1.0 + twice, ridge=1e-9)
    np.testing.assert_allclose(weighted[0], doubled[0], rtol=1e-6)
    held = logistic_regression(x_BF, kept_B, prior=(np.array([2.0, 1.0]), -1.0), ridge=1e9)
    np.testing.assert_allclose([*held[0], held[1]], [2.0, 1.0, -1.0], atol=1e-3)


def test_separable_outcomes_end_in_finite_weights():
    x_BF = np.linspace(-1, 1, 200)[:, None]
    weights_F, bias = logistic_regression(x_BF, x_BF[:, 0] > 0, prior=(np.zeros(1), 0.0), ridge=1.0)
    assert np.isfinite([*weights_F, bias]).all()
    assert weights_F[0] > 1
    always, _ = logistic_regression(x_BF, np.ones(200, bool), prior=(np.zeros(1), 0.0), ridge=1.0)
    assert abs(always[0]) < 0.1


def test_combined_has_no_use_for_evidence_of_other_drafts():
    outcomes = synthetic(3_000, share=1.0)
    fitted = combined(outcomes)
    changed = np.array(outcomes.evidence_BKF)
    changed[:, 1:] = 7
    np.testing.assert_array_equal(fitted.confidences(changed)[:, 0], fitted.confidences(outcomes.evidence_BKF)[:, 0])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_confidences_stay_probabilities_whatever_the_evidence(scale):
    confidence_BK = Fitted.tempered(np.full(BLOCK, scale)).confidences(np.full((2, BLOCK, 3), 40.0) * [[[1]], [[-1]]])
    assert ((confidence_BK >= 0) & (confidence_BK <= 1)).all()
