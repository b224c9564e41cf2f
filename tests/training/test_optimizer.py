"""The schedule's values around the hand-over, and what the chain does to a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.core.mesh import make_mesh
from dspark_jax.training.optimizer import OptimizerConfig, build_optimizer, optimizers, warmup_cosine
from dspark_jax.training.setup import place

STEPS, WARMUP = 200, 8  # 4 % of 200


KINDS = ("adafactor", "adamw", "muon", "sgd")


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


class Parameters(nnx.Module):
    """One of every kind that drafters have, and a head of a single row."""

    def __init__(self):
        shapes = {
            "w1": ("vocab", "rank"),
            "row": ("pair", "model"),
            "scale": ("model",),
            "scalar": (),
            "q": ("model", "heads", "head_dim"),
            "kv": ("model", "pair", "kv_heads", "head_dim"),
            "o": ("heads", "head_dim", "model"),
            "down": ("ffw", "model"),
        }
        sizes = {"vocab": 12, "rank": 3, "pair": 1, "model": 8, "heads": 2, "head_dim": 4, "kv_heads": 1, "ffw": 6}
        rng = np.random.default_rng(0)
        for name, axes in shapes.items():
            value = jnp.asarray(rng.normal(size=[sizes[axis] for axis in axes]), jnp.float32)
            setattr(self, name, nnx.Param(value, axes=axes))


@pytest.mark.parametrize(
    "name",
    # One of each kind; the others are alike.
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in sorted(optimizers())],
)
def test_d_48_every_optimizer_moves_parameters_of_every_shape_as_fast_as_the_warm_up_says(name):
    params = Parameters()
    grads = jax.tree.map(lambda leaf: leaf + 0.1, params)
    moved = []
    for warmup in (0.5, 0.0):
        optimizer = build_optimizer(OptimizerConfig(name=name, warmup=warmup), 20)
        state = place(make_mesh(devices=jax.devices()[:1]), optimizer.init(params))
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        moved.append(jax.tree.leaves(updates))
    # The first of ten updates of a warm-up runs at a tenth of the peak.
    for slow, fast in zip(*moved, strict=True):
        assert np.isfinite(fast).all()
        assert np.abs(fast).max() > 0
        np.testing.assert_allclose(slow, fast / 10, rtol=1e-4, atol=1e-9)


def test_muon_makes_kernels_orthogonal_and_leaves_the_rest_to_adamw():
    params = Parameters()
    grads = jax.tree.map(lambda leaf: leaf + 0.1, params)
    config = OptimizerConfig(name="muon", clip=1e6)
    rate = warmup_cosine(config, 20)
    updates = {}
    for name, optimizer in (("muon", build_optimizer(config, 20)), ("adamw", optax.nadamw(rate, weight_decay=0.0))):
        updates[name], _ = optimizer.update(grads, optimizer.init(params), params)
    for name in ("w1", "row", "scale", "scalar"):
        np.testing.assert_allclose(getattr(updates["muon"], name)[...], getattr(updates["adamw"], name)[...], rtol=1e-3)
    matrices = {
        "q": updates["muon"].q[...].reshape(8, 8),
        "kv": updates["muon"].kv[...].reshape(8, 4),
        "o": updates["muon"].o[...].reshape(8, 8),
        "down": updates["muon"].down[...],
    }
    for name, matrix in matrices.items():
        sizes = np.linalg.svd(np.asarray(matrix), compute_uv=False)
        assert sizes.max() < 4 * sizes.min(), name


@pytest.mark.parametrize(
    ("name", "near"), [("adamv", "adamw"), ("muoon", "muon"), ("scale_by_adam", ""), ("lbfgs", "")]
)
def test_an_unknown_optimizer_is_answered_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=rf"there is no optimizer\.name {name}; the nearest are .*{near}"):
        OptimizerConfig(name=name)
