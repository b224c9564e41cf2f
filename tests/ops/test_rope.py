"""Rotary embedding against plain numpy, at short and at long positions."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ops.rope import LinearScaling, Llama3Scaling, RopeSpec, inverse_frequencies, rotate

POSITIONS = np.array([[0, 1, 17, 4095], [8191, 65_537, 100_000, 131_071]], np.int32)
SPEC = RopeSpec(theta=100_000.0)


def turned(x_BTHC, angles_BTC):
    """Pair (c, c + C/2) of every head turned by its angle, one by one in float64."""
    batch, length, heads, channels = x_BTHC.shape
    half = channels // 2
    out = np.empty(x_BTHC.shape)
    for b, t, h, c in np.ndindex(batch, length, heads, half):
        cos, sin = math.cos(angles_BTC[b, t, c]), math.sin(angles_BTC[b, t, c])
        first, second = float(x_BTHC[b, t, h, c]), float(x_BTHC[b, t, h, c + half])
        out[b, t, h, c] = first * cos - second * sin
        out[b, t, h, c + half] = first * sin + second * cos
    return out


def test_rotation_equals_a_plain_loop():
    x = np.random.default_rng(0).normal(size=(2, 4, 3, 16)).astype(np.float32)
    frequencies = (SPEC.theta ** -(np.arange(0, 16, 2) / 16)).astype(np.float32)
    angles = POSITIONS[..., None].astype(np.float32) * frequencies
    np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.asarray(POSITIONS), SPEC), turned(x, angles), atol=2e-6)


def test_narrow_inputs_turn_by_float32_angles_at_long_positions():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 1, 16)), jnp.bfloat16)
    exact = POSITIONS[..., None] * SPEC.theta ** -(np.arange(0, 16, 2) / 16)
    out = rotate(x, jnp.asarray(POSITIONS), SPEC)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), turned(np.asarray(x, np.float32), exact), atol=0.04)


def test_scores_depend_on_distance_only():
    q, k = np.random.default_rng(2).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(query, key):
        turned_q = rotate(jnp.asarray(q), jnp.array([[query]]), SPEC)
        turned_k = rotate(jnp.asarray(k), jnp.array([[key]]), SPEC)
        return float(jnp.vdot(turned_q, turned_k))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-2)


def test_plain_and_linear_frequencies():
    plain = [10_000.0 ** (-2 * pair / 8) for pair in range(4)]
    found = inverse_frequencies(RopeSpec(theta=10_000.0), 8)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain, rtol=1e-7)
    scaled = inverse_frequencies(RopeSpec(theta=10_000.0, scaling=LinearScaling(factor=4.0)), 8)
    np.testing.assert_allclose(scaled, [f / 4 for f in plain], rtol=1e-7)


def test_llama3_frequencies_follow_the_published_rule():
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    expected, kinds = [], set()
    for pair in range(64):
        frequency = 500_000.0 ** (-2 * pair / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            kinds.add("kept")
        elif wavelength > original / low:
            frequency, _ = frequency / factor, kinds.add("divided")
        else:
            smooth = (original / wavelength - low) / (high - low)
            frequency, _ = (1 - smooth) * frequency / factor + smooth * frequency, kinds.add("blended")
        expected.append(frequency)
    assert kinds == {"kept", "divided", "blended"}
    scaling = Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_len=original)
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(theta=5e5, scaling=scaling), 128), expected, rtol=1e-6)
