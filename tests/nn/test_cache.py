"""Writing rows at their own positions, and changing a cache's span."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import init_cache, resize, write
from dspark_jax.ops.rope import RopeSpec

RNG = np.random.default_rng(0)


def test_a_cache_has_each_layers_own_shape():
    def layer(kv_heads, head_dim):
        return LayerSpec(
            d_model=8, ffw=8, heads=4, kv_heads=kv_heads, head_dim=head_dim, rope=RopeSpec(), norm_eps=1e-5
        )

    cache = init_cache([layer(2, 4), layer(1, 6)], 3, 7, jnp.bfloat16)
    assert [x.shape for x in cache.keys] == [x.shape for x in cache.values] == [(3, 2, 7, 4), (3, 1, 7, 6)]
    assert all(x.dtype == jnp.bfloat16 and not x.any() for x in (*cache.keys, *cache.values))


def test_each_row_is_written_at_its_own_start_and_nowhere_else():
    old = RNG.normal(size=(3, 2, 6, 4)).astype(np.float32)
    new = RNG.normal(size=(3, 2, 2, 4)).astype(np.float32)
    expected = old.copy()
    for row, start in enumerate([0, 3, 4]):
        expected[row, :, start : start + 2] = new[row]
    np.testing.assert_array_equal(write(jnp.asarray(old), jnp.asarray(new), jnp.array([0, 3, 4])), expected)


@pytest.mark.parametrize("span", [3, 6, 9])
def test_a_resized_cache_keeps_its_first_positions(span):
    old = RNG.normal(size=(2, 1, 6, 4)).astype(np.float32)
    found = np.asarray(resize(jnp.asarray(old), span))
    assert found.shape == (2, 1, span, 4)
    np.testing.assert_array_equal(found[:, :, :6], old[:, :, :span])
    assert not found[:, :, 6:].any()
