"""A cache in pages holds, for rows, what one in rows does; and who is given one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.nn.block import LayerSpec
from dspark_jax.nn.cache import KVCache
from dspark_jax.nn.paged_attention import KernelPages, PlainPages
from dspark_jax.nn.paged_cache import InPages, InRows, PagedCache, init_pages, page_size
from dspark_jax.ops.rope import RopeSpec


def layer(kv_heads, head_dim):
    return LayerSpec(d_model=8, ffw=8, heads=48, kv_heads=kv_heads, head_dim=head_dim, rope=RopeSpec(), norm_eps=1e-5)


def filled(batch, span, page, seed):
    """The same entries of one layer twice: pages in any order, and rows."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(batch * span // page).reshape(batch, -1)
    pages = jnp.asarray(rng.normal(size=(table.size, page, 4, 3)), jnp.float32)
    paged = PagedCache(pages=(pages,), pages_BI=jnp.asarray(table), attention=PlainPages())
    return paged, in_rows(paged)


def in_rows(paged):
    (pages,) = paged.pages
    held = pages[paged.pages_BI].reshape(-1, paged.span, 4, 3).swapaxes(1, 2)
    return KVCache(keys=(held[:, ::2],), values=(held[:, 1::2],))


def same(paged, rows):
    assert paged.span == rows.span
    for found, expected in zip(jax.tree.leaves(in_rows(paged)), jax.tree.leaves(rows), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("span", [6, 12, 200, 256])
def test_picked_rows_of_another_span_are_those_of_rows(span):
    paged, rows = filled(3, 12, 4, seed=0)
    picked = jnp.array([2, 0, 2, 1])
    found = paged.picked(picked, span)
    same(found, rows.picked(picked, span))
    assert found.pages[0].shape == (4 * span // page_size(span), page_size(span), 4, 3)
    assert sorted(found.pages_BI.ravel().tolist()) == list(range(found.pages[0].shape[0]))


def test_inserted_rows_go_to_the_pages_of_the_rows_they_replace():
    (paged, rows), (group, others) = filled(4, 12, 4, seed=0), filled(3, 12, 4, seed=1)
    # The last one is dropped.
    places = jnp.array([3, 1, 4])
    found = paged.inserted(group, places)
    same(found, rows.inserted(others, places))
    np.testing.assert_array_equal(found.pages_BI, paged.pages_BI)


def test_every_row_starts_with_pages_of_its_own():
    cache = init_pages([layer(2, 4), layer(1, 6)], 3, 256, jnp.bfloat16, PlainPages())
    assert [x.shape for x in cache.pages] == [(6, 128, 4, 4), (6, 128, 2, 6)]
    assert all(x.dtype == jnp.bfloat16 and not x.any() for x in cache.pages)
    assert (cache.pages_BI.tolist(), cache.span) == ([[0, 1], [2, 3], [4, 5]], 256)
    assert (page_size(384), page_size(60)) == (128, 60)


@pytest.mark.parametrize(
    ("kv_heads", "channels", "dtype", "takes"),
    [
        *((heads, 128, jnp.bfloat16, heads != 3) for heads in (1, 2, 3, 4, 8, 24)),
        *((heads, 128, jnp.float32, heads != 6) for heads in (1, 2, 4, 6, 12)),
        (48, 128, jnp.bfloat16, True),
        (16, 128, jnp.bfloat16, False),
        (48, 128, jnp.float32, False),
        (8, 64, jnp.bfloat16, False),
        (8, 256, jnp.bfloat16, False),
    ],
)
def test_kernels_are_for_heads_that_fill_tiles(kv_heads, channels, dtype, takes):
    """And a target with a layer that they are not for has rows."""
    spec = layer(kv_heads, channels)
    assert KernelPages().fits(spec, dtype) is takes
    cache = jax.eval_shape(lambda: InPages(attention=KernelPages())([layer(8, 128), spec], 1, 128, dtype))
    assert isinstance(cache, PagedCache if takes else KVCache)
    assert isinstance(jax.eval_shape(lambda: InRows()([spec], 1, 128, dtype)), KVCache)
