"""Grouped-query attention against a loop over queries and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ops.attention import attention

RNG = np.random.default_rng(0)
jitted = jax.jit(attention, static_argnames="scale")


def arrays(heads, kv_heads, *, batch=2, queries=3, keys=5, channels=4):
    q = RNG.normal(size=(batch, queries, heads, channels)).astype(np.float32)
    k, v = RNG.normal(size=(2, batch, kv_heads, keys, channels)).astype(np.float32)
    mask = RNG.random((batch, queries, keys)) < 0.6
    mask[..., 0] = True
    return q, k, v, mask


def slow(q, k, v, mask, scale):
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[1]
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        scores = np.array([q[b, t, h].astype(np.float64) @ k[b, h // group, s] * scale for s in seen])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, h] = sum(weight * v[b, h // group, s] for weight, s in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_attention_equals_a_loop(heads, kv_heads, scale):
    q, k, v, mask = arrays(heads, kv_heads)
    found = jitted(*map(jnp.asarray, (q, k, v, mask)), scale=scale)
    np.testing.assert_allclose(found, slow(q, k, v, mask, scale), atol=1e-5)


def test_narrow_inputs_have_their_softmax_in_float32():
    """Scores near 32, where bfloat16 steps by 1/8."""
    q, k, v, mask = (jnp.asarray(x) for x in arrays(4, 2, keys=8))
    narrow = [x.astype(jnp.bfloat16) for x in (q.at[..., 0].set(8), k.at[..., 0].set(8), v)]
    found = jitted(*narrow, mask, scale=0.5)
    assert found.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float32) for x in narrow]
    np.testing.assert_allclose(found.astype(jnp.float32), slow(*wide, np.asarray(mask), 0.5), atol=0.015)


def test_a_query_that_may_look_nowhere_gets_finite_numbers():
    q, k, v, mask = arrays(2, 1)
    mask[0, 1] = False
    found = np.asarray(jitted(*map(jnp.asarray, (q, k, v, mask)), scale=1.0))
    assert np.isfinite(found).all()
    others = np.ones(mask.shape[:2], bool)
    others[0, 1] = False
    mask[0, 1] = True
    np.testing.assert_allclose(found[others], slow(q, k, v, mask, 1.0)[others], atol=1e-5)
