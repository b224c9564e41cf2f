"""The schedule's values around the hand-over, and what the chain does to a gradient."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.training.optimizer import OptimizerConfig, build_optimizer, warmup_cosine

STEPS, WARMUP = 200, 8  # 4 % of 200


@pytest.fixture
def rates() -> np.ndarray:
    schedule = warmup_cosine(OptimizerConfig(), STEPS)
    return np.array([float(schedule(jnp.int32(step))) for step in range(STEPS)])


def test_the_peak_is_reached_and_never_passed_at_the_hand_over(rates):
    peak = 6e-4
    assert rates[WARMUP - 2] == pytest.approx(peak * 7 / 8, rel=1e-6)
    assert rates[WARMUP - 1] == pytest.approx(peak, rel=1e-6)
    assert rates[WARMUP] == pytest.approx(peak, rel=1e-6)
    assert rates[WARMUP + 1] == pytest.approx(peak * 0.5 * (1 + np.cos(np.pi / (STEPS - WARMUP))), rel=1e-6)
    assert rates.max() <= peak * (1 + 1e-6)


def test_it_rises_then_falls_and_no_update_is_wasted(rates):
    assert np.all(np.diff(rates[:WARMUP]) > 0)
    assert np.all(np.diff(rates[WARMUP:]) < 0)
    assert rates.min() > 0


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_short_runs_have_finite_positive_rates(steps):
    schedule = warmup_cosine(OptimizerConfig(), steps)
    assert all(0 < float(schedule(jnp.int32(step))) <= 6e-4 * (1 + 1e-6) for step in range(steps))


def test_final_is_the_floor():
    schedule = warmup_cosine(OptimizerConfig(final=0.1), STEPS)
    assert float(schedule(jnp.int32(STEPS))) == pytest.approx(6e-5, rel=1e-5)


def test_a_huge_gradient_is_clipped_before_adam_sees_it():
    params = {"w": jnp.zeros((2, 2))}
    optimizer = build_optimizer(OptimizerConfig(clip=1.0), STEPS)
    state = optimizer.init(params)
    _, state = optimizer.update({"w": jnp.full((2, 2), 1e6)}, state, params)
    first_moment = optax.tree.get(state, "mu")["w"]
    assert float(jnp.linalg.norm(first_moment)) == pytest.approx(0.1, rel=1e-5)


def test_only_matrices_decay():
    params = {"w": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.5), STEPS)
    zero = {"w": jnp.zeros((2, 2)), "scale": jnp.zeros(2)}
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert np.all(np.asarray(updates["w"]) < 0)
    assert np.all(np.asarray(updates["scale"]) == 0)


@pytest.mark.parametrize("bad", [{"warmup": 1.0}, {"warmup": -0.1}, {"learning_rate": 0.0}, {"clip": float("nan")}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match="optimizer"):
        OptimizerConfig(**bad)
