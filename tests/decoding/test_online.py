"""An estimator that learns from served rounds: as good as the offline one, bounded, forgetful."""

import numpy as np
import pytest

from dspark_jax.decoding.fitted import Fitted
from dspark_jax.decoding.logistic import sigmoid
from dspark_jax.decoding.online import OnlineEstimator
from dspark_jax.decoding.slots import SlotRound

BLOCK = 2
START = Fitted(weights_KF=np.tile([1.0, 0.0, 0.0], (BLOCK, 1)), bias_K=np.zeros(BLOCK))
HEAD = Fitted.tempered(np.ones(BLOCK))


def served(count, *, true, seed=0, verified=BLOCK):
    """Rounds whose drafts are kept with the probability `true(evidence)`."""
    rng = np.random.default_rng(seed)
    rounds = []
    for evidence_KF in rng.normal(size=(count, BLOCK, 3)):
        kept = rng.random(BLOCK) < sigmoid(true(evidence_KF))
        accepted = min(int(np.cumprod(kept).sum()), verified)
        rounds.append(
            SlotRound(
                handle=0,
                tokens=(0,) * (accepted + 1),
                proposed=BLOCK,
                verified=verified,
                accepted=accepted,
                confidence=(0.5,) * BLOCK,
                evidence=tuple(map(tuple, evidence_KF)),
            )
        )
    return rounds


def off(evidence_KF):
    return 0.5 * evidence_KF[:, 0] + evidence_KF[:, 2] - 1


def test_it_learns_what_decides_and_stays_put_where_nothing_is_seen():
    online = OnlineEstimator(START, every=100)
    unchanged = online.refit()
    np.testing.assert_array_equal(unchanged.weights_KF, START.weights_KF)
    online.observe(served(6_000, true=off, verified=1))
    learned = online.refit()
    np.testing.assert_allclose(learned.weights_KF[0], [0.5, 0, 1], atol=0.12)
    assert learned.bias_K[0] == pytest.approx(-1, abs=0.12)
    np.testing.assert_array_equal(learned.weights_KF[1], START.weights_KF[1])


def test_a_handful_of_rounds_moves_it_little():
    online = OnlineEstimator(START)
    online.observe(served(20, true=lambda evidence_KF: -evidence_KF[:, 0]))
    assert np.abs(online.refit().weights_KF - START.weights_KF).max() < 0.5


def test_it_is_due_every_so_many_rounds():
    online, rounds = OnlineEstimator(START, every=30), served(45, true=off)
    online.observe(rounds[:29])
    assert not online.due
    online.observe(rounds[29:])
    assert online.due
    online.refit()
    assert not online.due


def test_memory_is_bounded_and_what_is_old_counts_for_less():
    online = OnlineEstimator(START, memory=3_000, half_life=300.0)
    online.observe(served(2_000, true=lambda evidence_KF: -2 * evidence_KF[:, 0]))
    assert online.refit().weights_KF[0, 0] < 0
    online.observe(served(2_000, true=lambda evidence_KF: 2 * evidence_KF[:, 0], seed=1))
    assert online.kept == 3_000
    assert online.refit().weights_KF[0, 0] > 1
    ring = OnlineEstimator(START, memory=3_000, half_life=300.0)
    ring.observe(served(2_000, true=lambda evidence_KF: -2 * evidence_KF[:, 0])[1_000:])
    ring.observe(served(2_000, true=lambda evidence_KF: 2 * evidence_KF[:, 0], seed=1))
    np.testing.assert_allclose(ring.refit().weights_KF, online.refit().weights_KF)


def test_rounds_that_teach_nothing_are_left_out():
    (good,) = served(1, true=off)
    online = OnlineEstimator(START)
    unread = good._replace(evidence=tuple(features[:1] for features in good.evidence))
    nonsense = good._replace(evidence=((float("nan"), 0.0, 0.0),) * BLOCK)
    online.observe([good._replace(verified=0), nonsense, unread])
    assert online.kept == 0
    online.observe([good])
    assert online.kept == 1


@pytest.mark.parametrize("wrong", [{"every": 0}, {"memory": 0}, {"half_life": 0.0}, {"prior": 0.0}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="an online estimator needs"):
        OnlineEstimator(START, **wrong)


def test_rounds_that_drafted_less_count_for_what_they_drafted():
    whole, short = OnlineEstimator(START), OnlineEstimator(HEAD)
    rounds = served(500, true=off, verified=1)
    whole.observe(rounds)
    short.observe(each._replace(evidence=each.evidence[:1]) for each in rounds)
    np.testing.assert_array_equal(short.refit().weights_KF, whole.refit().weights_KF)
